"""The two texts that the notation is used for: how a tensor lies over a mesh, and how tensors are made of others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from tangram.layout.grammar import parse_layout, parse_statements
from tangram.layout.sizes import bind_dims
from tangram.layout.syntax import Cut, Dim, Statement


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
        return _layout(text)

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
        dims, flat = bind_dims(self.dims, self.flat, shape, known)
        return replace(self, dims=dims, flat=flat)


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
        return _mapping(text)

    def __str__(self) -> str:
        return "\n".join(map(str, self.statements))


@lru_cache(1 << 14)
def _layout(text: str) -> Layout:
    return Layout(*parse_layout(text))


@lru_cache(1 << 12)
def _mapping(text: str) -> Mapping:
    return Mapping(parse_statements(text, _lines(text)))


def _lines(text: str) -> list[tuple[int, str]]:
    """The statements of a text with their offsets. Comments and joints become spaces, so that offsets stay true."""
    text = re.sub(r"#[^\n]*", lambda m: " " * len(m.group()), text)
    text = re.sub(r"(,|=|->)\s*\n", lambda m: m.group().replace("\n", " "), text)
    margin = min((_indent(line) for line in text.split("\n") if line.strip()), default=0)
    out: list[tuple[int, str]] = []
    at = 0
    for line in text.split("\n"):
        if out and line.strip() and _indent(line) > margin:  # indented further than the others: it goes on
            start, before = out[-1]
            out[-1] = (start, before + " " * (at - start - len(before)) + line)
        elif line.strip():
            out.append((at, line))
        at += len(line) + 1
    return out


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
