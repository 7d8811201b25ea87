"""Layer streaming: parameters lie on the host, and a layer has its own on the device only while it computes.

    forward    a layer's parameters are copied before it, and gone after it
    backward   they are copied again before it is recomputed, and go as its operators have used them; each gradient
               updates the parameter on the host (`training.step.backward`), and is gone
    meanwhile  a thread copies those of the layer that is next

So at most two layers are there. Modules outside of layers are copied when they compute, too. Everything else, as the
optimiser and checkpoints, sees the parameters of the host.

A copy that was made ahead is used only if its parameters have not been written since, so a pass that ended early, and
whatever is loaded, leave nothing that is out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tangram.errors import UserError
from tangram.schema.plan import Plan, matches
from tangram.training.mesh.layout_to_torch import named_modules

Places = Sequence[tuple[dict[str, Any], str]]
"""Where a parameter stands: the `_parameters` of modules, and the name in each."""


@dataclass(frozen=True)
class _Copy:
    """Of the parameters of a unit."""

    there: Sequence[Tensor]
    versions: Sequence[int]
    """Of those on the host, when it was begun."""
    done: Future[None] | None


class LayerStream:
    """Copies the parameters of units: of each layer, and of each other module that has some."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Takes over the forwards of the units."""
        self._device, self._layers = device, layers
        self._at = {layer: at for at, layer in enumerate(layers)}
        self._ahead: dict[nn.Module, _Copy] = {}
        self._thread = ThreadPoolExecutor(1, "layer-stream")
        self.moved_bytes = 0
        """To the device, so far."""
        inside = {module for layer in layers for module in layer.modules()}
        outside = [m for m in model.modules() if m not in inside and [*m.parameters(recurse=False)]]
        self._modules = {**{unit: [unit] for unit in outside}, **{layer: [*layer.modules()] for layer in layers}}
        for unit in self._modules:
            unit.forward = _with_copies(self, unit, unit.forward)

    @contextmanager
    def copied(self, unit: nn.Module) -> Generator[None]:
        """Within, the unit's parameters are those on the device."""
        places = _places_of(self._modules[unit])  # each time, as a model on meta gets others with its memory
        copy = self._ahead.pop(unit, None)
        if copy is None or copy.versions != [one._version for one in places]:
            copy = self._begin(unit)
        if copy.done is not None:
            copy.done.result()
        if (following := self._next(unit)) is not None and following not in self._ahead:
            self._ahead[following] = self._begin(following)
        try:
            for (parameter, of_one), there in zip(places.items(), copy.there, strict=True):
                _put(of_one, cast(Tensor, _Lent.apply(parameter, there)) if parameter.requires_grad else there)
            del copy
            yield
        finally:
            for parameter, of_one in places.items():
                _put(of_one, parameter)

    def _next(self, unit: nn.Module) -> nn.Module | None:
        """The layer that is computed after this one: before it in a backward."""
        if unit not in self._at:
            return None
        in_backward = torch._C._current_graph_task_id() >= 0  # pyright: ignore[reportPrivateUsage]
        at = self._at[unit] + (-1 if in_backward else 1)
        return self._layers[at] if 0 <= at < len(self._layers) else None

    def _begin(self, unit: nn.Module) -> _Copy:
        """Memory is taken here and not by the thread, so whoever counts what this thread takes counts it."""
        hosts = [one.detach() for one in _places_of(self._modules[unit])]
        there = [torch.empty_like(one, device=self._device) for one in hosts]
        self.moved_bytes += sum(one.nbytes for one in hosts)
        versions = [one._version for one in hosts]
        if any(isinstance(one, FakeTensor) for one in hosts):
            _copy_all(there, hosts)
            return _Copy(there, versions, None)
        return _Copy(there, versions, self._thread.submit(_copy_all, there, hosts))


class _Lent(torch.autograd.Function):
    """A parameter's copy, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, there: Tensor) -> Tensor:
        return there.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def stream(part: nn.Module, layers: Sequence[nn.Module], plan: Plan, device: torch.device) -> LayerStream | None:
    """Have the layers of a model streamed, where the plan says so. Raises UserError for one that is not recomputed, and
    on accelerators, of which none was at hand to prove it on."""
    if not plan.run.stream_layers or plan.shard_ranks > 1:  # FSDP gathers a layer's parts from the files
        return None
    if device.type != "cpu":
        raise UserError('layers are streamed on the CPU alone: set run.device = "cpu", or leave out run.stream_layers')
    for name, module in named_modules(part):
        if module in layers and not matches(plan.run.recompute, name):
            raise UserError(f'run.stream_layers computes layers anew, and run.recompute leaves out {name}: set "full"')
    return LayerStream(part, layers, device)


def _places_of(modules: Sequence[nn.Module]) -> Mapping[nn.Parameter, Places]:
    found: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
    for module in modules:
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        for key, parameter in own.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((own, key))
    return found


def _put(places: Places, x: Tensor) -> None:
    for own, key in places:
        own[key] = x


@torch.no_grad()
def _copy_all(there: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    for one, host in zip(there, hosts, strict=True):
        one.copy_(host)


def _with_copies(stream: LayerStream, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with stream.copied(unit):
            return forward(*args, **kwargs)

    return run
