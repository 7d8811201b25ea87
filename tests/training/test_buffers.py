"""Buffers that steps change are alike on all ranks or refused; what runs otherwise by mode is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.training.data import Batch
from tangram.training.mesh.buffers import before_step, refuse_counted_twice, undo
from tangram.training.mesh.gradient_sums import GradientSums
from tangram.training.run.launch import run_ranks
from tests.training.buffer_tasks import BETWEEN, CASTS, Ran, batch_of, loss_sum, normed, run_all
from tests.training.oracle.warm import once
from tests.training.several_programs import AMONG
from tests.training.small import write_text

Buffers = dict[str, Tensor]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    text = write_text(tmp_path_factory.mktemp("buffers") / "text")

    def run(_: Path) -> list[Ran]:
        return run_ranks(run_all, text, world=2, on_event=lambda _: None, device="cpu")

    return once(tmp_path_factory, "buffers", run)


@pytest.mark.parametrize("layout", ["_/dp ...", "..."])
def test_statistics_of_batch_norms_are_the_mean_over_data_ranks(ran: list[Ran], layout: str) -> None:
    """At the first step weights are those of one process, and so is what each rank sees."""
    wanted: list[Buffers] = []
    for rank in range(2):
        model = normed().train()
        loss_sum(model, batch_of(rank))
        wanted.append(dict(model.named_buffers()))
    assert not torch.equal(wanted[0]["norm.running_mean"], wanted[1]["norm.running_mean"])
    mine, other = (one.buffers[layout][0] for one in ran)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert mine["norm.num_batches_tracked"] == 2
    first = torch.stack([one["norm.running_mean"] for one in wanted]).mean(0)
    # 0.9 of what the first step has left is in what the second leaves: the rest is a mean of what it saw.
    second = torch.stack([_seen(batch_of(2 + rank)) for rank in range(2)]).mean(0)
    assert torch.allclose(mine["norm.running_mean"], 0.9 * first + 0.1 * second, atol=2e-2)
    assert not torch.allclose(mine["norm.running_mean"], wanted[0]["norm.running_mean"], atol=2e-2)


def _seen(batch: Batch) -> Tensor:
    return normed().embed(batch.inputs_BS).flatten(0, 1).mean(0).detach()


def test_a_buffer_that_is_alike_by_itself_stays(ran: list[Ran]) -> None:
    for one in ran:
        buffers, said = one.buffers["steps"]
        assert (float(buffers["seen"]), said) == (2.0, "")


def test_a_buffer_of_what_a_rank_sees_is_refused_before_anything_is_updated(ran: list[Ran]) -> None:
    for one in ran:
        assert "seen is a buffer that steps change, and it is not alike on all ranks" in one.buffers["samples"][1]


def test_a_checkpoint_holds_no_value_of_one_rank_for_all(ran: list[Ran]) -> None:
    """In a loop that does not make them alike."""
    for rank, one in enumerate(ran):
        assert ("is not alike on all ranks" in one.buffers["saved"][1]) == (rank == 0), "rank 0 tells"


@pytest.mark.parametrize("name", BETWEEN)
def test_what_runs_otherwise_by_mode_is_that_of_one_process(ran: list[Ran], name: str) -> None:
    for one in ran:
        off, programs = one.kinds[name]
        assert off < (1e-2 if name in CASTS else 1e-5)
        assert programs == 5 + (name in CASTS)


@pytest.mark.parametrize("name", AMONG)
def test_several_programs_in_a_step_have_the_gradients_of_one_process(ran: list[Ran], name: str) -> None:
    """A gradient was doubled, or computed again by the program of another forward."""
    for one in ran:
        off = {what: off for what, off in one.among.items() if what.startswith(f"{name}; ")}
        assert len(off) == 2
        assert max(off.values()) < 1e-5, off


def test_what_a_backward_reads_outside_of_its_module_has_the_gradient_of_all(ran: list[Ran]) -> None:
    for one in ran:
        assert one.late < 1e-5


def test_sums_that_another_forward_has_changed_are_refused_in_the_backward() -> None:
    """Of a loop that adds up once a step."""
    model = nn.Linear(2, 2)
    sums = GradientSums(model, {})
    first, other = {"weight": ("tp",)}, {"bias": ("tp",)}
    sums.begin(first, {"weight"}, gradients_seen=True)
    sums.begin(other, {"weight"}, gradients_seen=True)
    assert sums.over == other  # a probe's gradients are thrown away
    sums.again(other)
    with pytest.raises(UserError, match="would sum the gradients of other parameters"):
        sums.again(first)
    model.bias.grad = torch.zeros(2)
    with pytest.raises(UserError, match="would sum the gradients of other parameters"):
        sums.begin(first, {"weight"}, gradients_seen=True)


def test_what_is_read_outside_of_its_module_is_summed_as_the_first_forward_says() -> None:
    """What goes through its module is each forward's own; a leaf in the model can be one thing only."""
    model = nn.Linear(2, 2)
    sums = GradientSums(model, {"tp": cast(Any, None)})
    sums.in_backward = True
    sums.begin({"weight": ("tp",), "bias": ("tp",)}, {"weight"}, gradients_seen=True)
    sums.begin({"bias": ("tp",)}, {"weight"}, gradients_seen=True)
    model.bias.grad = torch.zeros(2)
    with pytest.raises(UserError, match="would sum the gradients of other parameters"):
        sums.begin({"weight": ("tp",)}, {"weight"}, gradients_seen=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python", "Kinds draws from Python's random"),
        # Not that torch's stand-in for it draws a number.
        ("collective", "the model's code calls a collective itself (c10d.allreduce_)"),
        ("ever new", "calls was another one in each of 16 calls"),
        (
            "ever new values",
            "the model's code reads the values of n, of which it made something else in each of 16 calls",
        ),
        ("called again", "dropout is done otherwise on a part, and torch.utils.checkpoint calls it again"),
        ("other modules", "drop is not the module that the model had when it was derived"),
        ("renormed", "a forward writes into down.weight, which is trained: write into it after the optimiser's step"),
        ("detached", "a forward writes into down.weight, which is trained: write into it after the optimiser's step"),
        ("cache", "use_cache=True would keep this rank's part"),
        ("in a list", "more is a list, and a derived model takes tensors one by one"),
    ],
)
def test_what_no_program_could_stand_for_is_refused(ran: list[Ran], name: str, words: str) -> None:
    for one in ran:
        assert words in one.refused[name]


def test_what_a_forward_writes_into_parameters_is_kept_under_fsdp(ran: list[Ran]) -> None:
    """FSDP2 throws away what is written into a gathered parameter."""
    for one in ran:
        names, off, otherwise = one.written
        assert names == {"0.clamped.weight", "0.normed.weight"}
        assert off < 1e-6 < 0.1 < otherwise


def test_a_step_that_is_not_applied_leaves_statistics_as_they_were() -> None:
    model = normed().train()
    before = before_step([model])
    loss_sum(model, batch_of(0))
    assert model.get_buffer("norm.running_mean").any()
    undo([model], before)
    assert not model.get_buffer("norm.running_mean").any()
    assert model.norm.num_batches_tracked == 0


def test_what_is_computed_again_may_not_count_twice() -> None:
    with pytest.raises(
        UserError, match=r"run.recompute names block, and block.norm changes its buffers in each forward"
    ):
        refuse_counted_twice("block", normed())
