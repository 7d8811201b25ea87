"""The one base class of every mistake that a user can make and mend.

It lies below all rooms, so that each may raise it and the command line can tell a user's mistake (one sentence, exit
code 2) from a fault of Tangram's own (a stack trace, which belongs in a bug report).
"""


class UserError(Exception):
    """Something the user asked for cannot be done as asked; the message is one clear sentence that says what to do."""
