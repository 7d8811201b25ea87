"""Meshes against enumeration of their ranks: coordinates, groups, views that share ranks, refusals."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given

from tangram.layout import LayoutError, Mesh
from tests.layout.strategies import drawn, examples

# Two and three views of the same ranks: nested, crossing and not nested at all, with size-1 axes.
VIEWS = (
    "dp=4 tp=2 | edp=2 ep=2 etp=2",
    "dp=2 tp=4 | dp=2 kv=2 rep=2",
    "a=2 b=3 | c=3 d=2",
    "a=6 b=4 | c=4 d=6 | e=2 f=3 g=2 h=2",
    "a=2 one=1 b=2 | one=1 c=4",
    "a=1 | b=1 c=1",
    "",
)


def random_mesh(rng: Random, size: int) -> Mesh:
    """One to three views of up to 48 ranks: random factorisations of one number, in random order."""
    ranks = rng.choice([1, 2, 4, 6, 8, 12, 24, 36, 48][: 3 * size])
    views = []
    for v in range(rng.randint(1, 3)):
        left, sizes = ranks, []
        while left > 1 or rng.randrange(4) == 0:
            n = rng.choice([d for d in range(1, left + 1) if left % d == 0])
            sizes.append(n)
            left //= n
        rng.shuffle(sizes)
        views.append(tuple((f"{'abc'[v]}{i}", n) for i, n in enumerate(sizes)))
    return Mesh(tuple(views))


def table(mesh: Mesh) -> dict[str, np.ndarray]:
    """`{axis: coordinate of every rank}` by numpy's row-major grid."""
    out: dict[str, np.ndarray] = {}
    for view in filter(None, mesh.views):
        grid = np.indices([n for _, n in view]).reshape(len(view), -1)
        out.update({axis: grid[i] for i, (axis, _) in enumerate(view)})
    return out


def check(mesh: Mesh) -> None:
    at = table(mesh)
    assert mesh.size == math.prod(n for _, n in mesh.views[0])
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        assert coords == {axis: int(column[rank]) for axis, column in at.items()}
        for view in mesh.views:
            assert mesh.rank({axis: coords[axis] for axis, _ in view}) == rank
    for view in mesh.views:
        for x, y in itertools.combinations([axis for axis, _ in view], 2):
            assert mesh.independent(x, y)


