"""Who holds the source: explicit pieces, or layouts over a mesh. Both answer one question in time of the overlaps.

`find(part, box, near)` gives the pieces that hold the elements of a cell's box, each element once. Whoever keeps
bytes some other way (files, other ranks, streams) implements the same method.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tangram.layout import Coords, Layout, Mesh, Region, intervals, nearest_holder, region
from tangram.layout.intervals import IntSet
from tangram.layout.locate import dim_owners, flat_owners, indices_of_rank, validate
from tangram.layout.region import Box, box_intersect, box_subtract
from tangram.relayout.mapping.cells import CellPart, DimIndex
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorFamily, Tensors


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor at one place.

    `place` names where the bytes are: a rank, a file and offset, anything hashable. `tensor` is a real name, or a
    family's pattern; then `region` has the indices as leading dims, and there is a buffer for each member that it
    touches.
    """

    place: Hashable
    tensor: str
    region: Region


def stands_there(seen: set[tuple[Hashable, str]], piece: Piece, family: TensorFamily) -> bool:
    """Whether a buffer of this piece is another's, be it once by its name and once with its whole family; marks it."""
    mark = (piece.place, piece.tensor)
    whole = (piece.place, family.name)
    member = (piece.place, f"{family.name} in part")
    if mark in seen or whole in seen or (piece.tensor == family.name and member in seen):
        return True
    seen.update({mark} if piece.tensor == family.name else {mark, member})
    return False


class Holders(Protocol):
    """The source of a plan."""

    def find(self, part: CellPart, box: Box, near: Hashable) -> list[tuple[Piece, Box]]:
        """Pieces of families with disjoint sub-boxes (over the cell's factors) of `box`, those at `near` first."""
        ...


# ---------------------------------------------------------------- layouts over a mesh


@dataclass(frozen=True)
class _Memo:
    """What a sharding has worked out, since ranks ask the same again.

    Owners along a dim by part (which is kept, so that its id stays its own), sets along a dim by coordinates, pieces.
    """

    dims: dict[tuple[int, int], tuple[CellPart, dict[Box, list[tuple[Coords, Box]]]]]
    sets: dict[tuple[str, int, tuple[int, ...]], IntSet]
    pieces: dict[tuple[str, int], Piece]


