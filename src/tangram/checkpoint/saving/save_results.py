"""How saves beside training are made, and what comes of each: values alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """How saves are made."""

    policy: Literal["wait", "skip"] = "wait"
    """What a save does that comes while the last one is still being written: wait, or be left out and reported."""
    retries: int = 1
    """How often a save that failed is tried again, from the same copy."""
    pause: float = 5.0
    """Seconds before that."""
    limit: float = 600.0
    """Seconds without any progress after which storage, or another rank's writer, counts as stalled."""
    keep: tuple[str, ...] = ()
    """Rules of `tangram.checkpoint.store.retention`: which are kept after each commit. None: all."""
    node: tuple[int, int, int, int] | None = None
    """Of snapshots that stay on several machines: which of how many this is, its first rank, and how many it has.
    What the ranks of each have written is committed there, as a share."""
    digests: bool = True
    """Whether each tensor gets its digest; without, whoever copies a checkpoint of memory to a disk takes them."""


@dataclass(frozen=True)
class SaveResult:
    """What came of a save."""

    step: int
    path: Path | None
    """The checkpoint; None when there is none."""
    reason: str
    """Why not, in one sentence."""
    blocked: float
    """Seconds that training stood still: in `save` and in `fence`."""
    seconds: float
    """From `save` until the checkpoint was durable on this rank's word, or given up."""
    nbytes: int
    """That this rank's writer wrote."""
    cpu: float = 0.0
    """Seconds of a core that copying and writing took, on this rank."""
    notes: tuple[str, ...] = ()
    """What a person should know: a process that had to be replaced, an old checkpoint that could not be removed."""
