"""What ranks do with models whose steps change buffers, and with models that run otherwise from call to call."""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.building.twin import without_memory
from tangram.schema.plan import Plan
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.local_ops.samples import draws_of
from tangram.training.data import Batch, RankBatches
from tangram.training.mesh.tensor_parallel import parallel
from tangram.training.mesh.world import make_world
from tangram.training.mesh.written_parameters import keep_written
from tangram.training.observe.events import SaveFailed
from tangram.training.parallel.apply import apply
from tangram.training.run.launch import Rank
from tangram.training.state.checkpointer import Checkpointer, JobState
from tangram.training.step.loop import train_step
from tangram.training.step.optimiser_step import make_adamw
from tests.training.several_programs import among, read_late
from tests.training.small import small_tables

# ------------------------------------------------------------ buffers, on DP ranks


class Normed(nn.Module):
    """Tokens through a batch norm; counted by a buffer that no rule knows, from what a rank sees or from nothing."""

    def __init__(self, counts: str = "") -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(257, 12), nn.BatchNorm1d(12), nn.Linear(12, 257)
        self.counts = counts
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        x_NH = self.embed(input_ids).flatten(0, 1)
        if self.training and self.counts == "steps":
            self.seen += 1
        if self.training and self.counts == "samples":
            self.seen = self.seen + input_ids.float().mean()
        return self.head(torch.tanh(self.norm(x_NH))).view(*input_ids.shape, 257)


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits_BSV: Tensor = model(batch.inputs_BS)
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")


def batch_of(index: int) -> Batch:
    ids = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(index))
    return Batch(ids, ids.roll(-1, 1), None)


def normed(counts: str = "") -> Normed:
    torch.manual_seed(2)
    return Normed(counts)


def train_normed(rank: Rank, text: Path, layout: str, counts: str = "") -> tuple[dict[str, Tensor], str]:
    """The buffers after two steps, and what was refused."""
    tables = {**small_tables(text, checkpoint={"asynchronous": False}), "layouts": {"parameters": {"*": layout}}}
    plan = Plan.model_validate({**tables, "model": {}})
    group = torch.distributed.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    model = normed(counts).train()
    parallelized = apply(model, plan, world)
    optimiser = make_adamw(model, plan.optimiser)
    said = ""
    try:
        for step in range(2):
            batches = RankBatches((batch_of(2 * step + rank.index),), 32, (rank.index,))
            train_step(parallelized, optimiser, batches, lr=1e-2, loss_sum=loss_sum)
    except UserError as error:
        said = str(error)
    return {name: one.clone() for name, one in model.named_buffers()}, said


def save_unlike(rank: Rank, text: Path, folder: Path) -> list[str]:
    """What is told of a save of a model whose statistics differ between ranks, in a loop that does nothing about it."""
    plan = Plan.model_validate({**small_tables(text, checkpoint={"asynchronous": False}), "model": {}})
    group = torch.distributed.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    model = apply(normed().train(), plan, world).module
    loss_sum(model, batch_of(rank.index)).backward()
    checkpointer = Checkpointer(folder, plan, world)
    checkpointer.save(JobState(model, None), wait=True)
    return [str(one.reason) for one in checkpointer.close() if isinstance(one, SaveFailed)]


def all_buffers(rank: Rank, text: Path) -> Mapping[str, tuple[dict[str, Tensor], str]]:
    """All works of this kind, on one start."""
    found = {layout: train_normed(rank, text, layout) for layout in ("_/dp ...", "...")}
    found |= {counts: train_normed(rank, text, "...", counts) for counts in ("steps", "samples")}
    return {**found, "saved": ({}, " ".join(save_unlike(rank, text, text.parent / "unlike")))}


# ------------------------------------------------------------ modes, on model ranks


