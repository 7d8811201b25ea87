"""What the code of a module sees of parameters that are cut: a plain tensor, this rank's part, in each one's place.

A module sees its own so while its forward runs, and those of modules inside that its own code takes, as
nn.MultiheadAttention does of `out_proj`, and what stands in hooks before a forward. Which these are, a captured graph
says. All others stay DTensors until their module runs, so that whoever gathers parameters module by module still can.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from tangram.errors import UserError
from tangram.layout import LayoutError, Mesh
from tangram.models.capturing.graph import Graph
from tangram.relayout.collectives.uneven import indices, picked
from tangram.relayout.copies.dtensor import placements_of
from tangram.sharding.derive.layouts import layout_of
from tangram.sharding.derive.of_model import States
from tangram.sharding.derive.problem.states import State
from tangram.sharding.derive.transitions import here
from tangram.sharding.runtime.install import bound
from tangram.sharding.runtime.writes import Writes
from tangram.training.mesh.groups import Devices
from tangram.training.mesh.layout_to_torch import named_modules

Place = tuple[dict[str, Any], str, str]
"""The parameters of a module, the key of one, and its name in the model."""


class Handle:
    """What comes back beside a model that was changed in place; taken for the model, it says that it is none."""

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise UserError(f"{_IN_PLACE}: call the model")

        def __getattr__(self, name: str) -> NoReturn:
            why = f"{_IN_PLACE}: {name} is the model's" if hasattr(nn.Module, name) else f"it has no {name}"
            raise AttributeError(why)


_IN_PLACE = "the model was made parallel in place, and this is what parallelize returns beside it"


@dataclass(frozen=True)
class PlainPart:
    """A parameter of which this rank has a part that no DTensor describes: a plain tensor stands in the model."""

    shape: tuple[int, ...]
    """Of the whole."""
    states: States
    mesh: Mesh
    coords: Mapping[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        """The model axes that cut it."""
        return tuple(axis for axis, state in self.states.items() if state.kind == "cut")

    @property
    def count(self) -> int:
        """Over how many ranks it is cut."""
        return prod(self.mesh.axes[axis][0] for axis in self.axes)

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor of which it has all."""
        return own_part(full, self.states, self.mesh, self.coords)


PlainParts = Mapping[str, PlainPart]
"""By the name of the parameter."""
NO_PARTS: PlainParts = MappingProxyType({})


@dataclass(frozen=True)
class AsTorch:
    """What parameters are to whoever holds the model outside of its forward: DTensors over the axes that cut each."""

    plain: Collection[str] = ()
    """Of those that are cut, the ones that are plain tensors instead."""
    over_all: Collection[str] = ()
    """DTensors over all axes, also where nothing cuts them: torch's own functions over many tensors (`clip_grad_norm_`,
    foreach optimisers) take DTensors of one mesh, and none beside plain tensors."""


CUT_ALONE = AsTorch()


