"""Operators that draw, run with `random`: what each makes of the numbers of its elements.

A line with the note `counted` says that an operator may be cut when it runs so; `local.run` then draws here, by the key
of `random.using`. `DrawMode` does the same for a model that is not cut, so that a run in one process can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.random_numbers import DrawNumbers, Key, NumberSpan
from tangram.sharding.ops.calls import OpCall, count_returns, name_of

Places = Tensor | NumberSpan


def _dropout(call: OpCall, at: Places, key: Key) -> tuple[Any, ...]:
    x, p = _first(call), call.arguments["p"]
    if call.arguments["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = random_numbers.bernoulli(at, 1 - p, key)
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


def _bernoulli(call: OpCall, at: Places, key: Key) -> tuple[Any, ...]:
    x = _first(call)
    p = call.arguments.get("p", x)
    made = random_numbers.bernoulli(at, p.detach() if isinstance(p, Tensor) else p, key).to(x.dtype)
    return (made + x * 0 if p is x else made,)  # its gradient is zero, not absent


def _like(
    draw: Callable[[OpCall, Tensor, Key, torch.dtype], Tensor],
) -> Callable[[OpCall, Places, Key], tuple[Any, ...]]:
    """An operator that fills a tensor like its first, or the first itself."""

    def made(call: OpCall, at: Places, key: Key) -> tuple[Any, ...]:
        dtype = call.arguments.get("dtype") or _first(call).dtype
        return (draw(call, at.numbers if isinstance(at, NumberSpan) else at, key, dtype),)

    return made


def _uniform(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.uniform(at, key, dtype, call.arguments.get("from", 0.0), call.arguments.get("to", 1.0))


def _normal(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    made = random_numbers.normal(at, key, dtype)
    mean, std = call.arguments.get("mean", 0.0), call.arguments.get("std", 1.0)
    plain = not isinstance(mean, Tensor) and not isinstance(std, Tensor) and (mean, std) == (0.0, 1.0)
    if plain:
        return made
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    mean, std = (t.detach() if isinstance(t, Tensor) else t for t in (mean, std))
    return sum((t * 0 for t in given), made * std + mean)  # gradients are zero, not absent


def _integers(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    low = call.arguments.get("low", call.arguments.get("from", 0))
    return random_numbers.integers(at, key, low, call.arguments["high" if "high" in call.arguments else "to"]).to(dtype)


def _exponential(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.exponential(at, key, dtype) / call.arguments["lambd"]


def _geometric(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.geometric(at, call.arguments["p"], key, dtype)


def _cauchy(call: OpCall, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.cauchy(at, key, dtype) * call.arguments["sigma"] + call.arguments["median"]


def _first(call: OpCall) -> Tensor:
    tensor = call.tensors[0]
    if tensor is None:
        raise TypeError(f"{call.name} has no tensor to draw for")
    return tensor


DRAWS: Mapping[str, Callable[[OpCall, Places, Key], tuple[Any, ...]]] = {
    "native_dropout": _dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "rand_like": _like(_uniform),
    "uniform_": _like(_uniform),
    "randn_like": _like(_normal),
    "normal": _like(_normal),
    "normal_": _like(_normal),
    "randint_like": _like(_integers),
    "random_": _like(_integers),
    "exponential_": _like(_exponential),
    "geometric_": _like(_geometric),
    "cauchy_": _like(_cauchy),
}
"""By operator: its results, of a call, the numbers of its elements and a key."""


def draw(call: OpCall, at: Places, in_place: bool, shape: Sequence[int] | None = None) -> tuple[Any, ...]:
    """What a call draws, as `OpCall.run`, for elements of these numbers in the full tensor, of this shape."""
    key, numbers = random_numbers.current()
    if numbers is not None:
        at, key = numbers.of_all(at, tuple(at.shape if shape is None else shape), key)
    results = DRAWS[call.name.partition(".")[0]](call, at, key)
    if not call.name.partition(".")[0].endswith("_"):
        return results
    target = _first(call)
    return ((target if in_place else target.clone()).copy_(results[0]),)


class DrawMode(TorchDispatchMode):
    """Operators that draw do so from `random`, so that a model in one process draws what its parts on ranks draw.

    Without a seed each call has the key that comes next (`random.fresh`), as on the ranks of a derived model:
    `torch.manual_seed` says which. With one, calls have streams of their own, in order from `stream` on. A call with a
    generator of its own is left alone. `numbers`: of what global batch the tensors are a part. What cannot be drawn by
    element is drawn by torch's generator, which is seeded by the key for it. Operators that take functions, as a scan,
    run as they are.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int | None = None, stream: int = 0, numbers: DrawNumbers | None = None) -> None:
        super().__init__()
        self.seed, self.stream, self.numbers = seed, stream, numbers

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        call = drawing(func, args, given) if isinstance(cast(Any, func), OpOverload) else None
        if call is None or any(isinstance(x, FakeTensor) for x in call.tensors):
            return func(*args, **given)
        key = random_numbers.fresh() if self.seed is None else Key(self.seed, self.stream)
        self.stream += 1
        shape = shape_of(call)
        if not counts(call):
            return self._by_torch(key, call, shape)
        with random_numbers.using(key, self.numbers):
            results = draw(call, NumberSpan(0, shape, _first(call).device), True, shape)
        return results[0] if count_returns(func) == 1 else results

    def _by_torch(self, key: Key, call: OpCall, shape: tuple[int, ...]) -> Any:
        """By torch's generators, which are as before then. What has no samples is one for all micro-batches."""
        own = self.numbers.samples if self.numbers is not None and self.numbers.after.get(shape) != 0 else None
        seed = (key.seed + (own.first + 1 if own else 0) * 0x9E3779B97F4A7C15) & ((1 << 63) - 1)
        device = next((t.device for t in call.tensors if t is not None), None) or call.arguments.get("device")
        kinds: list[Any] = [torch.random.default_generator]
        if device is not None and torch.device(device).type != "cpu":
            kinds.append(torch.get_device_module(device))
        states: list[Tensor] = [k.get_state() if isinstance(k, torch.Generator) else k.get_rng_state() for k in kinds]
        try:
            for kind in kinds:
                kind.manual_seed(seed)
            found = call.run(in_place=True)
            return found[0] if count_returns(call.operator) == 1 else found
        finally:
            for kind, state in zip(kinds, states, strict=True):
                (kind.set_state if isinstance(kind, torch.Generator) else kind.set_rng_state)(state)


