"""The loss that keeps a mixture's experts in use: of what routers say to all tokens of a global micro-batch.

With E experts, C_e how often tokens of a micro-batch chose expert e, S_e the sum of the probabilities that they gave it
and N the number of tokens, each summed over all layers and over all ranks (N counts a token once a layer),

    loss = E * sum over e of (C_e / N) * (S_e / N)

Switch Transformers (Fedus, Zoph and Shazeer 2021, equations 4 to 6) for one expert a token, as transformers has it for
several (`load_balancing_loss_func`), where C_e / N sums up to that many. 1 (times the experts of a token) is a balanced
load. Means of ranks, each of its own tokens, are another loss: it asks for balance within each rank's few samples
(Qiu et al. 2025, "Demons in the Detail").

C_e has no gradient and S_e enters once, so the gradient of a rank's probabilities is a number for each expert, which
follows from the sums of C: ranks add these up, E + 1 integers a micro-batch, and nothing moves in the backward.

In a pipeline each stage adds its layers' sums to those that came with the micro-batch and passes them on (3 E + 1
numbers beside the hidden states). The last stage has those of all layers, adds up C over its ranks, and what S is
pulled by, the same E numbers for every layer, goes back with the gradients.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.relayout.collectives.one_collective import summed
from tangram.schema.job import Job
from tangram.training.data import IGNORE
from tangram.training.mesh.local_parts import ResultPlacement
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World

_Seen = tuple[Tensor, int]
"""What a router gave of logits, and its place among the leaves of all that the module gave."""
_RECORDED = "router_logits"
"""What transformers calls the logits of routers, where a class says which of its modules give them."""
_DEFINED = "load_balancing_loss_func"
_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Its definition, beside the model's class; a function of this name that takes other things is another loss."""


@dataclass(frozen=True)
class Kind:
    """Which modules of a model are routers, and what they choose of."""

    routers: Mapping[str, int]
    """By name, which of its results are the logits."""
    experts: int
    per_token: int


@dataclass(frozen=True)
class _Part:
    """What a rank has of a router's tokens."""

    logits_TE: Tensor
    counts_T: Tensor
    """Whether a token counts."""
    alike: int
    """How many ranks of the model axes have the same tokens."""
    shared: int
    """How many of them add up their gradients of these."""


def routers_in(model: nn.Module) -> Mapping[str, int]:
    """The routers of a model by name, and which of their results are the logits; as the model's class says."""
    routers: dict[str, int] = {}
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        recorded: dict[str, Any] = getattr(module, "_can_record_outputs", None) or {}
        if _RECORDED in recorded:
            routers |= _recorded(module, f"{path}." if path else "", recorded[_RECORDED])
    return routers


def kind_of(model: nn.Module) -> Kind:
    """The routers of a model. Raises UserError where it has none, and where transformers has no such loss for it."""
    name = type(model).__name__
    routers = routers_in(model)
    if not routers:
        raise UserError(f"run.router_loss is of routers, and {name} has none: leave it out")
    defined = getattr(sys.modules.get(_module_of(model)), _DEFINED, None)
    experts, per_token = (getattr(model, key, None) for key in ("num_experts", "num_experts_per_tok"))
    if defined is None or tuple(signature(defined).parameters) != _TAKES or not experts or not per_token:
        raise UserError(
            f"run.router_loss is the loss of routers that transformers has for a model, and for {name} it has none "
            "of this form: leave it out"
        )
    return Kind(routers, int(experts), int(per_token))


def refuse(model: nn.Module, job: Job) -> None:
    """Raise UserError where a job asks for the loss of routers of a model that has none."""
    if job.run.router_loss:
        kind_of(model)


def routers_with_loss(model: nn.Module, plan: Job) -> Kind | None:
    """The routers of a whole model whose loss the plan asks for; None for none. Raises UserError as `kind_of`."""
    return kind_of(model) if plan.run.router_loss else None


