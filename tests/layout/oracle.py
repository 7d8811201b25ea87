"""Who holds what, worked out element by element with numpy and torch.chunk: no intervals, no algebra of the engine's.

A layout is read as the documentation tells it: a factor is the list of its indices, a bracket the row-major list of
its terms, a cut keeps some positions of the list that is held so far.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tangram.layout import Cut, Dim, Layout, Mesh, Region

Array = np.ndarray


def chunk(x: Array, k: int, i: int, dim: int = 0) -> Array:
    """Part `i` of `torch.chunk(x, k, dim)`; the parts that torch leaves out are empty."""
    parts = torch.chunk(torch.from_numpy(np.ascontiguousarray(x)), k, dim)
    return parts[i].numpy() if i < len(parts) else x.take([], dim)


def zigzag(x: Array, k: int, i: int) -> Array:
    """Chunks `i` and `2 k - 1 - i` of `2 k`."""
    return np.concatenate([chunk(x, 2 * k, i), chunk(x, 2 * k, 2 * k - 1 - i)])


def part(x: Array, k: int, i: int, name: str, args: tuple[int, ...] = ()) -> Array:
    """What part `i` of `k` of a list holds by an index map."""
    if name == "zigzag":
        ends = np.cumsum(args or (len(x),))[:-1]
        return np.concatenate([zigzag(doc, k, i) for doc in np.split(x, ends)])
    if name == "cyclic":
        block = args[0] if args else 1
        return np.array([v for p, v in enumerate(x) if p // block % k == i], dtype=x.dtype)
    if name == "strided":
        return np.concatenate([chunk(chunk(x, args[0], j), k, i) for j in range(args[0])])
    if name == "sizes":
        return np.split(x, np.cumsum(args)[:-1])[i]
    return chunk(x, k, i)


def cut(x: Array, cuts: tuple[Cut, ...], mesh: Mesh, at: dict[str, int]) -> Array:
    """A list cut over one axis after the other."""
    for c in cuts:
        assert not isinstance(c.args, str)
        x = np.sort(part(x, mesh.axis(c.axis)[0], at[c.axis], c.map, c.args))
    return x


def held(dim: Dim, mesh: Mesh, at: dict[str, int]) -> Array:
    """The indices of a dim that the rank at these coordinates holds, ascending."""
    if not dim.terms:
        assert dim.size is not None
        return cut(np.arange(dim.size), dim.cuts, mesh, at)
    out, base = [np.zeros(0, int)], 0
    for term in dim.terms:
        grid = np.arange(int(np.prod([count(x) for x in term]))).reshape([count(x) for x in term])
        out.append(grid[np.ix_(*[held(x, mesh, at) for x in term])].ravel() + base)
        base += grid.size
    return cut(np.concatenate(out), dim.cuts, mesh, at)


def count(dim: Dim) -> int:
    """The size of a dim."""
    return sum(int(np.prod([count(x) for x in term])) for term in dim.terms) if dim.terms else int(dim.size or 0)


def elements(layout: Layout, mesh: Mesh, rank: int) -> list[int]:
    """The flat indices of what a rank holds, in the order of its buffer."""
    at = mesh.coords(rank)
    if any(at[axis] not in allowed for axis, allowed in layout.at):
        return []
    grid = np.arange(int(np.prod([count(d) for d in layout.dims]))).reshape([count(d) for d in layout.dims])
    local = grid[np.ix_(*[held(d, mesh, at) for d in layout.dims])] if layout.dims else grid
    return cut(local.ravel(), layout.flat, mesh, at).tolist()


def flat_elements(region: Region, shape: tuple[int, ...]) -> list[int]:
    """The flat indices of a region's elements, ascending, by listing its boxes."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    out: list[int] = []
    for box in region.boxes:
        lists = [[i for a, b in s for i in range(a, b)] for s in box]
        out += [sum(i * s for i, s in zip(point, strides, strict=True)) for point in itertools.product(*lists)]
    assert len(set(out)) == len(out), "the boxes of a region are disjoint"
    return sorted(out)
