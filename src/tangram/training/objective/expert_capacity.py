"""Experts that take no more than a share of a global micro-batch: which choices of its tokens are dropped.

Of N tokens that choose K of E experts each, an expert takes at most

    C = ceil(N * K / E * run.expert_capacity)

choices, as Megatron-core has it (`moe_expert_capacity_factor`; Switch Transformers, Fedus, Zoph and Shazeer 2021,
section 2.2, for K = 1). More than that are dropped: their weights are zero, the others stay as they were, and where a
token loses all, what stands around the experts goes on. Which are kept, `run.drop_by` says:

    "probs"      those of the largest weights, as routers give them; of equal ones those of earlier tokens
    "position"   those of earlier tokens: of the first DP rank's rows, then of the second's

N and the order are those of the global micro-batch, what all DP ranks take at once with all that model axes cut of
it. So any layout drops what one process would. Rows without any label, as those that fill up a micro-batch, are not of
it: they count for nothing, take no room and lose nothing. Outside of training nothing is dropped.

The C-th largest of what lies on many ranks is found digit by digit: ranks add up, for each expert, how many of its
choices have which next eight bits (E x 256 integers); that of as many digits as a weight and a place have. What moves
depends on no number of tokens or ranks.

Of a pipeline the ranks that have a stage do so among themselves, for the layers that they have; which rows count all
of them know from the batch. Micro-batches are under way at a time, so before a forward and a backward it is said of
which one they are.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.capturing.called import unseen
from tangram.relayout.collectives.one_collective import summed
from tangram.schema.job import Job, RunPlan
from tangram.training.data import IGNORE
from tangram.training.mesh.local_parts import ResultPlacement
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World
from tangram.training.objective.packing import ModelInputs
from tangram.training.objective.router_loss import result_placement, routers_in

_DIGIT = 8
"""Bits that are looked at in one round."""
_FLOAT = 32


def refuse(model: nn.Module, job: Job) -> None:
    """Raise UserError where a job asks for a capacity of experts of a model on meta that is not known to choose any."""
    name = type(model).__name__
    found = routers_with_capacity(model, job)
    size = getattr(getattr(model, "config", None), "hidden_size", 0)
    for path, place in (found or {}).items():
        if _places(_gives(model.get_submodule(path), size), place) is None:
            raise UserError(
                f"run.expert_capacity needs routers that give the experts of each token and their weights, and {path} "
                f"of {name} does not: leave it out"
            )


def routers_with_capacity(model: nn.Module, plan: Job) -> Mapping[str, int] | None:
    """The routers of a whole model to whose experts the plan gives a capacity; None for none.

    Raises UserError for a model without routers.
    """
    if not plan.run.expert_capacity:
        return None
    found = routers_in(model)
    if not found:
        raise UserError(f"run.expert_capacity is of experts, and {type(model).__name__} has no routers: leave it out")
    return found


class Capacity:
    """Drops choices of a model's routers while it trains, or of those of a stage, and counts them."""

    def __init__(
        self,
        part: nn.Module,
        derived: DerivedModel | None,
        known: Mapping[str, int],
        run: RunPlan,
        world: World,
        group: dist.ProcessGroup,
    ) -> None:
        """`known`: the routers of the whole model. `group`: as `world.of_stage` gives."""
        self._derived, self._factor, self._by = derived, run.expert_capacity, run.drop_by
        self._world, self.group = world, group
        self._layers = len(known)
        self._batches: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
        self._turn = 0
        self._dropped: dict[str, Tensor] = {}
        """By router: how many choices were dropped, and of how many. What is recomputed counts again in both."""
        here = {name for name, _ in cast("Iterable[tuple[str, nn.Module]]", part.named_modules())}
        for name, place in known.items():
            if name in here:
                part.get_submodule(name).register_forward_hook(_hook(self, name, place))

    def before(self, *seen: ModelInputs) -> None:
        """What comes next is of these micro-batches, of the first one until `turn` says another.

        Collective over all ranks of a stage, which have as many rows each.
        """
        counted = [(one.batch.labels_BS != IGNORE).any(1, keepdim=True) for one in seen]
        lengths = [one.batch.labels_BS.shape[1] for one in seen]
        tokens_M = torch.stack([rows_B1.sum() * S for rows_B1, S in zip(counted, lengths, strict=True)])
        tokens_M = summed(tokens_M, self.group) // self._world.model_size
        self._turn, self._batches = 0, [self._batch(*one) for one in zip(seen, counted, tokens_M, strict=True)]

    def turn(self, micro: int) -> None:
        """What comes next is of this one of the micro-batches, its forward or its backward."""
        self._turn = micro

    def pop_dropped(self) -> Tensor:
        """The share of choices that were dropped since it was asked before, a float64 scalar; alike on a stage's ranks.

        The sum over its layers, divided by the number of all. The step has ended: another needs another `before`.
        """
        self._batches = ()
        shares = [n[0] / n[1].clamp(min=1) for n in self._dropped.values()]
        self._dropped.clear()
        none = torch.zeros((), dtype=torch.float64, device=self._world.device)
        return torch.stack(shares).sum() / self._layers if shares else none

    def _batch(self, seen: ModelInputs, counted_B1: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a micro-batch the places of its tokens, whether they count, and how many do so on all ranks."""
        B, S = seen.batch.labels_BS.shape
        order_S = torch.arange(S, device=counted_B1.device) if seen.order is None else seen.order
        first_B = torch.arange(B, device=counted_B1.device) + self._world.data_index * B
        return (first_B[:, None] * S + order_S).flatten(), counted_B1.expand(B, S).flatten(), tokens

    @torch.no_grad()
    def kept(self, name: str, leaf: int, weights_TK: Tensor, experts_TK: Tensor, experts: int) -> Tensor:
        """Which of a router's choices are kept (T, K). `leaf`: the place of the weights in what it gives.

        Collective over all ranks of a stage.
        """
        if not self._batches:
            raise UserError(
                "run.expert_capacity is over what all ranks train on at once, as train_step gives it: leave it out for "
                "a loop that calls the model by itself"
            )
        places_T, counts_T, tokens = self._batches[self._turn]
        total = places_T.numel() * self._world.data_size
        places_T, counts_T, own = self._part(name, leaf, places_T, counts_T)
        if weights_TK.shape[0] != places_T.shape[0]:
            raise UserError(
                f"{name} chooses experts for {weights_TK.shape[0]} tokens and not for {places_T.shape[0]}: "
                "run.expert_capacity is of routers that see every token once"
            )
        T, K = weights_TK.shape
        bits = max(1, (total - 1).bit_length())
        key_TK = (total - 1 - places_T)[:, None].expand(T, K)
        if self._by == "probs":
            key_TK, bits = key_TK | (_in_order(weights_TK) << bits), bits + _FLOAT
        counted_TK = (counts_T & own)[:, None].expand(T, K).flatten()
        limit = (tokens.double() * K / experts * self._factor).ceil().long()
        index = experts_TK.flatten().long()
        least_E, chosen_E = largest(key_TK.flatten(), index, counted_TK, limit, experts, bits, self.group)
        told = torch.stack([(chosen_E - limit).clamp(min=0).sum(), chosen_E.sum()]).double()
        self._dropped[name] = self._dropped[name] + told if name in self._dropped else told
        return (key_TK.flatten() >= least_E[index]).view(T, K) | ~counts_T[:, None]

    def _part(self, name: str, leaf: int, places_T: Tensor, counts_T: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Places of the tokens that this rank's router sees, whether they count, and whether they do so from here."""
        lies = result_placement(self._derived, name, leaf)
        cutting: Sequence[str] = ()
        if lies is not None:
            chosen = cast("ResultPlacement", result_placement(self._derived, name, leaf + 1))
            others = [state for state in lies.states.values() if state.kind not in ("same", "several", "cut")]
            cutting = lies.axes_of((0,))
            if others or lies.axes_of((1,)) or chosen.axes_of((0, 1)) != cutting:
                raise UserError(f"what {name} chooses is no whole rows on each rank, as run.expert_capacity needs them")
            places_T, counts_T = lies.part(places_T, (0,)), lies.part(counts_T, (0,))
        at: Mapping[str, int] = self._world.mesh.coords(self._world.index)
        own = all(at[axis] == 0 for axis in self._world.axes.model if axis not in cutting)
        return places_T, counts_T, own


def largest(
    key_N: Tensor, index_N: Tensor, counted_N: Tensor, limit: Tensor, kinds: int, bits: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Of each kind the `limit`-th largest key over all ranks, or 0 where there are fewer; and how many there are.

    `key_N`: int64, at least 0 and below 2 ** `bits`; of one kind no two are alike. `index_N`: the kind of each.
    `counted_N`: those that count. `limit`: a scalar, the same on all ranks. Collective over the group.
    """
    wide = 1 << _DIGIT
    prefix_E = torch.zeros(kinds, dtype=torch.int64, device=key_N.device)
    wanted_E, count_E = limit.expand(kinds), prefix_E
    rounds = -(-bits // _DIGIT)
    for turn in range(rounds):
        shift = (rounds - 1 - turn) * _DIGIT
        here_N = key_N >> shift
        among_N = counted_N & (here_N >> _DIGIT == prefix_E[index_N])
        times = torch.zeros(kinds * wide, dtype=torch.int64, device=key_N.device)
        times.scatter_add_(0, index_N * wide + (here_N & (wide - 1)), among_N.long())
        times_ED = summed(times, group).view(kinds, wide)
        if turn == 0:
            count_E = times_ED.sum(1)
        least_ED = times_ED.flip(1).cumsum(1).flip(1)  # of this digit or a larger one
        digit_E = ((least_ED >= wanted_E[:, None]).sum(1) - 1).clamp(min=0)
        at_E1 = digit_E[:, None]
        wanted_E = wanted_E - (least_ED.gather(1, at_E1) - times_ED.gather(1, at_E1))[:, 0]
        prefix_E = prefix_E << _DIGIT | digit_E
    return prefix_E, count_E


def _in_order(x: Tensor) -> Tensor:
    """Whole numbers of 32 bits in the order of these, as IEEE 754 has them: below zero the larger the smaller."""
    bits = x.float().contiguous().view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + (1 << (_FLOAT - 1))


# ---------------------------------------------------------------- routers


def _places(gives: Any, logits: int) -> tuple[int, int] | None:
    """Where in what a router gives each token's weights and experts are, beside the logits."""
    if not isinstance(gives, tuple):
        return None
    every = cast("tuple[Any, ...]", gives)
    for place, (weights, experts) in enumerate(pairwise(every)):
        tensors = isinstance(weights, Tensor) and isinstance(experts, Tensor) and place != logits
        if tensors and weights.is_floating_point() and not experts.is_floating_point():
            return (place, place + 1) if weights.dim() == 2 and weights.shape == experts.shape else None
    return None


def _gives(router: nn.Module, size: int) -> Any:
    """What a router on meta gives for two tokens; None where it takes something else."""
    dtype = next((p.dtype for p in router.parameters()), torch.float32)
    try:
        with torch.no_grad():
            return router(torch.empty(2, size, dtype=dtype, device="meta"))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it is no router of rows of tokens
        return None


def _hook(capacity: Capacity, name: str, logits: int) -> Any:
    keep = cast(Any, torch.compiler.disable(capacity.kept))

    def limit(module: nn.Module, args: Any, result: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        places = _places(result, logits)
        if places is None:
            raise UserError(f"{name} gives no experts of each token with their weights: leave run.expert_capacity out")
        weights, experts = places
        leaf = len(tree_leaves(result[:weights]))
        with unseen():
            kept_TK = keep(name, leaf, result[weights], result[experts], result[logits].shape[-1])
            return (*result[:weights], result[weights].masked_fill(~kept_TK, 0), *result[experts:])

    return limit
