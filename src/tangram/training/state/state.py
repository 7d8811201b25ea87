"""The state of a training job as named tensors, each with the part of it that this rank holds.

`model.<name>` is a parameter or a persistent buffer, `optim.<name>.<state>` what the optimiser keeps for a parameter.
Where they lie is what the plan says, which is checked against what is there, and not asked of torch.
Which states there are and how each lies is declared in `tangram.relayout.mapping.states`, not guessed from names.
Parameters that are not trained have no states. Randomness is no part of it: the loop draws it from (seed, sample), and
the learning rate is a function of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from tangram.checkpoint.state.describe import frozen as frozen_of
from tangram.checkpoint.state.entries import StateEntry, replicas, uneven_share
from tangram.errors import UserError
from tangram.layout import LayoutError, Region, region
from tangram.layout.blocks import flat_blocks, shape_of_blocks
from tangram.planner.legality.check_plan import bound_layout
from tangram.relayout import TensorSpec
from tangram.relayout.mapping.states import ADAMW, SAME, States
from tangram.schema.plan import Plan
from tangram.training.mesh.local_parts import PlainPart, PlainParts
from tangram.training.mesh.world import World
from tangram.training.parallel.eight_bit_adamw import CODED, EightBitAdamW
from tangram.training.parallel.fsdp import reshard
from tangram.training.parallel.master_weights import MASTER, MasterAdamW

ADAMW_STATES: States = {name: ADAMW[name] for name in ("exp_avg", "exp_avg_sq", "step")}  # without amsgrad


@dataclass(frozen=True)
class Progress:
    """How far training has come, over all runs that it took."""

    step: int = 0
    samples: int = 0
    """Of the stream's order: where the data goes on."""
    tokens: int = 0
    seconds: float = 0.0
    scale: float = 0.0
    """Of the loss, where it is scaled."""
    good: int = 0
    """Steps that were applied since the scale changed."""
    skipped: int = 0
    """Steps that were not applied; `step` counts them."""


@dataclass
class JobState:
    """All that a job needs to go on: what `Checkpointer.save` writes and `load` fills."""

    model: nn.Module
    optimiser: AdamW | None
    """None: only the model, to evaluate or export it."""
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The last of each number that was measured; by them the best checkpoints can be kept."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What made the state, for people and for checks before loading: anything that JSON can say."""
    plain: PlainParts = field(default_factory=dict[str, PlainPart])
    """As of the `ParallelModel` that has the module."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies, as one rank sees it."""

    region: Region
    """What this rank holds."""
    replicas: tuple[int, ...]
    """The ranks that hold the same, this one included."""
    layout: str
    """As text."""
    uneven_share: Region | None = None
    """As an entry has it."""


class TensorPlaces:
    """Where tensors lie on this rank, worked out once each. Without a world everything is whole in this process."""

    def __init__(self, plan: Plan, world: World | None) -> None:
        self._plan = plan
        self._world = world
        self._known: dict[tuple[str, tuple[int, ...], bool], TensorPlace] = {}

    def of(self, name: str, shape: tuple[int, ...], *, alike: bool) -> TensorPlace:
        """The place of a tensor that lies like the parameter `name`, or else whole on every rank that has that."""
        known = self._known.get((name, shape, alike))
        if known is None:
            known = self._known[name, shape, alike] = self._place_of(name, shape, alike)
        return known

    def _place_of(self, name: str, shape: tuple[int, ...], like: bool) -> TensorPlace:
        if self._world is None:
            return TensorPlace(Region.full(shape), (0,), "")
        mesh, rank = self._world.mesh, self._world.index
        if not like:
            there = tuple(mesh.ranks(tuple((axis, at[0]) for axis, at in self._plan.stages_of(name))))
            return TensorPlace(Region.full(shape), there, "")
        layout = bound_layout(self._plan, name, shape)
        alike, share = replicas(mesh, layout.axes, rank, layout.at), uneven_share(layout, mesh, rank)
        return TensorPlace(region(layout, mesh, rank), alike, str(layout), share)