class LocalParts:
    """Wraps the forwards of a model's modules. `cut`: names of parameters; `brought`: a name and part, as used.

    `at_once`: those that the whole model's forward sees as plain tensors, and not only their modules': they are all on
    each rank, and may be used within a transform of torch.func, through which no DTensor becomes a plain tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Set[str],
        brought: Callable[[str, Tensor], Tensor],
        at_once: Collection[str] = (),
    ) -> None:
        self._model, self._cut, self._brought, self._graph = model, cut, brought, cast("Graph | None", None)
        self._before: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """What stands in the model outside of its forward, while that runs."""
        self._forward = _Forward()
        self._stored: dict[str, tuple[int, weakref.ref[Tensor]]] = {}
        """Of each DTensor, by name: which storage its wrapper has, and its part, whose memory is not kept by this."""
        self._others: dict[str, list[Place]] = {}
        """By module. Its wrapper has the list, and no path: equal blocks are compiled once."""
        names = {p: name for name, p in model.named_parameters()}
        own = {path: _cut_ones(module, names, cut) for path, module in named_modules(model)}
        self._places: dict[str, list[Place]] = {}
        """By name; a tied one stands in several modules, and code may read any of them."""
        for _, module in named_modules(model):
            for key, p in module.named_parameters(recurse=False):
                there = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
                self._places.setdefault(names[p], []).append((there, key, names[p]))
        places = itertools.chain(*self._places.values())
        self._at_once = [(there, key, name, there[key]) for there, key, name in places if name in at_once]
        for path, module in named_modules(model):
            if own[path] and getattr(module, "max_norm", None) is not None:  # autograd forbids it of a DTensor's part
                raise UserError(
                    f"{path} writes into its table in the forward (max_norm), which is not done beside axes of the "
                    "model: leave max_norm out and shorten the vectors after each update"
                )
            inner = (at for at in own if at != path and (not path or at.startswith(f"{path}.")))
            if own[path] or any(own[at] for at in inner):
                self._wrap(path, module, own[path])
        self._refuse_lost_data()

    @property
    def passing(self) -> Set[str]:
        """Parameters that go through `brought` before they are used."""
        return self._cut

    def begin(self, graph: Graph) -> None:
        """A forward begins whose graph this is."""
        if graph is self._graph:
            return
        self._graph = graph
        taken: dict[str, dict[str, None]] = {}
        for call in graph.calls:
            path = graph.runs[call.run].module
            for v in (v for node in graph.nodes[call.first : call.stop] for v in node.inputs):
                value = graph.values[v]
                if value.name in self._cut and value.kind == "parameter" and value.name.rpartition(".")[0] != path:
                    taken.setdefault(path, {})[value.name] = None
        for path in taken.keys() - self._others.keys():  # code that reads what is not inside its module
            self._wrap(path, self._model.get_submodule(path), {})
        for path, others in self._others.items():
            others[:] = [place for name in taken.get(path, ()) for place in self._places[name]]

    def enter(self) -> None:
        """The whole model's forward begins. What somebody else has put in the place of a parameter, as FSDP2, stays."""
        self._refuse_lost_data()
        for there, key, name, p in self._at_once:
            if _standing(there, key, name) is p:
                self._before.append((there, key, p))
                there[key] = self._brought(name, local(p))
        self._forward.depth += 1

    def leave(self) -> None:
        self._forward.depth -= 1
        while self._before:
            there, key, p = self._before.pop()
            there[key] = p

    def _wrap(self, path: str, module: nn.Module, keys: Mapping[str, str]) -> None:
        others = self._others[path] = []
        module.forward = _with_parts(module, keys, module.forward, self._brought, others, self._forward)

    def _refuse_lost_data(self) -> None:
        """Raise UserError where `.data` of a DTensor was set: that is its wrapper's, and its part stays as it was."""
        for name, ((there, key, _), *_) in self._places.items():
            p = there.get(key)
            if isinstance(p, DTensor):
                storage, part = p.untyped_storage()._cdata, p._local_tensor  # pyright: ignore
                before = self._stored.get(name)
                if before is not None and before[1]() is part and before[0] != storage:
                    raise UserError(
                        f"{name}.data was set, and DTensors do not take that: write into it instead, by "
                        "parameter.data.copy_(values), of which a plain tensor is made a DTensor by distribute_tensor"
                    )
                self._stored[name] = storage, weakref.ref(part)


@dataclass
class _Forward:
    """How many forwards of the whole model run: a hook may call it, too."""

    depth: int = 0


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _cut_ones(module: nn.Module, names: Mapping[nn.Parameter, str], cut: Set[str]) -> dict[str, str]:
    own: dict[str, nn.Parameter | None] = module._parameters  # pyright: ignore[reportPrivateUsage]
    return {key: names[p] for key, p in own.items() if p is not None and names[p] in cut}


def _standing(own: Mapping[str, Any], key: str, name: str) -> Any:
    """What stands in a parameter's place. Raises UserError for nothing."""
    if key not in own:
        raise UserError(
            f"{name} is no parameter any more, as torch.nn.utils.prune and weight_norm have it: do so before the model "
            "is derived"
        )
    return own[key]