@dataclass(frozen=True)
class Sharding:
    """The tensors of one side, laid over a mesh: `layouts` by family name, bound to the families' shapes."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    tensors: Tensors
    _memo: _Memo = field(default_factory=lambda: _Memo({}, {}, {}), compare=False, repr=False)

    def piece(self, tensor: str, rank: int) -> Piece:
        """What a rank holds of a family (or of a plain tensor)."""
        known = self._memo.pieces.get((tensor, rank))
        if known is None:
            known = self._memo.pieces[tensor, rank] = Piece(rank, tensor, self._region(tensor, rank))
        return known

    def _region(self, tensor: str, rank: int) -> Region:
        """`region`, from sets along dims that many ranks share."""
        layout = self._layout(tensor)
        if layout.flat or layout.at:
            return region(layout, self.mesh, rank, self.tensors.families[tensor].family_dims)
        at = self.mesh.coords(rank)
        sets: list[IntSet] = []
        for i, dim in enumerate(layout.dims):
            key = (tensor, i, tuple([at[a] for a in dim.axes]))
            s = self._memo.sets.get(key)
            if s is None:
                s = self._memo.sets[key] = indices_of_rank(dim, self.mesh, at)
            sets.append(s)
        return Region((tuple(sets),)) if all(sets) else Region()

    def _layout(self, tensor: str) -> Layout:
        try:
            return self.layouts[tensor]
        except KeyError:
            raise RelayoutError(f"the sharding has no tensor {tensor}") from None

    def pieces(self, rank: int) -> list[Piece]:
        """What a rank holds of everything; nothing is listed where it holds nothing."""
        found = [self.piece(name, rank) for name in self.layouts]
        return [p for p in found if p.region]

    def find(self, part: CellPart, box: Box, near: Hashable) -> list[tuple[Piece, Box]]:
        """`Holders.find`. A rank `near` picks the replica: itself where it is one, else spread over the ranks."""
        layout = self._layout(part.tensor)
        to = near if isinstance(near, int) else 0
        per_dim = [self._dim(part, i, tuple([box[k] for k in part.slots[i]])) for i in range(len(part.dims))]
        out: list[tuple[Piece, Box]] = []
        for combo in itertools.product(*per_dim):
            coords = tuple(sorted([pair for c, _ in combo for pair in c]))
            values: list[IntSet] = list(box)
            for slots, (_, sets) in zip(part.slots, combo, strict=True):
                for slot, s in zip(slots, sets, strict=True):
                    values[slot] = s
            if layout.flat:
                out += self._flat(part, coords, tuple(values), to)
            else:
                out.append((self.piece(part.tensor, nearest_holder(layout, self.mesh, coords, to)), tuple(values)))
        return out

    def _dim(self, part: CellPart, i: int, sets: Box) -> list[tuple[Coords, Box]]:
        """Who holds these factor values along one dim: a proved partition. Kept, as ranks repeat it."""
        _, known = self._memo.dims.setdefault((id(part), i), (part, {}))
        found = known.get(sets)
        if found is None:
            found = known[sets] = _owners_of(part.dims[i], self.layouts[part.tensor], i, sets, self.mesh)
        return found

    def _flat(self, part: CellPart, coords: Coords, box: Box, to: int) -> list[tuple[Piece, Box]]:
        layout, lead = self.layouts[part.tensor], self.tensors.families[part.tensor].family_dims
        out: list[tuple[Piece, Box]] = []
        known = dict(coords)
        if any(axis not in known for dim in layout.dims for axis in dim.axes):  # everybody's part of a cut sum
            at = self.mesh.coords(nearest_holder(layout, self.mesh, coords, to))
            coords = tuple(sorted((axis, at[axis]) for axis in frozenset[str]().union(*(d.axes for d in layout.dims))))
        for more, inside in flat_owners(layout, self.mesh, coords, part.indices(box), lead):
            for found in part.boxes(inside):
                common = box_intersect(found, box)
                if common is not None:
                    out.append((self.piece(part.tensor, nearest_holder(layout, self.mesh, more, to)), common))
        return out


def _owners_of(index: DimIndex, layout: Layout, i: int, sets: Box, mesh: Mesh) -> list[tuple[Coords, Box]]:
    wanted = index.indices(sets)
    out: list[tuple[Coords, Box]] = []
    left = wanted
    for coords, theirs in dim_owners(layout.dims[i], wanted, mesh):
        mine = intervals.intersect(theirs, left)  # an element that several ranks hold comes from the first
        left = intervals.subtract(left, mine)
        for found in index.boxes(mine):
            common = tuple(intervals.intersect(a, b) for a, b in zip(found, sets, strict=True))
            if all(common):
                out.append((coords, common))
    if left:
        raise RelayoutError(f"on mesh {mesh} no rank holds {intervals.show(left)} of dim {i} of {layout}")
    return out


def shard(
    mesh: Mesh | str, layouts: Mapping[str, str | Layout], tensors: Tensors, **sizes: int | tuple[int, ...]
) -> Sharding:
    """Lay tensors over a mesh. Raises LayoutError or RelayoutError naming the tensor.

    `layouts` gives a layout for each family by the name of its pattern, indices first; a key with wild cards
    (`{x*}.norm`) serves every name it fits that no other key names, first come first served. `sizes` are factors (and
    lists of index maps) that the shapes leave open.
    """
    grid = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    patterns = {key: ".+".join(map(re.escape, re.split(r"\{\w+\*\}", key))) for key in layouts if "*" in key}
    wild = [(re.compile(pattern), layouts[key]) for key, pattern in patterns.items()]
    unknown = [key for key in layouts if "*" not in key and key not in tensors.families]
    if unknown:
        raise RelayoutError(f"there is a layout for {unknown[0]}, but no such tensor")
    out: dict[str, Layout] = {}
    for name, family in tensors.families.items():
        text = layouts.get(name)
        if text is None:
            text = next((t for regex, t in wild if regex.fullmatch(name)), None)
        if text is None:
            raise RelayoutError(f"there is no layout for {name}; to keep it whole on every rank, give it '...'")
        layout = Layout.parse(text) if isinstance(text, str) else text
        if layout.pending:
            op, axis = layout.pending[0]
            raise RelayoutError(
                f"{name}: no rank of {layout} has the values before the {op} over {axis} is done; reduce it first"
            )
        try:
            out[name] = validate(layout.bind(family.spec.shape, **sizes), grid)
        except ValueError as error:
            raise RelayoutError(f"{name}: {error}") from None
    return Sharding(grid, out, tensors)


# ---------------------------------------------------------------- explicit pieces


@dataclass(frozen=True)
class PieceIndex:
    """Explicit pieces, found through an index over their hulls, dim by dim: a grid of shards is searched as a grid."""

    pieces: Sequence[Piece]
    tensors: Tensors

    @cached_property
    def _by_tensor(self) -> dict[str, _Node]:
        lifted: dict[str, list[Piece]] = {}
        seen: set[tuple[Hashable, str]] = set()
        for p in self.pieces:
            family, held = self.tensors.lift(p.tensor, p.region)
            if stands_there(seen, p, family):
                raise RelayoutError(
                    f"two pieces of {p.tensor} have the same place {p.place!r}; give each a place of its own"
                )
            if held:
                lifted.setdefault(family.name, []).append(Piece(p.place, family.name, held))
        return {name: _node(pieces, 0) for name, pieces in lifted.items()}

    def find(self, part: CellPart, box: Box, near: Hashable) -> list[tuple[Piece, Box]]:
        """`Holders.find`. Pieces at `near` come first; an element that several hold is taken from one of them."""
        root = self._by_tensor.get(part.tensor)
        wanted = part.indices(box)
        if root is None or not all(wanted):
            return []
        hulls = [(s[0][0], s[-1][1]) for s in wanted]
        candidates = sorted(_search(root, hulls, 0), key=lambda p: (p.place != near, _apart(p.place, near)))
        left = [box]
        out: list[tuple[Piece, Box]] = []
        for piece in candidates:
            for inside in piece.region.boxes:
                common = box_intersect(inside, wanted)
                if common is None:
                    continue
                for have in part.boxes(common):
                    got = [b for x in left if (b := box_intersect(x, have)) is not None]
                    out += [(piece, b) for b in got]
                    if got:
                        left = [z for x in left for z in box_subtract(x, have)]
            if not left:
                break
        return out


def _apart(place: Hashable, near: Hashable) -> int:
    """How far a rank is from another: replicas are spread over who asks. Places that are no ranks are all alike."""
    return place ^ near if isinstance(place, int) and isinstance(near, int) else 0


@dataclass(frozen=True)
class _Node:
    """Pieces by their hull along one dim: distinct hulls by start, the running maximum of stops, what is below."""

    starts: list[int]
    tops: list[int]
    hulls: list[tuple[int, int]]
    below: list[_Node | list[Piece]]


def _node(pieces: Sequence[Piece], dim: int) -> _Node:
    groups: dict[tuple[int, int], list[Piece]] = {}
    for p in pieces:
        hull = p.region.hull
        groups.setdefault(hull[dim] if hull else (0, 1), []).append(p)
    hulls = sorted(groups)
    tops = list(itertools.accumulate((b for _, b in hulls), max))
    ndim = len(pieces[0].region.boxes[0])
    below: list[_Node | list[Piece]] = [
        _node(groups[h], dim + 1) if dim + 1 < ndim and len(groups[h]) > 1 else groups[h] for h in hulls
    ]
    return _Node([a for a, _ in hulls], tops, hulls, below)


def _search(node: _Node, wanted: Sequence[tuple[int, int]], dim: int) -> Iterable[Piece]:
    lo, hi = wanted[dim] if wanted else (0, 1)
    for i in range(bisect_right(node.starts, hi - 1) - 1, -1, -1):
        if node.tops[i] <= lo:
            break
        if node.hulls[i][1] > lo:
            below = node.below[i]
            yield from _search(below, wanted, dim + 1) if isinstance(below, _Node) else below
