"""The one base class of every mistake that a user can make and mend, and an error as one sentence.

It lies below all rooms, so that each may raise it and the command line can tell a user's mistake (one sentence, exit
code 2) from a fault of Tangram's own (a stack trace, which belongs in a bug report).
"""

import os


class UserError(Exception):
    """Something the user asked for cannot be done as asked; the message is one clear sentence that says what to do."""


def sentence(error: BaseException) -> str:
    """An error in one sentence, without a trace."""
    if isinstance(error, OSError) and error.strerror:
        where = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return f'"{where}": {error.strerror}' if where else error.strerror
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
