"""Binding: a mapping's text and the tensors' shapes together, as cells that are proved to be bijections.

`bind` finds the families among real names, solves every size, matches the parts, and refuses what does not add up:
names that no statement uses, tensors claimed twice, dtypes that change without a cast. What it returns is pure data;
copy plans for any number of ranks are made from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tangram.layout import LayoutError
from tangram.layout.notation import Mapping as MappingText
from tangram.layout.sizes import integer, name_voids, solve
from tangram.layout.syntax import Dim, Statement, TensorPattern
from tangram.relayout.mapping.cells import Cell, CellPart, Monomial, match, monomials
from tangram.relayout.mapping.codecs import CODECS, Codec, arithmetic, fill_value, result_dtype
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import (
    NameTable,
    TensorFamily,
    Tensors,
    TensorSpec,
    extents,
    fill_wilds,
    known_size,
    template_of,
)

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class BoundMapping:
    """A mapping whose every size is known.

    `cells` by target family; `dropped` are source elements that go nowhere, `(tensor, how many)`; `sizes` the solved
    factors of each statement, `known` those that were given.
    """

    mapping: MappingText
    source: Tensors
    target: Tensors
    cells: Mapping[str, tuple[Cell, ...]]
    dropped: tuple[tuple[str, int], ...]
    sizes: tuple[Mapping[str, int], ...]
    known: Mapping[str, int]
    codecs: Mapping[str, Codec]

    @cached_property
    def tied(self) -> Mapping[str, int]:
        """Targets that are tied to others, by the number of their group."""
        groups = [group for s in self.mapping.statements for group in s.target if len(group) > 1]
        return {t.name: i for i, group in enumerate(groups) for t in group}


def bind(
    mapping: str | MappingText,
    source: Specs,
    target: Specs | None = None,
    *,
    codecs: Mapping[str, Codec] = CODECS,
    partial: bool = False,
    sizes: Mapping[str, int] | None = None,
    **more: int,
) -> BoundMapping:
    """Give a mapping its tensors.

    `source` and `target` are the global shapes and dtypes by real name, or by the name of a family's pattern with its
    indices as leading dims. Without `target`, its shapes follow from the source. `sizes` are factors that the shapes
    leave open; they may be given as keywords, such as `g=8`. `partial` permits source tensors that no statement names.

    Raises RelayoutError or LayoutError, naming the statement and what is wrong with it.
    """
    text = MappingText.parse(mapping) if isinstance(mapping, str) else mapping
    known = {name: integer(name, n) for name, n in {**(sizes or {}), **more}.items()}
    tables = NameTable.of(source), None if target is None else NameTable.of(target)
    text = MappingText(tuple(fill_wilds(text.statements, *tables, known)))
    binder = _Binder(*tables, known, codecs, {}, {}, {}, [], [], {}, {})
    for statement in text.statements:
        binder.add(statement)
    _refuse_unused("source", source, binder.used_source, "say where it goes, or drop it with `-> _`", partial)
    if target is not None:
        _refuse_unused("target", target, binder.used_target, "say what it is made of", False)
    return BoundMapping(
        text,
        Tensors(binder.source),
        Tensors(binder.target),
        {name: tuple(cells) for name, cells in binder.cells.items()},
        tuple(binder.dropped),
        tuple(binder.solved),
        known,
        codecs,
    )


def _refuse_unused(side: str, specs: Specs, used: Collection[str], advice: str, partial: bool) -> None:
    unused = [name for name in specs if name not in used]
    if unused and not partial:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise RelayoutError(f"no statement names the {side} tensor {unused[0]}{more}: {advice}")


@dataclass(frozen=True)
class _Present:
    """A tensor of a statement as it was found: its whole shape and dtype, None where only the statement will tell."""

    pattern: TensorPattern
    template: tuple[str, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Binder:
    """The statements bound so far. A builder: `add` fills the containers that `bind` then freezes."""

    source_table: NameTable
    target_table: NameTable | None
    known: Mapping[str, int]
    codecs: Mapping[str, Codec]
    source: dict[str, TensorFamily]
    target: dict[str, TensorFamily]
    cells: dict[str, list[Cell]]
    dropped: list[tuple[str, int]]
    solved: list[Mapping[str, int]]
    used_source: dict[str, Statement]
    used_target: dict[str, Statement]

    def add(self, statement: Statement) -> None:
        try:
            if not self._add_copy(statement):
                self._add(statement)
        except (RelayoutError, LayoutError) as error:
            text = str(statement)
            raise error if text in str(error) else type(error)(f"{text}: {error}") from None

    def _add_copy(self, statement: Statement) -> bool:
        """Bind `a -> b` of one whole tensor, in which nothing is to be solved or matched; False of any other statement.

        What leaves names as they are has one for each tensor, of which there may be a million.
        """
        pair = _copied(statement)
        spec = self.source_table.specs.get(pair[0].name) if pair and self.target_table is None else None
        if pair is None or spec is None:
            return False
        like = _plain_part(spec.shape)
        before, after = pair[0].name, pair[1].name
        a, source = CellPart(before, like.dims, like.slots), TensorFamily(before, (before,), (), spec)
        b, target = (a, source)
        if after != before:
            b, target = CellPart(after, like.dims, like.slots), TensorFamily(after, (after,), (), spec)
        self.source[before], self.target[after] = source, target
        _claim(source, self.used_source, statement)
        _claim(target, self.used_target, statement)
        factors = tuple(digit.factor for dim in like.dims for digit in dim.digits)
        self.cells.setdefault(b.tensor, []).append(Cell(factors, spec.shape, b, a))
        self.solved.append(dict(self.known))
        return True

    def _add(self, statement: Statement) -> None:
        env = {**self.known, **_inline(statement)}
        groups = (
            [self._present(group, self.source_table, env) for group in statement.source],
            [self._present(group, self.target_table, env) for group in statement.target],
        )
        flat = [p for side in groups for group in side for p in group]
        labels = _labels([p.pattern for p in flat])
        dims = _dims(flat)
        _check_ranks(flat, dims)
        env = {k: v for k, v in env.items() if k not in labels} | dict.fromkeys(labels, 1)
        bound, sizes = solve(list(zip(dims, (p.shape for p in flat), strict=True)), env)
        counter = itertools.count()
        expanded: dict[int, list[Monomial]] = {}
        for present, ds in zip(flat, bound, strict=True):
            own = frozenset({present.pattern.label} & labels)
            named = [name_voids(d, counter) for d in ds]
            expanded[id(present)] = monomials(present.pattern.name, named, labels, own)
        shapes = {id(p): tuple(d.n for d in ds) for p, ds in zip(flat, bound, strict=True)}
        sides = [[[m for p in group for m in expanded[id(p)]] for group in side] for side in groups]
        if statement.source and statement.target:
            cells, voids = match(str(statement), sides[0], sides[1], statement.options)
        else:
            cells, voids = _created(sides[1], statement), [m for group in sides[0] for m in group]
        self._register(statement, groups, shapes, cells)
        self.dropped.extend((m.tensor, math.prod(d.size for d in m.digits)) for m in voids)
        self.solved.append({k: v for k, v in sizes.items() if k not in labels and k[:1] != "#"})

    def _present(
        self, group: Sequence[TensorPattern], table: NameTable | None, env: Mapping[str, int]
    ) -> list[_Present]:
        """The tensors of a tied group that are there. Of several tied ones some may be missing, but not all."""
        found = [_find(pattern, table, env) for pattern in group]
        present = [p for p in found if p is not None]
        if not present:
            raise RelayoutError(f"there is no tensor {group[0].name}")
        return present

    def _register(
        self,
        statement: Statement,
        groups: tuple[list[list[_Present]], list[list[_Present]]],
        shapes: Mapping[int, tuple[int, ...]],
        cells: Sequence[Cell],
    ) -> None:
        dtypes = {p.dtype for group in groups[0] for p in group if p.dtype is not None}
        if len(dtypes) > 1:
            raise RelayoutError(f"the sources have different dtypes: {', '.join(sorted(dtypes))}")
        wanted = {p.dtype for group in groups[1] for p in group if p.dtype is not None}
        dtype = dtypes.pop() if dtypes else (sorted(wanted)[0] if wanted else "float32")
        _check_fill(fill_value(statement.options), wanted or {dtype})
        work = arithmetic(statement.options)
        if work and not (statement.source and statement.target):
            raise RelayoutError(
                f"{work[0][0]}: there is nothing to work on; created and dropped tensors take only fill="
            )
        result = result_dtype(dtype, statement.options, self.codecs) if statement.source else dtype
        if statement.target and wanted - {result}:
            raise RelayoutError(
                f"it gives {result}, but the target has {', '.join(sorted(wanted))}: say cast={dtype}:..."
            )
        for side, families, used, kind in zip(
            groups, (self.source, self.target), (self.used_source, self.used_target), (dtype, result), strict=True
        ):
            for p in (p for group in side for p in group):
                spec = TensorSpec(shapes[id(p)], p.dtype or kind)
                family = families[p.pattern.name] = TensorFamily(p.pattern.name, p.template, p.offsets, spec)
                _claim(family, used, statement)
        for cell in cells:
            self.cells.setdefault(cell.target.tensor, []).append(cell)


def _copied(statement: Statement) -> tuple[TensorPattern, TensorPattern] | None:
    """The two tensors of a statement that only renames a whole one."""
    sides = (statement.source, statement.target)
    if statement.options or any(len(side) != 1 or len(side[0]) != 1 for side in sides):
        return None
    a, b = sides[0][0][0], sides[1][0][0]
    return (a, b) if _is_plain(a) and (a is b or _is_plain(b)) else None


def _is_plain(pattern: TensorPattern) -> bool:
    """Whether it is a name alone."""
    if pattern.dims is not None or pattern.alias is not None:
        return False
    return all(isinstance(part, str) for part in pattern.parts)


@lru_cache(1 << 12)
def _plain_part(shape: tuple[int, ...]) -> CellPart:
    """All of a tensor, a factor for each dim."""
    (found,) = monomials("", [Dim(f"#{i}", n) for i, n in enumerate(shape)], frozenset(), frozenset())
    return found.part(found.factors)


def _inline(statement: Statement) -> dict[str, int]:
    leaves = (
        leaf for t in statement.tensors for d in (*(i.dim for i in t.index), *(t.dims or ())) for leaf in d.leaves
    )
    return {leaf.name: leaf.size for leaf in leaves if leaf.size is not None and leaf.name and leaf.name != "_"}


def _find(pattern: TensorPattern, table: NameTable | None, env: Mapping[str, int]) -> _Present | None:
    template, offsets = template_of(pattern)
    if table is None:
        return _Present(pattern, template, offsets, None, None, ())
    if pattern.name in table.specs:
        spec = table.specs[pattern.name]
        return _Present(pattern, template, offsets, spec.shape, spec.dtype, (pattern.name,))
    members = table.members(template)
    if not members:
        return None
    known = tuple(known_size(i.dim, env) for i in pattern.index)
    sizes, names = extents(template, members, offsets, known)
    if not names:
        return None
    spec = table.specs[names[0]]
    other = next((n for n in names if table.specs[n] is not spec and table.specs[n] != spec), None)
    if other is not None:
        b = table.specs[other]
        raise RelayoutError(
            f"{names[0]} is {spec.dtype} {list(spec.shape)} but {other} is {b.dtype} {list(b.shape)}; "
            "the tensors of a family are alike: split it by ranges such as {l=3} and {m+3}"
        )
    return _Present(pattern, template, offsets, (*sizes, *spec.shape), spec.dtype, tuple(names))


def _labels(patterns: Sequence[TensorPattern]) -> frozenset[str]:
    """Names of tensors that stand as factors in another tensor's dims: they mark its parts and have size 1."""
    labels: set[str] = set()
    names = {p.label for p in patterns}
    for p in patterns:
        factors = {leaf.name for d in (*(i.dim for i in p.index), *(p.dims or ())) for leaf in d.leaves}
        if p.label in factors:
            raise RelayoutError(f"{p.label} is both a tensor and one of its factors: name the tensor with `as`")
        labels |= factors & names
    return frozenset(labels)


