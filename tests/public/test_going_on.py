"""Runs that were gone on with as people have reported, and that did another training than the one that was cut off.

verl-project/verl#7401 a resume from the checkpoint at the end of an epoch leaves the next epoch out, and exits with 0
huggingface/accelerate#4071 a resume amid the second epoch has the order of the first
Lightning-AI/pytorch-lightning#1772 after a resume the learning rate is that of a step before
pytorch/torchtitan#930 what a save that goes on beside training has is of the steps that came meanwhile
NVIDIA/Megatron-LM#5281 NaN comes at the same step after each restart, and the job is restarted for ever
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangram.checkpoint import About, load
from tangram.checkpoint.saving.async_saver import AsyncSaver
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store.commits import committed, newest
from tangram.relayout.exchange.peers import Peers
from tangram.resilience.supervise import Settings
from tangram.training.data import open_corpus, tokens_of
from tangram.training.run.launch import RankError
from tests.resilience.runs import Run, job_of, run, text_in

EPOCH = 2  # steps


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_in(tmp_path_factory.mktemp("going_on"))


def test_a_run_goes_on_at_and_after_the_end_of_an_epoch_as_if_it_had_not_stopped(text: Path) -> None:
    data, steps, on_disk = {"sequence": 58, "global_batch": 24}, 3 * EPOCH + 1, Settings(snapshot_every=0)
    tables = {"data": data, "run": {"steps": steps}, "checkpoint": {"every_steps": 1, "keep": steps}}
    job, alone = job_of(text.parent / "alone", text, **tables), Run()
    (split,) = open_corpus(job.plan.data, tokens_of(job.plan)).training
    assert split.windows(data["sequence"]) == EPOCH * data["global_batch"]
    run(job, alone, on_disk)
    paths = {marker.step: path for path, marker in committed(job.folder / "checkpoint")}
    assert [*paths] == [*range(1, steps + 1)]
    for after in (EPOCH, EPOCH + 1):
        seen, folder = Run(), text.parent / f"after-{after}"
        folder.mkdir()
        report = run(replace(job, folder=folder, resume=paths[after]), seen, on_disk)
        assert (report.first, report.step) == (after, steps)
        assert [(one.step, one.loss, one.lr) for one in seen.steps] == [
            (one.step, one.loss, one.lr) for one in alone.steps[after:]
        ]


def test_a_run_that_goes_on_saves_when_it_is_due_and_not_at_once(text: Path) -> None:
    tables = {"run": {"steps": 4}, "checkpoint": {"every_steps": 3, "keep": 9}}
    job = job_of(text.parent / "due", text, **tables)
    run(job, Run(), Settings(1))
    (*_, (path, _)) = committed(job.folder / "checkpoint")
    more = job.plan.model_copy(update={"run": job.plan.run.model_copy(update={"steps": 7})})
    run(replace(job, plan=more, resume=path), Run(), Settings(1))
    steps = [marker.step for _, marker in committed(job.folder / "checkpoint")]
    assert steps[-1] == 7
    assert 5 not in steps


def test_what_is_saved_beside_training_is_of_the_step_it_was_saved_at(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20)
    saver = AsyncSaver(tmp_path, Peers())
    for step in (1, 2, 3):
        saver.save(describe({"model": {"w": weights}}), About(step))
        saver.fence()  # as the optimiser does before it writes
        weights += 1
    saver.wait()
    assert [(one.step, one.reason) for one in saver.close()] == [(1, ""), (2, ""), (3, "")]
    for path, marker in committed(tmp_path):
        found = {"model": {"w": torch.full_like(weights, -1)}}
        load(found, path)
        assert found["model"]["w"].unique().tolist() == [marker.step - 1]


NAN_EACH_TIME = """
import pathlib, torch
from torch.nn.modules.module import register_module_forward_pre_hook

forwards = 0

def spoil(module, args):
    global forwards
    flag = pathlib.Path(__file__).with_suffix(".flag")
    in_training = torch.distributed.is_initialized() and module.training
    if in_training and type(module).__name__.endswith("ForCausalLM"):
        forwards += 1
        if forwards > 4 or flag.exists():
            flag.touch()
            next(module.parameters()).data.fill_(float("nan"))

register_module_forward_pre_hook(spoil)
"""


def test_what_comes_again_after_each_restart_stops_the_run_at_the_second_time(text: Path) -> None:
    (text.parent / "spoils.py").write_text(NAN_EACH_TIME)
    job = job_of(text.parent / "spoilt", text, model={"code": str(text.parent / "spoils.py")}, run={"steps": 9})
    seen = Run()
    with pytest.raises(RankError, match=r"the (loss|gradient).* is nan.* the same error came twice after step \d+"):
        run(job, seen, Settings(1))
    assert seen.starts == 2
    sound = newest(job.folder / "checkpoint")
    assert sound is not None, "and the state before is on the disk"
    assert sound.name == f"step-{len(seen.steps):08d}"
