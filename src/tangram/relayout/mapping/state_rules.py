"""From a parameter's statement to its states' statements: one rule per kind of state, or a refusal with the reason.

A new optimiser is a new table (`StateSpec`); nothing else has to know it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tangram.layout.syntax import VOID, Dim, Index, Side, Statement, TensorPattern
from tangram.relayout.mapping.codecs import FILL
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import NameTable, template_of


@dataclass(frozen=True)
class StateSpec:
    """How a state is made of the elements of its parameter.

    `same`: one value an element. `reduced`: one value for all elements along `dims` (negative: from the end), which are
    gone from the shape, or of size 1 with `keepdim`. `blocks`: one value for each `block` consecutive elements of the
    flattened parameter, one-dimensional. `shared`: one tensor, of whatever shape, that all parts of a parameter have
    equal: a step count, a quantisation table.
    """

    kind: Literal["same", "reduced", "blocks", "shared"]
    dims: tuple[int, ...] = ()
    keepdim: bool = False
    block: int = 1


SAME = StateSpec("same")
SHARED = StateSpec("shared")
ROW, COLUMN = StateSpec("reduced", (-1,)), StateSpec("reduced", (-2,))

States = Mapping[str, StateSpec]

ADAMW: States = {"exp_avg": SAME, "exp_avg_sq": SAME, "max_exp_avg_sq": SAME, "step": SHARED}
"""`torch.optim.AdamW`, with or without amsgrad."""

MUON: States = {"momentum_buffer": SAME}
"""`torch.optim.Muon`, and SGD with momentum. The state moves; the update of a fused matrix is still not its parts'."""

ADAFACTOR: States = {
    "row_var": replace(ROW, keepdim=True),
    "col_var": replace(COLUMN, keepdim=True),
    "variance": SAME,
    "step": SHARED,
}
"""`torch.optim.Adafactor`."""

ADAFACTOR_HF: States = {
    "exp_avg_sq_row": ROW,
    "exp_avg_sq_col": COLUMN,
    "exp_avg_sq": SAME,
    "exp_avg": SAME,
    "step": SHARED,
}
"""`transformers.Adafactor` without its `RMS`, a value of the whole parameter that the next step computes anew."""

ADAM_8BIT: States = {
    "state1": SAME,
    "state2": SAME,
    "absmax1": StateSpec("blocks", block=256),
    "absmax2": StateSpec("blocks", block=256),
    "qmap1": SHARED,
    "qmap2": SHARED,
    "step": SHARED,
}
"""bitsandbytes' blockwise 8-bit Adam."""

ADAM_4BIT: States = {
    f"{moment}.{name}": spec
    for moment in ("exp_avg", "exp_avg_sq")
    for name, spec in (
        ("codes", StateSpec("blocks", block=2)),
        ("scale", StateSpec("blocks", block=128)),
        ("qmap", SHARED),
    )
} | {"step": SHARED}
"""torchao's 4-bit Adam: two values a byte, a scale for every 128."""

ROWWISE_8BIT: States = {"codes": SAME, "scale": ROW}
"""A quantised tensor with one scale a row."""


@dataclass(frozen=True)
class StateStatements:
    """One parameter statement, with what it takes to write its states' statements."""

    statement: Statement
    sizes: Mapping[str, int]
    states: States
    template: str
    table: NameTable

    def pattern(self, t: TensorPattern, state: str, dims: tuple[Dim, ...] | None) -> TensorPattern:
        """The state of a tensor, with the parameter's label, so that parts keep apart."""
        before, after = self.template.replace("{state}", state).split("{param}")
        label = t.label if dims is not None and t.label.isidentifier() else None
        return TensorPattern(tuple(p for p in (before, *t.parts, after) if p != ""), label, dims)

    def has(self, t: TensorPattern, state: str) -> bool:
        """Whether the source has this state of a tensor."""
        pattern = self.pattern(t, state, None)
        return pattern.name in self.table.specs or bool(self.table.members(template_of(pattern)[0]))

    def refuse(self, state: str, why: str) -> RelayoutError:
        """The error that a state does not follow."""
        return RelayoutError(f"{self.statement}: the state {state} does not follow: {why}")


def derived(job: StateStatements) -> Iterator[Statement]:
    for state, spec in job.states.items():
        tensors = [t for group in job.statement.source for t in group]
        have = [t for t in tensors if job.has(t, state)]
        if not have:
            continue
        missing = [g for g in job.statement.source if not any(t in have for t in g)]
        if missing:
            raise job.refuse(state, f"{have[0].name} has it, but {missing[0][0].name} does not")
        if not job.statement.target or _is_rename(job.statement):
            yield _statement(job, state, state, lambda t: None)
        else:
            yield from _RULES[spec.kind](job, state, spec)


def _is_rename(statement: Statement) -> bool:
    """Whether the statement only gives a tensor another name: then every state goes along as it is."""
    tensors = list(statement.tensors)
    index = [[(str(i.dim)) for i in t.index] for t in tensors]
    same = all(t.dims == tensors[0].dims for t in tensors) and all(i == index[0] for i in index)
    same = same and not _has_void(tensors)
    return len(statement.source) == len(statement.target) == 1 and same