def _dims(tensors: Sequence[_Present]) -> list[tuple[Dim, ...]]:
    """Each tensor's dims, indices first. Where a statement gives none, the same unnamed ones for all."""
    open_ = [p for p in tensors if p.pattern.dims is None]
    rest = 0
    if open_:
        if len(open_) != len(tensors):
            raise RelayoutError(f"give dims to all tensors or to none; {open_[0].pattern.name} has none")
        ranks = {len(p.shape) - len(p.offsets) for p in open_ if p.shape is not None}
        if len(ranks) != 1:
            raise RelayoutError(
                "the tensors have different numbers of dims; write them out" if ranks else "give the shape"
            )
        rest = ranks.pop()
    extra = tuple(Dim(f"#{i}") for i in range(rest))
    return [
        (*(i.dim for i in p.pattern.index), *(extra if p.pattern.dims is None else p.pattern.dims)) for p in tensors
    ]


def _check_ranks(tensors: Sequence[_Present], dims: Sequence[tuple[Dim, ...]]) -> None:
    for p, ds in zip(tensors, dims, strict=True):
        if p.shape is not None and len(p.shape) != len(ds):
            n, shape = len(p.pattern.index), list(p.shape)
            raise RelayoutError(f"{p.pattern.name} has shape {shape[n:]}, but the text gives it {len(ds) - n} dims")


def _created(groups: Sequence[Sequence[Monomial]], statement: Statement) -> list[Cell]:
    """The cells of whole tensors that the source does not have."""
    return [
        Cell(m.factors, tuple(d.size for d in m.digits), m.part(m.factors), None, (), statement.options)
        for group in groups
        for m in group
    ]


def _check_fill(value: float, dtypes: Iterable[str]) -> None:
    exact = [d for d in dtypes if not d.startswith(("float", "bfloat", "complex"))]
    if exact and not (value.is_integer() and abs(value) < 2**53):  # beyond, not every whole number has its float
        raise RelayoutError(f"fill={value:g} is no value of a tensor of {exact[0]}")


def _claim(family: TensorFamily, used: dict[str, Statement], statement: Statement) -> None:
    for name in {family.name: None, **dict.fromkeys(family.members)} if family.family_dims else (family.name,):
        if name in used:
            raise RelayoutError(f"{name} stands twice, here and in `{used[name]}`: tie copies with `=`")
        used[name] = statement
