"""Save the state of a job while it trains, and load it into any other layout.

    prepare (before step 1) -> save: starts to copy -> the next forward and backward -> fence, before the optimiser
    writes -> a process of its own writes the copy and commits it

Training waits at the fence for what of the copy is still missing, and for nothing else. The fence is a hook of the
optimiser's step, so a loop of one's own has it too. The engine is `tangram.checkpoint`; here is only what a job's state
is, when it is saved, and what is told of it. What fails on any rank fails the checkpoint and not the training.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import tangram.checkpoint.saving.save as engine
from tangram.checkpoint.saving import async_saver
from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.saving.file_writer import Ring
from tangram.checkpoint.saving.rank_parts import About, SaveError
from tangram.checkpoint.state.entries import Described, StateEntry
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store.commits import newest
from tangram.errors import UserError
from tangram.hardware.host.machine import usable_cores
from tangram.hardware.host.workers import Detached
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.training.mesh.buffers import refuse_unlike_saved
from tangram.training.mesh.world import World
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed
from tangram.training.state.restore import describe, load
from tangram.training.state.state import InMemory, JobState, Progress, TensorPlaces, entries, local_of, memory_of

__all__ = ["Checkpointer", "JobState", "Progress", "describe", "load", "newest"]


DEAD = 600.0  # seconds: a save that goes on changes its folder more often, even when no run is left to wait for it

MEMORY_STALLS = 60.0
"""Seconds without any progress after which a writer into memory is replaced: no storage is as slow."""

# How often to save where nobody says it: so that saving takes no more than a share of training. What a save costs is
# the time that training stood still for it, and the processor's time of copying and writing where training computes
# on the same cores. Rank 0 measures, and wishes for a save ahead of a step; all ranks hear of it in the all-reduce of
# each step.
SHARE = 0.03
LAST = 5
"""Costs and steps of which the median is taken: the first of a run are none of those to come."""


class Pace:
    """When a save is due."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._costs: deque[float] = deque(maxlen=LAST)
        self._steps: deque[float] = deque(maxlen=LAST)
        self._since = 0
        self._before: float | None = None
        self._told = False

    @property
    def every(self) -> int:
        """Steps from one save to the next, at least 1; 1 as long as nothing is measured. The first costs more than
        later ones do, so as long as few are known, twice as long after each."""
        if not self._costs or not self._steps:
            return 1
        step = statistics.median(self._steps)
        found = max(1, math.ceil(statistics.median(self._costs) / max(self._share * step, 1e-9)))
        return min(found, 2 ** len(self._costs)) if len(self._costs) < LAST else found

    def due(self, now: float) -> bool:
        """Whether to save after the step that begins `now` (seconds of any clock); called once before each step."""
        if self._before is not None:
            self._steps.append(now - self._before)
        self._before = now
        self._since += 1
        return self._since >= self.every

    def begun(self) -> None:
        self._since = 0

    def cost(self, seconds: float) -> None:
        """What one that has ended cost."""
        self._costs.append(seconds)

    def news(self) -> str:
        """What is worth saying, once: how often, and why."""
        if self._told or len(self._costs) < LAST or not self._steps:
            return ""
        self._told = True
        cost, step = statistics.median(self._costs), statistics.median(self._steps)
        every = "every step" if self.every == 1 else f"every {self.every} steps"
        return (
            f"a snapshot {every}: one costs {1e3 * cost:.0f} ms, and steps take {1e3 * step:.0f} ms "
            f"(at most {100 * self._share:.0f} % of training; --snapshot-every N is every N)"
        )


