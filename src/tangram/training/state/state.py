"""The state of a training job as named tensors, each with the part of it that this rank holds.

`model.<name>` is a parameter or a persistent buffer, `optim.<name>.<state>` what the optimiser keeps for a parameter.
Where they lie is what the plan says, which is checked against what is there, and not asked of torch.
Which states there are and how each lies is declared in `tangram.relayout.mapping.states`, not guessed from names.
Parameters that are not trained have no states. Randomness is no part of it: the loop draws it from (seed, sample), and
the learning rate is a function of the step.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.checkpoint.state.describe import frozen as frozen_of
from tangram.checkpoint.state.entries import StateEntry, replicas, uneven_share
from tangram.errors import UserError
from tangram.layout import LayoutError, Region, region
from tangram.layout.blocks import flat_blocks, shape_of_blocks
from tangram.planner.legality.check_plan import bound_layout
from tangram.relayout import TensorSpec
from tangram.relayout.mapping.states import SAME, SHARED, States, StateSpec, state_layout
from tangram.schema.plan import Plan
from tangram.training.mesh.local_parts import PlainPart, PlainParts, local
from tangram.training.mesh.mapped_tensors import mapped
from tangram.training.mesh.world import World
from tangram.training.objective.step_guard import Judged
from tangram.training.parallel.fsdp import reshard
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import ADAMW_STATES


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
    judged: Judged = field(default_factory=Judged)
    """By what the next step is judged."""
    measured: int = 0
    """The step after which the held-out loss was measured last."""


@dataclass
class JobState:
    """All that a job needs to go on: what `Checkpointer.save` writes and `load` fills."""

    model: nn.Module
    optimiser: Optimizer | None
    """None: only the model, to evaluate or export it."""
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The last of each number that was measured; by them the best checkpoints can be kept."""
    experts: Callable[[], Mapping[str, Any]] = dict[str, Any]
    """What was counted of experts and not told yet (`Loads.carried`); a save calls it on all ranks."""
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
        self._known: dict[tuple[str, tuple[int, ...], StateSpec], TensorPlace] = {}

    def of(self, name: str, shape: tuple[int, ...], spec: StateSpec) -> TensorPlace:
        """The place of a tensor made so of the parameter `name`, of this shape in all: like that, or reduced from it;
        else whole on every rank that has that."""
        known = self._known.get((name, shape, spec))
        if known is None:
            known = self._known[name, shape, spec] = self._place_of(name, shape, spec)
        return known

    def _place_of(self, name: str, shape: tuple[int, ...], spec: StateSpec) -> TensorPlace:
        if self._world is None:
            return TensorPlace(Region.full(_shape_of(shape, spec)), (0,), "")
        mesh, rank = self._world.mesh, self._world.index
        if spec.kind == "shared":
            where = [((axis, at),) for axis, places in self._plan.stages_of(name) for at in places] or [()]
            there = itertools.chain.from_iterable(mesh.ranks(coords) for coords in where)
            return TensorPlace(Region.full(shape), tuple(sorted(there)), "")
        layout = bound_layout(self._plan, name, shape)
        if spec.kind == "reduced":
            layout = state_layout(layout, mesh, spec)
        alike, share = replicas(mesh, layout.axes, rank, layout.at), uneven_share(layout, mesh, rank)
        return TensorPlace(region(layout, mesh, rank), alike, str(layout), share)


def _shape_of(shape: tuple[int, ...], spec: StateSpec) -> tuple[int, ...]:
    """Of a state that has all dims of its parameter, or 1 of those that it is reduced over."""
    gone = {dim % len(shape) for dim in spec.dims}
    return tuple(1 if dim in gone else n for dim, n in enumerate(shape))


def entries(state: JobState, places: TensorPlaces) -> list[StateEntry]:
    """Every tensor of the state, as it lies on this rank."""
    reshard(state.model)  # after an evaluation some parameters stand there whole
    parameters = dict(state.model.named_parameters())
    kept = state.model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in state.model.named_buffers() if name in kept}
    shapes = {name: part.shape for name, part in state.plain.items()}
    still = frozen_of(state.model) if state.optimiser is not None else set[str]()
    found = [
        replace(_entry(f"model.{name}", tensor, name, places, SAME, shapes.get(name)), frozen=name in still)
        for name, tensor in parameters.items()
    ]
    found += [_entry(f"model.{name}", tensor, name, places, SHARED) for name, tensor in buffers.items()]
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
                    found.append(_blocks_entry(full, values[key], places.of(name, shape, SAME), shape, spec.block))
                else:
                    of_all = tuple(values[key].shape) if spec.kind == "shared" else shape
                    found.append(_entry(full, values[key], name, places, spec, of_all))
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
    with torch.no_grad():  # else a part of a DTensor goes through autograd
        return tuple((id(tensor), local(tensor).data_ptr(), tensor.requires_grad) for tensor in tensors)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return local(tensor).detach()


def _entry(
    name: str,
    tensor: Tensor,
    owner: str,
    places: TensorPlaces,
    spec: StateSpec,
    shape: tuple[int, ...] | None = None,
) -> StateEntry:
    """`owner`: the parameter (or buffer) whose ranks have it, and that it is made of as `spec` says; `shape`: of all of
    that, where the tensor does not say it."""
    shape = shape or tuple(tensor.shape)
    own = local_of(tensor)
    place = places.of(owner, shape, spec)
    if own.numel() != place.region.size or (place.region and tuple(own.shape) != place.region.local_shape):
        raise RuntimeError(
            f"{name} has a part of shape {tuple(own.shape)} here, but by the plan this rank has {place.region}"
        )
    of_all = TensorSpec(_shape_of(shape, spec), str(tensor.dtype).removeprefix("torch."))
    return StateEntry(name, of_all, place.region, own, place.replicas, place.layout, place.uneven_share)


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


def states_of(optimiser: Optimizer, parameter: Tensor) -> States:
    """The states that the optimiser keeps of a parameter."""
    return optimiser.states_of(parameter) if isinstance(optimiser, RuledOptimiser) else ADAMW_STATES


def make_missing_states(optimiser: Optimizer, *, in_files: bool = False) -> None:
    """Give every parameter the states that it gets at its first gradient; before an update they mean the same.
    `in_files`: those that are no single numbers lie in files that are mapped."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimiser.state.get(parameter):
                continue
            if isinstance(optimiser, RuledOptimiser):
                optimiser.make_state(parameter)
            else:
                there = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
                for key, spec in ADAMW_STATES.items():
                    whole = spec.kind == "same"
                    optimiser.state[parameter][key] = (
                        torch.zeros_like(parameter) if whole else torch.zeros((), dtype=torch.float32, device=there)
                    )
            if in_files:
                own = cast("dict[str, Tensor]", optimiser.state[parameter])
                own.update({key: mapped(value) for key, value in own.items() if value.ndim})
