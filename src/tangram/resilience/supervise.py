"""Run the ranks of a job on this machine, and go on after a failure from what is nearest.

    ranks train, a snapshot into memory every step  ->  one is killed  ->  the others are ended  ->  new ones are forked
    from a process that has imported everything  ->  they load the newest snapshot  ->  the next step

Whoever watches the run sees it as if nothing had happened: a step that is done again is reported once, clocks go on,
and the report at the end is of the whole run. A step that is done again must have the loss it had; where it has not,
that is said, for then some rank computes otherwise than before.

Every attempt has a folder and a store of its own, so nothing of a dead one is taken for a live one's: torchrun's
restarts fail by that (pytorch#135712, #167288). Of several nodes each has its launcher (`resilience.nodes`).
"""

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tangram.checkpoint.store.commits import read_marker
from tangram.errors import UserError
from tangram.resilience import shares
from tangram.resilience.carrier import Carrier, Promoter
from tangram.resilience.fewer import shrunk, with_room
from tangram.resilience.nodes import ElsewhereError, Nodes
from tangram.resilience.policy import Cause, Failure, Limits, lost_capacity, verdict
from tangram.resilience.rescue import rescue_alone, saved
from tangram.resilience.seen import MEMORY, FailureLog, Recovered, Seen
from tangram.resilience.tiers import Tiers, id_of, memory_of
from tangram.tracing.settings import fresh_folder
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed, StopRequested
from tangram.training.run.environment import ReportedElsewhere, refuse_too_many
from tangram.training.run.launch import ENOUGH, RankError, run_ranks
from tangram.training.run.rank import RankJob, RankReport, Snapshots, packing_of, train_rank
from tangram.training.run.run_folder import CHECKPOINTS
from tangram.training.run.signals import POLITE, interrupt, on_signals
from tangram.training.run.torchrun import Meeting
from tangram.training.step.loop import Trained

__all__ = ["Recovered", "Settings", "supervised"]

OnEvent = Callable[[object], None]
LEFT_OUT = "left out: "
"""How a save begins that came while the one before was being written: of snapshots no failure."""
MORE_MEMORY = "for more, a container's --shm-size, or another folder with --memory"


@dataclass(frozen=True)
class Settings:
    """How a run is kept going."""

    snapshot_every: int | None = None
    """Steps from one snapshot in memory to the next; 0: none, so that checkpoints go to the disk alone. None: as often
    as costs at most 3 % of training."""
    limits: Limits = field(default_factory=Limits)
    min_ranks: int | None = None
    """With how many the run goes on where not all can be kept alive; None: only with all."""
    copies: int = 1
    """Of several nodes: on how many others each share of a snapshot is, too."""
    memory: Path | None = None
    """The folder for snapshots; None: /dev/shm."""


EVERYWHERE = 2
"""So many newer ones a snapshot has where each node is known to have its share: a save waits for the one before."""


class _SnapshotsEnd(Exception):
    """Memory takes no more of them."""


def supervised(
    job: RankJob,
    on_event: OnEvent,
    settings: Settings | None = None,
    on_start: Callable[[Sequence[int]], None] = lambda processes: None,
    meeting: Meeting | None = None,
) -> RankReport:
    """Run `train_rank` on all ranks until the run is done; the report of rank 0, or the first here, of the whole run.

    `meeting`: of the launchers of several nodes. Raises UserError and RankError as `run_ranks` does where the policy
    gives up, with its reason.
    """
    nodes, settings = None if meeting is None else Nodes(meeting), settings or Settings()
    job = with_room(job, settings.min_ranks, nodes, on_event)
    if nodes is not None:
        nodes.divide(job.plan.ranks)
    refuse_too_many(job.plan.ranks if nodes is None else nodes.ranks)
    run = _Run(job, on_event, settings, on_start, nodes)
    with on_signals(POLITE, run.ask, interrupt):  # between two attempts; within one the ranks hear of them
        try:
            return run.to_its_end()
        finally:
            run.close()


