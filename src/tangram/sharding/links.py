"""What parts of a cut factor need of each other: which cuts allow it, and how many bytes pass.

    halo    what a part's windows read and other parts hold (`tangram.sharding.halo`), all at once
    scan    the totals of the other parts, one slice of the results each (`tangram.sharding.scan`)

Bytes are exact averages over the ranks: sets are counted, rank by rank of the axes that cut the factor. Over several
axes each counts what passes between ranks of which it is the first axis that tells them apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from tangram.layout import Mesh
from tangram.layout.intervals import IntSet, intersect, size, subtract, take
from tangram.layout.maps import MAPS
from tangram.layout.sizes import check_cut
from tangram.layout.syntax import Cut
from tangram.sharding.bind import Bound
from tangram.sharding.calls import Call
from tangram.sharding.cost import results
from tangram.sharding.reading import Held
from tangram.sharding.trees import Tree, axes_of
from tangram.sharding.windows import Window

IN_ORDER = ("", "sizes")
"""Maps by which each part is one stretch, behind those before."""


def refusal(bound: Bound, factor: str, tree: Tree) -> str:
    """Why a factor whose parts need each other cannot be cut so; nothing where it can."""
    if not isinstance(tree, tuple):
        return "it is cut inside a bracket, and its parts need each other"
    for cut in tree:
        if cut.map not in IN_ORDER:
            return f"it is cut {cut.map}, and its parts need each other: they have to be chunks"
        window = bound.windows.get(factor)
        if cut.map and window is not None and window.n != bound.sizes[factor]:
            return f"its sizes count {window.n} elements, and the result has {bound.sizes[factor]}"
    return ""


class Read(NamedTuple):
    """How many elements of a dim a rank reads, on average."""

    needed: float
    held: float
    """Of those, that it holds itself."""
    missing: Mapping[str, float]
    """By axis: of those that are left, between which of its ranks they pass."""


def read(window: Window, m: int, tree: Sequence[Cut], mesh: Mesh) -> Read:
    """What windows over a dim read whose result has `m` elements and is cut like this, as the input is."""
    return _read(window, m, tuple(tree), tuple([mesh.axes[cut.axis][0] for cut in tree]))


@lru_cache(1 << 12)
def _read(window: Window, m: int, tree: tuple[Cut, ...], ranks: tuple[int, ...]) -> Read:
    needed = held = 0
    missing = dict.fromkeys([cut.axis for cut in tree], 0)
    for at in itertools.product(*map(range, ranks)):
        wanted = window.reads(_stages(m, tree, ranks, at)[-1])
        needed += size(wanted)
        own = _stages(window.n, tree, ranks, at)
        held += size(intersect(wanted, own[-1]))
        for cut, (outer, inner) in zip(tree, itertools.pairwise(own), strict=True):
            missing[cut.axis] += size(intersect(wanted, subtract(outer, inner)))
    count = math.prod(ranks)
    return Read(needed / count, held / count, {axis: n / count for axis, n in missing.items()})


def _stages(n: int, tree: Sequence[Cut], ranks: Sequence[int], at: Sequence[int]) -> list[IntSet]:
    """What a rank holds before the first cut and after each."""
    found: list[IntSet] = [((0, n),) if n else ()]
    for cut, k, i in zip(tree, ranks, at, strict=True):
        local = size(found[-1])
        found.append(take(found[-1], MAPS[cut.map].holds(local, k, i, check_cut(cut, local, k))))
    return found


def price(
    call: Call, bound: Bound, inputs: Sequence[Held], axis: str, factor: str, tree: Tree, mesh: Mesh
) -> float:  # fmt: skip
    """What passes over an axis when a factor is cut, by the inputs' own layouts."""
    window = bound.windows.get(factor)
    place = 0 if window is None else window.place
    held, tensor = next((one, call.tensors[place]) for one in inputs if one.place == place)
    assert tensor is not None
    ways = math.prod(
        mesh.axes[a][0] for a, state in held.where.items() if state.kind == "cut" and state.factor != factor
    )
    if window is None:
        return tensor.numel() / bound.sizes[factor] / ways * _itemsize(call, bound, factor) * (mesh.axes[axis][0] - 1)
    assert isinstance(tree, tuple)
    return tensor.nbytes / window.n / ways * read(window, bound.sizes[factor], tree, mesh).missing[axis]


def halos(call: Call, bound: Bound, trees: Mapping[str, Tree], mesh: Mesh) -> dict[int, list[tuple[str, float]]]:
    """What a rank receives of each input that windows read, by axis."""
    found: dict[int, list[tuple[str, float]]] = {}
    reads = {
        f: read(w, bound.sizes[f], tree, mesh)
        for f, w in bound.windows.items()
        if isinstance(tree := trees.get(f), tuple)
    }
    for factor, one in reads.items():
        place = bound.windows[factor].place
        tensor = call.tensors[place]
        assert tensor is not None
        nbytes, before = float(tensor.element_size()), True
        for n, factors in zip(tensor.shape, bound.inputs[place] or (), strict=True):
            other = reads.get(factors[0]) if len(factors) == 1 else None
            if factors == (factor,):
                before = False
            elif other is not None:  # what is read of a corner is counted with the dim that comes first
                nbytes *= other.held if before else other.needed
            else:
                nbytes *= n / _ways(factors, trees, mesh)
        found.setdefault(place, []).extend((axis, nbytes * n) for axis, n in one.missing.items())
    return found


def scans(call: Call, bound: Bound, trees: Mapping[str, Tree], mesh: Mesh) -> list[tuple[str, float]]:
    """What a rank receives of the totals of other parts, by axis."""
    found: list[tuple[str, float]] = []
    for factor in bound.scans:
        if factor in trees:
            others = [f for factors in bound.outputs[0] for f in factors if f != factor]
            tensor = call.tensors[0]
            assert tensor is not None
            slices = tensor.numel() / bound.sizes[factor] / _ways(others, trees, mesh)
            nbytes = slices * _itemsize(call, bound, factor)
            found += [(axis, nbytes * (mesh.axes[axis][0] - 1)) for axis in axes_of(trees[factor])]
    return found


def _ways(factors: Sequence[str], trees: Mapping[str, Tree], mesh: Mesh) -> int:
    return math.prod(mesh.axes[axis][0] for f in factors for axis in axes_of(trees.get(f, ())))


def _itemsize(call: Call, bound: Bound, factor: str) -> int:
    """Bytes of one element of all results that have a factor."""
    made = [
        one
        for one, dims in zip(results(call) or call.tensors[:1], bound.outputs, strict=False)
        if any(factor in factors for factors in dims)
    ]
    return sum(one.element_size() for one in made if isinstance(one, Tensor))