class Routers:
    """Sees the logits of a model's routers while it trains, or of those of a stage, and gives a micro-batch's loss."""

    def __init__(
        self,
        part: nn.Module,
        derived: DerivedModel | None,
        kind: Kind,
        weight: float,
        world: World,
        group: dist.ProcessGroup,
    ) -> None:
        """`kind`: of the whole model. `weight`: what the loss is multiplied by. `group`: as `world.of_stage` gives."""
        self._derived, self._kind, self._weight, self._world, self.group = derived, kind, weight, world, group
        here = {name for name, _ in cast("Iterable[tuple[str, nn.Module]]", part.named_modules())}
        self._own = {name: place for name, place in kind.routers.items() if name in here}
        self._seen: dict[str, _Seen] = {}
        self._told: Tensor | None = None
        for name, place in self._own.items():
            part.get_submodule(name).register_forward_hook(_hook(self._seen, name, place))

    @property
    def width(self) -> int:
        """How many numbers `sums` gives."""
        return 3 * self._kind.experts + 1

    def sums(self, labels_BS: Tensor) -> Tensor:
        """What this rank's routers add to the sums of a micro-batch: float64, (E of S, E of S, E of C, N).

        Of the micro-batch whose forward has just ended, and its labels in the order in which the model was given them:
        tokens without one do not count. Sums of several stages are added. The first S has the gradients, as much of
        them as is this rank's; the second the values, of which ranks that have the same tokens have a part each. C and
        N, whole numbers below 2**53, are as many times too large on all ranks.
        """
        E = self._kind.experts
        pulled_E = torch.zeros(E, dtype=torch.float64, device=labels_BS.device)
        told_E = torch.zeros_like(pulled_E)
        counts = torch.zeros(E + 1, dtype=torch.int64, device=labels_BS.device)
        for name, seen in self._pop_seen().items():
            part = self._part(name, seen, labels_BS)
            times = self._world.model_size // part.alike  # whole numbers, of which all ranks have as many alike
            chosen_TK = part.logits_TE.detach().float().softmax(-1).topk(self._kind.per_token).indices
            counts_TK = (part.counts_T * times)[:, None].expand_as(chosen_TK)
            counts[:E].scatter_add_(0, chosen_TK.flatten(), counts_TK.flatten())
            counts[E] += part.counts_T.sum() * times
            sums_E = (part.counts_T.to(torch.float32) @ part.logits_TE.float().softmax(-1)).double()
            pulled_E = pulled_E + sums_E / part.shared
            told_E += sums_E.detach() / part.alike
        return torch.cat([pulled_E, told_E, counts.double()])

    def loss(self, sums: Tensor, counted: int) -> Tensor:
        """What this rank's backward of a micro-batch adds: gradients summed as those of the other loss are of all.

        `sums`: of all layers. `counted`: the tokens of the step that count, over all DP ranks. A micro-batch weighs
        as many of them as are its own, so that those of a step add up to a mean. Collective over all ranks of a stage.
        """
        E = self._kind.experts
        pulled_E, told_E, counts = sums[:E], sums[E : 2 * E], sums[2 * E :]
        everything = summed(counts.detach().long(), self.group).double()
        # E * (C / N) * (S / N), times the N of the micro-batch over that of the step
        layers = len(self._kind.routers)
        rate_E = self._weight * E / max(1, counted * layers) * everything[:E] / everything[E].clamp(min=1)
        told = (rate_E * told_E.detach()).sum()
        self._told = told if self._told is None else self._told + told
        return (rate_E * pulled_E).sum().float()

    def pop_loss(self) -> Tensor:
        """This rank's part of the losses since it was asked before, a float64 scalar; over all ranks they add up."""
        told, self._told = self._told, None
        return torch.zeros((), dtype=torch.float64, device=self._world.device) if told is None else told

    def forget(self) -> None:
        """Let go of what was seen, as what a backward has recomputed."""
        self._seen.clear()

    def _pop_seen(self) -> Mapping[str, _Seen]:
        if missing := [name for name in self._own if name not in self._seen]:
            raise UserError(f"the router {missing[0]} was not run, so run.router_loss cannot be computed: leave it out")
        found = {name: self._seen[name] for name in self._own}
        self.forget()
        return found

    def _part(self, name: str, seen: _Seen, labels_BS: Tensor) -> _Part:
        logits, leaf = seen
        logits_TE = logits.reshape(-1, logits.shape[-1])
        counts_BS = labels_BS != IGNORE
        lies = result_placement(self._derived, name, leaf)
        counts_T, alike, shared = counts_BS.flatten(), self._world.model_size, 1
        if lies is not None:
            states = lies.states
            if any(state.kind not in ("same", "several", "cut") for state in states.values()) or lies.axes_of((1,)):
                raise UserError(f"the logits of {name} are no whole rows on each rank, as run.router_loss needs them")
            counts_T = lies.part(counts_T, (0,))
            for axis in lies.axes_of((0,)):
                alike //= lies.mesh.axes[axis][0]
            for axis, state in states.items():
                shared *= lies.mesh.axes[axis][0] if state.kind == "several" else 1
        if counts_T.shape[0] != logits_TE.shape[0] or logits_TE.shape[1] != self._kind.experts:
            raise UserError(
                f"{name} gives logits of shape {tuple(logits.shape)} for {counts_T.shape[0]} tokens and "
                f"{self._kind.experts} experts: run.router_loss is of routers that see every token once"
            )
        return _Part(logits_TE, counts_T, alike, shared)


def result_placement(derived: DerivedModel | None, name: str, leaf: int) -> ResultPlacement | None:
    """How what a module gave lies over the model axes, by its place among the leaves; None where nothing is derived."""
    return None if derived is None else derived.placement_of((name, leaf))


def _hook(seen: dict[str, _Seen], name: str, place: int) -> Any:
    def see(module: nn.Module, args: Any, result: Any) -> None:
        # What is recomputed in the backward does the same, and nobody looks: a compiler finds one code.
        if module.training and torch.is_grad_enabled():
            seen[name] = result[place], len(tree_leaves(result[:place]))

    return see


def _recorded(module: nn.Module, prefix: str, recorder: Any) -> dict[str, int]:
    """What a class of transformers says of its routers."""
    kinds: dict[str, int] = {}
    for one in cast("list[Any]", recorder) if isinstance(recorder, list) else [recorder]:
        target, place, layer = (getattr(one, key, None) for key in ("target_class", "index", "layer_name"))
        target = one if isinstance(one, type) else target
        for path, inner in cast("Iterable[tuple[str, nn.Module]]", module.named_modules()):
            if isinstance(target, type) and isinstance(inner, target) and (layer is None or layer in path):
                kinds[prefix + path] = int(place or 0)
    return kinds


def _module_of(model: nn.Module) -> str:
    """Where the model's class is written; FSDP2 puts one of its own around it."""
    return next(one.__module__ for one in type(model).__mro__ if not one.__module__.startswith("torch."))
