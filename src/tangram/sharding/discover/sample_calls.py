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
from tangram.models.building.build import did_you_mean
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall, name_of, schema_of, tensor_arguments
from tangram.sharding.ops.rule_table import RuleTable, bound, misfit

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
        raise UserError(f"torch has no operator {name}: import what defines it with --import MODULE{near(name)}")
    if (overload or "default") not in found.overloads():
        raise UserError(
            f"{space}::{packet} has no overload {overload or 'default'}, but {', '.join(found.overloads())}"
        )
    return cast(OpOverload, getattr(found, overload or "default"))


def near(name: str) -> str:
    """A hint at the operator `namespace::name` whose name is nearest; nothing where none is near."""
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}  # pyright: ignore[reportPrivateUsage]
    return did_you_mean(name.partition(".")[0], known, listed=False)


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


def with_other_dims(calls: Sequence[OpCall]) -> list[OpCall]:
    """The calls with most dims first; of two of them, all dims that an argument can name."""
    useful = [c for c in calls if not any(c.arguments.get(a) == 0 for a in ("alpha", "beta"))]
    ranked = sorted(useful or calls, key=lambda c: -sum(t.ndim for t in c.tensors if t is not None and t.numel() > 1))
    more: list[OpCall] = []
    for call in ranked[:2]:
        ndim = next((t.ndim for t in call.tensors if t is not None), 0)
        for name in DIM_ARGUMENTS & call.arguments.keys():
            own = call.arguments[name]
            if isinstance(own, int) and not isinstance(own, bool) and len(DIM_ARGUMENTS & call.arguments.keys()) == 1:
                more += [OpCall(call.operator, {**call.arguments, name: d}) for d in range(ndim) if d != own % ndim]
    return [*ranked[:2], *more, *ranked[2:]]


def calls_to_prove(calls: Sequence[OpCall], operator: OpOverload, table: RuleTable) -> list[OpCall]:
    """The calls of an operator that its rules are for, all where they are for none; and drawn ones."""
    own = [call for call in calls if (line := table.find(call)) is None or not misfit(line.rule, call)]
    return [*(own or calls), *fitting_calls(operator, table, own or calls)]


def fitting_calls(operator: OpOverload, table: RuleTable, beside: Sequence[OpCall]) -> list[OpCall]:
    """Drawn calls that a table cuts, of as many dims as its rules have; none where none of these runs.

    A rule is proved with them beside calls that are given: it may be right only where no two sizes are equal. Sizes
    that are equal in all of those are so in these, too: kernels run over fewer values than keys, and give anything.
    """
    equal = [*set[_Pair].intersection(*map(_equal_sizes, beside))] if beside else []
    rules = [line.rule for line in table.all_of(operator)]

    def ndims(operand: int) -> Sequence[int]:
        each = [rule.inputs[min(operand, len(rule.inputs) - 1)] for rule in rules]
        return [*dict.fromkeys(n for one in each for n in ((len(one.pieces),) if one.is_fixed else (1, 2, 3)))]

    def fits(call: OpCall) -> bool:
        sizes = _sizes(call)
        if any(one in sizes and other in sizes and sizes[one] != sizes[other] for one, other in equal):
            return False
        try:
            return bool(bound(table, call).cuttable)
        except UserError:
            return False

    try:
        return drawn_calls(operator, [ndims(i) for i, _ in enumerate(tensor_arguments(operator))], fits)
    except UserError:
        return []


_Pair = tuple[tuple[int, int], tuple[int, int]]


def _sizes(call: OpCall) -> dict[tuple[int, int], int]:
    """Of each tensor's dims, counted from the last."""
    return {(i, d): n for i, x in enumerate(call.tensors) if x is not None for d, n in enumerate(reversed(x.shape))}


def _equal_sizes(call: OpCall) -> set[_Pair]:
    sizes = _sizes(call)
    return {(one, other) for one, other in itertools.combinations(sizes, 2) if sizes[one] == sizes[other]}


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