def grids(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every choice of up to three axes that `independent` allows."""
    choices = itertools.chain.from_iterable(itertools.combinations(sorted(mesh.axes), n) for n in range(4))
    return [c for c in choices if all(mesh.independent(x, y) for x, y in itertools.combinations(c, 2))]


@pytest.mark.parametrize("text", VIEWS)
def test_coordinates_of_chosen_meshes(text: str) -> None:
    check(Mesh.parse(text))


@examples(200)
@given(drawn(random_mesh))
def test_coordinates_are_numpys(mesh: Mesh) -> None:
    check(mesh)
    assert Mesh.parse(str(mesh)) == mesh


@examples(200)
@given(drawn(random_mesh))
def test_independent_axes_make_a_grid(mesh: Mesh) -> None:
    """Axes are allowed together only where every combination of coordinates exists, each equally often."""
    at = table(mesh)
    for axes in grids(mesh):
        cells = list(zip(*[at[a].tolist() for a in axes], strict=True)) if axes else [()] * mesh.size
        counts = {c: cells.count(c) for c in set(cells)}
        assert len(counts) == math.prod(mesh.axis(a)[0] for a in axes)
        assert len(set(counts.values())) == 1


@examples(100)
@given(drawn(random_mesh))
def test_ranks_and_nearest_by_enumeration(mesh: Mesh) -> None:
    at = table(mesh)
    for axes in grids(mesh):
        for values in itertools.product(*[range(mesh.axis(a)[0]) for a in axes]):
            coords = tuple(zip(axes, values, strict=True))
            want = [r for r in range(mesh.size) if all(at[a][r] == i for a, i in coords)]
            assert list(mesh.ranks(coords)) == want
            assert mesh.rank(dict(coords)) == want[0]
            found = [mesh.nearest(coords, to) for to in range(mesh.size)]
            assert set(found) == set(want)
            assert all(found[r] == r for r in want)
            assert all(found.count(r) == mesh.size // len(want) for r in want), "spread evenly over the replicas"
            assert mesh.nearest(coords, mesh.size + 1) == mesh.nearest(coords, 1 % mesh.size)


@examples(100)
@given(drawn(random_mesh))
def test_peers_are_the_process_groups(mesh: Mesh) -> None:
    at = table(mesh)
    for view in mesh.views:
        names = [axis for axis, _ in view]
        for axes in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(3)):
            groups = set()
            for rank in range(mesh.size):
                want = [r for r in range(mesh.size) if all(at[a][r] == at[a][rank] for a in names if a not in axes)]
                assert list(mesh.peers(rank, *axes)) == want
                groups.add(mesh.peers(rank, *axes))
            assert sorted(r for g in groups for r in g) == list(range(mesh.size))


@examples(100)
@given(drawn(random_mesh))
def test_slices_are_numpys(mesh: Mesh) -> None:
    view = mesh.views[0]
    grid = np.arange(mesh.size).reshape([n for _, n in view])
    for n in range(min(len(view), 2) + 1):
        for kept in itertools.combinations(range(len(view)), n):
            for values in itertools.product(*[range(view[i][1]) for i in kept]):
                index = [slice(None)] * len(view)
                for i, value in zip(kept, values, strict=True):
                    index[i] = slice(value, value + 1)
                small, ranks = mesh.slice(**{view[i][0]: v for i, v in zip(kept, values, strict=True)})
                assert list(ranks) == grid[tuple(index)].ravel().tolist()
                assert small.size == len(ranks)
                for position, rank in enumerate(ranks):
                    whole = mesh.coords(rank)
                    assert {a: i for a, i in small.coords(position).items() if a != "one"} == {
                        a: whole[a] for a in small.axes if a != "one"
                    }


def test_slices_keep_the_views_that_have_the_axes() -> None:
    mesh = Mesh.parse("dp=2 tp=4 | dp=2 kv=2 rep=2 | x=8")
    small, ranks = mesh.slice(dp=1)
    assert (str(small), ranks) == ("tp=4 | kv=2 rep=2", (4, 5, 6, 7))
    small, ranks = mesh.slice(kv=1)
    assert (str(small), ranks) == ("dp=2 rep=2", (2, 3, 6, 7))
    small, ranks = mesh.slice(x=5)
    assert (str(small), ranks) == ("one=1", (5,))
    with pytest.raises(LayoutError, match="axes dp and x are not independent"):
        mesh.slice(dp=1, x=5)
    assert Mesh.parse("a=2 one=1 | b=2").slice(one=0)[1] == (0, 1)


def test_axes_of_crossing_views_are_dependent() -> None:
    mesh = Mesh.parse("a=2 b=3 | c=3 d=2")
    for x, y in (("a", "c"), ("a", "d"), ("b", "c"), ("c", "b")):
        assert not mesh.independent(x, y)
        with pytest.raises(LayoutError, match=f"axes {x} and {y} are not independent"):
            mesh.rank({x: 0, y: 0})
        with pytest.raises(LayoutError, match="not independent"):
            mesh.peers(0, x, y)
    assert mesh.independent("a", "b")
    assert not mesh.independent("a", "a")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp=2 dp=2", "an axis stands twice in one view"),
        ("dp=0", "an axis has at least one rank"),
        ("dp=4 tp=2 | dp=2 ep=2", "the views have different numbers of ranks"),
        ("dp=4 | ", "the views have different numbers of ranks"),
        ("dp=4 tp=2 | dp=2 ep=4", "axis dp means different ranks in two views"),
        ("dp=2 tp=2 | tp=2 dp=2", "axis .* means different ranks in two views"),
        ("dp=2 tp=1 | tp=2 dp=1", "axis .* means different ranks in two views"),
    ],
)
def test_meshes_that_make_no_sense_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        Mesh.parse(text)


def test_size_one_axes_may_stand_anywhere() -> None:
    mesh = Mesh.parse("one=1 a=4 | b=2 one=1 c=2")
    assert mesh.coords(3) == {"one": 0, "a": 3, "b": 1, "c": 1}


def test_coordinates_outside_the_mesh_are_refused() -> None:
    mesh = Mesh.parse("dp=2 tp=3")
    for rank in (-1, 6):
        with pytest.raises(LayoutError, match=f"rank {rank} is outside mesh dp=2 tp=3 of 6 ranks"):
            mesh.coords(rank)
    for coords in ({"tp": 3}, {"dp": -1}):
        with pytest.raises(LayoutError, match="has no"):
            mesh.rank(coords)
    for call in (lambda: mesh.rank(pp=0), lambda: mesh.peers(0, "pp"), lambda: mesh.slice(pp=0)):
        with pytest.raises(LayoutError, match="no axis 'pp' in mesh dp=2 tp=3"):
            call()
    with pytest.raises(LayoutError, match="axis tp is used twice"):
        mesh.peers(0, "tp", "tp")
    with pytest.raises(LayoutError, match="mesh dp=2 tp=3 has no tp=3"):
        mesh.ranks((("tp", 3),))