class Checkpointer:
    """Saves a job into one folder. All ranks make one, and call each method at the same steps.

    Without a world it serves a process that trains alone.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: Plan,
        world: World | None,
        *,
        snapshots: bool = False,
        node: tuple[int, int, int, int] | None = None,
        spare: Detached | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`snapshots`: into memory, so often that one is left out where the one before is still being written; `node`:
        which of several this is, where they stay on each (`async_saver.Settings`). `spare`: a helper without a job.
        `pace`: says how often, by what saves cost."""
        self.folder = Path(folder)
        self.blocked_seconds = 0.0
        """How long training stood still for saves that have ended."""
        self._keep = ("last=3",) if snapshots else (f"last={plan.checkpoint.keep}", *plan.checkpoint.also)
        self._mesh = plan.mesh
        self._peers = world.peers if world is not None else Peers()
        self._places, self._world = TensorPlaces(plan, world), world
        self._saver: AsyncSaver | None = None
        if plan.checkpoint.asynchronous or snapshots:
            retries = 1 if node is None else 0  # of one id on all machines
            settings = Settings(retries=retries, keep=self._keep, node=node)
            if snapshots:
                settings = replace(settings, policy="skip", digests=False, limit=MEMORY_STALLS, pause=0.5)
            self._saver = AsyncSaver(folder, self._peers, settings, spare)
        self._tells = self._peers.index == (0 if node is None else node[2])
        self._known: tuple[StateEntry, ...] = ()
        self._held: InMemory = ()
        """The tensors that they are of."""
        self._kept: dict[str, Tensor] = {}
        self._config: tuple[Any, Mapping[str, str]] = None, {}
        """Of the model, and the file that says it."""
        self._fenced: Optimizer | None = None
        self._ring: Ring | None = None
        self._last: int | None = None
        self._pace = pace
        self._crowd = 0.0
        """Seconds of training that a second of this rank's processor costs, where all ranks do alike."""
        if world is not None and world.device.type == "cpu":
            self._crowd = world.size / max(1.0, usable_cores())
        self._untold: list[CheckpointSaved | SaveFailed | Note] = []

    def prepare(self, state: JobState) -> None:
        """Take the memory for the copy and start what writes it, so that the first save costs no more than others."""
        if self._saver is not None:
            self._fence_at(state)
            if problem := self._saver.prepare(self._described(state).entries):
                self._tell(Note(f"checkpoints will be tried without memory taken ahead: {problem}"))

    def save(self, state: JobState, *, wait: bool = False) -> None:
        """Save the state as it is now. `wait`: return when it is committed.

        Without `wait` the parameters and the optimiser's states may not change before `fence`, which the optimiser
        calls before it writes them; whoever else writes them has to. A state without an optimiser is copied at once.
        A step that this object has saved already is not saved again. Nothing is raised for what cannot be written:
        `poll` reports it.
        """
        step = state.progress.step
        if wait:
            self._await()
        if self._last == step:
            return
        self._last = step
        if self._pace is not None:
            self._pace.begun()
        try:
            if self._world is not None:
                refuse_unlike_saved(state.model, self._world)
            if self._saver is not None and (not wait or self._saver.settings.node):  # no folder is everybody's there
                self._fence_at(state)
                self._saver.save(self._described(state), self._about(state))
                if wait:
                    self._await()
                elif state.optimiser is None:  # nobody would wait
                    self._saver.fence()
            else:
                self._save_now(state)
        except UserError as error:  # a state that no checkpoint can hold; all ranks have the same
            self._tell(SaveFailed(step, str(error)))

    def has(self, state: JobState) -> bool:
        """Whether this step was saved, alike on all ranks; after `save` with `wait`."""
        return self._last == state.progress.step

    def due(self) -> bool:
        """Whether this rank's pace wants a save after the step that begins now; called before each step."""
        if self._pace is None or self._saver is None:
            return False
        return self._pace.due(time.monotonic()) and not self._saver.busy

    def fence(self) -> None:
        """Wait until the state that is being saved may change. Without a save under way it costs nothing."""
        if self._saver is not None:
            self._saver.fence()

    def poll(self) -> list[CheckpointSaved | SaveFailed | Note]:
        """What came of saves since the last call, on rank 0, or the first of each node; else nothing. Never waits."""
        for result in self._saver.poll() if self._saver is not None else ():
            self._take(result)
        told, self._untold = self._untold, []
        return told

    def close(self) -> list[CheckpointSaved | SaveFailed | Note]:
        """Wait for the save that is under way; what is still to be told."""
        for result in self._saver.close() if self._saver is not None else ():
            self._take(result)
        return self.poll()

    # ------------------------------------------------------------ what is saved

    def _described(self, state: JobState) -> Described:
        """The state as the engine saves it; the same entries again while they lie in the same memory."""
        here = memory_of(state)
        if not self._known or here != self._held:
            found = self._with_buffers_apart(entries(state, self._places), state)
            self._known, self._held = tuple(found), memory_of(state)  # states may just have been made
        elif self._kept:
            self._keep_buffers(state)
        objects = {
            "progress": asdict(state.progress),
            "metrics": dict(state.metrics),
            "experts": dict(state.experts()),
            "about": dict(state.about),
        }
        return Described(self._known, objects)

    def _with_buffers_apart(self, found: Sequence[StateEntry], state: JobState) -> list[StateEntry]:
        """Buffers are copied at once: a forward may write them, and that is before the fence."""
        self._kept = {}
        if self._saver is None:
            return list(found)
        buffers = {f"model.{name}" for name, _ in state.model.named_buffers()}
        self._kept = {entry.name: torch.empty_like(entry.local) for entry in found if entry.name in buffers}
        self._keep_buffers(state)
        return [replace(e, local=self._kept[e.name]) if e.name in self._kept else e for e in found]

    def _keep_buffers(self, state: JobState) -> None:
        self.fence()
        for name, buffer in state.model.named_buffers():
            if (kept := self._kept.get(f"model.{name}")) is not None:
                kept.copy_(local_of(buffer))

    def _about(self, state: JobState) -> About:
        config: Any = getattr(state.model, "config", None)
        if self._peers.index == 0 and config is not self._config[0]:  # only the first writes it, and once is enough
            text = {"config.json": str(config.to_json_string())} if hasattr(config, "to_json_string") else {}
            self._config = config, text
        return About(state.progress.step, self._mesh, self._config[1])

    def _fence_at(self, state: JobState) -> None:
        """Have the optimiser wait, before it writes, for the copy of what it writes."""
        if state.optimiser is not None and self._fenced is not state.optimiser:
            self._fenced = state.optimiser

            def fence(*_: object) -> None:
                self.fence()

            state.optimiser.register_step_pre_hook(fence)

    # ------------------------------------------------------------ what comes of it

    def _save_now(self, state: JobState) -> None:
        step, begun = state.progress.step, time.monotonic()
        if self._peers.index == 0:
            commits.sweep(self.folder, idle=DEAD)
        path = Path(self._peers.from_first(str(commits.free_path(self.folder, step))))
        self._ring = self._ring or Ring()
        try:
            engine.save_described(self._described(state), path, self._peers, self._about(state), self._ring)
        except SaveError as error:
            self._last = None
            self._tell(SaveFailed(step, str(error)))
            return
        finally:
            self.blocked_seconds += time.monotonic() - begun
        seconds = time.monotonic() - begun
        self._tell(CheckpointSaved(step, str(path), seconds, seconds, asynchronous=False))
        if self._peers.index == 0:
            for note in retention.keep_to(self._keep, self.folder):
                self._tell(Note(note))

    def _await(self) -> None:
        """Until what is under way has ended, and all ranks know how."""
        if self._saver is not None:
            self._saver.wait()
            for result in self._saver.poll():
                self._take(result)

    def _take(self, result: async_saver.SaveResult) -> None:
        self.blocked_seconds += result.blocked
        if self._pace is not None and result.path is not None:
            self._pace.cost(result.blocked + self._crowd * result.cpu)
            if news := self._pace.news():
                self._tell(Note(news))
        if result.path is None:
            self._last = None if self._last == result.step else self._last
            self._tell(SaveFailed(result.step, result.reason))
        else:
            path = str(self.folder / result.path.name)
            self._tell(CheckpointSaved(result.step, path, result.blocked, result.seconds, asynchronous=True))
        for note in result.notes:
            self._tell(Note(note))

    def _tell(self, event: CheckpointSaved | SaveFailed | Note) -> None:
        if self._tells:
            self._untold.append(event)
