"""Where samples stand in the tensors that a model draws for: found by two runs without memory, of unlike batches.

What is drawn for a sample is to be the same in whatever micro-batch it comes (`random.Numbers`), so it has to be known
which of a tensor's elements are a sample's. The model runs once with as many samples as there are and once with one
more; the dim that has grown with them is theirs. In one that several share, as after `flatten(0, 1)`, samples come
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_map  # pyright: ignore[reportUnknownVariableType]

from tangram.models.building.twin import fake_twin, storage_of
from tangram.models.capturing.capture import quiet
from tangram.models.capturing.opened import GROUPED, grouped
from tangram.models.capturing.reasons import place_and_reason
from tangram.sharding.local_ops.random_ops import drawing, shape_of
from tangram.sharding.ops.calls import schema_of


class RandomDraw(NamedTuple):
    """A call that draws."""

    module: str
    """The innermost one that runs."""
    name: str
    shape: tuple[int, ...]


class _Seen(TorchDispatchMode):
    def __init__(self, inside: Sequence[str], parameters: Mapping[int, str], written: set[str]) -> None:
        super().__init__()
        self.draws: list[RandomDraw] = []
        self._inside, self._parameters, self._written = inside, parameters, written

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if schema_of(func).is_mutable and isinstance(args[0] if args else None, Tensor):
            self._written.update({self._parameters.get(storage_of(args[0]), "")} - {""})
        call = drawing(func, args, kwargs or {})
        if call is not None:
            self.draws.append(RandomDraw(self._inside[-1] if self._inside else "", call.name, shape_of(call)))
        return grouped(func, args, kwargs or {}) if func is GROUPED else func(*args, **(kwargs or {}))


def draws_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Mapping[int, int], written: set[str]
) -> list[RandomDraw]:
    """What a forward draws, in order, of inputs whose first dim has another size: `rows` says which instead of which.

    Into `written` come the names of the parameters that it writes into. The model (on meta or not) is not changed, and
    runs as it is, in training or not. Raises what it raises.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inside: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: inside.append(name)

    def leave(*_: Any) -> None:
        inside.pop()

    with _disable_current_modes(), ExitStack() as stack:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        twin = fake_twin(model, dtype, fake)
        for name, module in cast("Iterable[tuple[str, nn.Module]]", twin.named_modules()):
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave, always_call=True)

        def faked(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            shape = (rows.get(x.shape[0], x.shape[0]), *x.shape[1:]) if x.ndim else ()
            return torch.empty(shape, dtype=x.dtype, device="cpu")

        stack.enter_context(quiet())
        stack.enter_context(fake)
        given = tree_map(faked, (tuple(args), dict(kwargs)))
        parameters = {storage_of(p): name for name, p in twin.named_parameters()}
        seen = stack.enter_context(_Seen(inside, parameters, written))
        twin(*given[0], **given[1])
    return seen.draws


class Placed(NamedTuple):
    """Where samples stand in what a model draws for."""

    draws: bool
    """Whether it draws at all."""
    after: Mapping[tuple[int, ...], int]
    """By shape, as `random.Numbers.after`."""
    unknown: str
    """Of what is not there, the first: what draws, for which shape. "" where all is."""


def places_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, written: set[str]
) -> Placed:
    """Where the samples stand in what a model draws for. `count`: of its inputs; `written`: as of `draws_of`. Raises
    what the model raises.
    """
    one = draws_of(model, args, kwargs, {}, written)
    if not one:
        return Placed(False, {}, "")
    try:
        more = draws_of(model, args, kwargs, {count: count + 1}, written)
    except Exception as error:  # noqa: BLE001  whatever a model's code raises
        return Placed(True, {}, f"with one sample more it does not run, {place_and_reason(error)}")
    after = _places(one, more, count)
    unknown = next((draw for draw in one if draw.shape not in after), None)
    if unknown is None:
        return Placed(True, after, "")
    what = f"{unknown.name} in {unknown.module or type(model).__name__}"
    return Placed(True, after, f"samples stand in no dim of the {list(unknown.shape)} that {what} draws")


def _places(one: Sequence[RandomDraw], more: Sequence[RandomDraw], count: int) -> dict[tuple[int, ...], int]:
    """By what is drawn for `count` samples and for one more."""
    found: dict[tuple[int, ...], int | None] = {}
    if [(draw.module, draw.name) for draw in one] != [(draw.module, draw.name) for draw in more]:
        return {}
    for draw, other in zip(one, more, strict=True):
        after = _after(draw.shape, other.shape, count)
        found[draw.shape] = after if found.get(draw.shape, after) == after else None
    return {shape: after for shape, after in found.items() if after is not None}


def _after(shape: Sequence[int], other: Sequence[int], count: int) -> int | None:
    """None where it is not one dim that grows with the samples."""
    if len(shape) != len(other):
        return None
    grown = [dim for dim, (n, m) in enumerate(zip(shape, other, strict=True)) if n != m]
    if not grown:
        return 0
    (dim, *rest) = grown
    if rest or shape[dim] % count or other[dim] * count != shape[dim] * (count + 1):
        return None
    return shape[dim] // count * math.prod(shape[dim + 1 :])
