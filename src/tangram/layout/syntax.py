"""The words of the notation as values: cuts, dims, tensor patterns, statements, operands. They print as they parse.

Whole texts are made of them: `notation.Layout` and `notation.Mapping`, `rule.Rule`.

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
class Slot:
    """`{dim}`, `{dim:keepdim}`, `{#normalized_shape}`: dims that an argument names."""

    argument: str
    keep: str = ""
    """The argument that says whether the dims stay, with one element each (`kept`: they do); none: they stay whole."""
    trailing: int = 0
    """Where the argument says how many last dims by its number of entries: how many entries a dim has."""

    def __str__(self) -> str:
        return "{" + "#" * self.trailing + self.argument + (f":{self.keep}" if self.keep else "") + "}"


@dataclass(frozen=True)
class Piece:
    """A dim of an operand, `...`, or a slot."""

    what: Dim | Slot
    uncut: bool = False
    beyond: bool = False
    """Of an input: a part of the result reads more of it than the same part, by windows."""

    def __str__(self) -> str:
        return str(self.what) + "^" * self.uncut + "'" * self.beyond

    @cached_property
    def rest(self) -> bool:
        """Whether it stands for all other dims."""
        return isinstance(self.what, Dim) and self.what.name == REST


@dataclass(frozen=True)
class Operand:
    """One tensor of an operator."""

    pieces: tuple[Piece, ...]
    pending: tuple[tuple[str, str], ...] = ()
    """Of an output: what is pending, `sum`, when this factor is cut; a slot is written as in the text."""

    @property
    def is_fixed(self) -> bool:
        """Whether it writes every dim, and none stands for several."""
        return not any(isinstance(piece.what, Slot) or piece.rest for piece in self.pieces)

    def __str__(self) -> str:
        return " ".join([*map(str, self.pieces), *(f"{op}:{factor}" for op, factor in self.pending)])

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Its slots."""
        return tuple(piece.what for piece in self.pieces if isinstance(piece.what, Slot))

    @cached_property
    def fixed(self) -> int:
        """How many of its pieces are not `...`."""
        return len([piece for piece in self.pieces if not piece.rest])


Note = tuple[str, tuple[str, ...]]
"""`once(0)`, `linear`: what is true of an operator beside its factors, and of which arguments or factors."""


LayoutWords = tuple[
    tuple[Dim, ...], tuple[Cut, ...], tuple[tuple[str, str], ...], tuple[tuple[str, tuple[int, ...]], ...]
]
"""The fields of a `Layout`: dims, flat, pending, at."""
RuleWords = tuple[tuple[str, ...], tuple[Operand, ...], tuple[Operand, ...], tuple[Note, ...]]
"""The fields of a `Rule`: operators, inputs, outputs, notes."""
