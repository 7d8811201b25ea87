"""Real tensor names and families: `layers.{l+3}.experts.{e}.up` is one tensor whose leading dims are layers and
experts.

Names are found by their skeleton (every number replaced by `#`), so that looking up thirty patterns among a quarter
of a million names reads each name once.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.layout.sizes import solve
from tangram.layout.syntax import Dim, Index, Side, Statement, TensorPattern, Wild
from tangram.relayout.mapping.errors import RelayoutError

_NUMBERS = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
"""Numbers as indices write them; the 007 in a name is text."""


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor: its global shape, and its dtype by torch's name (`float32`, `bfloat16`, ...) or torch's own."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        except TypeError:
            raise RelayoutError(f"{self.shape!r}: a shape is a tuple of whole numbers") from None
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class TensorFamily:
    """A tensor whose leading dims are the indices in its name. A plain tensor is a family without indices.

    `template` is the name between the numbers, `offsets` what a position adds up to in the name, `spec` the whole
    family's shape (indices first) and dtype.
    """

    name: str
    template: tuple[str, ...]
    offsets: tuple[int, ...]
    spec: TensorSpec

    @property
    def family_dims(self) -> int:
        """How many leading dims stand in the name."""
        return len(self.offsets)

    @property
    def member_shape(self) -> tuple[int, ...]:
        """The shape of one tensor of the family."""
        return self.spec.shape[len(self.offsets) :]

    def member(self, index: tuple[int, ...]) -> str:
        """The real name at these positions."""
        out = [self.template[0]]
        for i, offset, text in zip(index, self.offsets, self.template[1:], strict=True):
            out += [str(i + offset), text]
        return "".join(out)

    @property
    def members(self) -> Iterator[str]:
        """The real names."""
        if not self.offsets:
            return iter(self.template)
        return map(self.member, itertools.product(*[range(n) for n in self.spec.shape[: self.family_dims]]))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(r"(\d+)".join(map(re.escape, self.template)))

    def index(self, name: str) -> tuple[int, ...] | None:
        """The positions of a real name, None when it is not of this family."""
        found = self._regex.fullmatch(name)
        if found is None or any(str(int(x)) != x for x in found.groups()):
            return None
        index = tuple(int(x) - o for x, o in zip(found.groups(), self.offsets, strict=True))
        return index if all(0 <= i < n for i, n in zip(index, self.spec.shape, strict=False)) else None


@dataclass(frozen=True)
class Tensors:
    """The tensors of one side, as families by the name of their pattern."""

    families: Mapping[str, TensorFamily]

    def locate(self, name: str) -> tuple[TensorFamily, tuple[int, ...] | None]:
        """The family of a tensor and its place there (None for a whole family). Raises RelayoutError."""
        if name in self.families:
            return self.families[name], None
        for family in self._by_head.get(_head(name), ()):
            index = family.index(name)
            if index is not None:
                return family, index
        raise RelayoutError(f"the mapping has no tensor {name}")

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is on this side."""
        try:
            self.locate(name)
        except RelayoutError:
            return False
        return True

    def lift(self, name: str, region: Region) -> tuple[TensorFamily, Region]:
        """A region of a real tensor as a region of its family. Raises RelayoutError when it is outside the tensor."""
        family, index = self.locate(name)
        shape = family.spec.shape if index is None else family.member_shape
        if not region.within(shape):
            raise RelayoutError(f"{name} has shape {list(shape)}; the region {region} is outside it")
        if index is None or not index:
            return family, region
        lead = tuple(span(i, i + 1) for i in index)
        return family, Region.of([(*lead, *box) for box in region.boxes])

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every real tensor with its shape and dtype, families written out (once: there may be a million)."""
        out: dict[str, TensorSpec] = {}
        for family in self.families.values():
            spec = TensorSpec(family.member_shape, family.spec.dtype)
            out.update(dict.fromkeys(family.members, spec))
        return out

    @cached_property
    def _by_head(self) -> dict[str, list[TensorFamily]]:
        out: dict[str, list[TensorFamily]] = {}
        for family in self.families.values():
            if family.family_dims:
                out.setdefault(_head("0".join(family.template)), []).append(family)
        return out


def _head(name: str) -> str:
    return "".join("#" if numeric else "".join(chars) for numeric, chars in itertools.groupby(name, str.isdigit))


def template_of(pattern: TensorPattern) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """`layers.{l+3}.w` as `(("layers.", ".w"), (3,))`. Raises RelayoutError where a number could not be told apart."""
    texts, offsets = [""], list[int]()
    for part in pattern.parts:
        if isinstance(part, str):
            texts[-1] += part
        elif isinstance(part, Index):
            offsets.append(part.offset)
            texts.append("")
        else:
            raise RelayoutError(f"{pattern.name}: the wild card {part} is not filled in")
    for before, after in itertools.pairwise(texts):
        if before[-1:].isdigit() or after[:1].isdigit() or "" in texts[1:-1]:
            raise RelayoutError(
                f"{pattern.name}: an index beside a digit or another index cannot be read back from a name"
            )
    return tuple(texts), tuple(offsets)


Numbered = tuple[tuple[int, ...], str]
"""The numbers in a name, and the name."""


@dataclass(frozen=True)
class NameTable:
    """The tensors of one side by name, with an index by skeleton, and where one is asked for by some of the numbers."""

    specs: Mapping[str, TensorSpec]
    _by_skeleton: Mapping[str, list[Numbered]]
    _by_constants: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], list[Numbered]]]

    @staticmethod
    def of(specs: Mapping[str, TensorSpec]) -> NameTable:
        """Index the names once."""
        by_skeleton: dict[str, list[Numbered]] = {}
        for name in specs:
            parts = _NUMBERS.split(name)
            by_skeleton.setdefault("#".join(parts[::2]), []).append((tuple(map(int, parts[1::2])), name))
        return NameTable(specs, by_skeleton, {})

    def members(self, template: tuple[str, ...]) -> list[Numbered]:
        """`[(numbers at the indices, name)]` of the names that fit a template."""
        if len(template) == 1:
            return [((), template[0])] if template[0] in self.specs else []
        constants: list[int | None] = []
        for i, text in enumerate(template):
            constants += [None] * (i > 0) + [int(x) for x in _NUMBERS.findall(text)]
        skeleton = "#".join(_NUMBERS.sub("#", text) for text in template)
        found = self._by_skeleton.get(skeleton, [])
        if all(c is None for c in constants):
            return found
        free = [i for i, c in enumerate(constants) if c is None]
        fixed = tuple(i for i, c in enumerate(constants) if c is not None)
        groups = self._by_constants.get((skeleton, fixed))
        if groups is None:
            groups = self._by_constants[skeleton, fixed] = {}
            for numbers, name in found:
                key = tuple([numbers[i] for i in fixed])
                groups.setdefault(key, []).append((tuple([numbers[i] for i in free]), name))
        return groups.get(tuple([c for c in constants if c is not None]), [])

    def wild_values(self, pattern: TensorPattern) -> dict[str, dict[str, str]]:
        """`{real name: {wild card: text}}` of the names that fit a pattern with wild cards."""
        regex, seen = "", set[str]()
        for part in pattern.parts:
            if isinstance(part, str):
                regex += re.escape(part)
            elif isinstance(part, Wild):
                regex += f"(?P={part.name})" if part.name in seen else f"(?P<{part.name}>.+)"
                seen.add(part.name)
            else:
                regex += r"\d+"
        compiled = re.compile(regex)
        return {name: m.groupdict() for name in self.specs if (m := compiled.fullmatch(name))}


def known_size(dim: Dim, env: Mapping[str, int]) -> int | None:
    """The size of an index where the text or the caller gives it."""
    if any(leaf.name and leaf.size is None and leaf.name not in env for leaf in dim.leaves):
        return None
    ((sized,),), _ = solve([((dim,), None)], {leaf.name: env[leaf.name] for leaf in dim.leaves if leaf.name in env})
    return sized.n


def extents(
    template: tuple[str, ...],
    members: Iterable[tuple[tuple[int, ...], str]],
    offsets: tuple[int, ...],
    known: tuple[int | None, ...],
) -> tuple[tuple[int, ...], list[str]]:
    """The size of each index of a family, and the names that belong to it.

    A size that is known claims just that range of numbers; an open one reaches to the highest number there is. Raises
    RelayoutError when a member inside these ranges is missing.
    """
    limits = [(o, math.inf if k is None else o + k) for o, k in zip(offsets, known, strict=True)]
    inside = [m for m in members if all(lo <= x < hi for x, (lo, hi) in zip(m[0], limits, strict=True))]
    columns = list(zip(*[numbers for numbers, _ in inside], strict=True)) or [()] * len(offsets)
    sizes = tuple(
        k if k is not None else max(column, default=o - 1) + 1 - o
        for k, o, column in zip(known, offsets, columns, strict=True)
    )
    if len(inside) != math.prod(sizes):
        have = {tuple([x - o for x, o in zip(numbers, offsets, strict=True)]) for numbers, _ in inside}
        index = next(i for i in itertools.product(*map(range, sizes)) if i not in have)
        missing = TensorFamily("", template, offsets, TensorSpec(sizes)).member(index)
        raise RelayoutError(
            f"{len(inside)} of {math.prod(sizes)} tensors are there; the first that is missing is {missing}"
        )
    return sizes, [name for _, name in inside]


def fill_wilds(
    statements: Iterable[Statement], source: NameTable, target: NameTable | None, known: Mapping[str, int]
) -> list[Statement]:
    """Statements without `{name*}`: one for each value that the names give, where no plain statement takes the name.

    `known` are sizes given from outside: `{l}` of a known size takes just its range of numbers.
    """
    plain: list[Statement] = []
    wild: list[Statement] = []
    for statement in statements:
        (wild if any(t.wilds for t in statement.tensors) else plain).append(statement)
    taken = (_claimed(plain, 0, source, known), _claimed(plain, 1, target, known))
    out = list(plain)
    for statement in wild:
        side, table = (0, source) if statement.source else (1, target)
        if table is None:
            raise RelayoutError(f"{statement}: which tensors these are follows only from the target's names; pass them")
        wanted = frozenset(w for t in statement.tensors for w in t.wilds)
        values: dict[tuple[tuple[str, str], ...], None] = {}
        for pattern in (t for group in (statement.source, statement.target)[side] for t in group):
            if pattern.wilds != wanted:
                raise RelayoutError(f"{statement}: every tensor names the same wild cards")
            for name, found in table.wild_values(pattern).items():
                if name not in taken[side]:
                    values.setdefault(tuple(sorted(found.items())))
        out += [_filled(statement, dict(v)) for v in values]
    return out


def _claimed(statements: Iterable[Statement], side: int, table: NameTable | None, known: Mapping[str, int]) -> set[str]:
    """The names of one side that plain statements take."""
    if table is None:
        return set()
    patterns = [t for s in statements for group in (s.source, s.target)[side] for t in group]
    out = {t.name for t in patterns}
    for t in patterns:
        sizes = [known_size(i.dim, known) for i in t.index]
        limits = [(i.offset, None if n is None else i.offset + n) for i, n in zip(t.index, sizes, strict=True)]
        for numbers, name in table.members(template_of(t)[0]):
            if all(x >= lo and (hi is None or x < hi) for x, (lo, hi) in zip(numbers, limits, strict=True)):
                out.add(name)
    return out


def _filled(statement: Statement, values: Mapping[str, str]) -> Statement:
    def tensor(t: TensorPattern) -> TensorPattern:
        return TensorPattern(tuple([values[p.name] if isinstance(p, Wild) else p for p in t.parts]), t.alias, t.dims)

    def side(s: Side) -> Side:
        return tuple([tuple([tensor(t) for t in group]) for group in s])

    source = side(statement.source)
    # what keeps its name is the same value on both sides: there may be a million
    target = source if statement.target == statement.source else side(statement.target)
    return Statement(source, target, statement.options)
