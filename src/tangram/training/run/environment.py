"""What the environment says of this process when something else has started the ranks: torchrun, or a Slurm script.

It loads no torch, so that the command line can ask.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from tangram.errors import UserError

MOST_RANKS = 256
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


class ReportedElsewhere(Exception):
    """The job has ended for a reason that another rank tells; this one only leaves, with the exit code `code`."""

    def __init__(self, code: int, sentence: str = "another rank says why the job has ended") -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


@dataclass(frozen=True)
class RankPlace:
    """This process among all that were started together."""

    index: int
    world: int
    local_index: int
    local_world: int
    node: str


def _nothing() -> None:
    """No other machine has ranks."""


@dataclass(frozen=True)
class Among:
    """Which of a job's ranks this machine has, where others have the rest."""

    world: int
    first: int = 0
    here: int = 0
    """0: all."""
    address: tuple[str, int] = ("", 0)
    """Of the store where all ranks meet; without one they meet in a file."""
    prefix: str = ""
    """Of what they say there."""
    elsewhere: Callable[[], Exception | None] = _nothing
    """What has ended the ranks of another machine."""

    def for_ranks(self) -> "Among":
        return replace(self, elsewhere=_nothing)

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        return range(self.first, self.first + (self.here or self.world))


def refuse_too_many(world: int) -> None:
    """One machine starts these ranks: more than it could ever hold is a slip of the pen. Raises UserError."""
    if world > MOST_RANKS:
        raise UserError(f"there are {world:,} ranks, but this version starts at most {MOST_RANKS} on one machine")


def started_by_torchrun() -> bool:
    """Whether this process is one rank of several that somebody else has started: torchrun, or what sets the same."""
    return all(os.environ.get(name) for name in _VARIABLES)


class FinalCode(int):
    """An exit code that a new start would come to again: torchrun's agent is to end, though it has restarts left."""


def final(code: int, *, mistake: bool = False) -> int:
    """The code, final where torchrun would start this process again. `mistake`: of a plan or its data, say; what a
    first start has met comes again, what a later one has, as a store that cannot be reached, may not."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return FinalCode(code) if count != most and not (mistake and count != "0") else code


def end_process(code: int) -> NoReturn:
    """Without the interpreter's own end, which may wait for ranks that are gone, and now and then aborts.

    With a final code the agent is sent the signal that asks it to end, as its processes do.
    """
    sys.stderr.flush()
    if isinstance(code, FinalCode):
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)


def speaks() -> bool:
    """Whether this process says what all ranks would say alike, as that an option is unknown."""
    return not started_by_torchrun() or os.environ["RANK"] == "0" or not os.environ["RANK"].isdecimal()


def leave_word(sentence: str) -> None:
    """Write why this rank ends where torchrun looks for it: the last line of its report then says it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not started_by_torchrun():
        return
    more = {"py_callstack": f"error: {sentence}", "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # it has been printed
        Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": more}}), encoding="utf-8")


def place() -> RankPlace:
    """This process's place. Raises UserError where the variables make none."""
    index, world, local_index = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    _number("MASTER_PORT")
    local_world = _number("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", default=1)
    if not index < world:
        raise UserError(f"RANK is {index} and WORLD_SIZE {world}: ranks count from 0 to one less than WORLD_SIZE")
    return RankPlace(index, world, local_index, local_world, os.environ.get("GROUP_RANK") or socket.gethostname())


def _number(*names: str, default: int | None = None) -> int:
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        if default is not None:
            return default
        raise UserError(f"{names[0]} is not set: start the ranks with torchrun, or set what torchrun sets")
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f'the environment variable {name} is "{text}": it must be a whole number')
    return int(text)