@dataclass
class _Run:
    """The run so far."""

    job: RankJob
    on_event: OnEvent
    settings: Settings
    on_start: Callable[[Sequence[int]], None]
    nodes: Nodes | None = None
    """Of several, which all do the same."""
    failures: list[Failure] = field(default_factory=list[Failure])
    begun: int = 0
    """The failures before there were as many ranks as now."""
    bad: set[str] = field(default_factory=set[str])
    """Checkpoints that no attempt came to a step from: their paths, or on several nodes their ids."""
    apart: bool = False
    """Whether something happened here of which other nodes do not know yet."""
    full: str = ""
    """Why memory takes no more snapshots of this attempt."""
    newest: CheckpointSaved | None = None
    """The newest snapshot of this attempt."""
    stopping: bool = False
    """Whether somebody has asked the run to stop."""

    def __post_init__(self) -> None:
        plan, folder = self.job.plan, self.job.folder
        memory = memory_of(folder, self.settings.memory) if self.settings.snapshot_every != 0 else None
        if self.settings.snapshot_every != 0 and memory is None:
            self.on_event(Note("this system has no /dev/shm: without snapshots in memory, checkpoints go to the disk"))
        self.tiers = Tiers(memory, folder / CHECKPOINTS)
        self.keep = keep = (f"last={plan.checkpoint.keep}", *plan.checkpoint.also)
        self.promoter: Promoter | Carrier
        if self.nodes is None or memory is None:
            self.promoter = Promoter(self.tiers.disk, keep)
        else:
            self.promoter = Carrier(self.nodes, self.tiers, self.settings.copies, keep)
        self.log = FailureLog(folder if self.nodes is None or self.nodes.index == 0 else None, plan.ranks)
        self.seen = Seen(plan, self._tell)
        self.attempts = max((int(path.name.partition("-")[2]) for path in self.tiers.attempts()), default=0)

    # ------------------------------------------------------------ attempts

    def to_its_end(self) -> RankReport:
        self.tiers.forget()  # of a run before; `rescue` has what is to be gone on from
        resume = self.job.resume
        while True:
            began = self.seen.reached
            try:
                report = self._agreed(resume)
            except (RankError, _SnapshotsEnd, UserError) as error:
                if isinstance(error, UserError):
                    if resume in (None, self.job.resume) or self.seen.reached > began:
                        raise
                    assert resume is not None
                    # As a damaged one: its copy on the disk may do, or an older one.
                    self.bad.add(str(resume) if self.nodes is None else id_of(resume))
                    self.on_event(Note(f"cannot go on from {resume}: {error}"))
                    resume = self._newest()
                    if resume is None:
                        raise
                elif not self._must_stop():
                    resume = self._after(error)
                if self._must_stop():
                    return self._stopped(error)
            else:
                self._last_to_disk()
                return self._with_all_steps(report)

    def ask(self, name: str) -> None:
        """Note that a signal asks the run to stop: it may come in the midst of anything."""
        self.stopping = True

    def _must_stop(self) -> bool:
        """Whether the run was asked to stop, alike on all nodes."""
        if self.nodes is not None:
            self.stopping = any(self.nodes.words(self.stopping))
        return self.stopping

    def _started(self, processes: Sequence[int]) -> None:
        if self.stopping:  # before there was anybody to hear of it
            signal.raise_signal(signal.SIGTERM)
        self.on_start(processes)

    def close(self) -> None:
        """Leave nothing in memory; of a run that did not come to its end the newest snapshot goes to the disk.

        Where other nodes do not know of the end yet, what is in memory stays there for `rescue`.
        """
        self.log.ended()
        if not self.apart:
            self.promoter.close()
            self.pass_on()
            if why := self._rescued():
                self.on_event(Note(why))
        if self.nodes is not None:
            self.nodes.close()

    def _rescued(self) -> str:
        """Why the newest snapshot could not be brought to the disk."""
        if self.nodes is None:
            return rescue_alone(self.tiers, self.on_event)
        try:
            shares.to_disk(self.nodes, self.tiers, partial(saved, self.on_event))
        except (UserError, RankError, ReportedElsewhere) as error:
            return str(error)
        return ""

    def _agreed(self, resume: Path | None) -> RankReport:
        """An attempt, which ends on all nodes alike."""
        error, report, self.apart = None, None, self.nodes is not None
        try:
            report = self._attempt(resume)
        except (RankError, UserError, _SnapshotsEnd, ElsewhereError) as caught:
            error = caught
        if self.nodes is not None:
            reached, stopping = self.seen.reached, self.stopping
            error, self.seen.reached = self.nodes.settled(self.attempts, error, reached, stopping=stopping)
        self.apart = False
        if error is not None:
            raise error
        assert report is not None
        return report

    def _attempt(self, resume: Path | None) -> RankReport:
        self.attempts, self.newest, self.full = self.attempts + 1, None, ""
        try:
            memory = self.tiers.attempt(self.attempts)
        except OSError as error:
            self.on_event(Note(f'no snapshots in memory: "{error.filename}": {error.strerror}'))
            memory = None
        trace, nodes = self.job.trace, self.nodes
        if trace is not None and self.failures:  # that of the attempt before says what it died of
            trace = replace(trace, folder=fresh_folder(self.job.folder))
        if nodes is not None:
            words = nodes.words((memory, trace and trace.folder))
            memory = None if any(one is None for one, _ in words) else memory
            trace = trace and replace(trace, folder=words[0][1])
        if memory is None:
            self.tiers = replace(self.tiers, memory=None)
        snapshots = memory and Snapshots(memory, self.settings.snapshot_every, nodes and nodes.place)
        job = replace(self.job, resume=resume, snapshots=snapshots, trace=trace)
        job = replace(job, spent=self.seen.spent(), reached=self.seen.reached)
        if resume is not None and resume.parent == self.tiers.disk:
            self.seen.promoted = read_marker(resume).step
        self.seen.begin(
            "the beginning" if resume is None else "the disk" if resume.parent == self.tiers.disk else MEMORY
        )
        world = job.plan.ranks if nodes is None else nodes.among(self.attempts)
        try:
            hear, begun, device = self._hear, self._started, job.plan.run.device
            report = run_ranks(
                train_rank, job, world=world, on_event=hear, device=device, on_start=begun, spare=True, trace=trace
            )[0]
        except UserError:  # nor does the disk take the state
            if not self.full or self.stopping:
                raise
            report = None
        if self.full and not self.stopping and (report is None or report.trained.stopped == "signal"):
            raise _SnapshotsEnd(self.full)
        assert report is not None
        return report

    def _stopped(self, error: Exception) -> RankReport:
        """Of ranks that had been asked to stop and were lost: they are not started again, and the newest state goes to
        the disk. Raises the error where there is none, and UserError where the disk takes none."""
        self.tiers.settle()
        if (newest := self._newest()) is None:
            raise error
        step, packing = read_marker(newest).step, packing_of(newest)
        self.on_event(Note(f"{error}, after it had been asked to stop: its newest state is of step {step}"))
        self.promoter.close()
        if why := self._rescued():
            raise UserError(why)
        trained = Trained((), 0, self.seen.spent(), "signal")
        return self._with_all_steps(RankReport(trained, 0, step, None, None, 0.0, 0.0, packing, self.job.plan.ranks))

    def _after(self, error: RankError | _SnapshotsEnd) -> Path | None:
        """Where the run goes on from after a failure. Raises what the policy stops at."""
        now, step = time.monotonic(), self.seen.reached
        self.seen.failed_at = now
        if isinstance(error, RankError):
            failure = Failure(Cause(error.how), str(error), step, now)
        else:
            failure = Failure(Cause.STORE, str(error), step, now)
            self.promoter.close()  # which may be at the very one; no more come
            self.tiers.settle()
            if why := self._rescued():
                self.on_event(Note(why))
            self.tiers = replace(self.tiers, memory=None)
        self.failures.append(failure)
        self.log.failed(failure, error.details if isinstance(error, RankError) else "")
        of_size, limits, least = self.failures[self.begun :], self.settings.limits, self.settings.min_ranks
        why = verdict(self.failures, replace(limits, in_a_row=len(self.failures)))
        # Several nodes go on with fewer ranks where fewer of them meet: all ranks are worth that.
        least = least if self.nodes is None else None
        if not why and (why := verdict(of_size, limits)) and least is not None and lost_capacity(of_size, limits):
            self.job = shrunk(self.job, least, f"{failure.words}; {why}", self.on_event)
            self.begun, why, self.seen.relaid = len(self.failures), "", True
        if why:
            if least is None and lost_capacity(of_size, limits):
                many = "" if self.nodes is None else ", on the nodes that are left without that one"
                why += f"; with --min-ranks N it goes on with fewer{many}"
            if isinstance(error, RankError):
                words = f"{error.error}; {why}"
                raise RankError(error.rank, self.job.plan.ranks, words, error.details, error.how) from error
            raise UserError(f"{failure.words}; {why}")
        self.tiers.settle()
        resume = self._newest()
        where = "the beginning" if resume is None else f"{resume}"
        self.on_event(Note(f"after step {failure.step}: {failure.words}; going on from {where}"))
        return resume

    def _newest(self) -> Path | None:
        if self.nodes is not None:
            return shares.newest(self.nodes, self.tiers, self.bad, self.attempts) or self.job.resume
        return next((path for path in self.tiers.newest_first() if str(path) not in self.bad), self.job.resume)

    # ------------------------------------------------------------ what is heard

    def _tell(self, event: object) -> None:
        if isinstance(event, Recovered):
            self.log.recovered(event)
        self.on_event(event)

    def _hear(self, event: object) -> str | None:
        self.pass_on()
        match event:
            case StopRequested():
                self.stopping = True
                self.on_event(event)
            case CheckpointSaved() if self.tiers.memory is not None:
                self._snapshot(event)
            case SaveFailed() if self.tiers.memory is not None:
                if not event.reason.startswith(LEFT_OUT):
                    self.full = self.full or f"snapshots in memory have ended: {event.reason} ({MORE_MEMORY})"
                    if self.nodes is not None:
                        raise _SnapshotsEnd(self.full)
                    self.promoter.close()  # so that what is older is on the disk before the state of the last step
                    self.pass_on()
                    self.promoter = Promoter(self.tiers.disk, self.keep)
                    return ENOUGH
            case _:
                self.seen(event)
        return None

    def _snapshot(self, event: CheckpointSaved) -> None:
        """A snapshot in memory; those that the plan wants on the disk, or the first after them, are brought there."""
        if self.full:
            self.newest = event
            if Path(event.path).parent == self.tiers.disk:
                self.seen.promoted, self.newest = event.step, None
                self.on_event(event)
            return
        self.seen.blocked += event.blocked_seconds
        every = self.job.plan.checkpoint.every_steps
        self.newest = event
        self._offer(event, disk=every > 0 and event.step // every > self.seen.promoted // every)
        mine = self.tiers.attempt(self.attempts)
        if mine is None or Path(event.path).parent != mine:
            return
        # What an attempt before has left is older now; once this one is known to be everywhere, where it has to be.
        if self.nodes is None or len(list(mine.glob("step-*"))) > EVERYWHERE:
            self.tiers.forget(but=mine)

    def _offer(self, event: CheckpointSaved, *, disk: bool) -> None:
        if disk:
            event = replace(event, blocked_seconds=self.seen.blocked)
        if self.promoter.offer(event, disk=disk) and disk:
            self.seen.promoted, self.seen.blocked = event.step, 0.0

    def _last_to_disk(self) -> None:
        """The state at the end of the run, or where somebody asked to stop."""
        if self.tiers.memory is None:
            return
        newest = self.newest
        if newest is not None and newest.step > self.seen.promoted:
            self._offer(newest, disk=True)
        self.promoter.close()
        self.pass_on()
        self.promoter = Promoter(self.tiers.disk, ())
        lost = newest is not None and not self.tiers.on_disk(Path(newest.path))
        if newest is not None and (lost if self.nodes is None else self.nodes.words(lost)[0]):
            again = f"tangram launch --resume --out {shlex.quote(str(self.job.folder))}"
            raise UserError(
                f"the last checkpoint, of step {newest.step}, could not be written to the disk: where that takes it "
                f"again, {again} brings it there"
            )

    def pass_on(self) -> None:
        for event in self.promoter.heard():
            self.on_event(event)

    def _with_all_steps(self, report: RankReport) -> RankReport:
        """The report of the last attempt, with the steps of all of them."""
        steps = self.seen.steps
        if not self.failures or not steps:
            return report
        first = min(steps) - 1
        losses = tuple(steps[step].loss for step in sorted(steps))
        tokens, seconds = sum(one.tokens for one in steps.values()), max(one.seconds for one in steps.values())
        trained = replace(report.trained, losses=losses, tokens=tokens, seconds=seconds)
        return replace(report, trained=trained, first=first)
