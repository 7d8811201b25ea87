"""Coverage dim by dim is the coverage of the regions of all ranks, and so are the shapes of what they hold."""

import pytest
from hypothesis import given

from tangram.layout import Layout, LayoutError, Mesh, Region, coverage, region
from tangram.layout.intervals import size
from tangram.layout.locate import local_shapes, partitions
from tests.layout.strategies import examples, sized_layouts


@examples(400)
@given(sized_layouts)
def test_it_is_what_all_ranks_say(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    if layout.flat or layout.at:
        with pytest.raises(LayoutError, match="dim by dim"):
            partitions(layout, mesh)
        return
    regions = {region(layout, mesh, rank) for rank in range(mesh.size)}
    if any(not mesh.independent(x, y) for dim in layout.dims for x in dim.axes for y in dim.axes - {x}):
        with pytest.raises(LayoutError, match="not independent"):
            partitions(layout, mesh)
        return
    assert partitions(layout, mesh) == coverage(Region.full(layout.shape), [r for r in regions if r]).exact
    shapes = {tuple(size(s) for s in r.boxes[0]) for r in regions if r}
    assert {s for s in local_shapes(layout, mesh) if 0 not in s} == shapes


@pytest.mark.parametrize(
    ("text", "shape", "exact"),
    [
        ("_/dp _/tp", (8, 8), True),
        ("_/dp/tp _", (5, 3), True),
        ("(_/dp + 2) _", (6, 4), False),  # the last two rows stand in every part
        ("(4/dp + 2/dp) _", (6, 4), True),
        ("_/dp _", (0, 4), True),
        ("", (), True),
    ],
)
def test_by_hand(text: str, shape: tuple[int, ...], exact: bool) -> None:
    assert partitions(Layout.parse(text).bind(shape), Mesh.parse("dp=2 tp=2")) is exact


def test_time_is_that_of_the_axes_that_cut() -> None:
    layout = Layout.parse("_/tp _/dp").bind((4096, 4096))
    assert partitions(layout, Mesh.parse("pp=1000000 dp=16 tp=8"))
    assert local_shapes(layout, Mesh.parse("pp=1000000 dp=16 tp=8")) == {(512, 256)}
