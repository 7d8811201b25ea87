"""Windows over a cut dim: which elements a part reads, what that costs, and that it is right."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.layout import Layout, Mesh
from tangram.layout.errors import NotationError
from tangram.layout.intervals import elements, intersect, size, span
from tangram.layout.rule import Rule
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops import local_call
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.bind import BoundOp, RuleError
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import Tree, tree_of
from tangram.sharding.ops.rank_part import of_result, part_of, stands
from tangram.sharding.ops.rule_table import builtin, parse_lines
from tangram.sharding.ops.windows import SlidingWindow
from tangram.sharding.proof.execute import check as check_cut
from tangram.sharding.proof.execute import run_reference, ways
from tangram.sharding.proof.propagated import check
from tangram.sharding.proof.propagated import part_of as proved_part
from tangram.sharding.propagation.halo import needed
from tangram.sharding.propagation.neighbour_needs import read as read_by
from tangram.sharding.propagation.propagate import Propagation, options, propagate

aten = torch.ops.aten
CONV = "convolution : b i ...', o i ...^ -> b o ... ; window(1 stride padding dilation) filled"


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def conv(
    n: int, extent: int, stride: int = 1, padding: int = 0, dilation: int = 1, *, transposed: bool = False
) -> OpCall:
    arguments = (some(2, 3, n), some(3, 3, extent), None, [stride], [padding], [dilation], transposed, [0], 1)
    return OpCall.of(aten.convolution.default, arguments, {})


def propagated(call: OpCall, mesh: str, *layouts: str | None) -> Propagation:
    given = [None if text is None else Layout.parse(text) for text in layouts]
    given += [None] * (len(call.tensors) - len(given))
    return propagate(builtin(), call, given, Mesh.parse(mesh))


@pytest.mark.parametrize("text", [CONV, "avg_pool2d : ... h' w' -> ... h w ; window(kernel_size stride)"])
def test_a_rule_with_windows_prints_as_it_parses(text: str) -> None:
    assert str(Rule.parse(text)) == text
    assert Rule.parse(str(Rule.parse(text))) == Rule.parse(text)


def test_what_windows_cannot_say_is_refused() -> None:
    with pytest.raises(NotationError, match="only inputs are read beyond a part's borders"):
        Rule.parse("avg_pool2d : ... h w -> ... h' w ; window(kernel_size)")
    call = OpCall.of(aten.avg_pool2d.default, (some(3, 4, 5), [2, 2]), {})
    for line, words in (
        ("avg_pool2d : ... h' w -> ... h w", "has a ' and none of the notes window, spread, pad"),
        ("avg_pool2d : ... (h w)' -> ... h w ; window(kernel_size)", "has a ' on what is not one factor"),
    ):
        with pytest.raises(RuleError, match=words):
            rule_table.bound(builtin().with_lines(parse_lines(line)), call)


@st.composite
def windows(draw: st.DrawFn) -> SlidingWindow:
    extent, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    n = draw(st.integers(1, 12))
    before, behind = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return SlidingWindow(0, 0, 0, n, extent, stride, before, dilation, behind, draw(st.booleans()))


def read(window: SlidingWindow, o: int) -> set[int]:
    """What one element is made of, by the definition; also outside of the tensor."""
    taps = range(0, window.dilation * window.extent, window.dilation)
    if window.spread:  # any place whose spread reaches it
        return {i for i in range(-40, 60) if o in {i * window.stride - window.before + tap for tap in taps}}
    return {o * window.stride - window.before + tap for tap in taps}


@given(windows(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_part_reads_the_hull_of_its_windows(window: SlidingWindow, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, max(0, window.m - 1)))
    hi = data.draw(st.integers(lo, window.m))
    union = {i for o in range(lo, hi) for i in read(window, o)}
    hull = range(min(union), max(union) + 1) if union else range(0)
    found, wanted = elements(window.reads(span(lo, hi))), [i for i in hull if 0 <= i < window.n]
    if window.spread and window.dilation > 1:  # an element may be spread around a part and reach none of it
        assert {*found} >= {*wanted}
        assert len(found) <= len(wanted) + 2 * window.dilation
    else:
        assert found == wanted
    if lo < hi:
        start, stop = window.run_on(lo, hi)
        assert all(start <= i < stop for i in union)
        first = window.first(start)
        made = (stop - start - 1) * window.stride + window.reach + 1 if window.spread else 0
        assert first <= lo
        assert hi <= first + made if window.spread else first == lo


POOLS: dict[str, Any] = {
    "max_pool2d_with_indices": lambda n, k, s, p, d, c: (some(2, n, n), [k, k], [s, s], [p, p], [d, d], c),
    "avg_pool2d": lambda n, k, s, p, d, c: (some(2, n, n), [k, k], [s, s], [p, p], c),
    "im2col": lambda n, k, s, p, d, c: (some(2, 3, n, n), [k, k], [d, d], [p, p], [s, s]),
}


@given(st.sampled_from(sorted(POOLS)), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_results_have_the_sizes_that_torch_gives_them(name: str, n: int, k: int, s: int, data: st.DataObject) -> None:
    padding, dilation = data.draw(st.integers(0, k // 2)), data.draw(st.integers(1, 3))
    call = OpCall.of(getattr(aten, name).default, POOLS[name](n, k, s, padding, dilation, data.draw(st.booleans())), {})
    try:
        result = call.run()[0]
    except RuntimeError:  # windows larger than the tensor
        return
    bound = rule_table.bound(builtin(), call)
    sizes = [math.prod(bound.sizes[f] for f in dims) for dims in bound.outputs[0] if dims]
    assert sizes == [n for n, dims in zip(result.shape, bound.outputs[0], strict=True) if dims]


def test_a_part_may_read_more_than_its_neighbour_holds() -> None:
    call = conv(6, 5, padding=2)
    bound, cuts, mesh = rule_table.bound(builtin(), call), {".1": (Cut("x"),)}, Mesh.parse("x=5")
    parts = [part_of(bound, cuts, mesh, rank) for rank in range(5)]
    assert [needed(bound, part, ".1") for part in parts] == [((0, 4),), ((0, 6),), ((2, 6),), (), ()]
    assert [stands(part, ".1", 6) for part in parts] == [((0, 2),), ((2, 4),), ((4, 6),), (), ()]


def test_each_stretch_of_a_part_has_a_halo_of_its_own() -> None:
    call = conv(12, 3, padding=1)
    bound, mesh = rule_table.bound(builtin(), call), Mesh.parse("x=2")
    parts = [part_of(bound, {".1": (Cut("x", "zigzag"),)}, mesh, rank) for rank in range(2)]
    assert [needed(bound, part, ".1") for part in parts] == [((0, 4), (8, 12)), ((2, 10),)]
    apart = part_of(bound, {".1": (Cut("x", "cyclic", (2,)),)}, mesh, 0)
    assert needed(bound, apart, ".1") == ((0, 11),)  # where two windows overlap, an element comes once


@pytest.mark.parametrize(
    ("n", "made", "text", "wanted"),
    [
        (8, 6, "b/x:[3 5]", "b/x:[2 4]"),
        (24, 12, "b/x:[10 14]", "b/x:[5 7]"),
        (24, 11, "b/x:zigzag[6 18]", "b/x:zigzag[3 8]"),
        (24, 11, "b/x:zigzag/y", "b/x:zigzag/y"),
        (24, 11, "b/x:cyclic[4]", "b/x:cyclic[4]"),
        (24, 24, "(2 b/x)", "(2 b/x)"),
        (24, 11, "(2 b/x)", "b/x:strided[2]"),
        (24, 11, "(b=12/x + c=12/x)", None),
        (24, 11, "b/y/x:[4 8]", None),
    ],
)
def test_a_result_is_cut_by_the_map_of_what_it_is_made_of(n: int, made: int, text: str, wanted: str | None) -> None:
    def tree(text: str, n: int) -> Tree:
        return tree_of(Layout.parse(text).bind((n,)).dims[0], Mesh.parse("x=2 y=2"), ())

    assert of_result(tree(text, n), n, made) == (None if wanted is None else tree(wanted, made))


def brute(bound: BoundOp, n: int, others: int, mesh: Mesh, tree: tuple[Cut, ...]) -> float:
    """Bytes that a rank receives, by sets of elements."""
    total = 0
    for rank in range(mesh.size):
        part = part_of(bound, {".1": tree}, mesh, rank)
        wanted, own = elements(needed(bound, part, ".1")), elements(stands(part, ".1", n))
        total += len({*wanted} - {*own})
    return total * others * 8 / mesh.size


@pytest.mark.parametrize("n", [7, 8, 13])
@pytest.mark.parametrize(("extent", "stride", "padding", "dilation"), [(3, 1, 1, 1), (3, 2, 0, 2), (4, 3, 2, 1)])
def test_what_passes_is_what_is_needed_and_not_held(
    n: int, extent: int, stride: int, padding: int, dilation: int
) -> None:
    call = conv(n, extent, stride, padding, dilation)
    for mesh, layout, tree in (
        ("x=3", "b c h/x", (Cut("x"),)),
        ("x=2 y=3", "b c h/y/x", (Cut("y"), Cut("x"))),
    ):
        one = propagated(call, mesh, layout)
        assert check(one, call.run()) is None
        if one.choices["x"].kind != "cut":  # of small tensors that is cheaper
            continue
        assert {kind for kind, _ in one.moved} <= {"halo"}
        assert one.nbytes == pytest.approx(brute(one.bound, n, 6, Mesh.parse(mesh), tree))


def test_two_dims_at_once_have_their_corners() -> None:
    call = OpCall.of(aten.avg_pool2d.default, (some(2, 8, 8), [3, 3], [1, 1], [1, 1]), {})
    one = propagated(call, "x=2 y=2", "c h/x w/y")
    assert check(one, call.run()) is None
    assert [str(layout) for layout in one.outputs] == ["c=2 h=8/x w=8/y"]
    assert one.nbytes == 2 * 8 * (5 * 5 - 4 * 4)  # each rank reads 5 by 5 and holds 4 by 4
    assert one.relayouts[0].source == one.relayouts[0].target


def test_the_result_is_cut_as_the_input_is_though_its_size_is_another() -> None:
    one = propagated(conv(24, 3, stride=2), "x=3", "b c length/x")
    assert str(one.outputs[0]) == "b=2 _=3 _=11/x"
    assert size(one.bound.windows[".1"].reads(((4, 8),))) == 9
    assert check(one, one.call.run()) is None


def test_windows_cost_no_more_than_to_gather() -> None:
    wide = propagated(conv(6, 5, padding=2), "x=6", "b c h/x")  # a window is nearly all
    assert wide.choices["x"].kind == "cut"
    assert wide.moved["halo", "x"] < 6 * 8 * 5
    whole_ = propagated(conv(6, 11, padding=5), "x=6", "b c h/x")
    assert whole_.nbytes == 6 * 8 * 5
    assert check(whole_, whole_.call.run()) is None


MAPS = ("zigzag", "zigzag[5 0 19]", "strided[2]", "strided[3]", "cyclic[4]", "[1 0 23]", "[3 20 1]")


@pytest.mark.parametrize("text", [*(f"h/x:{one}" for one in MAPS), "(2 h/x)", "(3 h/x)"])
@pytest.mark.parametrize("numbers", [(3, 1, 1, 1), (3, 1, 0, 1), (3, 2, 1, 1), (2, 2, 0, 1)], ids=str)
def test_by_every_map_windows_read_across_and_the_result_lies_so(text: str, numbers: tuple[int, int, int, int]) -> None:
    call = conv(24, *numbers)
    one = propagated(call, "x=3", f"b c {text}")
    assert check(one, call.run()) is None
    assert (one.choices["x"].kind, {kind for kind, _ in one.moved} <= {"halo"}) == ("cut", True)
    tree, mesh = one.trees[".1"], Mesh.parse("x=3")
    parts = [proved_part(one, rank) for rank in range(3)]
    missing = [{*elements(needed(one.bound, p, ".1"))} - {*elements(stands(p, ".1", 24))} for p in parts]
    assert one.nbytes == pytest.approx(sum(map(len, missing)) * 6 * 8 / 3)
    assert one.nbytes < 6 * 8 * 16  # to gather
    assert read_by(one.bound.windows[".1"], one.bound.sizes[".1"], tree, mesh).missing["x"] == one.nbytes / 48


@pytest.mark.parametrize("layout", ["b c h/x:zigzag", "b c h/x:[3 5]", "b c (h=2/x g=4)/y", "b c h/y:cyclic/x"])
def test_cuts_of_few_elements_are_right_whatever_is_chosen(layout: str) -> None:
    one = propagated(conv(8, 3), "x=2 y=2", layout)
    assert check(one, one.call.run()) is None


@pytest.mark.parametrize("text", ["h/y/x:[4 8]", "(h=12/x + g=12/x)"])
def test_where_no_layout_says_how_the_result_lies_chunks_are_made(text: str) -> None:
    one = propagated(conv(24, 3), "x=2 y=2", f"b c {text}")
    refused = {option.refused for option in options(one)["x"]}
    assert "no layout cuts the 22 elements of the result as these cut the 24 that are read" in refused
    assert one.choices["x"].kind == "cut"
    assert {kind for kind, _ in one.moved} == {"all-to-all", "halo"}
    assert check(one, one.call.run()) is None


@pytest.mark.parametrize("mistake", ["nothing is read beyond a stretch", "stretches in another order"])
def test_windows_that_take_stretches_for_others_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "nothing is read beyond a stretch":
        reads = SlidingWindow.reads
        monkeypatch.setattr(SlidingWindow, "reads", lambda self, some: intersect(reads(self, some), some))
    else:
        join = local_call._side_by_side
        monkeypatch.setattr(local_call, "_side_by_side", lambda some, *rest: join([*reversed(some)], *rest))
    call, cuts = conv(16, 3, padding=1), {".1": (Cut("x", "zigzag"),)}
    assert check_cut(call, rule_table.bound(builtin(), call), cuts, Mesh.parse("x=2"), run_reference(call)) is not None


@pytest.mark.parametrize(
    ("size_", "scale", "kind"), [(12, None, "cut"), (12, 3.0, "cut"), (12, 2.9, "whole"), (10, None, "whole")]
)
def test_elements_taken_a_whole_number_of_times_stay_where_they_are(size_: int, scale: float | None, kind: str) -> None:
    one = propagated(OpCall.of(aten.upsample_nearest1d.default, (some(2, 3, 4), [size_], scale), {}), "x=2", "b c h/x")
    assert one.choices["x"].kind == kind
    assert (one.nbytes > 0) == (kind == "whole")
    assert check(one, one.call.run()) is None


def test_sizes_that_fit_both_are_kept() -> None:
    one = propagated(conv(8, 3, padding=1), "x=3", "b c h/x:[1 0 7]")
    assert one.choices["x"].kind == "cut"
    assert one.nbytes == pytest.approx((1 + 0 + 1) * 6 * 8 / 3)
    assert check(one, one.call.run()) is None


def test_operations_of_a_convolution_are_those_of_its_windows() -> None:
    assert propagated(conv(9, 3), "x=2").flops == 2 * (2 * 3 * 7) * (3 * 3)
    assert propagated(conv(9, 3, transposed=True), "x=2").flops == 2 * (2 * 3 * 9) * (3 * 3)
    assert propagated(conv(16, 3, padding=1), "x=4", "b c h/x").flops == 2 * (2 * 3 * 4) * (3 * 3)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_convolutions_of_all_kinds_are_right_on_ranks(
    n: int, extent: int, stride: int, padding: int, data: st.DataObject
) -> None:
    dilation, transposed = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    call = conv(n, extent, stride, padding, dilation, transposed=transposed)
    try:
        expected = run_reference(call)
    except RuntimeError:  # windows larger than the tensor
        return
    bound = rule_table.bound(builtin(), call)
    listed = [(cuts, mesh) for cuts, mesh in ways(bound, (2, 3)) if ".1" in cuts]
    for cuts, mesh in listed[: data.draw(st.integers(0, 4))]:
        assert check_cut(call, bound, cuts, mesh, expected) is None