@lru_cache(1 << 12)
def _may_draw(operator: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags or name_of(operator).partition(".")[0] in DRAWS


def drawing(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall | None:
    """A call that draws by torch's generator; None for any other. `torch.rand` is as what fills a tensor."""
    if not _may_draw(func):
        return None
    call = OpCall.of(func, args, kwargs)
    told = call.arguments
    if told.get("generator") is not None or told.get("dropout_p") == 0 or told.get("train") is False:
        return None
    fills, dtype = _FILLS.get(call.name.partition(".")[0], (None, None))
    if fills is None:
        return call
    named = told["dtype"] if isinstance(told["dtype"], torch.dtype) else dtype
    empty = torch.empty(told["size"], dtype=named, device=told["device"])
    return OpCall.of(fills, (empty, told.get("low", 0), told["high"]) if "high" in told else (empty,), {})


_FILLS: Mapping[str, tuple[OpOverload, torch.dtype | None]] = {
    "rand": (torch.ops.aten.uniform_.default, None),
    "randn": (torch.ops.aten.normal_.default, None),
    "randint": (getattr(torch.ops.aten.random_, "from"), torch.int64),
}
"""What makes a tensor of random numbers: what fills one, and the type where none is named."""


def makes_random(call: OpCall) -> bool:
    """Whether a call makes a tensor of random numbers of none, which rules have whole."""
    return call.name.partition(".")[0] in (*_FILLS, "randperm") and call.arguments.get("generator") is None


def shape_of(call: OpCall) -> tuple[int, ...]:
    """Of the elements that a call draws for; of one that is not known how, of its first tensor."""
    shapes = [t.shape for t in call.tensors if t is not None]
    if not shapes:
        return (call.arguments["n"],) if "n" in call.arguments else ()
    return tuple(cast("list[int]", torch.broadcast_shapes(*shapes))) if counts(call) else tuple(shapes[0])


def counts(call: OpCall) -> bool:
    """Whether a call draws here: it is known how, and it has no generator of its own."""
    found = call.name.partition(".")[0] in DRAWS and call.arguments.get("generator") is None
    return found and not isinstance(call.arguments.get("high"), Tensor)
