"""Random mappings and layouts, each with its own plain-numpy meaning.

A case has parts (`q`, `k`, ...), each a tensor over the same common factors and factors of its own. Each side of the
mapping stores them in its own way: alone or concatenated in a bracket, with padding, factors in any order, fused into
dims, some of them as numbers in names. The text and the arrays are made side by side and know nothing of each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.relayout.moving import CARRIERS, Array, Side

Draw = Any


@dataclass
class Axes:
    """The axes of a mesh that are still free to cut."""

    names: list[str]

    def fork(self) -> Axes:
        return Axes(list(self.names))


MESHES = [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (1, 3, 2), (3, 1, 1)]


@st.composite
def meshes(draw: Draw) -> tuple[str, list[list[str]]]:
    """A mesh of one or two views, and the axes of each view."""
    sizes = list(draw(st.sampled_from(MESHES)))
    views = [sizes]
    if draw(st.booleans()):
        views.append(list(draw(st.permutations([sizes[0], math.prod(sizes[1:])]))))
    named = [[f"{'xy'[v]}{i}" for i in range(len(view))] for v, view in enumerate(views)]
    text = " | ".join(
        " ".join(f"{a}={n}" for a, n in zip(names, view, strict=True)) for names, view in zip(named, views, strict=True)
    )
    return text, named


def _cuts(draw: Draw, axes: Axes) -> str:
    text = ""
    while axes.names and draw(st.integers(0, 2)) == 0:
        axis = axes.names.pop(draw(st.integers(0, len(axes.names) - 1)))
        text += f"/{axis}" + draw(st.sampled_from(["", "", "", ":zigzag", ":cyclic[2]", ":strided[2]", ":cyclic"]))
    return text


def _dim(draw: Draw, n: int, axes: Axes, depth: int) -> str:
    """A dim of size n as the notation may write it: a factor, a product or a sum, cut here and there."""
    shape = draw(st.sampled_from(["leaf", "sum", "product"])) if depth and n > 1 else "leaf"
    if shape == "sum":
        a = draw(st.integers(1, n - 1))
        left, right = axes.fork(), axes.fork()
        body = f"({_dim(draw, a, left, depth - 1)} + {_dim(draw, n - a, right, depth - 1)})"
        axes.names = [x for x in axes.names if x in left.names and x in right.names]
        return body + _cuts(draw, axes)
    if shape == "product":
        a = draw(st.sampled_from([i for i in range(1, n + 1) if n % i == 0]))
        body = f"({_dim(draw, a, axes, depth - 1)} {_dim(draw, n // a, axes, depth - 1)})"
        return body + _cuts(draw, axes)
    return str(n) + _cuts(draw, axes)


@st.composite
def layouts(draw: Draw, shape: tuple[int, ...], views: list[list[str]], lead: int = 0) -> str:
    """A layout of a tensor of this shape; the first `lead` dims are indices in its name."""
    axes = Axes(list(draw(st.sampled_from(views))))
    dims = [_dim(draw, n, axes, 0 if i < lead else 2) for i, n in enumerate(shape)]
    text = " ".join(dims)
    if axes.names and draw(st.integers(0, 4)) == 0:
        text += " //" + axes.names.pop()
    if axes.names and draw(st.integers(0, 4)) == 0:
        text += f" @{axes.names.pop()}=0"
    return text


@dataclass(frozen=True)
class Parts:
    """What a case is made of: values over `(common factors, own factors)` for every part."""

    sizes: dict[str, int]
    common: list[str]
    own: dict[str, list[str]]
    values: dict[str, Array]


@st.composite
def parts(draw: Draw, alike: bool) -> Parts:
    """One to three parts. `alike`: they may share their own factors too, so that only labels tell them apart."""
    size = st.sampled_from([1, 1, 2, 2, 3, 4, 0] if draw(st.integers(0, 9)) == 0 else [1, 2, 2, 3])
    common = list("abc"[: draw(st.integers(0, 3))])
    sizes = {name: draw(size) for name in common}
    own: dict[str, list[str]] = {}
    for part in "qkv"[: draw(st.integers(1, 3))]:
        names = [f"{'f' if alike and draw(st.booleans()) else part}{j}" for j in range(draw(st.integers(0, 2)))]
        own[part] = names if alike or names else [f"{part}0"]
        if not alike:  # what tells the parts apart is more than one element
            sizes[own[part][0]] = draw(st.integers(2, 3))
        for name in own[part]:
            sizes.setdefault(name, draw(size))
    values: dict[str, Array] = {}
    start = 1
    for part, names in own.items():
        shape = [sizes[x] for x in (*common, *names)]
        values[part] = np.arange(start, start + math.prod(shape), dtype=np.int32).reshape(shape)
        start += 1000
    return Parts(sizes, common, own, values)


@dataclass
class Store:
    """One side of a statement as it is written and as it is: texts of tied groups, arrays, family shapes."""

    texts: list[str] = field(default_factory=list)
    state: dict[str, Array] = field(default_factory=dict)
    families: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)


FILL = 7
NUMBERS = [
    *("bool", "uint8", "int8", "uint16", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


def split(draw: Draw, items: Sequence[Any]) -> list[list[Any]]:
    """Items in their order, parted into consecutive groups."""
    groups: list[list[Any]] = []
    for item in items:
        if groups and draw(st.booleans()):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _tensor(draw: Draw, p: Parts, members: Sequence[str], labelled: bool, pad: int, name: str, store: Store) -> str:
    """Write one tensor with these parts; returns its text without tie or alias."""
    order = list(draw(st.permutations(p.common)))
    named = order[: draw(st.integers(0, len(order)))] if draw(st.booleans()) else []
    named = [x for x in named if p.sizes[x]]
    rest = [x for x in order if x not in named]
    alone = len(members) == 1 and not labelled and not pad
    terms: list[str] = []
    blocks: list[Array] = []
    if alone:
        (part,) = members
        sequence: list[str | None] = list(draw(st.permutations(rest + p.own[part])))
        values = p.values[part]
        source = p.common + p.own[part]
        axes = [source.index(x) for x in [*named, *[x for x in sequence if x]]]
        whole = values.transpose(axes)
        extents = [p.sizes[x] for x in sequence if x]
    else:
        at = draw(st.integers(0, len(rest)))
        sequence = [*rest[:at], None, *rest[at:]]
        outer, inner = [*named, *rest[:at]], rest[at:]
        for part in members:
            mine = list(draw(st.permutations(p.own[part])))
            source = p.common + p.own[part]
            axes = [source.index(x) for x in [*outer, *mine, *inner]]
            sizes = [p.sizes[x] for x in outer], math.prod(p.sizes[x] for x in mine), [p.sizes[x] for x in inner]
            blocks.append(p.values[part].transpose(axes).reshape([*sizes[0], sizes[1], *sizes[2]]))
            terms.append(" ".join([part] * labelled + mine) or "1")
        if pad:
            shape = [*[p.sizes[x] for x in outer], pad, *[p.sizes[x] for x in inner]]
            place = draw(st.integers(0, len(blocks)))
            blocks.insert(place, np.full(shape, FILL, np.int32))
            terms.insert(place, f"_={pad}")
        whole = np.concatenate(blocks, axis=len(outer))
        extents = [p.sizes[x] if x else whole.shape[len(outer)] for x in sequence]
    bracket = f"({' + '.join(terms)})" if terms else ""
    groups = split(draw, list(zip(sequence, extents, strict=True)))
    dims, shape = [], []
    for group in groups:
        texts = [x or bracket for x, _ in group]
        dims.append(texts[0] if len(texts) == 1 else f"({' '.join(texts)})")
        shape.append(math.prod(n for _, n in group))
    offsets = [draw(st.sampled_from([0, 0, 3, 11])) for _ in named]
    pattern = name + "".join(f".{{{x}+{o}}}" if o else f".{{{x}}}" for x, o in zip(named, offsets, strict=True))
    lead = [p.sizes[x] for x in named]
    for index in itertools.product(*map(range, lead)):
        member = name + "".join(f".{i + o}" for i, o in zip(index, offsets, strict=True))
        store.state[member] = np.ascontiguousarray(whole[index]).reshape(shape)
    store.families[pattern] = (*lead, *shape), len(lead)
    return f"{pattern}: {' '.join(dims)}", pattern


@st.composite
def stores(draw: Draw, p: Parts, fused: bool, labelled: bool, pad: int, prefix: str) -> Store:
    """All parts on one side: each in a tensor of its own, or in one or more brackets; some tensors tied to a copy."""
    store = Store()
    names = list(draw(st.permutations(list(p.own))))
    groups = split(draw, names) if fused and not labelled else [names] if fused else [[x] for x in names]
    for i, members in enumerate(groups):
        one = labelled and not fused
        copies = draw(st.sampled_from([1, 1, 1, 2]))
        texts: list[str] = []
        for copy in range(copies):
            name = f"{prefix}{'abc'[copy]}.{members[0] if not fused else i}"
            text, pattern = _tensor(draw, p, members, labelled and fused, pad, name, store)
            label = f"{members[0]}" if one else ""
            texts.append(text.replace(f"{pattern}:", f"{pattern} as {label}:", 1) if one else text)
        store.texts.append(" = ".join(texts))
    return store


@dataclass(frozen=True)
class Case:
    """A mapping, both sides, and the sizes of its factors."""

    mapping: str
    source: Side
    target: Side
    sizes: dict[str, int]
    ways: tuple[str, ...]


@st.composite
def cases(draw: Draw) -> Case:
    """Fuse, split, transpose, stack, unstack, pad, slice and tie at random, between random layouts."""
    labelled = draw(st.booleans())
    p = draw(parts(labelled))
    pad = draw(st.sampled_from([0, 0, 1, 2]))
    kinds = [(False, 0), (True, pad)] if labelled else [(draw(st.booleans()), x) for x in (0, pad)]
    ends = [draw(stores(p, fused, labelled, n, side)) for (fused, n), side in zip(kinds, "st", strict=True)]
    if draw(st.booleans()):
        ends.reverse()
    text = f"{', '.join(ends[0].texts)} -> {', '.join(ends[1].texts)}" + (f"; fill={FILL}" if pad else "")
    dtype = draw(st.sampled_from(NUMBERS if pad else [*NUMBERS, *CARRIERS]))
    sides: list[Side] = []
    for store in ends:
        store.state = {name: a.astype(CARRIERS.get(dtype, dtype)) for name, a in store.state.items()}
        mesh, views = draw(meshes())
        texts = {name: draw(layouts(shape, views, lead)) for name, (shape, lead) in store.families.items()}
        sides.append(Side(store.state, texts, mesh, dtype=dtype if dtype in CARRIERS else None))
    ways = draw(st.sampled_from([("layouts",), ("pieces",)]))
    return Case(text, sides[0], sides[1], p.sizes, ways)
