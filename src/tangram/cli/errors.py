"""From what went wrong to an exit code: 2 and one sentence for a user's mistake, a stack trace for one of ours."""

import sys
from collections.abc import Callable

import typer

from tangram.errors import UserError
from tangram.training.observe.text_tables import printable
from tangram.training.run.environment import ReportedElsewhere, leave_word, speaks

MISTAKE = 2
_INTERRUPTED = 130  # what a shell reports of a process that was ended by Ctrl-C


def reported(command: Callable[[], object]) -> int:
    """Run `command`; report a user's mistake; return the exit code. A number that the command returns is its code."""
    try:
        answer = command()
    except UserError as mistake:
        return _say(str(mistake))
    except typer.TyperException as mistake:  # an unknown option, a missing argument ... on every rank of a job alike
        return _say(mistake.format_message()) if speaks() else MISTAKE
    except ReportedElsewhere as elsewhere:
        leave_word(elsewhere.sentence)
        return elsewhere.code
    except (KeyboardInterrupt, typer.Abort) as ended:
        if isinstance(ended.__context__, EOFError):  # which typer takes for Ctrl-D
            raise ended.__context__ from None
        answer = _INTERRUPTED
    if answer == _INTERRUPTED:  # typer makes this number of Ctrl-C by itself, and says nothing
        print("interrupted", file=sys.stderr)
    return answer if isinstance(answer, int) else 0


def _say(sentence: str) -> int:
    say(printable(" ".join(sentence.split())))
    return MISTAKE


def say(sentence: str) -> None:
    """Print why the command ends, and leave it for torchrun, whose own report would bury it."""
    print(f"error: {sentence}", file=sys.stderr)
    leave_word(sentence)
