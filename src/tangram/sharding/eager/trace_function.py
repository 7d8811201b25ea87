"""The operators that one function of torch runs, found by running it without memory on tensors of the whole's sizes.

The same as `tangram.models.capturing.capture` does for a model, for one call: so a function is derived operator by
operator, whatever it is made of. Found once for each function, sizes and numbers that it is called with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.capturing.capture import quiet
from tangram.models.capturing.graph import Ref, refs
from tangram.models.capturing.opened import GROUPED, grouped
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall, schema_of
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.ops.rule_table import bound as find_bound


class Like(NamedTuple):
    """A tensor of the whole's size, as a function sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trained: bool
    """Whether gradients flow through it."""
    leaf: bool = False
    """Whether it is where they end."""


@dataclass(frozen=True)
class TracedOperator:
    """One operator, and the values that it takes and gives, by number."""

    call: OpCall
    """On tensors without memory."""
    bound: BoundOp | None
    """None where it takes no tensor, as `arange`."""
    inputs: tuple[int | None, ...]
    """By place."""
    results: tuple[int | None, ...]
    shares: bool
    """Whether its results may share memory with what it takes first."""
    written: frozenset[int]
    """The places that it writes."""


@dataclass(frozen=True)
class Recorded:
    """What a function runs. Its arguments' tensors are the first values, in the order of their leaves."""

    operators: tuple[TracedOperator, ...]
    made: Mapping[int, Tensor]
    """Every value that it makes, without memory, and whether gradients flow through it."""
    constants: Mapping[int, Tensor]
    """Tensors of numbers that stand in the call."""
    gives: tuple[Any, ...]
    """The leaves of what it gives: a `Ref` for a tensor."""
    form: Any


class TraceRecorder:
    """Finds what functions run, and keeps it."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._known: dict[Any, Recorded] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def recorded(self, func: Any, args: Any, kwargs: Any, like: Mapping[int, Like]) -> Recorded:
        """What a function runs. `like`: for each leaf that is a tensor, one of the whole's size, type and strides.

        Raises UserError for operators without a rule, and what the function raises.
        """
        leaves, form = tree_flatten((args, kwargs))
        modes = torch.is_grad_enabled(), torch.get_default_dtype()
        key = func, form, modes, tuple(_key(like.get(i, x)) for i, x in enumerate(leaves))
        if torch._C._is_any_autocast_enabled():  # pyright: ignore[reportPrivateUsage]  # what runs depends on more than is in the key
            return self._record(func, leaves, form, like)
        try:
            found = self._known.get(key)
        except TypeError:  # some argument is no key
            return self._record(func, leaves, form, like)
        if found is None:
            found = self._known[key] = self._record(func, leaves, form, like)
        return found

    def _record(self, func: Any, leaves: Sequence[Any], form: Any, like: Mapping[int, Like]) -> Recorded:
        numbers: dict[int, int] = {}
        twins: list[Any] = []
        for i, x in enumerate(leaves):
            twins.append(self._twin(like[i]) if i in like else x)
            if i in like:
                numbers[id(twins[-1])] = len(numbers)
        args, kwargs = tree_unflatten(twins, form)
        log = _Log()
        grad = torch.is_grad_enabled()  # leaving inference mode, in which operators are not taken apart, puts it on
        plain = torch.inference_mode(False), torch.set_grad_enabled(grad)
        with plain[0], plain[1], quiet(), _disable_current_modes(), self._fake, log:
            given = func(*args, **kwargs)
        return self._read(log, numbers, given)

    def _twin(self, x: Like) -> Tensor:
        with self._fake, torch.inference_mode(False), torch.enable_grad():
            twin = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device)
            if not x.trained:
                return twin
            twin.requires_grad_()
            return twin if x.leaf else twin.clone()

    def _read(self, log: _Log, numbers: dict[int, int], inputs: Any) -> Recorded:
        made: dict[int, Tensor] = {}
        constants: dict[int, Tensor] = {}

        def number(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in numbers:
                constant = x.constant if isinstance(x, FakeTensor) else x
                if constant is None:
                    raise UserError("it works with a tensor that it is not given")
                numbers[id(x)] = len(numbers)
                constants[numbers[id(x)]] = constant
            return Ref(numbers[id(x)])

        operators: list[TracedOperator] = []
        for func, args, kwargs, found in log.ran:
            call = OpCall.of(func, args, kwargs)
            by_place = tree_map(number, dict(call.arguments))
            results: list[int | None] = []
            flat: list[Any] = tree_leaves(found)
            for x in flat:
                if isinstance(x, Tensor) and id(x) not in numbers:
                    numbers[id(x)] = len(numbers)
                    made[numbers[id(x)]] = _meta(x).requires_grad_(x.requires_grad)
                results.append(numbers[id(x)] if isinstance(x, Tensor) else None)
            operators.append(self._operator(call, by_place, tuple(results)))
        gives, form = tree_flatten(inputs)
        return Recorded(tuple(operators), made, constants, tuple(map(number, gives)), form)

    def _operator(self, call: OpCall, by_place: Mapping[str, Any], results: tuple[int | None, ...]) -> TracedOperator:
        plain = tree_map(_plain, dict(call.arguments))
        call = OpCall(call.operator, plain)
        schema = schema_of(call.operator)
        if any(a.is_out for a in schema.arguments):
            raise UserError(f"{call.name} writes its result into a tensor that it is given: leave `out=` away")
        inputs: list[int | None] = []
        for (name, i), tensor in zip(call.places, call.tensors, strict=True):
            own = by_place[name] if i is None else by_place[name][i]
            inputs.append(None if tensor is None else next(refs(own)))
        bound = find_bound(self._table, call) if inputs else None
        counted = bound is not None and bound.rule.note("counted") is not None
        if bound is not None and bound.rule.note("random") is not None and not counted:
            raise UserError(
                f"{call.name} draws random numbers that depend on what else a rank has drawn: draw them from tensors "
                "without a layout, or set dropout inside of attention to 0"
            )
        aliased = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = frozenset(i for i, (name, _) in enumerate(call.places) if name in aliased)
        shares = any(r.alias_info is not None for r in schema.returns)
        return TracedOperator(call, bound, tuple(inputs), results, shares, written)


class _Log(TorchDispatchMode):
    """Keeps what runs, with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[OpOverload, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        found = grouped(func, args, given) if func is GROUPED else func(*args, **given)
        leaves: list[Any] = tree_leaves(found)
        if func.namespace != "prim" and any(isinstance(x, Tensor) for x in leaves):
            self.ran.append((func, args, given, found))
        return found


def _plain(x: Any) -> Any:
    return _meta(x) if isinstance(x, Tensor) else x


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _key(x: Any) -> Any:
    if isinstance(x, float):
        return float, x.hex()  # other than ==, it tells -0.0
    return type(x), (x.start, x.stop, x.step) if isinstance(x, slice) else x