class Kinds(nn.Module):
    """Two products, and between them what is done otherwise by mode, call or state."""

    def __init__(self, between: Callable[[Kinds, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.drop, self.p, self.calls = nn.Dropout(0.5), 0.5, 0
        self.between = between

    def forward(
        self, x: Tensor, use_cache: bool = False, more: Sequence[Tensor] = (), n: Tensor | None = None
    ) -> Tensor:
        return self.down(self.between(self, torch.tanh(self.up(x)))) * (1 if n is None else n.item())


def _own_branch(model: Kinds, x: Tensor) -> Tensor:
    return x * 2 if model.training else x.sum(-1, keepdim=True) - x


def _default_argument(model: Kinds, x: Tensor) -> Tensor:
    return F.dropout(x, model.p)  # training=True by default: also in evaluation


def _by_gradients(model: Kinds, x: Tensor) -> Tensor:
    return x if torch.is_grad_enabled() else x - x.mean(-1, keepdim=True)


def _drop_path(model: Kinds, x: Tensor) -> Tensor:
    """As transformers and timm have it: samples are kept or not."""
    if not model.training:
        return x
    keep = (0.5 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)).floor_()
    return x.div(0.5) * keep * x.new_empty(x.shape[0], 1).bernoulli_(0.7)


def _statistics(model: Kinds, x: Tensor) -> Tensor:
    return x * model.norm(model.down(x)).square().mean()


def _noise(model: Kinds, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) * torch.empty_like(x).uniform_(0.5, 1.5)


def _recomputed(model: Kinds, x: Tensor) -> Tensor:
    return cast(Any, checkpoint)(lambda y: torch.sin(model.drop(y)), x, use_reentrant=False)


def _in_place(model: Kinds, x: Tensor) -> Tensor:
    return F.dropout(x * 1, model.p, model.training, inplace=True)


BETWEEN: Mapping[str, Callable[[Kinds, Tensor], Tensor]] = {
    "self.training in the model's code": _own_branch,
    "a default argument": _default_argument,
    "torch.is_grad_enabled": _by_gradients,
    "stochastic depth": _drop_path,
    "batch norm": _statistics,
    "noise": _noise,
    "recomputed": _recomputed,
    "in place": _in_place,
}


CASTS = ("self.training in the model's code", "in place")
"""Those that run under autocast, too, so that sums of ranks are rounded to bfloat16."""


def _steps(model: nn.Module, drawing: bool, casts: bool) -> list[Tensor]:
    """Results, gradients and buffers of some calls, each in another mode."""
    found: list[Tensor] = []
    torch.manual_seed(3)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for mode in ("train", "eval", "train without gradients", "frozen", "autocast", "another p"):
        model.train(mode != "eval")
        model.zero_grad()
        kinds = cast(Kinds, model)
        kinds.norm.train(mode not in ("eval", "frozen"))
        kinds.p = kinds.drop.p = 0.25 if mode == "another p" else 0.5
        low = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" and casts else nullcontext()
        with DrawMode() if drawing else nullcontext(), torch.set_grad_enabled("without" not in mode), low:
            result: Tensor = model(x)
        found.append(result.detach().float())
        if result.requires_grad:
            result.float().square().sum().backward()
    return found


def kinds(rank: Rank) -> dict[str, tuple[float, int]]:
    """By kind: how far a result is off that of one process at most, and how many programs there were."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, tuple[float, int]] = {}
    for name, between in BETWEEN.items():
        torch.manual_seed(0)
        whole = Kinds(between)
        model = copy.deepcopy(whole)
        marks = [Mark.parse("up.weight: o/tp i"), Mark.parse("down.weight: o i/tp")]
        torch.manual_seed(rank.index)  # as of a person who seeds each rank otherwise
        held = parallel(model, marks, devices, {"x": torch.empty(6, 8)})
        torch.manual_seed(rank.index)
        casts = name in CASTS
        right = _steps(whole, drawing=True, casts=casts)
        ours = _steps(model, drawing=False, casts=casts)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, right, strict=True))
        for buffer, one in whole.named_buffers():
            off = max(off, float((model.get_buffer(buffer) - one).abs().max()))
        found[name] = off, len(held.programs)
    return found


def _python(model: Kinds, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x * 2


def _own_collective(model: Kinds, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _ever_new(model: Kinds, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def _called_again(model: Kinds, x: Tensor) -> Tensor:
    return cast(Any, checkpoint)(lambda y: F.dropout(torch.sin(y), 0.5), x, use_reentrant=False)


def _same(model: Kinds, x: Tensor) -> Tensor:
    return x


def _other_modules(model: Kinds, x: Tensor) -> Tensor:
    if isinstance(model.drop, nn.Dropout):  # as BigBird's short sequences do with its attention
        model.drop = cast(Any, nn.Sequential(nn.Dropout(0.1)))
    return model.drop(x)


def _renormed(model: Kinds, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.down.weight.div_(model.down.weight.norm(dim=1, keepdim=True))
    return x


def _detached(model: Kinds, x: Tensor) -> Tensor:
    model.down.weight.detach().mul_(0.9)
    return x


def refused(rank: Rank) -> dict[str, str]:
    """What is said to models that no program could stand for."""
    devices = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    said: dict[str, str] = {}

    def hear(
        name: str, between: Callable[[Kinds, Tensor], Tensor], calls: int = 1, numbers: bool = False, **more: Any
    ) -> None:
        torch.manual_seed(0)
        model = Kinds(between)
        try:
            parallel(model, [Mark.parse("up.weight: o/tp i")], devices, {"x": torch.empty(6, 8)})
            for i in range(calls):
                model(torch.zeros(6, 8), **({"n": torch.tensor(i)} if numbers else {}), **more)
        except UserError as error:
            said[name] = str(error)

    hear("python", _python)
    hear("collective", _own_collective)
    hear("ever new", _ever_new, 40)
    hear("ever new values", _same, 40, numbers=True)
    hear("called again", _called_again)
    hear("other modules", _other_modules, 2)
    hear("cache", _same, use_cache=True)
    hear("renormed", _renormed)
    hear("detached", _detached)
    hear("in a list", _same, more=[torch.zeros(2)])
    return said


class Clamping(nn.Module):
    """Writes into one weight through `.data`, as Gemma 3n does, and into one without gradients; reads a third.

    Five rows do not divide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clamped, self.normed, self.read = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.clamped.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.normed.weight.div_(self.normed.weight.norm(dim=1, keepdim=True))
        return self.clamped(x) + self.normed(x) + self.read(x)


def written(rank: Rank) -> tuple[set[str], float, float]:
    """Of a model that FSDP2 cuts: into what its forward writes, how far its parameters are off those of one process
    after two forwards, and how far they would be had nothing been written.
    """
    torch.manual_seed(0)
    whole, names, x = nn.Sequential(Clamping(), nn.Linear(5, 2)), set[str](), torch.randn(3, 4)
    model, before = copy.deepcopy(whole), copy.deepcopy(whole)
    draws_of(without_memory(whole), (x,), {}, {}, names)
    for one in (model[0], model):  # after its forward the root alone keeps what it has gathered
        fully_shard(one, mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):
        keep_written(model, names)
        model(x), whole(x)
    own = [cast("DTensor", p).full_tensor() for p in model[0].parameters()]
    off, otherwise = (
        max(float((one - p).abs().max().detach()) for one, p in zip(some, whole[0].parameters(), strict=True))
        for some in (own, before[0].parameters())
    )
    return names, off, otherwise


@dataclass(frozen=True)
class Ran:
    """What came of all of it on one rank."""

    buffers: Mapping[str, tuple[dict[str, Tensor], str]]
    kinds: Mapping[str, tuple[float, int]]
    refused: Mapping[str, str]
    written: tuple[set[str], float, float]
    among: Mapping[str, float]
    late: float


def run_all(rank: Rank, text: Path) -> Ran:
    """The task of the ranks."""
    return Ran(all_buffers(rank, text), kinds(rank), refused(rank), written(rank), among(rank), read_late(rank))
