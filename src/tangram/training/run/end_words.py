"""What is said of a rank that has ended: of its error, or of how it was ended."""

import signal

from tangram.relayout.exchange.peers import lost_peer

UNKNOWN = 255  # what multiprocessing takes for the exit code of a process whose fork server is gone


def death(exitcode: int | None) -> str:
    """How a process without last words ended."""
    if exitcode == UNKNOWN:
        return "it ended without an error message, after the process that it was forked from had been killed"
    if exitcode == -signal.SIGKILL:
        return "killed by signal 9, as the kernel does when memory runs out"
    if exitcode is not None and exitcode < 0:
        return f"killed by signal {-exitcode}"
    return f"exited with code {exitcode} without an error message"


def first_line(error: BaseException) -> str:
    """An error as one sentence: its kind and the first line of what it says; of a rank that is gone what that means."""
    if said := lost_peer(error):
        return said
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
