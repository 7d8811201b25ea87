"""A rank that torchrun, or a test in its place, has started; the arguments say which scenes it plays."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tangram.checkpoint.saving.save import save
from tangram.cli.errors import reported
from tangram.errors import UserError
from tangram.tracing.files.format import LOSS_NOT_FINITE, Phase
from tangram.tracing.settings import TraceSettings
from tangram.training.observe.events import Note
from tangram.training.run.launch import Rank, RankError
from tangram.training.run.torchrun import Meeting, on_one, run_as_rank, together


def say(*words: object) -> None:
    """One line, in one piece: several processes write to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def show(event: object) -> None:
    say("event:", event.text if isinstance(event, Note) else event)


def add_up(rank: Rank, payload: int) -> int:
    """Talk to the others and to whoever watches."""
    rank.emit(f"rank {rank.index} emits")
    value = torch.tensor(payload + rank.index)
    dist.all_reduce(value)
    return int(value)


def step_until_asked(rank: Rank, payload: None) -> int:
    """The step at which all ranks stopped."""
    for step in range(1_000_000):
        wish = torch.tensor(float(rank.stop.requested()))
        dist.all_reduce(wish)
        if step == 0:
            say("pid", rank.index, os.getpid())
        if wish > 0:
            return step
    raise AssertionError("nobody asked")


def never_ask(rank: Rank, payload: None) -> None:
    """A step that takes for ever."""
    say("pid", rank.index, os.getpid())
    time.sleep(600)


def hang(rank: Rank, payload: None) -> None:
    """Rank 1 sleeps in its third step; the others wait for it in a collective."""
    for step in range(1, 4):
        rank.trace.step(step)
        rank.trace.phase(Phase.FORWARD)
        if rank.index == 1 and step == 3:
            time.sleep(600)
        dist.barrier()


def diverge(rank: Rank, payload: None) -> None:
    """The loss of rank 1 is not finite, and so is that of all: rank 0 is the first to say so."""
    rank.trace.step(3)
    if rank.index == 1:
        time.sleep(0.3)
        rank.trace.not_finite(LOSS_NOT_FINITE)
    raise FloatingPointError("step 3: the loss is nan")


def fail(rank: Rank, payload: None) -> None:
    """Rank 1 fails; the others wait for it in a collective."""
    if rank.index == 1:
        raise ValueError("the disk is on fire\nand more lines")
    dist.barrier()


def fail_at_first(rank: Rank, payload: str) -> int:
    """Rank 1 of the first attempt is killed in training; in the second all goes well.

    Rank 0 does not fail of that by itself, so an agent that has only rank 0 restarts it without counting.
    """
    for step in range(5):
        try:
            dist.barrier()
        except RuntimeError:
            while not rank.stop.requested():
                time.sleep(0.05)
            raise
        if rank.index == 1 and step == 3 and not Path(payload).exists():
            Path(payload).write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    say("restarts", os.environ["TORCHELASTIC_RESTART_COUNT"])
    return add_up(rank, 10)


def work(meeting: Meeting | None, arguments: list[str]) -> None:
    """Before, in and after the process group, all goes well."""
    assert meeting is not None
    here = meeting.place.index
    value = on_one(meeting, lambda: say("once") or f"of rank {here}")
    node = on_one(meeting, lambda: say("once per node") or here, per="node")
    try:
        run_as_rank(add_up, 0, world=3, on_event=show, device="cpu", meeting=meeting)
    except UserError as error:
        mistake = str(error)
    total = run_as_rank(add_up, 10, world=2, on_event=show, device="cpu", meeting=meeting)
    say("rank", here, "|", value, "|", node, "|", total, "|", mistake)
    on_one(meeting, lambda: time.sleep(0.1) or say("proved"))


def mistaken(meeting: Meeting | None, arguments: list[str]) -> None:
    """All ranks read the same plan, and it is wrong."""
    raise UserError("mend your plan")


def mistaken_once(meeting: Meeting | None, arguments: list[str]) -> None:
    """Rank 0 reads the plan for all."""

    def read() -> int:
        raise UserError("mend your plan, rank 0")

    on_one(meeting, read)


def mistaken_elsewhere(meeting: Meeting | None, arguments: list[str]) -> None:
    """Rank 1 lacks a file that rank 0 has."""
    assert meeting is not None
    if meeting.place.index == 1:
        raise UserError("where is the text, rank 1")
    on_one(meeting, lambda: None)


def other_mesh(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    run_as_rank(add_up, 0, world=3, on_event=show, device="cpu", meeting=meeting)


def save_alone(rank: Rank, payload: str) -> None:
    """Rank 1 is killed while the other saves."""
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    save({"x": torch.ones(4)}, payload, group=dist.group.WORLD)


def killed_in_save(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    run_as_rank(save_alone, arguments[0], world=2, on_event=show, device="cpu", meeting=meeting)


def killed_in_step(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    run_as_rank(killed, None, world=2, on_event=show, device="cpu", meeting=meeting)


def killed(rank: Rank, payload: None) -> None:
    """Rank 1 is killed in a step."""
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    run_as_rank(fail, None, world=2, on_event=show, device="cpu", meeting=meeting)


def stuck(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    trace = TraceSettings(Path(arguments[0]), b"a run of stuck..", "dp=2", hang_seconds=2.0)
    run_as_rank(hang, None, world=2, on_event=show, device="cpu", meeting=meeting, trace=trace)


def astray(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    trace = TraceSettings(Path(arguments[0]), b"a run that bends", "dp=2")
    run_as_rank(diverge, None, world=2, on_event=show, device="cpu", meeting=meeting, trace=trace)


def stop(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    say("stopped at step", run_as_rank(step_until_asked, None, world=2, on_event=show, device="cpu", meeting=meeting))


def stubborn(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    run_as_rank(never_ask, None, world=2, on_event=show, device="cpu", meeting=meeting)


def restart(meeting: Meeting | None, arguments: list[str]) -> None:
    assert meeting is not None
    say("total", run_as_rank(fail_at_first, arguments[0], world=2, on_event=show, device="cpu", meeting=meeting))


SCENES: dict[str, Callable[[Meeting | None, list[str]], None]] = {
    scene.__name__: scene
    for scene in (
        work,
        mistaken,
        mistaken_once,
        mistaken_elsewhere,
        other_mesh,
        crash,
        stuck,
        astray,
        killed_in_save,
        killed_in_step,
        stop,
        stubborn,
        restart,
    )
}


def play(scene: str, arguments: list[str]) -> int:
    """Play one scene as `tangram train` is to run a job; the exit code."""
    try:
        with together() as meeting:
            SCENES[scene](meeting, arguments)
    except RankError as failure:
        os.write(2, f"error: {failure}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    names, rest = sys.argv[1].split(","), sys.argv[2:]
    codes = [reported(lambda name=name: play(name, rest)) for name in names]
    if len(codes) > 1:
        say("codes", *codes)
    sys.stderr.flush()
    os._exit(codes[-1])  # as tangram.cli.main does
