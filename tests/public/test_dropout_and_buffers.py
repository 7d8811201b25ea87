"""Public reports of masks that ranks had in common or not, of forwards that ran twice, and of one rank's statistics."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.data import Batch, RankBatches
from tangram.training.mesh.buffers import refuse_counted_twice
from tangram.training.mesh.drawing import Drawer, drawing, seed_for
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.run.launch import Rank, run_ranks
from tests.training.buffer_tasks import train_normed
from tests.training.oracle.warm import once
from tests.training.small import write_text

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Attention and a product, with a dropout in each place where there may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, h // 2).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).reshape(b, s, h)
        x = x + self.drop(self.out(found))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Outer(nn.Module):
    """A block that may be recomputed."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.block, self.again = Block(), again

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, checkpoint)(self.block, x, use_reentrant=False) if self.again else self.block(x)


MARKS = ("*.qkv.weight: (3 o/tp) i", "*.out.weight: o i/tp", "*.up.weight: o/tp i", "*.down.weight: o i/tp")


@dataclass(frozen=True)
class Ran:
    """What came of it on one rank."""

    results: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    refused: Mapping[str, str]


class Renormed(nn.Module):
    """Vectors that are shortened in the table where they are longer than 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(8, 8, max_norm=1.0), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.embed(x))


class Shortened(nn.Module):
    """A block that is passed over at some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else self.block(x)


def what_is_said(make: type[nn.Module], mark: str, x: Tensor, devices: DeviceMesh) -> str:
    model = make()
    try:
        parallel(model, [Mark.parse(mark)], devices, {"x": x})
        model(x)
    except UserError as error:
        return str(error)
    return "nothing"


def block(again: bool = False) -> Outer:
    torch.manual_seed(0)
    return Outer(again)


def run_all(rank: Rank, text: Path) -> bytes:
    """The task of two ranks; tensors by value, for a rank may have ended before they are looked at."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name, again, marks in (
        ("plain", False, MARKS),
        ("again", True, MARKS),
        ("sequence", False, (*MARKS, "block.out: b s/tp h")),
    ):
        model = block(again)
        parallel(model, [Mark.parse(mark) for mark in marks], devices, {"x": X})
        torch.manual_seed(7)
        if rank.index == 1:
            torch.rand(3)  # as what loads data there may draw
        results[name] = model(X).detach().clone()
        results[f"{name}, evaluated"] = model.eval()(X).detach()
        model.train().zero_grad()
        torch.manual_seed(7)
        model(X).square().sum().backward()
        gradients[name] = cast(Any, model.block.up.weight.grad).full_tensor()
    refused = {
        "renormed": what_is_said(Renormed, "up.weight: o/tp i", torch.arange(8), devices),
        "shortened": what_is_said(Shortened, "*.up.weight: o/tp i", X, devices),
    }
    return pickle.dumps(Ran(results, gradients, train_normed(rank, text, "...")[0], refused))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    text = write_text(tmp_path_factory.mktemp("reports") / "text")

    def run(_: Path) -> list[Ran]:
        return [pickle.loads(one) for one in run_ranks(run_all, text, world=2, on_event=lambda _: None, device="cpu")]

    return once(tmp_path_factory, "dropout-reports", run)


def test_ranks_whose_generators_have_run_on_drop_alike(ran: list[Ran]) -> None:
    """NVIDIA/Megatron-LM#206: a data loader drew on one TP rank alone, and ranks dropped otherwise."""
    model = block()
    torch.manual_seed(7)
    with DrawMode():
        want = model(X)
    for one in ran:
        assert torch.allclose(one.results["plain"], want, atol=1e-5)


def test_masks_under_sequence_parallelism_are_of_places_in_the_whole(ran: list[Ran]) -> None:
    """NVIDIA/Megatron-LM#1256: dropout of hidden states that are cut by sequence drew from the wrong generator."""
    for one in ran:
        assert torch.allclose(one.results["sequence"], one.results["plain"], atol=1e-5)


def test_what_is_computed_again_has_the_masks_of_the_forward(ran: list[Ran]) -> None:
    """allenai/OLMo-core#828: the generator was not restored, so gradients were of other masks."""
    for one in ran:
        assert torch.allclose(one.gradients["again"], one.gradients["plain"], atol=1e-5)


def test_nothing_is_dropped_in_evaluation(ran: list[Ran]) -> None:
    """pytorch/pytorch#141557: a compiled dropout did in evaluation what it does in training."""
    want = block().eval()(X)
    for one in ran:
        for name in ("plain", "again", "sequence"):
            assert torch.allclose(one.results[f"{name}, evaluated"], want, atol=1e-5)


def test_a_layer_that_is_dropped_by_chance_is_not_fixed_at_the_first_call(ran: list[Ran]) -> None:
    """pytorch/pytorch#95425: a layer that Python's random drops was there or not in all calls of a compiled model."""
    for one in ran:
        assert "Shortened draws from Python's random" in one.refused["shortened"]


def test_a_table_that_is_renormed_in_the_forward_is_told(ran: list[Ran]) -> None:
    """pytorch/pytorch#37246: max_norm of an embedding ended in a trace about views on several devices."""
    for one in ran:
        assert "embed writes into its table in the forward (max_norm)" in one.refused["renormed"]


def test_masks_differ_between_data_ranks_and_not_within_a_group() -> None:
    """tenstorrent/tt-metal#55947: one seed for all gave DP ranks one mask, one by device unlike masks to TP."""

    def mask(sample: int) -> Tensor:
        module, ids = nn.Dropout(), torch.zeros(2, 64, dtype=torch.long)
        drawer = Drawer(module, compiled=False)
        with drawing([drawer], 3, RankBatches((Batch(ids, ids, None),), 1, (sample,), 0, 4)) as draws:
            draws.begin(0)
            return module(torch.ones(2, 64))

    assert torch.equal(mask(0), mask(0))  # ranks of a model axis have the same samples
    assert not torch.equal(mask(0), mask(2))


def test_masks_are_a_function_of_seed_and_sample_whatever_a_resume_restores() -> None:
    """NVIDIA/Megatron-LM#6858: most ranks resumed on another rank's generator, of which one state was saved for all."""
    seed_for(torch.device("cpu"), 3, 40)
    before = torch.rand(8)
    torch.manual_seed(0)  # another process
    seed_for(torch.device("cpu"), 3, 40)
    assert torch.equal(torch.rand(8), before)


def test_statistics_of_a_batch_norm_are_those_of_all_data_ranks(ran: list[Ran]) -> None:
    """huggingface/pytorch-image-models#110: without a step of its own each rank validates by other statistics."""
    first, other = (one.buffers for one in ran)
    assert first["norm.running_mean"].any()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_batch_norm_may_not_be_computed_again() -> None:
    """cybertronai/gradient-checkpointing#35: a forward that runs twice counts what it sees twice."""
    with pytest.raises(UserError, match=r"would change twice: leave it out of run\.recompute"):
        refuse_counted_twice("block", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
