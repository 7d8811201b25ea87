"""What was saved is what is loaded, at any layout; whatever fails or is killed, the last good checkpoint stays good."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tangram.checkpoint.store import commits
from tangram.errors import UserError
from tangram.training.observe.events import CheckpointSaved, SaveFailed
from tangram.training.run.launch import run_ranks
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress, load, newest
from tests.training.saving import (
    LAYOUTS,
    PROGRESS,
    Seen,
    net,
    plan_of,
    same,
    step,
    trainable,
    two_ranks,
    values,
    whole_state,
)

ONE = plan_of(ranks=1)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Seen]]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "file").touch()
    return folder, run_ranks(two_ranks, folder, world=2, on_event=print, device="cpu")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, JobState]:
    """A checkpoint of one process, and the state that is in it."""
    state = whole_state(net())
    return save(tmp_path / "checkpoint", state), state


def save(folder: Path, state: JobState) -> Path:
    checkpointer = Checkpointer(folder, ONE, None)
    checkpointer.save(state, wait=True)
    (event,) = checkpointer.close()
    assert isinstance(event, CheckpointSaved), event
    return Path(event.path)


def other() -> JobState:
    """A job of the same kind with other values everywhere."""
    return whole_state(net(7), seed=5, steps=3)


# ---------------------------------------------------------------- other layouts


def test_two_ranks_to_one_process(warm: tuple[Path, Sequence[Seen]]) -> None:
    folder, seen = warm
    state = other()
    assert not same(values(state), seen[0].saved)
    assert load(folder / "rows" / "step-00000002", state, ONE, None) == PROGRESS
    assert same(values(state), seen[0].saved), "and not what training made of it while it was written"
    assert state.model.get_parameter("head.weight") is state.model.get_parameter("embed.weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_to_two_of_any_layout_and_from_there(warm: tuple[Path, Sequence[Seen]], layout: str) -> None:
    folder, seen = warm
    for rank in seen:
        assert same(rank.loaded[layout], rank.saved)
    state = other()
    load(folder / f"again-{layout}" / "step-00000002", state, ONE, None)
    assert same(values(state), seen[0].saved)


def test_what_all_ranks_hold_is_written_once_and_by_turns(warm: tuple[Path, Sequence[Seen]]) -> None:
    manifest = commits.read_manifest(warm[0] / "again-copies" / "step-00000002")
    files = [piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces]
    assert len(files) == len(manifest.tensors)
    assert 0.2 < sum("-00001-of" in file for file in files) / len(files) < 0.8


def test_every_save_of_the_same_state_has_the_same_digests(warm: tuple[Path, Sequence[Seen]]) -> None:
    """Whatever the layout: so a copy is proved equal without reading the other."""
    folder = warm[0]
    first, *others = (
        {name: tensor.digest for name, tensor in commits.read_manifest(path / "step-00000002").tensors.items()}
        for path in (folder / "rows", *(folder / f"again-{name}" for name in LAYOUTS))
    )
    assert all(other == first for other in others)


def test_only_the_first_rank_tells(warm: tuple[Path, Sequence[Seen]]) -> None:
    _, (first, second) = warm
    (event,) = first.events["rows"]
    assert isinstance(event, CheckpointSaved)
    assert event.asynchronous
    assert event.step == 2
    assert 0 < event.blocked_seconds <= event.seconds
    assert not any(second.events.values())


def test_a_parameter_that_some_rank_has_nothing_of_is_there_once(warm: tuple[Path, Sequence[Seen]]) -> None:
    tensors = commits.read_manifest(warm[0] / "rows" / "step-00000002").tensors
    assert len(tensors["model.gain.bias"].pieces) == 1  # one element, two ranks
    assert len(tensors["model.embed.weight"].pieces) == 2
    assert tensors["model.embed.weight"].layout == "_=11/dp _=6"
    assert len(tensors["optim.embed.weight.step"].pieces) == 1  # every rank has it
    assert "model.seen" in tensors
    assert not {"model.table", "model.head.weight", "optim.norm.weight.exp_avg"} & tensors.keys()


# ---------------------------------------------------------------- what cannot be written


def test_one_rank_cannot_write(warm: tuple[Path, Sequence[Seen]]) -> None:
    folder, (first, _) = warm
    (failed,) = first.events["full"]
    assert isinstance(failed, SaveFailed)
    assert failed.step == 3
    assert failed.reason.endswith("could not be written: rank 1: File too large")
    (after,) = first.events["after"]
    assert isinstance(after, CheckpointSaved), "the next one is written again"
    assert not after.asynchronous
    assert sorted(path.name for path in (folder / "rows").iterdir()) == ["step-00000002", "step-00000004"]


def test_no_folder_can_be_made(warm: tuple[Path, Sequence[Seen]]) -> None:
    (failed,) = warm[1][0].events["no folder"]
    assert isinstance(failed, SaveFailed)
    assert "cannot be made" in failed.reason
    assert "Not a directory" in failed.reason


def test_what_json_cannot_say_fails_the_checkpoint_only(tmp_path: Path) -> None:
    state = whole_state(net())
    state.about = {"plan": object()}
    checkpointer = Checkpointer(tmp_path, ONE, None)
    checkpointer.save(state)
    (failed,) = checkpointer.close()
    assert isinstance(failed, SaveFailed)
    assert "JSON" in failed.reason
    assert not list(tmp_path.iterdir())


def die_at(number: int, folder: Path) -> None:
    """Kill this process when something is done to files in the folder for the n-th time."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Every file operation of a save is once the last thing that a process does."""
    folder = tmp_path / "checkpoint"
    plan = plan_of(ranks=1, keep=1)
    state = whole_state(net())
    kept: dict[int, Any] = {}
    seen: set[int] = set()
    moment = status = 0
    state.progress, kept[1] = Progress(1), values(state)
    Checkpointer(tmp_path / "before", plan, None).save(state, wait=True)
    assert state.optimiser is not None
    step(state.model, state.optimiser, 1)
    state.progress, kept[2] = Progress(2), values(state)
    for moment in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "before", folder)
        child = os.fork()
        if child == 0:
            die_at(moment, folder)
            Checkpointer(folder, plan, None).save(state, wait=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        path = newest(folder)
        assert path is not None
        assert len(commits.committed(folder)) == len(list(folder.glob("step-*"))), "none is seen half gone"
        found = other()
        at = load(path, found, plan, None).step
        assert same(values(found), kept[at]), f"killed before file operation {moment}"
        seen.add(at)
        if not os.WIFSIGNALED(status):
            break
        commits.sweep(folder)
        assert not list(folder.glob(".*")), "what the dead one left is removed"
    assert seen == {1, 2}
    assert moment > 8
    assert not os.WIFSIGNALED(status)


# ---------------------------------------------------------------- which are kept


def test_the_newest_are_kept(tmp_path: Path) -> None:
    state = whole_state(net())
    checkpointer = Checkpointer(tmp_path, plan_of(ranks=1, keep=2), None)
    for number in (1, 2, 3, 4):
        state.progress = Progress(number)
        checkpointer.save(state)
    steps = [event.step for event in checkpointer.close() if isinstance(event, CheckpointSaved)]
    assert steps == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert newest(tmp_path) == tmp_path / "step-00000004"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_others_are_kept_by_rules(tmp_path: Path, asynchronous: bool) -> None:
    state = whole_state(net())
    rules = ("every=3", "best=metrics.held_out_loss:min")
    plan = plan_of(ranks=1, keep=1, also=rules, asynchronous=asynchronous)
    checkpointer = Checkpointer(tmp_path, plan, None)
    for number, loss in enumerate((5.0, 1.0, 3.0, 4.0, 2.0), start=1):
        state.progress, state.metrics["held_out_loss"] = Progress(number), loss
        checkpointer.save(state)
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000005"]


def test_of_a_job_that_went_back_the_newest_is_what_it_wrote_last(tmp_path: Path) -> None:
    state = whole_state(net())
    for number in (10, 20, 10):
        state.progress = Progress(number)
        save(tmp_path, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010-2", "step-00000020"]
    assert newest(tmp_path) == tmp_path / "step-00000010-2"


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    state = whole_state(net())
    checkpointer = Checkpointer(tmp_path, ONE, None)
    checkpointer.save(state)
    checkpointer.save(state, wait=True)
    assert len(checkpointer.close()) == 1


def test_of_a_view_only_the_view_is_written(tmp_path: Path) -> None:
    model = net()
    model.gain.weight = torch.nn.Parameter(torch.arange(1e6)[5:11].view(1, 6))
    checkpointer = Checkpointer(tmp_path, plan_of(ranks=1, asynchronous=False), None)
    checkpointer.save(JobState(model, None))
    (event,) = checkpointer.close()
    assert isinstance(event, CheckpointSaved)
    assert (Path(event.path) / DATA).stat().st_size < 100_000
    found = JobState(net(3), None)
    load(Path(event.path), found, ONE, None)
    assert torch.equal(found.model.get_parameter("gain.weight"), model.gain.weight)


def test_a_model_without_an_optimiser_is_copied_at_once(tmp_path: Path) -> None:
    model = net()
    before = model.embed.weight.detach().clone()
    checkpointer = Checkpointer(tmp_path, ONE, None)
    checkpointer.save(JobState(model, None))
    with torch.no_grad():
        model.embed.weight.zero_()
    (event,) = checkpointer.close()
    assert isinstance(event, CheckpointSaved)
    assert event.asynchronous
    found = JobState(net(3), None)
    load(Path(event.path), found, ONE, None)
    assert torch.equal(found.model.get_parameter("embed.weight"), before)


def test_what_was_counted_of_experts_and_not_told_yet_goes_along(tmp_path: Path) -> None:
    counted = {"step": 0, "tokens": 5, "layers": {"experts": [3, 7]}}
    checkpointer = Checkpointer(tmp_path, ONE, None)
    checkpointer.save(JobState(net(), None, experts=lambda: counted), wait=True)
    (event,) = checkpointer.close()
    assert isinstance(event, CheckpointSaved)
    found = JobState(net(3), None)
    assert found.experts() == {}
    load(Path(event.path), found, ONE, None)
    assert found.experts() == counted


def test_who_writes_the_state_by_hand_waits_at_the_fence(tmp_path: Path) -> None:
    state = whole_state(net())
    saved = values(state)
    checkpointer = Checkpointer(tmp_path, ONE, None)
    checkpointer.save(state)
    checkpointer.fence()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    checkpointer.close()
    found = other()
    load(tmp_path / "step-00000002", found, ONE, None)
    assert same(values(found), saved)


def test_transformers_loads_a_checkpoint_that_lies_whole(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
    path = save(tmp_path, JobState(model, None))
    ids = torch.arange(7)[None]
    loaded: Any = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "none") is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_before_the_first_step(tmp_path: Path, asynchronous: bool) -> None:
    model = net()
    state = JobState(model, torch.optim.AdamW(trainable(model)))
    checkpointer = Checkpointer(tmp_path, plan_of(ranks=1, asynchronous=asynchronous), None)
    checkpointer.save(state)
    (event,) = checkpointer.close()
    assert isinstance(event, CheckpointSaved)
    assert event.asynchronous == asynchronous
    found = JobState(net(3), None)
    assert load(Path(event.path), found, ONE, None) == Progress()
    assert torch.equal(found.model.get_parameter("embed.weight"), model.embed.weight)


# ---------------------------------------------------------------- checkpoints that are wrong


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


DATA = "model-00001-of-00001.safetensors"


HARMS: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda path: flip(path / DATA, 4100),
        rf'its file "{DATA}", with model.embed.weight and 8 more tensors, has other bytes',
    ),
    (lambda path: flip(path / DATA, 100), rf"{DATA}"),
    (lambda path: flip(path / commits.MANIFEST, 100), r"manifest.json.*damaged"),
    (lambda path: cut(path / DATA), rf'is not whole: its file "{DATA}" has \d+ of \d+ bytes'),
    (lambda path: (path / DATA).unlink(), rf'is not whole: its file "{DATA}" is not there'),
    (lambda path: (path / commits.MARKER).unlink(), "is not a whole checkpoint: it has no tangram.json"),
    (lambda path: (path / commits.MARKER).write_text("{"), r"the tangram.json of the checkpoint .* cannot be read"),
    (lambda path: (path / commits.MARKER).write_text("[]"), r"has the format None; this version reads 2"),
    (lambda path: flip(path / commits.MARKER, 30), r"tangram.json"),
    (lambda path: shutil.rmtree(path), "there is no checkpoint"),
]
TEARS: list[Callable[[Path], Any]] = [lambda path: cut(path / DATA), lambda path: (path / commits.MARKER).unlink()]


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_harm_is_found(saved: tuple[Path, JobState], harm: Callable[[Path], Any], message: str) -> None:
    path, _ = saved
    harm(path)
    with pytest.raises(UserError, match=message):
        load(path, other(), ONE, None)


