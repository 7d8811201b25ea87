"""What a launcher that was killed has left in memory: brought to the disk, before a run goes on from there."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tangram.checkpoint.store.commits import read_marker
from tangram.checkpoint.tiers.promote import promote
from tangram.errors import UserError, sentence
from tangram.resilience import shares
from tangram.resilience.nodes import Nodes
from tangram.resilience.tiers import Tiers, memory_of
from tangram.training.observe.events import CheckpointSaved, Note
from tangram.training.run.rank import RankJob
from tangram.training.run.run_folder import CHECKPOINTS, alone
from tangram.training.run.torchrun import Meeting

OnEvent = Callable[[object], None]


def rescue(folder: Path, on_event: OnEvent, memory: Path | None = None, meeting: Meeting | None = None) -> None:
    """Bring to the disk what the launcher of a run, who was killed, has left in memory, where that is newer.

    `memory`: where that is, if not in /dev/shm; `meeting`: of the launchers of several nodes, all of which call this.
    Raises UserError where another process trains in this folder, or the disk takes none of it: it stays in memory.
    """
    tiers = Tiers(memory_of(folder, memory), folder / CHECKPOINTS)
    with alone(folder) if meeting is None or meeting.place.index == 0 else contextlib.nullcontext():
        if meeting is not None:
            nodes = Nodes(meeting)
            shares.to_disk(nodes, tiers, partial(saved, on_event))
            nodes.close()
        elif why := rescue_alone(tiers, on_event):
            raise UserError(why)


def forget_others(job: RankJob) -> None:
    """A run that begins is not the one whose launcher was killed at the same path: what that has left in this machine's
    memory goes, or it would be taken for later steps of this one."""
    if job.resume is None:
        Tiers(memory_of(job.folder), job.folder / CHECKPOINTS).forget()


def rescue_alone(tiers: Tiers, on_event: OnEvent) -> str:
    """Why what is newer in memory could not be brought to the disk, and stays there; else nothing is left in memory."""
    why = ""
    for newest in tiers.newest_first():
        if (share := read_marker(newest).share) is not None:
            return (
                f'the state in memory, "{newest}", is a part of that of {share[1]} nodes: tangram launch --resume on '
                f'all of them brings it to the disk; without "{tiers.memory}" the run goes on from there'
            )
        try:
            if not tiers.on_disk(newest):
                saved(on_event, read_marker(newest).step, promote(newest, tiers.disk))
            tiers.forget()
            return ""
        except (OSError, UserError) as error:
            on_event(Note(f"a snapshot could not be brought to the disk: {sentence(error)}"))
            why = why or (
                f'the state in memory, "{newest}", could not be brought to "{tiers.disk}": {sentence(error)}: make '
                "room there, and go on with tangram launch --resume"
            )
            if isinstance(error, OSError):  # older ones are none for it: it is sound, and stays
                return why
    if not why:
        tiers.forget()
    return why


def saved(tell: OnEvent, step: int, path: Path) -> None:
    """Tell of a checkpoint that came to the disk."""
    tell(CheckpointSaved(step, str(path), 0.0, 0.0, asynchronous=False))
