"""The mesh: the ranks of a job as a named grid, with as many views as the job has ways to name them.

`dp=4 tp=8 | edp=2 ep=8 etp=2` is two views of the same 32 ranks. In each view the rank is the row-major position, so an
axis is a digit of the rank: `(size, stride)`. Nothing here knows processes or devices; a mesh is arithmetic on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tangram.layout.errors import LayoutError
from tangram.layout.grammar import parse_mesh

Coords = tuple[tuple[str, int], ...]
"""Some coordinates of a rank, as sorted `(axis, index)` pairs. Axes that are not named are free."""


@dataclass(frozen=True)
class Mesh:
    """One or more row-major views of the same ranks; `Mesh.parse("dp=4 tp=2 | edp=2 ep=4")`.

    Raises LayoutError when the views have different numbers of ranks, an axis stands twice in a view, or one name
    means different ranks in two views.
    """

    views: tuple[tuple[tuple[str, int], ...], ...]

    def __post_init__(self) -> None:
        for view in self.views:
            names = [axis for axis, _ in view]
            if len(set(names)) != len(names):
                raise LayoutError(f"mesh {self}: an axis stands twice in one view")
            if any(n < 1 for _, n in view):
                raise LayoutError(f"mesh {self}: an axis has at least one rank")
        if len({math.prod(n for _, n in view) for view in self.views}) != 1:
            raise LayoutError(f"mesh {self}: the views have different numbers of ranks")
        _ = self.axes  # computed now, so that a name with two meanings is refused at once

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh that `text` names. Raises NotationError (with the character) or LayoutError."""
        return Mesh(parse_mesh(text))

    def __str__(self) -> str:
        return " | ".join(" ".join(f"{axis}={n}" for axis, n in view) for view in self.views)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(n for _, n in self.views[0])

    @cached_property
    def axes(self) -> Mapping[str, tuple[int, int]]:
        """`{axis: (size, stride)}` over all views; the coordinate of a rank is `rank // stride % size`."""
        out: dict[str, tuple[int, int]] = {}
        for view in self.views:
            stride = self.size
            for axis, n in view:
                stride //= n
                known = out.setdefault(axis, (n, stride))
                if known != (n, stride) and not known[0] == n == 1:
                    raise LayoutError(f"mesh {self}: axis {axis} means different ranks in two views")
        return out

    def axis(self, name: str) -> tuple[int, int]:
        """`(size, stride)` of one axis. Raises LayoutError when the mesh has no such axis."""
        try:
            return self.axes[name]
        except KeyError:
            raise LayoutError(f"no axis {name!r} in mesh {self}") from None

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank on every axis of every view."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside mesh {self} of {self.size} ranks")
        return {axis: rank // stride % n for axis, (n, stride) in self.axes.items()}

    def rank(self, coords: Mapping[str, int] | None = None, /, **more: int) -> int:
        """The rank at these coordinates; axes that are not given count as 0. Axes must be independent."""
        at = {**(coords or {}), **more}
        self.require_independent(at, f"coordinates {at}")
        for name, i in at.items():
            if not 0 <= i < self.axis(name)[0]:
                raise LayoutError(f"mesh {self} has no {name}={i}")
        return sum(i * self.axis(name)[1] for name, i in at.items())

    def independent(self, x: str, y: str) -> bool:
        """Whether two axes are different digits of the rank: each pair of their coordinates exists equally often."""
        (n, s), (m, t) = self.axis(x), self.axis(y)
        if n == 1 or m == 1:
            return x != y
        return s % (t * m) == 0 or t % (s * n) == 0

    def require_independent(self, names: Iterable[str], what: str) -> None:
        """Raise LayoutError unless the axes are pairwise independent; `what` begins the sentence."""
        seen: list[str] = []
        for name in names:
            self.axis(name)
            for other in seen:
                if name == other:
                    raise LayoutError(f"{what}: axis {name} is used twice")
                if not self.independent(name, other):
                    raise LayoutError(f"{what}: axes {other} and {name} are not independent on mesh {self}")
            seen.append(name)

    def ranks(self, coords: Coords = ()) -> Iterator[int]:
        """Every rank with these coordinates, ascending. Time in their number, not in the size of the mesh."""
        free = self._free_digits(tuple(a for a, _ in coords))
        for a, i in coords:
            if not 0 <= i < self.axis(a)[0]:
                raise LayoutError(f"mesh {self} has no {a}={i}")
        base = sum(i * self.axis(a)[1] for a, i in coords)

        def walk(level: int, at: int) -> Iterator[int]:
            if level == len(free):
                yield at
                return
            n, stride = free[level]
            for i in range(n):
                yield from walk(level + 1, at + i * stride)

        return walk(0, base)

    def nearest(self, coords: Coords, to: int) -> int:
        """The rank with these coordinates that agrees with rank `to` on all other digits.

        It is `to` itself when it has them; spread over `to` it balances the replicas. `to` may lie outside the mesh.
        """
        axes = self.axes
        free = self._free_digits(tuple([a for a, _ in coords]))
        to %= self.size
        return sum([i * axes[a][1] for a, i in coords]) + sum([to // s % n * s for n, s in free])

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these axes only, ascending, `rank` included: a process group."""
        self.require_independent(axes, f"peers along {', '.join(axes)}")
        at = self.coords(rank)
        base = rank - sum(at[a] * self.axis(a)[1] for a in axes)
        out = [base]
        for a in axes:
            n, stride = self.axis(a)
            out = [r + i * stride for r in out for i in range(n)]
        return tuple(sorted(out))

    def slice(self, **coords: int) -> tuple[Mesh, tuple[int, ...]]:
        """The sub-mesh at these coordinates: `(mesh of the other axes, its ranks in this mesh by position)`.

        Keeps each view that has all the named axes. Raises LayoutError when none has.
        """
        first = self.rank(coords)
        views = [tuple((a, n) for a, n in v if a not in coords) for v in self.views if coords.keys() <= dict(v).keys()]
        if not views:
            raise LayoutError(f"no view of mesh {self} has all of {', '.join(coords)}")
        ranks = tuple(self.ranks(tuple(sorted((a, first // self.axis(a)[1] % self.axis(a)[0]) for a in coords))))
        return Mesh(tuple(v or (("one", 1),) for v in views)), ranks

    @cached_property
    def _free(self) -> dict[tuple[str, ...], tuple[tuple[int, int], ...]]:
        """What `_free_digits` has worked out, kept here: hashing the mesh at each call costs more than the work."""
        return {}

    def _free_digits(self, fixed: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        """The digits of the rank that the fixed axes leave free, `((size, stride), ...)`, most significant first."""
        known = self._free.get(fixed)
        if known is not None:
            return known
        self.require_independent(fixed, "coordinates")
        out: list[tuple[int, int]] = []
        top = self.size
        for n, stride in sorted((self.axis(a) for a in fixed), key=lambda d: (-d[1], -d[0])):
            if n == 1:
                continue
            if top > n * stride:
                out.append((top // (n * stride), n * stride))
            top = stride
        if top > 1:
            out.append((top, 1))
        return self._free.setdefault(fixed, tuple(out))
