"""A model whose operators are derived as they run, on the ranks of a mesh: to try marks, with breakpoints and prints.

    parallel = eager(model, devices, marks)
    with parallel:
        loss = loss_of(model(ids))         # `mark`, `relayout`, `layout_of` in the model's code mean this mesh
    loss.backward()

Parameters lie as their marks say and are whole without one: nothing is derived for them. Each operator is derived from
how its tensors lie then, so nothing is known of what comes after it. For the whole model at once there is
`tangram.training.mesh.tensor_parallel.parallel`, which reads the same marks from the same code, and runs it as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.capturing.graph import Graph, Value
from tangram.sharding.derivation import marks_from
from tangram.sharding.derive.derive import ConflictError
from tangram.sharding.derive.marking.marks import Mark, matched
from tangram.sharding.derive.marking.marks import states as states_of
from tangram.sharding.derive.problem.states import SAME, State
from tangram.sharding.derive.transitions import Change
from tangram.sharding.discover.own_rules import OwnRules
from tangram.sharding.eager import api
from tangram.sharding.eager.api import WrittenMark, marks_in
from tangram.sharding.eager.session import Eager, ParameterPart
from tangram.sharding.ops.rule_table import table_of
from tangram.sharding.runtime.apply_change import brought
from tangram.sharding.runtime.install import bound
from tangram.training.mesh.groups import (
    device_mesh_of,
    devices_of,
    proved_rules,
    refuse_unlike_inputs,
    refuse_unlike_weights,
)
from tangram.training.mesh.layout_to_torch import named_modules
from tangram.training.mesh.local_parts import AsTorch, as_dtensors, local
from tangram.training.mesh.modes import agree_on_draws, refuse_transforms


def eager(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | str,
    marks: Sequence[str | Mark] = (),
    rules: Path | str | OwnRules | None = None,
) -> EagerModel:
    """Make a model (whole, with the same values on all ranks) parallel in place, each operator derived as it runs.

    `mesh`: as of `tangram.parallelize`. `marks` name parameters, and modules for the first tensor that each gives;
    those that `mark` keeps in the model count, too. Each rank gives the model all of its inputs. Its results are plain
    and whole, but for those that the model's code marks: these stay parts, with layouts. After the backward every
    gradient is right: nothing is left to sum. `rules`: a file of op rules for operators of one's own, each proved
    first, or what `sharding.discover.own_rules.own_rules` gives. Raises UserError for marks and rules that do not fit,
    and where ranks have other weights or give other inputs.
    """
    devices = device_mesh_of(model, mesh)
    refuse_unlike_weights(model, devices.get_all_groups())
    return EagerModel(model, [*marks_in(model), *marks_from(marks)], devices, proved_rules(rules, devices))


class EagerModel:
    """What `eager` has made: a context in which the model runs."""

    def __init__(self, model: nn.Module, marks: Sequence[Mark], devices: DeviceMesh, rules: str = "") -> None:
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        names = devices.mesh_dim_names or ()
        mesh = Mesh.parse(" ".join(f"{name}={n}" for name, n in zip(names, devices.shape, strict=True)))
        self._devices = devices_of(devices)
        coords = {name: dist.get_rank(group) for name, group in self._devices.groups.items()}
        rank = sum(at * mesh.axes[name][1] for name, at in coords.items())
        found = _marked_states(model, marks, mesh)
        whole: dict[str, State] = dict.fromkeys(mesh.axes, SAME)
        lies = {name: {**whole, **found.get(name, {})} for name, _ in model.named_parameters()}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        as_dtensors(model, lies, mesh, coords, self._devices, AsTorch(over_all=lies.keys()))

        def bring(x: Tensor, change: Change, trained: bool) -> Tensor:
            return brought(x, change, self._devices.together, differentiable=trained)

        self.session = Eager(mesh, rank, bring, local, table_of(rules))
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                self.session.parameters[parameter] = ParameterPart(name, shapes[name], lies[name])
            self.session.names[parameter] = name
        for mark, path in _on_modules(model, marks):
            module = model.get_submodule(path)
            module.forward = self._marked(module.forward, mark)
        model.forward = self._begun(model.forward)
        self._entered = ExitStack()

    def __enter__(self) -> EagerModel:
        """From here on the code that runs means this mesh."""
        if api.current.get() is not None:
            raise UserError("another model runs as its operators are derived: one at a time")
        self._entered.enter_context(torch.compiler.set_stance("force_eager"))  # compiled parts run as they are written
        self._entered.enter_context(self.session.entered())
        self._agree_on_draws()
        return self

    def _agree_on_draws(self) -> None:
        agree_on_draws(self._devices.groups, self._model)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No longer. What has a layout keeps it."""
        self._entered.__exit__(kind, error, trace)

    def _begun(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(_: object, *args: Any, **kwargs: Any) -> Any:
            if api.current.get() is not self.session:
                raise UserError("this rank has parts of the model: run it in the context that `eager` has given")
            refuse_transforms()
            self._agree_on_draws()
            refuse_unlike_inputs(
                {**{str(i): x for i, x in enumerate(args)}, **kwargs}, self._device, [*self._devices.groups.values()]
            )
            self.session.begin()
            return self.session.end(forward(*args, **kwargs))

        return bound(run)

    def _marked(self, forward: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
        """The first tensor that a module gives, marked."""
        written = WrittenMark(mark.layout, f"the mark `{mark}`")

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten(forward(*args, **kwargs))
            first = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor)), None)
            if first is not None:
                leaves[first] = self.session.mark(leaves[first], written)
            return tree_unflatten(leaves, form)

        return run