def entries(state: JobState, places: TensorPlaces) -> list[StateEntry]:
    """Every tensor of the state, as it lies on this rank."""
    reshard(state.model)  # after an evaluation some parameters stand there whole
    parameters = dict(state.model.named_parameters())
    kept = state.model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in state.model.named_buffers() if name in kept}
    shapes = {name: part.shape for name, part in state.plain.items()}
    still = frozen_of(state.model) if state.optimiser is not None else set[str]()
    found = [
        replace(_entry(f"model.{name}", tensor, name, places, shapes.get(name)), frozen=name in still)
        for name, tensor in parameters.items()
    ]
    found += [_entry(f"model.{name}", tensor, name, places, alike=False) for name, tensor in buffers.items()]
    if state.optimiser is not None:
        make_missing_states(state.optimiser)
        for name in trained(state):
            values = cast("dict[str, Tensor]", state.optimiser.state[parameters[name]])
            states = states_of(state.optimiser, parameters[name])
            if values.keys() != states.keys():
                raise RuntimeError(f"the optimiser keeps {sorted(values)} for {name}, not {sorted(states)}")
            shape = shapes.get(name) or tuple(parameters[name].shape)
            for key, spec in states.items():
                full = f"optim.{name}.{key}"
                if spec.kind == "blocks":
                    found.append(
                        _blocks_entry(full, values[key], places.of(name, shape, alike=True), shape, spec.block)
                    )
                else:
                    alike = spec.kind == "same"
                    found.append(_entry(full, values[key], name, places, shape if alike else None, alike=alike))
    return found


def _blocks_entry(name: str, own: Tensor, place: TensorPlace, shape: tuple[int, ...], count: int) -> StateEntry:
    """Of a number for each block of a parameter that lies here and has this shape."""
    try:
        here = flat_blocks(place.region, shape, count)
        share = None if place.uneven_share is None else flat_blocks(place.uneven_share, shape, count)
    except LayoutError as error:
        raise UserError(f'"{place.layout}" cannot have {name}: {error}') from None
    spec = TensorSpec(shape_of_blocks(shape, count), "float32")
    return StateEntry(name, spec, here, own.view(here.local_shape or -1), place.replicas, "", share)


InMemory = tuple[tuple[int, int, bool], ...]


def memory_of(state: JobState) -> InMemory:
    """Which tensors a state has, and in which memory: as long as this is the same, so are its entries.

    Whoever keeps the entries keeps their memory, so that no other tensor comes to lie there.
    """
    reshard(state.model)
    tensors = [*state.model.parameters(), *state.model.buffers()]
    if state.optimiser is not None:
        tensors += [value for states in state.optimiser.state.values() for value in states.values()]
    return tuple((id(tensor), local_of(tensor).data_ptr(), tensor.requires_grad) for tensor in tensors)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _entry(
    name: str,
    tensor: Tensor,
    owner: str,
    places: TensorPlaces,
    shape: tuple[int, ...] | None = None,
    *,
    alike: bool = True,
) -> StateEntry:
    """`owner`: the parameter (or buffer) whose ranks have it, and that it lies like if it is `alike`; `shape`: of the
    whole, where the tensor does not say it."""
    shape = shape or tuple(tensor.shape)
    local = local_of(tensor)
    place = places.of(owner, shape, alike=alike)
    if local.numel() != place.region.size or (place.region and tuple(local.shape) != place.region.local_shape):
        raise RuntimeError(
            f"{name} has a part of shape {tuple(local.shape)} here, but by the plan this rank has {place.region}"
        )
    spec = TensorSpec(shape, str(tensor.dtype).removeprefix("torch."))
    return StateEntry(name, spec, place.region, local, place.replicas, place.layout, place.uneven_share)


def trained(state: JobState) -> list[str]:
    """The parameters that the optimiser has and that are not frozen."""
    assert state.optimiser is not None
    known = {id(parameter) for group in state.optimiser.param_groups for parameter in group["params"]}
    return [name for name, p in state.model.named_parameters() if p.requires_grad and id(p) in known]


def frozen(state: JobState) -> tuple[str, ...]:
    """The parameters without optimiser states."""
    if state.optimiser is None:
        return ()
    some = set(trained(state))
    return tuple(name for name, _ in state.model.named_parameters() if name not in some)


def states_of(optimiser: AdamW, parameter: Tensor) -> States:
    """The states that the optimiser keeps of a parameter."""
    own = CODED if isinstance(optimiser, EightBitAdamW) and optimiser.has_codes(parameter) else ADAMW_STATES
    has_master = isinstance(optimiser, MasterAdamW) and parameter.dtype != optimiser.masters
    return {**own, MASTER: SAME} if has_master else own


def make_missing_states(optimiser: AdamW) -> None:
    """Give every parameter the states that AdamW gives it at its first gradient; with step 0 they mean the same."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimiser.state.get(parameter):
                continue
            if isinstance(optimiser, MasterAdamW):
                optimiser.make_state(parameter)
                continue
            there = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
            for key, spec in ADAMW_STATES.items():
                whole = spec.kind == "same"
                optimiser.state[parameter][key] = (
                    torch.zeros_like(parameter) if whole else torch.zeros((), dtype=torch.float32, device=there)
                )
