"""One process against two ranks: a model with its own defaults, in training and evaluation, two calls each.

What comes of it is one of four: `equal` (losses and gradients), `refused` (a UserError, with its sentence), `crash`
(anything else that is raised), `wrong` (by how much).
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel
from tangram.training.run.launch import Rank

BOUND = 2e-4
"""Of a loss or of a gradient, relative to all: sums in another order, through whatever a model has."""
PATIENCE = datetime.timedelta(seconds=60)
"""In a collective: a rank that failed leaves the other one waiting."""


@dataclass(frozen=True)
class Case:
    """A model to compare."""

    name: str
    model: Callable[[], nn.Module]
    """The same values each time."""
    inputs: Callable[[nn.Module], Mapping[str, Any]]
    marks: Callable[[nn.Module, Mapping[str, Any]], Sequence[Mark]]
    mistake: Callable[[DerivedModel], None] | None = None
    double: bool = False
    """In double precision."""


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    name: str
    what: str
    """equal, refused, crash, wrong, or unfit: where one process has no finite loss."""
    why: str = ""


class Unfit(Exception):
    """One process does not run it."""


def run_all(rank: Rank, cases: Callable[[], Sequence[Case]]) -> list[Result]:
    """The task of the ranks. They share a group until a case fails: each group takes threads that stay."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[Result] = []
    group = None
    for case in cases():
        group = group or dist.new_group([*range(rank.world)], timeout=PATIENCE)
        assert group is not None
        own = result_of(case, group)
        everyone: list[Any] = [None] * rank.world
        dist.all_gather_object(everyone, own)
        worst = max(everyone, key=lambda one: ORDER.index(one.what))
        if worst.what not in ("unfit", "equal"):
            group = None  # a rank that stopped may have left the others in a collective
        found.append(worst)
        if rank.index == 0:
            rank.emit(worst)
    return found


ORDER = ("unfit", "equal", "refused", "wrong", "crash")


def result_of(case: Case, group: dist.ProcessGroup) -> Result:
    """Of one rank."""
    try:
        apart = _apart(case, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))
    except Unfit as error:
        return Result(case.name, "unfit", str(error))
    except UserError as error:
        return Result(case.name, "refused", str(error))
    except Exception as error:  # noqa: BLE001  whatever a model's class raises
        return Result(
            case.name, "crash", f"{type(error).__name__}: {' '.join(str(error).split())[:300]} {_where(error)}"
        )
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] < BOUND or (not case.double and result_of(replace(case, double=True), group).what == "equal"):
        return Result(case.name, "equal")  # the latter where single precision is too coarse for what a model does
    return Result(case.name, "wrong", f"{worst} by {apart[worst]:.2g}")


def _where(error: BaseException) -> str:
    """The innermost place in Tangram."""
    found, here = "", error.__traceback__
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        if "/tangram/" in name:
            found = f"({name.rsplit('/tangram/', 1)[1]}:{here.tb_lineno})"
        here = here.tb_next
    return found


def _apart(case: Case, devices: DeviceMesh) -> dict[str, float]:
    whole, model = case.model(), case.model()
    inputs = case.inputs(whole)
    if case.double:
        whole, model = whole.double(), model.double()
        inputs = {name: x.double() if _is_float(x) else x for name, x in inputs.items()}
    try:
        want = _losses(whole, inputs, DrawMode)
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}") from error
    if not all(torch.isfinite(torch.tensor(loss)) for loss, _ in want.values()):
        raise Unfit("the loss of one process is not finite")
    held = parallel(model, case.marks(model, inputs), devices, inputs)
    if case.mistake is not None:
        case.mistake(held)
    found = _losses(model, inputs, nullcontext)
    off = {name: abs(found[name][0] - loss) / max(abs(size), 1e-30) for name, (loss, size) in want.items()}
    right = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    # Of biases before a norm nothing is left of the gradient but rounding.
    least = 5e-3 * float(torch.stack([g.norm() for g in right.values()]).norm()) if right else 1.0
    for name, parameter in model.named_parameters():
        if name in right:
            grad = parameter.grad
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            full = torch.zeros_like(right[name]) if full is None else full
            off[f"gradient of {name}"] = float((full - right[name]).norm()) / max(
                float(right[name].norm()), least, 1e-30
            )
    return {name: float("inf") if x != x else x for name, x in off.items()}


def _losses(
    model: nn.Module,
    inputs: Mapping[str, Any],
    drawing: Callable[[], AbstractContextManager[Any]],
) -> dict[str, tuple[float, float]]:
    """Of two calls in training (the second leaves gradients) and two in evaluation; and sizes of their terms.

    Generators are seeded once, before all four: a mask that stays as it is from call to call is another one.
    """
    found: dict[str, tuple[float, float]] = {}
    torch.manual_seed(5)
    np.random.seed(5)  # where models draw what is masked in training
    for name in ("train", "train again", "eval", "eval again"):
        model.train(name.startswith("train"))
        if model.training:
            model.zero_grad()
        with drawing():  # the backward, too: it may compute a part of the forward again
            with nullcontext() if model.training else torch.no_grad():
                loss, size = _loss(model(**inputs))
            if loss.requires_grad:
                loss.backward()
        found[name] = float(loss.detach()), float(size)
    return found


def _loss(output: Any) -> tuple[Tensor, Tensor]:
    """Of every number that a model gives, each with a weight of its own; and the norm of what is summed."""
    leaves = [x for x in tree_leaves(_plain(output)) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not leaves:
        raise Unfit("it gives no numbers")
    terms: list[Tensor] = []
    for i, x in enumerate(leaves):
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        terms.append((torch.where(x > -1e30, x, 0) * weights.to(x.dtype) / x.numel() ** 0.5).flatten())
    every = torch.cat(terms)
    return every.sum(), every.detach().norm()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output