def _names(model: nn.Module, mark: Mark) -> list[str]:
    """What a mark names: parameters, modules, and what the model is given. Raises UserError."""
    ndim = len(mark.layout.dims)
    inputs = [*inspect.signature(model.forward).parameters]
    values = [Value(tuple(p.shape), p.dtype, "parameter", name) for name, p in model.named_parameters()]
    some = next((p.dtype for p in model.parameters()), None)
    assert some is not None, "a model without parameters has nothing to mark by name"
    values += [Value((1,) * ndim, some, "input", name) for name in inputs]
    first = len(values)
    modules = [name for name, _ in named_modules(model) if name]
    values += [Value((1,) * ndim, some) for _ in modules]
    results = {name: first + i for i, name in enumerate(modules)}
    return [*matched(Graph(tuple(values), (), {}, results=results), mark)]


def _on_modules(model: nn.Module, marks: Sequence[Mark]) -> list[tuple[Mark, str]]:
    modules = {name for name, _ in named_modules(model)}
    return [(mark, name) for mark in marks for name in _names(model, mark) if name in modules]


def _marked_states(model: nn.Module, marks: Sequence[Mark], mesh: Mesh) -> dict[str, dict[str, State]]:
    """How marked parameters lie. Raises UserError."""
    parameters = dict(model.named_parameters())
    inputs = {*inspect.signature(model.forward).parameters}
    found: dict[str, dict[str, State]] = {}
    by: dict[tuple[str, str], Mark] = {}
    for mark in marks:
        for name in _names(model, mark):
            if name in inputs and mark.layout.axes:
                axis = min(mark.layout.axes)
                raise UserError(
                    f"a mark cuts {name} over {axis}, but every rank has all of what a model is given: mark what is "
                    "made of it"
                )
            if name not in parameters:
                continue
            for axis, state in _states_of_mark(mark, name, parameters[name], mesh).items():
                if found.setdefault(name, {}).setdefault(axis, state) != state:
                    said = f"the marks `{by[name, axis]}` and `{mark}` contradict each other on {name} over {axis}"
                    raise ConflictError(said, axis)
                by[name, axis] = mark
    return {**_biases(parameters, found, mesh), **found}


def _biases(
    parameters: Mapping[str, Tensor], found: Mapping[str, Mapping[str, State]], mesh: Mesh
) -> dict[str, dict[str, State]]:
    """How biases without a mark lie: as the rows of the weight beside them, of which each bias is added to one.

    A weight that is cut otherwise, or has its rows elsewhere (of a transposed convolution), leaves its bias whole.
    """
    follow: dict[str, dict[str, State]] = {}
    for name, states in found.items():
        stem, _, last = name.rpartition(".")
        bias = f"{stem}.{last.replace('weight', 'bias')}".removeprefix(".")
        if bias == name or bias in found or bias not in parameters:
            continue
        if tuple(parameters[bias].shape) == tuple(parameters[name].shape[:1]):
            rows = {axis: state for axis, state in states.items() if state.kind == "cut" and state.dim == 0}
            follow[bias] = {**dict.fromkeys(mesh.axes, SAME), **rows}
    return follow


def _states_of_mark(mark: Mark, name: str, parameter: Tensor, mesh: Mesh) -> Mapping[str, State]:
    try:
        states = states_of(mark.layout, parameter.shape, mesh) or dict.fromkeys(mesh.axes, SAME)
    except UserError as error:
        raise UserError(f"the mark `{mark}` does not fit {name}: {error}") from None
    if getattr(mark, "used", None) is not None:
        raise UserError(f"the mark `{mark}` gathers {name} each time, which is for a whole graph: leave the arrow out")
    for axis, state in states.items():
        if state.kind == "sum":
            raise UserError(f"the mark `{mark}` makes {name} a pending sum, which no parameter is")
        n, k = parameter.shape[state.dim] // state.outer, mesh.axes[axis][0]
        if state.kind == "cut" and (state.parts or n % k):
            raise UserError(f"the mark `{mark}` cuts {n} of {name} into {k} parts that are not even")
    return states
