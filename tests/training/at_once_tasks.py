"""Models in which tensors change over two axes at once, on four ranks, beside one process; and what ranks receive."""

# ruff: noqa: N803

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.relayout.collectives.digits import WAITING
from tangram.relayout.collectives.sequences import cheapest
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.transitions import Change, Joint, costs
from tangram.sharding.eager import relayout
from tangram.sharding.runtime.program import Program
from tangram.training.mesh.eager_marks import eager
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank
from tangram.training.trials.dry_run_counts import Tally
from tests.training.derived_models import _furthest as furthest  # pyright: ignore[reportPrivateUsage]
from tests.training.derived_models import inputs_of, loss_of, marks_for, model_of
from tests.training.incode_tasks import devices_of


class Scaled(nn.Module):
    """A product, and a layout over two axes."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.scale_SH = layout, nn.Parameter(torch.randn(16, 32))

    def forward(self, x_BSH: Tensor) -> Tensor:
        return relayout(x_BSH * torch.tanh(self.scale_SH), self.layout)


class Moving(nn.Module):
    """Products between layouts over two axes, as its code says."""

    def __init__(self, layouts: tuple[str, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*map(Scaled, layouts))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids_BS)))


EXCHANGE = ("b s/tp h/cp", "b s/cp h/tp", "b s/tp h/cp")
"""Two axes change places, twice."""
TOKENS = ("b s/tp h/cp", "b s/cp/tp h", "b/cp s h/tp", "b s h")
"""Hidden parts of tokens become tokens, those become samples, and all of it."""
OUTER = "{model.embed_tokens,model.layers.*,model.norm}: b s/cp h"


@dataclass(frozen=True)
class Work:
    """A model on a mesh."""

    mesh: str
    layouts: tuple[str, ...] = ()
    """Of `Moving`; none: a Llama by the marks that come with it, with its sequence cut over cp, too."""
    mistake: bool = False
    """What is gathered is not summed on the way back."""


WORKS: Mapping[str, Work] = {
    "an exchange of two axes": Work("cp=2 tp=2", EXCHANGE),
    "hidden parts to tokens": Work("cp=2 tp=2", TOKENS),
    "a sequence under the cut of another axis": Work("tp=2 cp=2"),
    "gradients are not summed": Work("tp=2 cp=2", mistake=True),
}


@dataclass(frozen=True)
class Ran:
    """What came of one on one rank."""

    worst: float
    where: str
    eager: float
    """The same of operators that are derived as they run."""
    joint: int
    """Places where a tensor changes over both axes at once."""
    received: float
    """Bytes, forward and backward, as they were counted."""
    derived: float
    """Bytes that a rank receives on average, as `tangram shard` prints them."""
    apart: float
    """The same with one axis after the other."""


def run_all(rank: Rank, works: Mapping[str, Work]) -> dict[str, Ran]:
    """The task of the ranks."""
    return {name: run(work) for name, work in works.items()}


def _model(work: Work) -> nn.Module:
    torch.manual_seed(0)
    return Moving(work.layouts) if work.layouts else model_of("llama")


def _loss(work: Work, model: nn.Module) -> Tensor:
    if not work.layouts:
        return loss_of(model, "llama")
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())


def run(work: Work) -> Ran:
    whole, model = _model(work), _model(work)
    _loss(work, whole).backward()
    marks = [] if work.layouts else [*marks_for("llama"), Mark.parse(OUTER)]
    inputs = {"ids_BS": torch.zeros(4, 16, dtype=torch.int64)} if work.layouts else inputs_of("llama")
    held = parallel(model, marks, devices_of(work.mesh), inputs)
    program = held.prepare(inputs)
    joints = _joints(program)
    if work.mistake:
        _unsummed(held)
    with torch.no_grad():
        _loss(work, model)  # at the first call, ranks compare their inputs
    with Tally() as tally:
        _loss(work, model).backward()
    found = program.derived
    return Ran(
        *furthest(model, dict(whole.named_parameters())),
        _eager(work, whole),
        len(joints),
        sum(tally.step.nbytes.values()),
        total(found),
        total(found) + _spared(program),
    )


def _joints(program: Program) -> list[Joint]:
    changes = [change for border in program.borders.values() for side in (border.takes, border.gives)
               for change in side.values()]  # fmt: skip
    for own in program.actions.values():
        changes += [c for action in own.values() for side in (action.before, action.after) for c in side.values()]
    return [one for change in changes for one in change if isinstance(one, Joint)]


def _spared(program: Program) -> float:
    """Bytes that a rank would receive beside, with one axis after the other."""
    found = program.derived
    sizes = {over.axis: over.k for over in found.axes}
    more = 0.0
    for joint in _joints(program):
        problem = (joint.there or joint.back or ())[0].of
        nbytes = 4.0 * math.prod(problem.shape)
        source = {step.axis: step.source for step in joint.apart[::-1]}
        sides = [
            costs(c, nbytes, source, sizes, differentiable=joint.back is not None) for c in ((joint,), joint.apart)
        ]
        at_once, after = (sum(c.forward_bytes + c.backward_bytes for c in side) for side in sides)
        assert at_once <= after
        more += after - at_once
    return more


def _unsummed(held: DerivedModel) -> None:
    """As if what each rank does something of its own with were used by all alike."""

    def wrong(joint: Joint) -> Joint:
        back = joint.back or ()
        problem = back[0].of if back else None
        if problem is None or WAITING not in problem.source:
            return joint
        source = tuple(None if spot == WAITING else spot for spot in problem.source)
        return replace(joint, back=cheapest(replace(problem, source=source), 4))

    def changed(change: Change) -> Change:
        return tuple(wrong(one) if isinstance(one, Joint) else one for one in change)

    for border in held.programs[0].borders.values():
        for side in (border.takes, border.gives):
            side.update({leaf: changed(change) for leaf, change in side.items()})


def _eager(work: Work, whole: nn.Module) -> float:
    if not work.layouts:
        return 0.0
    model = _model(work)
    with eager(model, devices_of(work.mesh)):
        loss = _loss(work, model)
    loss.backward()
    return furthest(model, dict(whole.named_parameters()))[0]
