"""Calls of an operator that torch has no samples of: given by its author, or drawn from its schema.

Drawn are tensors of one to three dims with sizes of 3 and 5 to 7, numbers or indices, beside small numbers for what has
no default: whatever runs, in a fork, is a call. An operator that wants more of its arguments than that needs samples.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall, name_of, schema_of

SIZES = (6, 5, 7, 3)
TRIES = 6000
"""Of shapes that are run."""
KEPT = 12
"""Calls."""
LIMIT = 60.0
"""Seconds to try them all."""
BELOW = 3
"""What drawn indices are smaller than."""
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Of each tensor, `float` or `index` and its sizes."""


def operator_of(name: str) -> OpOverload:
    """The operator `namespace::name` or `namespace::name.overload`. Raises UserError where torch has none."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: Any = getattr(getattr(torch.ops, space), packet, None)
    if found is None:
        raise UserError(f"torch has no operator {name}: import what defines it with --import MODULE")
    if (overload or "default") not in found.overloads():
        raise UserError(
            f"{space}::{packet} has no overload {overload or 'default'}, but {', '.join(found.overloads())}"
        )
    return cast(OpOverload, getattr(found, overload or "default"))


def load(operator: OpOverload) -> None:
    """Import here what torch does at the first call of an operator of others, rather than in each fork: seconds."""
    if operator.namespace != "aten":
        import torch._dynamo  # noqa: F401  # pyright: ignore[reportUnusedImport]


def calls_from(operator: OpOverload, samples: Callable[[], Iterable[Any]]) -> list[OpCall]:
    """The calls that a function gives, each `(args, kwargs)` or only `args`; of several operators a dict of such lists.

    Raises UserError where it gives others, or none of this operator.
    """
    found: list[OpCall] = []
    given, others = made_by(samples, operator.name()), ""
    if isinstance(given, dict):
        given, others = given.get(name_of(operator), []), f", but of {', '.join(given)}"
    for one in given:
        if not isinstance(one, tuple | list):
            raise UserError(
                f"a sample of {operator.name()} is {type(one).__name__}: give tuples of arguments, or (args, kwargs)"
            )
        pair = cast("tuple[Any, ...]", one)
        with_names = len(pair) == 2 and isinstance(pair[1], dict)
        call = OpCall.of(operator, tuple(pair[0] if with_names else pair), cast(Any, pair[1]) if with_names else {})
        try:
            call.run()
        except Exception as error:  # noqa: BLE001  the author's operator may raise anything
            raise UserError(f"the sample {call} does not run: {error}".splitlines()[0]) from None
        found.append(call)
    if not found:
        raise UserError(f"there is no sample of {operator.name()}{others}")
    return found


def made_by(samples: Callable[[], Any], of: str) -> list[Any] | dict[str, list[Any]]:
    """What the author's function gives: calls, or those of several operators by how the table calls these (`own::op`
    and `own.op` are one, `aten::sum` is `sum`). Raises UserError where it raises."""
    try:
        given = samples()
        if not isinstance(given, Mapping):
            return list(given)
        by_name = cast("Mapping[str, Iterable[Any]]", given)
        return {key.replace("::", ".", 1).removeprefix("aten."): list(calls) for key, calls in by_name.items()}
    except Exception as error:  # noqa: BLE001  it may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"the samples of {of} cannot be made: {why}".splitlines()[0]) from None


def own_calls(names: Sequence[str], samples: Callable[[], Iterable[Any]] | None = None) -> dict[str, list[OpCall]]:
    """Calls of operators that torch has no samples of, by name; nothing where all of them are torch's own.

    Raises UserError where some are and some are not, or `samples` are given for none.
    """
    if samples is not None and not names:
        raise UserError("--samples goes with the operators that they are of: name them")
    others = [name for name in names if not name.startswith("aten::") and "::" in name]
    if samples is not None:
        others = [name if "::" in name else f"aten::{name}" for name in names]
    elif others and len(others) < len(names):
        raise UserError(f"{others[0]} is not torch's own: give it in a command of its own")
    operators = [operator_of(name) for name in others]
    return {name_of(op): drawn_calls(op) if samples is None else calls_from(op, samples) for op in operators}


def drawn_calls(
    operator: OpOverload, ndims: Sequence[Sequence[int]] = (), fits: Callable[[OpCall], bool] = lambda _: True
) -> list[OpCall]:
    """Calls of an operator by its schema that run, of those that fit. Raises UserError where none does.

    `ndims`: how many dims each tensor may have, where that is known; calls are then of all patterns of equal sizes.
    """
    load(operator)
    arguments = schema_of(operator).arguments
    tensors = [a for a in arguments if "Tensor" in str(a.type)]
    if any("List" in str(a.type) for a in tensors):
        raise UserError(f"{operator.name()} takes a list of tensors: give its calls with --samples FILE.py:function")
    others = {a.name: _other(a) for a in arguments if a not in tensors}

    def try_all() -> Any:
        torch.set_num_threads(1)
        kept: list[Shapes] = []
        seen: set[Any] = set()
        for shapes in _shapes(len(tensors), ndims or [(1, 2, 3)] * len(tensors)):
            kinds = _alike(shapes, by_pattern=bool(ndims))
            if kept and [kind for kind, _ in kept[0]] != [kind for kind, _ in shapes]:
                break  # indices only where numbers do not fit
            if kinds in seen:
                continue
            call = _call(operator, [a.name for a in tensors], shapes, others)
            if fits(call) and _runs(call):
                seen.add(kinds)
                kept.append(shapes)
        return sorted(kept, key=lambda s: -len({n for _, size in s for n in size}))[:KEPT]

    found = cast("list[Any] | None", workers.forked(try_all, LIMIT))
    calls = [
        _call(operator, [a.name for a in tensors], tuple((k, tuple(s)) for k, s in one), others) for one in found or []
    ]
    if not calls:
        raise UserError(f"no drawn call of {operator.name()} runs: give some with --samples FILE.py:function")
    return calls


def _other(argument: Any) -> Any:
    """What is given for an argument that is no tensor."""
    if argument.has_default_value():
        return argument.default_value
    kind = str(argument.type)
    number = -1 if argument.name in DIM_ARGUMENTS else 2
    if kind.startswith("Optional"):
        return None
    if "List" in kind:
        return [number]
    return {"bool": False, "float": 0.5, "str": "", "number": 2.0}.get(kind, number)


def _shapes(count: int, ndims: Sequence[Sequence[int]]) -> Iterator[Shapes]:
    """Kinds and sizes of tensors: few letters first, so that dims that must be equal often are."""
    generator = random.Random(0)  # the same calls each time
    kinds = list(itertools.product(("float", "index"), repeat=count))
    tries = max(1, TRIES // (math.prod(map(len, ndims)) * len(kinds)))
    for kind in sorted(kinds, key=lambda k: k.count("index")):
        if count == 1:
            each = (tuple(size) for ndim in ndims[0] for size in itertools.product(SIZES, repeat=ndim))
            pairs: Iterable[tuple[tuple[int, ...], ...]] = ((size,) for size in each)
        else:
            pairs = (
                tuple(tuple(generator.choice(SIZES[:3]) for _ in range(ndim)) for ndim in some)
                for some in itertools.product(*ndims)
                for _ in range(tries)
            )
        for sizes in pairs:
            yield tuple(zip(kind, sizes, strict=True))


def _alike(shapes: Shapes, *, by_pattern: bool) -> Any:
    """Shapes that show the same: of as many dims and letters; `by_pattern`: with the same sizes equal."""
    sizes = [n for _, size in shapes for n in size]
    same = tuple(map(sizes.index, sizes)) if by_pattern else len({*sizes})
    return tuple((kind, len(size)) for kind, size in shapes), same


def _call(operator: OpOverload, names: Sequence[str], shapes: Shapes, others: Mapping[str, Any]) -> OpCall:
    generator = torch.Generator().manual_seed(sum(map(sum, (size for _, size in shapes))))

    def tensor(kind: str, size: tuple[int, ...]) -> Tensor:
        if kind == "index":
            return torch.randint(BELOW, size, generator=generator)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    given = {name: tensor(*shape) for name, shape in zip(names, shapes, strict=True)}
    return OpCall(operator, {a.name: given.get(a.name, others.get(a.name)) for a in schema_of(operator).arguments})


def _runs(call: OpCall) -> bool:
    try:
        call.run()
    except Exception:  # noqa: BLE001  whatever it raises, these do not fit
        return False
    return True
