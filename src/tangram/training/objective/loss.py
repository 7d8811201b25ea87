"""The loss of tokens, from logits as they lie: cut over the vocabulary, over the sequence, over both or not at all.

    vocabulary cut   a rank has some of the classes: two numbers a token go over the axis (`kernels.cross_entropy`)
    tokens cut       a rank has some of the tokens, takes their labels, and what it sums is summed over the axis
    whole            all ranks compute the same

So of a model that is derived (`derived`) the logits are never put together. Where it is to give them whole, ask it as
any model, outside of `next_token_loss`; a mark `logits: ...` says how they lie in either case.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tangram.errors import UserError
from tangram.kernels.cross_entropy import Classes, OverParts, cross_entropy
from tangram.kernels.divergence import Comparison, Formula, TopRows, divergence, top_divergence
from tangram.relayout.collectives.one_collective import largest, move, summed
from tangram.sharding.derive.problem.states import SAME, SUM, State
from tangram.training.data import IGNORE
from tangram.training.mesh.local_parts import ResultPlacement, own_part
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.objective.cached_teacher import TopLogits
from tangram.training.objective.packing import ModelInputs


class Logits(NamedTuple):
    """What a model says of a batch."""

    values_BSV: Tensor
    """This rank's part of them."""
    inputs: ModelInputs
    """What it was given."""
    placement: ResultPlacement | None
    """None: they are whole."""


Reduce = Callable[[Tensor, dist.ProcessGroup], Tensor]
LOGITS = "logits"
"""What a Hugging Face model calls them."""


def leaving(derived: DerivedModel | None) -> AbstractContextManager[None]:
    """Within, a derived model leaves its logits in parts; another one (None) has but whole ones."""
    return nullcontext() if derived is None else derived.leaving()


def logits_placement(derived: DerivedModel | None, result: str = LOGITS) -> ResultPlacement | None:
    """How the logits of a model's last forward lie; None: whole, as of a model that is not derived."""
    return None if derived is None else derived.placement_of(result)


def token_loss(logits_BSV: Tensor, labels_BS: Tensor, placement: ResultPlacement | None = None) -> Tensor:
    """The cross-entropy in nats of the labels, summed over those that count; the same number on every rank.

    `logits_BSV`: this rank's part of them, by `placement`; `labels_BS`: all. Collective over the axes that
    cut the logits.
    """
    return _over_ranks(_losses(logits_BSV, labels_BS, placement).sum(), placement)


def token_divergence(
    student: Logits, teacher: Logits | TopLogits, formula: Formula, beta: float, temperature: float
) -> Tensor:
    """The divergence of a student from its teacher in nats, summed over the tokens whose labels count.

    Of both over the classes that both have, from the first: what a vocabulary is padded with has no part. The same
    number on every rank. Of a teacher of which the likeliest classes are known, over these and the rest. Collective
    over the axes that cut the logits.
    """
    placement, labels_BS = student.placement, student.inputs.batch.labels_BS
    counted_BS = labels_BS != IGNORE
    if placement is not None:
        counted_BS = placement.part(counted_BS, (0, 1))
    classes = None if placement is None else _classes(student.values_BSV, placement)
    own_NV, counted_N = student.values_BSV.flatten(0, 1), counted_BS.flatten()
    if isinstance(teacher, TopLogits):
        said = [student.inputs.input_order_of(x) for x in (teacher.classes_BSK, teacher.logp_BSC)]
        said = said if placement is None else [placement.part(x, (0, 1)) for x in said]
        how = Comparison(formula, beta, temperature, teacher.shared)
        found_N = top_divergence(own_NV, TopRows(*(x.flatten(0, 1) for x in said)), counted_N, how, classes)
    else:
        theirs_BSV, shared = _lying_as(student, teacher)
        how = Comparison(formula, beta, temperature, shared)
        found_N = divergence(own_NV, theirs_BSV.flatten(0, 1), counted_N, how, classes)
    return _over_ranks(found_N.sum(), placement)


