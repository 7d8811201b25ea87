"""Random layouts: every element is held, by as many ranks as it should be, and `owners` finds exactly those ranks."""

import math
from random import Random

import pytest
from hypothesis import given

from tangram.layout import Layout, LayoutError, Mesh, Owner, Region, nearest_holder, owners, ranks_of, region
from tests.layout import oracle
from tests.layout.strategies import drawn, examples, random_region, random_sized_layout, sized_layouts

Case = tuple[Mesh, Layout]
Wanted = tuple[Mesh, Layout, Region, int]


def random_question(rng: Random, size: int) -> Wanted:
    """A layout, a region of its tensor, and how many leading dims are a family's."""
    mesh, layout = random_sized_layout(rng, size)
    return (
        mesh,
        layout,
        random_region(rng, layout.shape, size),
        rng.randint(0, len(layout.dims) - 1) if layout.dims else 0,
    )


@examples(900)
@given(sized_layouts)
def test_regions_are_the_oracles(case: Case) -> None:
    mesh, layout = case
    assert Layout.parse(str(layout)) == layout
    assert layout.bind(layout.shape) == layout
    count = [0] * math.prod(layout.shape)
    for rank in range(mesh.size):
        found = region(layout, mesh, rank)
        want = oracle.elements(layout, mesh, rank)
        assert oracle.flat_elements(found, layout.shape) == sorted(want), f"{layout} on {mesh}, rank {rank}"
        assert found.size == len(want)
        for i in want:
            count[i] += 1
    assert min(count, default=1) >= 1, "every element is held"
    if not any(len(node.terms) > 1 for dim in layout.dims for node in dim.nodes):
        free = mesh.size // math.prod(mesh.axis(a)[0] for a in layout.axes)
        for axis, allowed in layout.at:
            free = free // mesh.axis(axis)[0] * len(allowed)
        assert set(count) <= {free}, "the axes that do not cut are its replicas"


@examples(900)
@given(drawn(random_question))
def test_owners_are_the_ranks_that_hold_it(case: Wanted) -> None:
    mesh, layout, wanted, family = case
    shape = layout.shape
    found = owners(layout, mesh, wanted, family)
    got: dict[int, list[int]] = {rank: [] for rank in range(mesh.size)}
    for owner in found:
        mine = [i for box in owner.boxes for i in oracle.flat_elements(Region.of([box]), shape)]
        assert mine, "no owner of nothing"
        ranks = list(ranks_of(layout, mesh, owner))
        assert len(set(ranks)) == len(ranks)
        for rank in ranks:
            got[rank] += mine
        for to in (0, 1, mesh.size - 1, mesh.size + 3):
            near = nearest_holder(layout, mesh, owner.coords, to)
            assert near in ranks
            assert near == to or to not in ranks, "the rank itself where it is one"
    want = set(oracle.flat_elements(wanted, shape))
    for rank in range(mesh.size):
        held = oracle.flat_elements(region(layout, mesh, rank, family), shape)
        assert sorted(got[rank]) == sorted(want.intersection(held)), f"{layout} on {mesh}, rank {rank}, {found}"


@pytest.mark.parametrize(
    ("text", "mesh_text", "shape", "known"),
    [
        ("(g/kv (r/rep + 1 + 1) d) h", "dp=2 tp=4 | dp=2 kv=2 rep=2", (48, 3), {"g": 2, "d": 4}),
        ("e/ep h/edp (2 f/etp)", "dp=4 tp=2 | edp=2 ep=2 etp=2", (3, 4, 10), {}),
        ("(a/tp + b/kv) c/dp", "dp=2 tp=4 | dp=2 kv=2 rep=2", (16, 2), {"a": 8}),
        ("(a/tp + b) //dp", "dp=2 tp=2", (7,), {"a": 4}),
        ("(a/tp + b/cp) c //dp", "dp=2 tp=2 cp=2", (7, 3), {"a": 4}),
        ("((a/tp + b) c/cp)/dp", "dp=2 tp=2 cp=2", (21,), {"a": 4, "c": 3}),
        ("v/tp h @pp=0,3", "pp=4 tp=2", (5, 2), {}),
        ("", "dp=4", (), {}),
    ],
)
def test_owners_of_chosen_layouts(text: str, mesh_text: str, shape: tuple[int, ...], known: dict[str, int]) -> None:
    mesh, layout = Mesh.parse(mesh_text), Layout.parse(text).bind(shape, **known)
    test_owners_are_the_ranks_that_hold_it.hypothesis.inner_test((mesh, layout, Region.full(shape), 0))
    for rank in range(mesh.size):
        part = region(layout, mesh, rank)
        test_owners_are_the_ranks_that_hold_it.hypothesis.inner_test((mesh, layout, part, 0))


def test_replicas_are_not_listed_and_are_spread() -> None:
    mesh, layout = Mesh.parse("rep=4 dp=2"), Layout.parse("a/dp").bind((8,))
    assert owners(layout, mesh, Region.parse("[1:6]")) == [
        Owner((("dp", 0),), ((((1, 4),),),)),
        Owner((("dp", 1),), ((((4, 6),),),)),
    ]
    assert [nearest_holder(layout, mesh, (("dp", 1),), to) for to in range(8)] == [1, 1, 3, 3, 5, 5, 7, 7]
    placed = Layout.parse("a/dp @rep=1,3").bind((8,))
    assert [nearest_holder(placed, mesh, (("dp", 1),), to) for to in range(8)] == [3, 7, 3, 3, 3, 7, 7, 7]


def test_a_question_that_does_not_fit_the_tensor_is_refused() -> None:
    mesh, layout = Mesh.parse("dp=2"), Layout.parse("a/dp b").bind((8, 2))
    for text in ("[0:4]", "[0:9 0:2]", "[0:1 2:3]"):
        with pytest.raises(LayoutError, match=r"\[8, 2\]"):
            owners(layout, mesh, Region.parse(text))
    with pytest.raises(LayoutError, match="no axis 'dp'"):
        owners(layout, Mesh.parse("tp=2"), Region.full((8, 2)))


def test_thousands_of_ranks_cost_only_the_overlaps() -> None:
    """One rank of 16,384 asks another layout of 16,384 ranks: a handful of owners, found without listing ranks."""
    layout = Layout.parse("(g/tp (r + 1 + 1) d)/fsdp h/cp").bind((64 * 10 * 128, 8192), g=64, d=128)
    mine = region(layout, Mesh.parse("pp=8 fsdp=64 cp=4 tp=8"), 12345)
    mesh = Mesh.parse("dp=2048 tp=8")
    found = owners(Layout.parse("o/tp/dp h").bind(layout.shape), mesh, mine)
    assert 1 <= len(found) <= 64
    assert Region.of([box for owner in found for box in owner.boxes]) == mine
