"""How parameters are updated: one row for each rule, with the states that it keeps and its arithmetic.

    rule          states of a parameter                    needs of other ranks            the same as
    adamw         exp_avg, exp_avg_sq, step                nothing                         torch.optim.AdamW
    adamw-8bit    codes and scales (`update_codes`)        nothing                         bitsandbytes' AdamW8bit
    sgd           step                                     nothing                         torch.optim.SGD
    sgd-momentum  momentum_buffer                          nothing                         torch.optim.SGD
    adafactor     row_var, col_var, step of matrices;      sums over the axes that cut     torch.optim.Adafactor
                  variance, step of vectors                rows, columns or both
    muon          momentum_buffer                          the matrix, put together over   torch.optim.Muon
                                                           the axes that cut its two dims

A rule updates local tensors: the masters of a rank's parts by its gradients. Stacked matrices, as of experts, are a
matrix each to Muon and to the rows and columns of Adafactor, whose norms are of the whole parameter, as torch has them.

How the ranks of a mesh have cut a parameter, for updates that need more of it than a rank has: sums, whole matrices.

By the plan's layouts, as checkpoints are, and over exactly the axes that cut a dim: copies have the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _zeropower_via_newtonschulz,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.optim.adamw import adamw  # pyright: ignore[reportUnknownVariableType]  typed in part

from tangram.layout.locate import indices_of_rank
from tangram.models.lora.dynamic_codes import places, shares, table
from tangram.planner.legality.check_plan import bound_layout
from tangram.relayout.mapping.states import ADAFACTOR, ADAM_8BIT, ADAMW, MUON, SHARED, States
from tangram.schema.optimiser import RuleName
from tangram.training.mesh.groups import summed
from tangram.training.mesh.world import dim_of
from tangram.training.parallel.model import ParallelModel


@dataclass(frozen=True)
class ParameterShards:
    """Of one parameter."""

    shape: tuple[int, ...]
    """Of the whole."""
    places: tuple[Tensor, ...] = ()
    """By dim that is cut, which of it this rank has: int64."""
    groups: tuple[tuple[dist.ProcessGroup, ...], ...] = ()
    """By dim, the ranks between which it is cut."""
    name: str = ""

    def over(self, dims: Iterable[int]) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that have the other parts of some dims."""
        return tuple(group for dim in dims for group in self.groups[dim]) if self.groups else ()

    def joined(self, part: Tensor, dims: Sequence[int]) -> Tensor:
        """A tensor cut like the parameter, with all of some dims. Collective over the ranks that have parts of it."""
        for dim in dims:
            if groups := self.over((dim,)):
                shape = list(part.shape)
                shape[dim] = self.shape[dim]
                part = part.new_zeros(shape).index_copy_(dim, self.places[dim].to(part.device), part)
                for group in groups:
                    dist.all_reduce(part, group=group)
        return part

    def own(self, full: Tensor, dims: Sequence[int]) -> Tensor:
        """This rank's part of a tensor that has all of these dims."""
        for dim in dims:
            if self.over((dim,)):
                full = full.index_select(dim, self.places[dim].to(full.device))
        return full


def shards_of(model: ParallelModel) -> dict[Tensor, ParameterShards]:
    """Of each parameter that is trained."""
    plan, world = model.plan, model.world
    at = world.mesh.coords(world.index)
    found: dict[Tensor, ParameterShards] = {}
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        shape = model.plain[name].shape if name in model.plain else tuple(parameter.shape)
        layout = replace(bound_layout(plan, name, shape), at=())
        places, groups = list[Tensor](), list[tuple[dist.ProcessGroup, ...]]()
        for dim in layout.dims:
            cutting = [axis for axis in dim.axes if world.mesh.axes[axis][0] > 1]
            kept = indices_of_rank(dim, world.mesh, at) if cutting else ()
            places.append(torch.cat([torch.arange(0), *(torch.arange(first, stop) for first, stop in kept)]))
            names = ["shard" if axis in world.axes.shard else dim_of(axis) for axis in sorted(cutting)]
            groups.append(tuple(world.devices.get_group(name) for name in names))
        found[parameter] = ParameterShards(shape, tuple(places), tuple(groups), name)
    return found


