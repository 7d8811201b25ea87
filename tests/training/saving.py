"""A module of odd sizes, plans that cut it in several ways, and what two ranks do with its checkpoints."""

import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from tangram.schema.plan import Plan
from tangram.training.mesh.world import make_world
from tangram.training.objective.step_guard import Judged
from tangram.training.observe.events import CheckpointSaved, Note, SaveFailed
from tangram.training.parallel.apply import apply
from tangram.training.run.launch import Rank
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress, load
from tangram.training.state.load_weights import load_pretrained

Values = dict[str, npt.NDArray[Any]]
Events = list[CheckpointSaved | SaveFailed | Note]
ROWS, COLUMNS, COPIES = {"*": "_/dp ..."}, {"*": "... _/dp"}, {"*": "..."}
TENSOR = {"blocks.*.weight": "o/tp i", "blocks.*.bias": "o/tp", "*": "..."}
PROGRESS = Progress(2, 16, 128, 1.5, judged=Judged(1, 2, (0.1, 3.0)))
LAYOUTS = {"rows": ROWS, "columns": COLUMNS, "copies": COPIES, "tensor": TENSOR}


class Net(nn.Module):
    """Odd numbers of rows, a bias of one element, tied embeddings, a frozen scale and buffers of both kinds."""

    seen: Tensor

    def __init__(self, *, tied: bool = True, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.gain = nn.Linear(width, 1)
        self.register_buffer("seen", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("table", torch.ones(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """A value for each place."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(x)
        return self.head(x).logsumexp(-1) + self.gain(x)[..., 0]


def net(seed: int = 0, **options: Any) -> Net:
    """The module with values of its own for each seed."""
    torch.manual_seed(seed)
    return Net(**options)


def plan_of(
    parameters: dict[str, str] = ROWS, *, ranks: int = 2, freeze: Iterable[str] = ("norm.weight",), **policy: Any
) -> Plan:
    """A plan over `dp`, or over `tp` for the layout that cuts it; `policy` are keys of the checkpoint's table."""
    tensor = parameters is TENSOR
    return Plan.model_validate(
        {
            "version": 3,
            "model": {"preset": "none", "freeze": list(freeze)},
            "data": {"sources": [{"path": "stdlib"}], "sequence": 8, "global_batch": 4},
            "optimiser": {"lr": 0.01},
            "run": {"steps": 1},
            "checkpoint": policy,
            "mesh": f"dp=1 tp={ranks}" if tensor else f"dp={ranks}",
            "axes": {"data": ["dp"], "tensor": ["tp"] if tensor else []},
            "layouts": {"parameters": parameters},
        }
    )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def whole_state(model: Net, seed: int = 0, steps: int = 2) -> JobState:
    """A job in one process that has taken some steps."""
    model.norm.weight.requires_grad_(False)
    optimiser = AdamW(trainable(model), lr=0.01)
    step(model, optimiser, steps, seed)
    return JobState(model, optimiser, Progress(steps, 4 * steps, 32 * steps, 0.5), {"model": "net"})


def step(model: nn.Module, optimiser: AdamW, steps: int, seed: int = 0) -> None:
    """Change every parameter that is trained, and its states."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randint(0, 11, (4, 8), generator=generator)).sum().backward()
        optimiser.step()
        optimiser.zero_grad()


def values(state: JobState) -> Values:
    """Every tensor of a job, whole. Collective where they are cut."""
    found: dict[str, Tensor] = dict(state.model.named_parameters())
    found |= {"seen": state.model.get_buffer("seen")}
    if state.optimiser is not None:
        for name, parameter in state.model.named_parameters():
            for key, value in state.optimiser.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value
    return values_of(found)


def values_of(found: Mapping[str, Tensor]) -> Values:
    """Tensors as they are when no rank holds just a part. Collective where they are cut."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    return {name: t.detach().numpy().copy() for name, t in whole.items()}


def same(a: Values, b: Values) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- on two ranks


@dataclass
class Seen:
    """What one rank saw."""

    saved: Values
    loaded: dict[str, Values] = field(default_factory=dict[str, Values])
    events: dict[str, list[CheckpointSaved | SaveFailed | Note]] = field(
        default_factory=dict[str, list[CheckpointSaved | SaveFailed | Note]]
    )
    losses: list[float] = field(default_factory=list[float])


def two_ranks(rank: Rank, folder: Path) -> Seen:
    """Save, change, load at other layouts, fail, go on."""
    group = dist.group.WORLD
    assert group is not None
    state, checkpointer = _start(rank, plan_of(ROWS, keep=3), folder / "rows")
    assert state.optimiser is not None
    step(state.model, state.optimiser, 2, seed=rank.index)
    state.progress = PROGRESS
    seen = Seen(values(state))
    checkpointer.save(state)
    step(state.model, state.optimiser, 1, seed=rank.index)  # waits before it writes
    with torch.no_grad():
        for parameter in trainable(state.model):
            parameter.mul_(-1)  # at once, while it is written
            state.optimiser.state[parameter]["exp_avg"].zero_()
    checkpointer.save(state, wait=True)  # of the same step: waits, and has nothing to do
    seen.events["rows"] = checkpointer.poll()

    for name, layout in LAYOUTS.items():
        other, again = _start(rank, plan_of(layout), folder / f"again-{name}", seed=9)
        progress = load(folder / "rows" / "step-00000002", other, *_place(rank, plan_of(layout)))
        assert progress == other.progress == PROGRESS
        seen.loaded[name] = values(other)
        again.save(other, wait=True)

    seen.events["full"] = _fail_on_rank_1(rank, checkpointer, state)
    state.progress = Progress(4)
    checkpointer.save(state, wait=True)
    seen.events["after"] = checkpointer.poll()

    checkpointer.close()
    state, blocked = _start(rank, plan_of(COPIES), folder / "file" / "below")
    blocked.save(state, wait=True)
    seen.events["no folder"] = blocked.close()
    return seen


def load_cut(rank: Rank, folder: Path) -> list[Values]:
    """The weights of a directory at three layouts."""
    found: list[Values] = []
    for layout in LAYOUTS.values():
        plan = plan_of(layout)
        _, world = _place(rank, plan)
        model = net(1)
        apply(model, plan, world)
        load_pretrained(folder, model, plan, world)
        found.append(values_of({**dict(model.named_parameters()), "seen": model.seen}))
    return found


def _place(rank: Rank, plan: Plan) -> tuple[Plan, Any]:
    group = dist.group.WORLD
    assert group is not None
    return plan, make_world(plan, rank.index, rank.device, group)


def _start(rank: Rank, plan: Plan, folder: Path, seed: int = 0) -> tuple[JobState, Checkpointer]:
    _, world = _place(rank, plan)
    model = apply(net(seed), plan, world).module
    return JobState(model, AdamW(trainable(model), lr=0.01)), Checkpointer(folder, plan, world)


def _fail_on_rank_1(rank: Rank, checkpointer: Checkpointer, state: JobState) -> Events:
    """The disk of rank 1 takes no more than some bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    state.progress = Progress(3)
    checkpointer.save(state, wait=True)
    events = checkpointer.poll()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return events