def _statement(
    job: StateStatements, state: str, target_state: str, dims: Callable[[TensorPattern], tuple[Dim, ...] | None]
) -> Statement:
    """The parameter's statement with other names and dims. Elements without a counterpart are zero in a state."""

    def side(s: Side, name: str, only: bool) -> Side:
        groups = [tuple(t for t in group if not only or job.has(t, name)) for group in s]
        return tuple(tuple(job.pattern(t, name, dims(t)) for t in group) for group in groups)

    unknown = [o for o, _ in job.statement.options if o not in (FILL, "cast", "add")]
    if unknown and job.states[state].kind != "shared":
        raise job.refuse(state, f"{unknown[0]} changes the values that it was made from")
    voids = _has_void(list(job.statement.tensors))
    source, target = side(job.statement.source, state, True), side(job.statement.target, target_state, False)
    return Statement(source, target, ((FILL, 0.0),) if voids and target else ())


def _has_void(tensors: Sequence[TensorPattern]) -> bool:
    return any(leaf.name == VOID for t in tensors for d in t.dims or () for leaf in d.leaves)


def _same(job: StateStatements, state: str, spec: StateSpec) -> Iterator[Statement]:
    yield _statement(job, state, state, lambda t: t.dims)


# ---------------------------------------------------------------- reduced over dims


def _reduced(job: StateStatements, state: str, spec: StateSpec) -> Iterator[Statement]:
    tensors = list(job.statement.tensors)
    gone = {_gone(job, state, t, spec) for group in job.statement.source for t in group}
    if len(gone) != 1:
        raise job.refuse(state, "the sources reduce over different factors: " + " and ".join(map(_names, gone)))
    (factors,) = gone
    sources = [t for group in job.statement.source for t in group]
    targets = [t for group in job.statement.target for t in group]
    found = {
        other: other_spec
        for other, other_spec in job.states.items()
        if other_spec.kind == "reduced" and all(_gone_or_none(job, t, other_spec) == factors for t in targets)
    }
    target_state = state if state in found else next(iter(found), None)
    if state not in found and len(found) > 1:
        raise job.refuse(state, f"{' and '.join(found)} of the target both reduce over {_names(factors)}")
    if target_state is None:
        raise job.refuse(state, f"no state of the target reduces over just {_names(factors)}")
    specs = {id(t): spec if t in sources else found[target_state] for t in tensors}
    yield _statement(job, state, target_state, lambda t: _without(t, specs[id(t)]))


def _positions(t: TensorPattern, spec: StateSpec) -> set[int]:
    n = len(t.dims or ())
    return {d + n if d < 0 else d for d in spec.dims}


def _gone_or_none(job: StateStatements, t: TensorPattern, spec: StateSpec) -> frozenset[str] | None:
    """The factors that a reduction loses; None when a dim is a concatenation, whose sum is not that of its parts."""
    dims, at = t.dims or (), _positions(t, spec)
    if any(not 0 <= i < len(dims) for i in at) or any(len(node.terms) > 1 for i in at for node in dims[i].nodes):
        return None
    return frozenset(leaf.name for i in at for leaf in dims[i].leaves if job.sizes.get(leaf.name, leaf.size) != 1)


def _gone(job: StateStatements, state: str, t: TensorPattern, spec: StateSpec) -> frozenset[str]:
    if t.dims is None:
        raise job.refuse(state, "write out the dims of the parameter")
    found = _gone_or_none(job, t, spec)
    if found is None:
        raise job.refuse(state, f"on {t.name} it reduces over a concatenation")
    return found


def _without(t: TensorPattern, spec: StateSpec) -> tuple[Dim, ...]:
    at = _positions(t, spec)
    kept = [Dim("", 1) if i in at else d for i, d in enumerate(t.dims or ()) if spec.keepdim or i not in at]
    return tuple(kept)


def _names(factors: frozenset[str]) -> str:
    return f"({' '.join(sorted(factors))})"


# ---------------------------------------------------------------- blocks of the flattened parameter


def _blocks(job: StateStatements, state: str, spec: StateSpec) -> Iterator[Statement]:
    cut: dict[int, tuple[frozenset[tuple[str, int]], tuple[Dim, ...]]] = {}
    for t in job.statement.tensors:
        if t.dims is None:
            raise job.refuse(state, "write out the dims of the parameter")
        left, inside, rest = _split_block(t.dims, job.sizes, spec.block)
        if left != 1:
            raise job.refuse(state, f"blocks of {spec.block} do not end where the factors of {t.name} do")
        cut[id(t)] = frozenset(inside.items()), flattened(rest)
    if len({inside for inside, _ in cut.values()}) != 1:
        raise job.refuse(state, f"blocks of {spec.block} hold other elements on one side than on the other")
    yield _statement(job, state, state, lambda t: cut[id(t)][1])