BLOCK = ADAM_8BIT["absmax1"].block
CODED: States = {name: ADAM_8BIT[name] for name in ("state1", "absmax1", "state2", "absmax2", "step")}
"""Of a parameter whose moments are codes, beside its master: `state1` and `state2` are uint8 of its shape, places in
tables of signed and of unsigned numbers (`models.lora.dynamic_codes`); `absmax1` and `absmax2` float32, the largest of
each block of 256 of the whole parameter, cut with it in whole blocks (`layout.blocks`), so any mesh that cuts none
apart has the states of one process."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"state1": torch.uint8, "absmax1": torch.float32, "state2": torch.uint8, "absmax2": torch.float32}
)
"""Of them."""
DECODED_AT_ONCE = 1 << 20
"""Numbers that are decoded at a time; whole blocks."""


def update_codes(
    master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], steps: float, group: Mapping[str, Any]
) -> None:
    """Update local numbers whose moments are codes (Dettmers et al. 2022). `steps`: how many there are with this one.

    In float32, with moments that are decoded, some blocks at a time, and coded again afterwards: that of bitsandbytes
    to the bit, where that takes the nearest place in a table (its kernel for CPUs takes another one for one number in a
    thousand of the first moment, and in thirty of the second). But for numbers of which codes have lost the second
    moment, as of a token that is not there again: no first moment is so large beside it (by Cauchy and Schwarz), so it
    is dropped, where theirs is divided by eps.
    """
    numbers, gradients = (x.contiguous().view(-1) for x in (master, gradient))
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    first_of, second_of = (_Moment(state[f"state{i}"], state[f"absmax{i}"], signed=i == 1) for i in (1, 2))
    root = math.sqrt(1 - beta2**steps)
    most = 2 * (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf
    for begin in range(0, numbers.numel(), DECODED_AT_ONCE):
        some = slice(begin, begin + DECODED_AT_ONCE)
        g, p = gradients[some].float(), numbers[some].float()
        first, second = first_of.read(some), second_of.read(some)
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if decay:
            p.mul_(1 - lr * decay)
        deviation = second.sqrt()
        first.masked_fill_(first.abs().div_(most) > deviation, 0)
        p.addcdiv_(first, deviation.div_(root).add_(group["eps"]), value=-lr / (1 - beta1**steps))
        numbers[some] = p
        first_of.write(some, first)
        second_of.write(some, second)
    if not master.is_contiguous():
        master.copy_(numbers.view(master.shape))


class _Moment:
    """One of the two, as it is kept of a rank's part."""

    def __init__(self, codes: Tensor, largest: Tensor, *, signed: bool) -> None:
        self._codes, self._largest = codes.view(-1), largest
        self._table = table(codes.device, signed=signed)

    def read(self, some: slice) -> Tensor:
        """Numbers of whole blocks, but for the last one of all."""
        found = self._table[self._codes[some].int()]
        return _blocks(found).mul_(self._largest[_of(some)][:, None]).view(-1)[: found.numel()]

    def write(self, some: slice, values: Tensor) -> None:
        blocks = _blocks(values)
        largest = self._largest[_of(some)] = blocks.abs().amax(dim=1)
        found = places(shares(blocks, largest), self._table).masked_fill_((largest == 0)[:, None], 0)
        self._codes[some] = found.view(-1)[: values.numel()]