@pytest.mark.parametrize("harm", TEARS)
def test_a_torn_one_is_passed_over(saved: tuple[Path, JobState], harm: Callable[[Path], Any]) -> None:
    path, state = saved
    state.progress = Progress(90)
    with torch.no_grad():  # else its file is that of the one before, which would be torn, too
        for parameter in state.model.parameters():
            parameter.add_(1)
    later = save(path.parent, state)
    assert newest(path.parent) == later
    harm(later)
    assert newest(path.parent) == path


def test_the_folder_of_all_of_them_is_none(saved: tuple[Path, JobState]) -> None:
    path, _ = saved
    with pytest.raises(UserError, match=f'holds several checkpoints, give one of them: the newest is "{path}"'):
        load(path.parent, other(), ONE, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": False}, r"of another model than the plan's: it lacks model.head.weight \(4 differences in all\)"),
        ({"width": 8}, r"its model.embed.weight is float32 \[11, 6\], not float32 \[11, 8\]"),
    ],
)
def test_another_model(saved: tuple[Path, JobState], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(saved[0], whole_state(net(**options)), ONE, None)


def test_another_type(saved: tuple[Path, JobState]) -> None:
    with pytest.raises(UserError, match=r"model.embed.weight is float32 \[11, 6\], not bfloat16"):
        load(saved[0], JobState(net().to(torch.bfloat16), None), ONE, None)


def test_other_frozen_parameters(saved: tuple[Path, JobState]) -> None:
    path, _ = saved
    model = net()
    with pytest.raises(UserError, match=r"was written with norm.weight frozen .* the same model.freeze"):
        load(path, JobState(model, torch.optim.AdamW(model.parameters())), ONE, None)
    model.norm.weight.requires_grad_(False)
    model.gain.bias.requires_grad_(False)
    with pytest.raises(UserError, match=r"was written with gain.bias trained \(1 parameter"):
        load(path, JobState(model, torch.optim.AdamW(trainable(model))), ONE, None)