def _split_block(
    dims: Sequence[Dim], sizes: Mapping[str, int], block: int
) -> tuple[int, dict[str, int], tuple[Dim, ...]]:
    """Take `block` consecutive elements off the end of a row-major product.

    Returns what is left of `block` (1 when it came out even), how many values of which factors are inside a block, and
    the dims that remain outside.
    """
    rest, inside = list(dims), dict[str, int]()
    while rest and block > 1:
        last = rest.pop()
        if last.terms:
            first, *others = last.terms
            if others:
                return block, inside, (*rest, last)
            rest += first
            continue
        n = sizes.get(last.name, last.size) or 0
        if n == 1:
            continue
        if n and block % n == 0:
            inside[last.name] = n
            block //= n
        elif n and n % block == 0 and last.name not in ("", VOID):
            inside[last.name] = block
            rest.append(Dim(f"{last.name}_block{block}", n // block))
            block = 1
        else:
            return block, inside, (*rest, last)
    return block, inside, tuple(rest)


def flattened(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    return (Dim(terms=(tuple(dims),)),) if dims else (Dim("", 1),)


# ---------------------------------------------------------------- one tensor for the whole parameter


def _shared(job: StateStatements, state: str, spec: StateSpec) -> Iterator[Statement]:
    """All parts tied. Indices that every tensor has stay; the members along others are written out as tied copies."""
    tensors = list(job.statement.tensors)
    common = [i for i in tensors[0].index if all(i.dim in [own.dim for own in t.index] for t in tensors)]
    if any(
        _factors(i.dim) & {f for c in common for f in _factors(c.dim)}
        for t in tensors
        for i in t.index
        if not any(i.dim == c.dim for c in common)
    ):
        common = []
    classes = _classes(job, tensors, common)
    sources = {id(t) for group in job.statement.source for t in group}
    for members in classes:
        source = tuple(job.pattern(t, state, None) for t, origin in members if origin in sources and job.has(t, state))
        target = tuple(job.pattern(t, state, None) for t, origin in members if origin not in sources)
        if not source:
            made = next(t.name for t, origin in members if origin not in sources)
            raise job.refuse(state, f"no source of {made} has it")
        yield Statement((source,), (target,) if target else ())


_Member = tuple[bool, str]
"""Whether a tensor is of the target, and its name: both sides may use the same names."""


def _factors(dim: Dim) -> set[str]:
    return {leaf.name for leaf in dim.leaves if leaf.name}


def _classes(
    job: StateStatements, tensors: Sequence[TensorPattern], common: Sequence[Index]
) -> list[list[tuple[TensorPattern, int]]]:
    """Real tensors grouped by which share elements: `[[(tensor, id of its pattern)]]`."""
    open_ = sorted({f for t in tensors for i in t.index if not _has(common, i) for f in _factors(i.dim)})
    groups: dict[_Member, dict[_Member, tuple[TensorPattern, int]]] = {}
    where: dict[_Member, dict[_Member, tuple[TensorPattern, int]]] = {}
    sources = sum(len(group) for group in job.statement.source)
    for values in itertools.product(*[range(_size(job, f)) for f in open_]):
        at = dict(zip(open_, values, strict=True))
        members = [_member(job, t, common, at) for t in tensors]
        here = {(k >= sources, m.name): (m, id(t)) for k, (m, t) in enumerate(zip(members, tensors, strict=True))}
        joined: dict[_Member, tuple[TensorPattern, int]] = {}
        for name in here:
            joined.update(where.get(name, {}))
        joined.update(here)
        for name in joined:
            where[name] = joined
    for group in where.values():
        groups[min(group)] = group
    return [list(group.values()) for group in groups.values()]


def _has(common: Sequence[Index], index: Index) -> bool:
    return any(c.dim == index.dim for c in common)


def _size(job: StateStatements, factor: str) -> int:
    if factor not in job.sizes:
        raise RelayoutError(f"{job.statement}: the size of {factor} is not known")
    return job.sizes[factor]


def _member(job: StateStatements, t: TensorPattern, common: Sequence[Index], at: Mapping[str, int]) -> TensorPattern:
    """A tensor with numbers in place of the indices that are not common."""
    parts = [
        str(_position(job, p.dim, at) + p.offset) if isinstance(p, Index) and not _has(common, p) else p
        for p in t.parts
    ]
    return TensorPattern(tuple(parts), None, None)


def _position(job: StateStatements, dim: Dim, at: Mapping[str, int]) -> int:
    """The row-major position of factor values along an index. Only products number a tensor's names."""
    if len(dim.terms) > 1:
        raise RelayoutError(f"{job.statement}: an index that is a sum cannot be written out")
    if not dim.terms:
        return at[dim.name] if dim.name else 0
    position = 0
    for x in dim.terms[0]:
        n = math.prod(_size(job, leaf.name) if leaf.name else leaf.n for leaf in x.leaves)
        position = position * n + _position(job, x, at)
    return position


_RULES: Mapping[str, Callable[[StateStatements, str, StateSpec], Iterator[Statement]]] = {
    "same": _same,
    "reduced": _reduced,
    "blocks": _blocks,
    "shared": _shared,
}