def _over_ranks(loss: Tensor, placement: ResultPlacement | None) -> Tensor:
    """Summed over the axes that cut tokens."""
    if placement is None:
        return loss
    for axis in placement.axes_of((0, 1)):
        loss = move(loss, SUM, SAME, placement.groups[axis])
    return loss


def _count(logits: Logits) -> int:
    width = logits.values_BSV.shape[2]
    return width if logits.placement is None else logits.placement.count(width, 2)


@torch.no_grad()
def _lying_as(student: Logits, teacher: Logits) -> tuple[Tensor, int]:
    """The teacher's logits as the student's lie, and how many classes both have.

    Where both are cut alike, and have as many classes, nothing moves; what is cut otherwise is gathered.
    """
    own, other = ({} if one.placement is None else _cuts(one.placement) for one in (student, teacher))
    count, theirs = _count(student), _count(teacher)
    unlike = {axis for axis in {*own, *other} if own.get(axis) != other.get(axis)}
    dims = {states[axis].dim for axis in unlike for states in (own, other) if axis in states}
    dims |= {2} if count != theirs else set()
    x = teacher.values_BSV
    for axis, state in reversed(other.items()):
        if state.dim in dims:
            assert teacher.placement is not None  # it has cuts
            x = move(x, state, SAME, teacher.placement.groups[axis])
    if count != theirs:
        x = x[..., :count] if count < theirs else pad(x, (0, count - theirs))
    again = {axis: state for axis, state in own.items() if state.dim in dims}
    if again:
        assert student.placement is not None  # it has cuts
        x = own_part(x, again, student.placement.mesh, student.placement.coords)
    return x, min(count, theirs)


def _cuts(placement: ResultPlacement) -> dict[str, State]:
    return {axis: state for axis, state in placement.states.items() if state.kind == "cut"}


def row_losses(
    logits_BSV: Tensor, labels_BS: Tensor, masks: Sequence[Tensor], placement: ResultPlacement | None = None
) -> list[Tensor]:
    """The same of each row (B), summed over those of its labels that a mask (B, S) has, for each of these.

    In float64, so that what is left of a small difference of large sums is right. Raises UserError where an axis cuts
    the rows.
    """
    losses_BS = _losses(logits_BSV, labels_BS, placement).view(logits_BSV.shape[:2]).double()
    if placement is None:
        return [losses_BS.where(mask_BS, 0.0).sum(1) for mask_BS in masks]
    if axes := placement.axes_of((0,)):
        raise UserError(f"the axis {axes[0]} cuts the rows of logits, which this task compares: leave it out of them")
    found = [losses_BS.where(placement.part(mask_BS, (0, 1)), 0.0).sum(1) for mask_BS in masks]
    for axis in placement.axes_of((1,)):
        found = [move(sum_B, SUM, SAME, placement.groups[axis]) for sum_B in found]
    return found


def _losses(logits_BSV: Tensor, labels_BS: Tensor, placement: ResultPlacement | None) -> Tensor:
    """Of each token that this rank has."""
    if placement is not None:
        labels_BS = placement.part(labels_BS, (0, 1))
    classes = None if placement is None else _classes(logits_BSV, placement)
    return cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), IGNORE, classes)


def _classes(logits_BSV: Tensor, placement: ResultPlacement) -> Classes | None:
    axes = placement.axes_of((2,))
    if not axes:
        return None
    count = placement.count(logits_BSV.shape[2], 2)
    numbers_W = placement.part(torch.arange(count, device=logits_BSV.device), (2,))

    def over(reduce: Reduce) -> OverParts:
        def run(x: Tensor) -> Tensor:
            for axis in axes:
                x = reduce(x, placement.groups[axis])
            return x

        return run

    return Classes(numbers_W, count, over(largest), over(summed))
