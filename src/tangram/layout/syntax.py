"""The words of the notation as values: cuts, dims, layouts, tensor patterns, statements. They print as they parse.

A dim is a polynomial of factors: a space multiplies (row-major), `+` concatenates, brackets group, `/` cuts. One node
type serves factors and brackets, so that every walk over a dim is one recursion without cases for the notation's
corners.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tangram.layout.errors import LayoutError

VOID, REST = "_", "..."
"""The names of an unnamed factor and of any number of them."""


@dataclass(frozen=True)
class Cut:
    """`/axis`, `/axis:zigzag`, `/axis:cyclic[64]`, `/axis:[7 8 8 7]`. `args` is a name until it is bound to a list."""

    axis: str
    map: str = ""
    args: tuple[int, ...] | str = ()

    def __str__(self) -> str:
        args = self.args if isinstance(self.args, str) else " ".join(map(str, self.args))
        name = "" if self.map == "sizes" else self.map
        return self.axis + (f":{name}" if self.map else "") + (f"[{args}]" if args or self.map == "sizes" else "")


@dataclass(frozen=True)
class Dim:
    """A factor (name and/or size) or a bracket (`terms`: a sum of products), then its cuts, major axis first."""

    name: str = ""
    size: int | None = None
    terms: tuple[tuple[Dim, ...], ...] = ()
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        if self.terms:
            body = "(" + " + ".join(" ".join(map(str, term)) for term in self.terms) + ")"
        elif not self.name:
            body = str(self.size)
        else:
            body = self.name if self.size is None else f"{self.name}={self.size}"
        return body + "".join(f"/{cut}" for cut in self.cuts)

    @cached_property
    def n(self) -> int:
        """The number of elements. Raises LayoutError while a factor has no size."""
        if self.terms:
            return sum(math.prod(x.n for x in term) for term in self.terms)
        if self.size is None:
            raise LayoutError(f"the size of {self.name!r} is not known: give the tensor's shape or {self.name}=...")
        return self.size

    @cached_property
    def nodes(self) -> tuple[Dim, ...]:
        """This dim and every dim inside it."""
        return (self, *(y for term in self.terms for x in term for y in x.nodes))

    @cached_property
    def leaves(self) -> tuple[Dim, ...]:
        """The factors, literals and voids inside, left to right."""
        return tuple(y for term in self.terms for x in term for y in x.leaves) if self.terms else (self,)

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that cuts this dim or something inside it."""
        return frozenset(cut.axis for node in self.nodes for cut in node.cuts)

    @cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """Every mesh axis that cuts something inside the bracket, sorted."""
        return tuple(sorted({cut.axis for node in self.nodes[1:] for cut in node.cuts}))

    def over(self, axes: Collection[str]) -> Dim:
        """The same dim with the cuts over these axes alone."""
        terms = tuple(tuple(x.over(axes) for x in term) for term in self.terms)
        return replace(self, terms=terms, cuts=tuple(cut for cut in self.cuts if cut.axis in axes))

    def uncut(self) -> Dim:
        """The same dim without any cut."""
        return replace(self, cuts=(), terms=tuple(tuple(x.uncut() for x in term) for term in self.terms))


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over a mesh: cut dims, cuts of the flattened local block, pending reductions, held-by.

    `Layout.parse("(heads/tp d)/dp h sum:cp @pp=0,3")`; `bind(shape)` gives every factor its size. A layout has no mesh:
    `tangram.layout.region` and `owners` take both.
    """

    dims: tuple[Dim, ...]
    flat: tuple[Cut, ...] = ()
    pending: tuple[tuple[str, str], ...] = ()
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that `text` writes. Raises NotationError, pointing at the character."""
        from tangram.layout.grammar import parse_layout

        return parse_layout(text)

    def __str__(self) -> str:
        parts = [*map(str, self.dims), *(f"//{cut}" for cut in self.flat)]
        parts += [f"{op}:{axis}" for op, axis in self.pending]
        parts += [f"@{axis}=" + ",".join(map(str, coords)) for axis, coords in self.at]
        return " ".join(parts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor. Raises LayoutError before `bind`."""
        return tuple(dim.n for dim in self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes that cut something."""
        return frozenset(cut.axis for cut in self.flat).union(*(dim.axes for dim in self.dims))

    def bind(self, shape: tuple[int, ...] | None = None, **known: int | tuple[int, ...]) -> Layout:
        """Give every factor its size, solved from `shape` and the sizes in `known`; lists in `known` fill `[name]`.

        Raises LayoutError when a size has no solution or more than one.
        """
        from tangram.layout.sizes import bind_layout

        return bind_layout(self, shape, known)


@dataclass(frozen=True)
class Index:
    """`{dim+offset}` in a tensor's name: the number there is the position along `dim` plus `offset`."""

    dim: Dim
    offset: int = 0

    def __str__(self) -> str:
        inner = str(self.dim)
        return "{" + inner + (f"+{self.offset}" if self.offset else "") + "}"


@dataclass(frozen=True)
class Wild:
    """`{name*}` in a tensor's name: any text, the same wherever the name stands in the statement."""

    name: str

    def __str__(self) -> str:
        return "{" + self.name + "*}"


@dataclass(frozen=True)
class TensorPattern:
    """`layers.{l+3}.experts.{e}.up as up: f h`: a tensor, or with indices in its name a family of them.

    `parts` are the pieces of the name; `dims` is None when the text gives none, which means any shape, unchanged.
    """

    parts: tuple[str | Index | Wild, ...]
    alias: str | None = None
    dims: tuple[Dim, ...] | None = None

    @cached_property
    def name(self) -> str:
        """The name as written, the key of the family."""
        return "".join(map(str, self.parts))

    @cached_property
    def index(self) -> tuple[Index, ...]:
        """The indices in the name: leading dims of the family's tensor."""
        return tuple(p for p in self.parts if isinstance(p, Index))

    @cached_property
    def wilds(self) -> frozenset[str]:
        """The names of the wild cards in the name."""
        return frozenset(p.name for p in self.parts if isinstance(p, Wild))

    @property
    def label(self) -> str:
        """What names this tensor's part inside another tensor's brackets."""
        return self.alias or self.name

    def __str__(self) -> str:
        dims = "" if self.dims is None else ":" + "".join(f" {d}" for d in self.dims)
        return self.name + (f" as {self.alias}" if self.alias else "") + dims


Option = tuple[str, float | str | None]
"""`fill=0`, `add=-1`, `cast=float32:bfloat16`, `swap_nibbles`: a name and its value."""

Side = tuple[tuple[TensorPattern, ...], ...]
"""One side of a statement: groups of tied tensors. Empty when the text says `_`."""


@dataclass(frozen=True)
class Statement:
    """One line of a mapping: `q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h`."""

    source: Side
    target: Side
    options: tuple[Option, ...] = ()

    def __str__(self) -> str:
        return f"{_side(self.source)} -> {_side(self.target)}" + "".join(
            (";" if i == 0 else "") + " " + _option(o) for i, o in enumerate(self.options)
        )

    @property
    def tensors(self) -> Iterator[TensorPattern]:
        """Every tensor on either side, source first."""
        return (t for side in (self.source, self.target) for group in side for t in group)


def _side(side: Side) -> str:
    return ", ".join(" = ".join(map(str, group)) for group in side) or VOID


def _option(option: Option) -> str:
    name, value = option
    if value is None:
        return name
    return f"{name}={value:.17g}" if isinstance(value, float) else f"{name}={value}"


@dataclass(frozen=True)
class Mapping:
    """How the tensors of one model structure are made of those of another: one statement a line.

    `Mapping.parse(text)`; `#` begins a comment; a line that ends in `,` `=` or `->`, or is followed by one
    indented further, goes on. `tangram.relayout.mapping.bind` gives it the tensors' shapes, `inverse` turns it round.
    """

    statements: tuple[Statement, ...]

    @staticmethod
    def parse(text: str) -> Mapping:
        """The mapping that `text` writes. Raises NotationError, pointing at the character."""
        from tangram.layout.grammar import parse_mapping

        return parse_mapping(text)

    def __str__(self) -> str:
        return "\n".join(map(str, self.statements))