def _with_parts(
    module: nn.Module,
    keys: Mapping[str, str],
    forward: Callable[..., Any],
    brought: Callable[[str, Tensor], Tensor],
    others: list[Place],
    whole_forward: _Forward,
) -> Callable[..., Any]:
    def run(_: object, *args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        places = [*((own, key, name) for key, name in keys.items()), *others]
        if places and not whole_forward.depth:
            _refuse_alone(places[0][-1])
        before = [(there, key, _standing(there, key, name)) for there, key, name in places]
        for there, key, name in places:
            if isinstance(there[key], nn.Parameter):  # else a module around has done it
                there[key] = brought(name, local(there[key]))
        try:
            return forward(*args, **kwargs)
        finally:
            for there, key, p in before:
                there[key] = p

    return bound(run)


def _refuse_alone(name: str) -> None:
    """Raise UserError for a module that is called by itself; a backward that computes again may do so."""
    if torch._C._current_graph_task_id() == -1:  # pyright: ignore
        raise UserError(
            f"a module with {name} is called outside of the model's forward, where a rank has its own part alone: call "
            "the model itself, as model(...), and have its forward give what is needed"
        )


def as_dtensors(
    model: nn.Module,
    lies: Mapping[str, States],
    mesh: Mesh,
    coords: Mapping[str, int],
    devices: Devices,
    as_torch: AsTorch = CUT_ALONE,
) -> PlainParts:
    """Make DTensors of the parameters that are cut, over the axes that cut each; those that are plain tensors instead.

    Every rank has all of each, so nothing is sent.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, PlainPart] = {}
    states_of = {parameter: lies[name] for name, parameter in model.named_parameters()}
    for _, module in named_modules(model):
        for key, whole in [*module.named_parameters(recurse=False)]:
            states = states_of[whole]
            axes = [
                (axis, n)
                for axis, n in mesh.views[0]
                if names[whole] in as_torch.over_all or states[axis].kind == "cut"
            ]
            if not axes:
                continue
            if whole not in made:  # a tied one stands in several modules, and stays one parameter
                refuse_lost_hooks(names[whole], whole)
                cutting = {axis: states[axis] for axis, _ in axes}
                part = own_part(whole.data, cutting, mesh, coords)
                placements = _placements(whole, cutting, axes) if names[whole] not in as_torch.plain else None
                if placements is None:
                    found[names[whole]] = PlainPart(tuple(whole.shape), cutting, mesh, coords)
                    made[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
                else:
                    part = DTensor.from_local(
                        part,
                        devices.over([*cutting]),
                        placements,
                        run_check=False,  # it would send tensors to compare them
                        shape=whole.shape,
                        stride=whole.stride(),
                    )
                    made[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
                vars(made[whole]).update(vars(whole))  # as `_no_weight_decay`, by which code tells parameters apart
            module.register_parameter(key, made[whole])
    return found


def refuse_lost_hooks(name: str, parameter: nn.Parameter) -> None:
    """Raise UserError for a parameter with hooks for its gradient: the one that takes its place would have none."""
    own = cast(Any, parameter)
    if own._backward_hooks or getattr(own, "_post_accumulate_grad_hooks", None):
        raise UserError(
            f"{name} has a hook for its gradient, which its part on a rank would not have: register hooks of "
            "parameters once the model is parallel"
        )


def _placements(whole: Tensor, cutting: States, axes: Sequence[tuple[str, int]]) -> tuple[Placement, ...] | None:
    """Those of a parameter over the axes that cut it; None where torch has no word for them."""
    try:
        return placements_of(layout_of(whole.shape, cutting), Mesh((tuple(axes),)))
    except LayoutError:
        return None


def own_part(full: Tensor, states: States, mesh: Mesh, coords: Mapping[str, int]) -> Tensor:
    """A rank's part of a tensor, with storage of its own."""
    part, done = full, dict[str, State]()
    sizes = {axis: n for axis, (n, _) in mesh.axes.items()}
    for axis, state in states.items():
        if state.kind == "cut":
            dim, now = state.dim, here(state, axis, done, sizes)
            at = indices(now.outer, part.shape[dim], sizes[axis], now.parts)[coords[axis]]
            part = picked(part, dim, at)
            done[axis] = state
    return part


def written_parameters(model: nn.Module, graph: Graph) -> set[str]:
    """The parameters that a forward writes into.

    Raises UserError where one has gradients and the parameter, too: the module sees a view of the DTensor then, and
    autograd knows no writes into such, nor a use of it after one through `detach()`. Of `.data` it knows nothing.
    """
    writes = {v: nodes for v, nodes in Writes.of(graph).nodes.items() if graph.values[v].kind == "parameter"}
    seen = {
        graph.values[v].name
        for v, nodes in writes.items()
        if graph.values[v].name in graph.written and not all(_past(graph, i) for i in nodes)
    }
    for name, p in model.named_parameters():
        if name in seen and p.requires_grad and isinstance(p, DTensor) and torch.is_grad_enabled():
            raise UserError(
                f"a forward writes into {name}, which is trained: write into it after the optimiser's step instead"
            )
    return {graph.values[v].name for v in writes}


def _past(graph: Graph, write: int) -> bool:
    """Whether a write is through `detach()` and into what nothing uses after it."""
    node = graph.nodes[write]
    detached = node.renews is not None and graph.nodes[node.renews[1]].operator is torch.ops.aten.detach.default
    return detached and not any({*node.results} & {*later.inputs} for later in graph.nodes[write + 1 :])


@dataclass(frozen=True)
class ResultPlacement:
    """How a result of a model lies over the ranks that have computed it: for who takes it in parts."""

    states: States
    """By axis; `same` over those that are not named."""
    mesh: Mesh
    coords: Mapping[str, int]
    """Of this rank, by axis."""
    groups: Mapping[str, dist.ProcessGroup]

    def axes_of(self, dims: Sequence[int]) -> tuple[str, ...]:
        """The axes that cut one of these dims."""
        return tuple(axis for axis, state in self.states.items() if state.kind == "cut" and state.dim in dims)

    def count(self, n: int, dim: int) -> int:
        """How many elements a dim has in all of which this rank has `n`."""
        for state in (self.states[axis] for axis in self.axes_of((dim,))):
            if state.parts:
                return state.outer * state.block
        return n * prod(self.mesh.axes[axis][0] for axis in self.axes_of((dim,)))

    def part(self, full: Tensor, dims: Sequence[int]) -> Tensor:
        """This rank's part of a tensor of which it has all, whose dims are these of the result and cut as they are."""
        own = {axis: self.states[axis] for axis in self.axes_of(dims)}
        states = {axis: state._replace(dim=dims.index(state.dim)) for axis, state in own.items()}
        return own_part(full, states, self.mesh, self.coords)
