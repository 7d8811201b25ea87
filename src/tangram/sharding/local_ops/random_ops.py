"""Operators that draw, run with `random`: what each makes of the numbers of its elements.

A line with the note `counted` says that an operator may be cut when it runs so; `local.run` then draws here, by the key
of `random.using`. `Drawing` does the same for a model that is not cut, so that a run in one process can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.random_numbers import Key
from tangram.sharding.ops.calls import Call, schema_of


def _dropout(call: Call, at: Tensor, key: Key) -> tuple[Any, ...]:
    x, p = _first(call), call.arguments["p"]
    if call.arguments["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = random_numbers.bernoulli(at, 1 - p, key)
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


def _bernoulli(call: Call, at: Tensor, key: Key) -> tuple[Any, ...]:
    x = _first(call)
    p = call.arguments.get("p", x)
    made = random_numbers.bernoulli(at, p.detach() if isinstance(p, Tensor) else p, key).to(x.dtype)
    return (made + x * 0 if p is x else made,)  # its gradient is zero, not absent


def _like(draw: Callable[[Call, Tensor, Key, torch.dtype], Tensor]) -> Callable[[Call, Tensor, Key], tuple[Any, ...]]:
    """An operator that fills a tensor like its first, or the first itself."""

    def made(call: Call, at: Tensor, key: Key) -> tuple[Any, ...]:
        dtype = call.arguments.get("dtype") or _first(call).dtype
        return (draw(call, at, key, dtype),)

    return made


def _uniform(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.uniform(at, key, dtype, call.arguments.get("from", 0.0), call.arguments.get("to", 1.0))


def _normal(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    made = random_numbers.normal(at, key, dtype)
    mean, std = call.arguments.get("mean", 0.0), call.arguments.get("std", 1.0)
    plain = not isinstance(mean, Tensor) and not isinstance(std, Tensor) and (mean, std) == (0.0, 1.0)
    if plain:
        return made
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    mean, std = (t.detach() if isinstance(t, Tensor) else t for t in (mean, std))
    return sum((t * 0 for t in given), made * std + mean)  # gradients are zero, not absent


def _integers(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    low = call.arguments.get("low", call.arguments.get("from", 0))
    return random_numbers.integers(at, key, low, call.arguments["high" if "high" in call.arguments else "to"]).to(dtype)


def _exponential(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.exponential(at, key, dtype) / call.arguments["lambd"]


def _geometric(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.geometric(at, call.arguments["p"], key, dtype)


def _cauchy(call: Call, at: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    return random_numbers.cauchy(at, key, dtype) * call.arguments["sigma"] + call.arguments["median"]


def _first(call: Call) -> Tensor:
    tensor = call.tensors[0]
    if tensor is None:
        raise TypeError(f"{call.name} has no tensor to draw for")
    return tensor


DRAWS: Mapping[str, Callable[[Call, Tensor, Key], tuple[Any, ...]]] = {
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


def draw(call: Call, at: Tensor, in_place: bool) -> tuple[Any, ...]:
    """What a call gives that draws, as `Call.run`, for elements of these numbers in the whole tensor."""
    results = DRAWS[call.name.partition(".")[0]](call, at, random_numbers.current())
    if not call.name.partition(".")[0].endswith("_"):
        return results
    target = _first(call)
    return ((target if in_place else target.clone()).copy_(results[0]),)


class Drawing(TorchDispatchMode):
    """Operators that draw do so from `random`, so that a model in one process draws what its parts on ranks draw.

    Without a seed each call has the key that comes next (`random.fresh`), as on the ranks of a derived model:
    `torch.manual_seed` says which. With one, calls have streams of their own, in order from `stream` on. A call with a
    generator of its own is left alone.
    """

    def __init__(self, seed: int | None = None, stream: int = 0) -> None:
        super().__init__()
        self.seed, self.stream = seed, stream

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = Call.of(func, args, kwargs or {})
        if not counts(call):
            return func(*args, **(kwargs or {}))
        shape = [*cast("list[int]", torch.broadcast_shapes(*[t.shape for t in call.tensors if t is not None]))]
        at = random_numbers.numbered([((0, n),) if n else () for n in shape], shape, _first(call).device)
        with random_numbers.using(random_numbers.fresh() if self.seed is None else Key(self.seed, self.stream)):
            results = draw(call, at, in_place=True)
        self.stream += 1
        return results[0] if len(schema_of(func).returns) == 1 else results


def counts(call: Call) -> bool:
    """Whether a call draws here: it is known how, and it has no generator of its own."""
    found = call.name.partition(".")[0] in DRAWS and call.arguments.get("generator") is None
    return found and not isinstance(call.arguments.get("high"), Tensor)