def _blocks(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _of(some: slice) -> slice:
    """The blocks of some numbers."""
    return slice(some.start // BLOCK, -(-some.stop // BLOCK))


ADAMW_STATES: States = {name: ADAMW[name] for name in ("exp_avg", "exp_avg_sq", "step")}  # without amsgrad
_BETA2_DECAY, _LEAST_SCALE = -0.8, 1e-3
"""Of Adafactor, as torch has them: how the second moment's beta falls, and the least root mean square that scales."""
_norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)
AT_ONCE = 1 << 24
"""Numbers of parameters, of all ranks, that Adafactor updates together: in as many sums, with as much memory."""


@dataclass(frozen=True)
class UpdatedPart:
    """What a rank updates of a parameter, all of it local."""

    master: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    shards: ParameterShards

    @property
    def cast_gradient(self) -> Tensor:
        """In the type of the master."""
        return self.gradient.to(self.master.dtype)

    @property
    def dims(self) -> range:
        """All of the parameter's."""
        return range(len(self.shards.shape))


Update = Callable[[Sequence[UpdatedPart], Mapping[str, Any]], None]
"""Of the parts of a group of the optimiser, by the group's settings."""


@dataclass(frozen=True)
class UpdateRule:
    """A row of the table."""

    states: Callable[[int], States]
    """Of a parameter of so many dims; masters beside them are no part of it."""
    update: Update
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    """Of states that are not in the type of the masters."""


def has_no_values(x: Tensor) -> bool:
    """Whether it is of a run without memory, so that nothing can be read of it."""
    return isinstance(x, FakeTensor)


def _advance(step: Tensor) -> float:
    """One step more; how many there are now."""
    step += 1
    return 1.0 if has_no_values(step) else float(step.item())


def _adamw(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [part.master for part in parts],
        [part.cast_gradient for part in parts],
        [part.state["exp_avg"] for part in parts],
        [part.state["exp_avg_sq"] for part in parts],
        [],
        [part.state["step"] for part in parts],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        fused=has_no_values(parts[0].state["step"]),  # which reads no step
    )


def _coded(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    for part in parts:
        update_codes(part.master, part.gradient, part.state, _advance(part.state["step"]), group)


def _sgd(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    for part in parts:
        gradient = part.cast_gradient
        if decay := group["weight_decay"]:  # of the gradient, as torch has it
            gradient = gradient.add(part.master, alpha=decay)
        if (momentum := part.state.get("momentum_buffer")) is None:
            _advance(part.state["step"])
        else:
            gradient = momentum.mul_(group["momentum"]).add_(gradient)
        part.master.add_(gradient, alpha=-group["lr"])


# ---------------------------------------------------------------- Adafactor


def _adafactor(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    some: list[UpdatedPart] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        some.append(part)
        if following is None or sum(math.prod(one.shards.shape) for one in (*some, following)) > AT_ONCE:
            _adafactor_of(some, group)
            some = []


def _adafactor_of(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    matrices = [part for part in parts if "row_var" in part.state]
    steps = [_advance(part.state["step"]) for part in parts]
    every = [part.shards.over(part.dims) for part in parts]
    squares = [_squares(part, dim) for part in matrices for dim in (-1, -2)]
    sums = iter(summed(squares, [_over(part, dim) for part in matrices for dim in (-1, -2)]))
    for part, step in zip(parts, steps, strict=True):
        _move_moments(part, sums, step**_BETA2_DECAY)
    rows = [part.state["row_var"].sum(-2, keepdim=True, dtype=torch.float32) for part in matrices]
    totals = iter(summed(rows, [_over(part, -2) for part in matrices]))
    updates = [_scaled(part, totals) for part in parts]
    sizes = summed([_square_sum(part.master) for part in parts], every)
    norms = summed([_square_sum(update) for update in updates], every)
    for part, step, update, size, norm in zip(parts, steps, updates, sizes, norms, strict=True):
        lr, numbers = group["lr"], math.prod(part.shards.shape)
        rate = (size / numbers).sqrt().clamp_(min=_LEAST_SCALE) * min(lr, step**-0.5)
        if decay := group["weight_decay"]:
            part.master.mul_(1 - lr * decay)
        share = rate / (norm / numbers).sqrt().clamp_(min=1.0)
        part.master.addcmul_(update, share.to(update.dtype), value=-1)


def _over(part: UpdatedPart, dim: int) -> tuple[Any, ...]:
    return part.shards.over((dim,))


def _square_sum(x: Tensor) -> Tensor:
    """Of all numbers of a part: float32."""
    return _norm(x, dtype=torch.float32).square()


def _squares(part: UpdatedPart, dim: int) -> Tensor:
    """The sum of the gradient's squares along a dim of what lies here."""
    return _norm(part.cast_gradient, dim=dim, keepdim=True, dtype=torch.float32).square_()


def _move_moments(part: UpdatedPart, sums: Iterator[Tensor], share: float) -> None:
    if "variance" in part.state:
        part.state["variance"].lerp_(part.cast_gradient.square(), share)
        return
    for name, dim in (("row_var", -1), ("col_var", -2)):
        own = part.state[name]
        own.lerp_(next(sums).div_(part.shards.shape[dim]).to(own.dtype), share)


def _scaled(part: UpdatedPart, totals: Iterator[Tensor]) -> Tensor:
    """The gradient by the root of its estimated variance."""
    least = torch.finfo(part.master.dtype).eps
    if "row_var" in part.state:
        variance = part.state["row_var"] @ part.state["col_var"]
        variance.div_((next(totals) / part.shards.shape[-2]).clamp_(min=least))
    else:
        variance = part.state["variance"].clone()
    return variance.clamp_(min=least * least).rsqrt_().mul_(part.cast_gradient)


# ---------------------------------------------------------------- Muon


def _muon(parts: Sequence[UpdatedPart], group: Mapping[str, Any]) -> None:
    lr, momentum = group["lr"], group["momentum"]
    for part in parts:
        gradient, buffer = part.cast_gradient, part.state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = _orthogonal(part.shards.joined(gradient.lerp(buffer, momentum), (-1, -2)))
        if decay := group["weight_decay"]:
            part.master.mul_(1 - lr * decay)
        rate = lr * ADJUSTED[group["adjust_lr"]](*part.shards.shape[-2:])
        part.master.add_(part.shards.own(update, (-1, -2)), alpha=-rate)


ADJUSTED: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""What the rate of a matrix is multiplied by."""


def _orthogonal(update: Tensor) -> Tensor:
    """Each matrix by five steps of Newton and Schulz: bfloat16, by torch's own function."""
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    flat = update.reshape(-1, *update.shape[-2:])
    found = [_zeropower_via_newtonschulz(one, coefficients, DEFAULT_NS_STEPS, EPS) for one in flat]
    return torch.stack(found).view_as(update) if found else update


_MATRIX: States = {name: ADAFACTOR[name] for name in ("row_var", "col_var", "step")}
_VECTOR: States = {name: ADAFACTOR[name] for name in ("variance", "step")}

RULES: Mapping[RuleName, UpdateRule] = MappingProxyType(
    {
        "adamw": UpdateRule(lambda dims: ADAMW_STATES, _adamw),
        "adamw-8bit": UpdateRule(lambda dims: CODED, _coded, DTYPES),
        "sgd": UpdateRule(lambda dims: {"step": SHARED}, _sgd),
        "sgd-momentum": UpdateRule(lambda dims: MUON, _sgd),
        "adafactor": UpdateRule(lambda dims: _MATRIX if dims > 1 else _VECTOR, _adafactor),
        "muon": UpdateRule(lambda dims: MUON, _muon),
    }
)
