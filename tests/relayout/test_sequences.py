"""The cheapest collectives between two layouts: run on all ranks of one process, and against every other sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.relayout.collectives.sequences import Link, cheapest, received, sequence
from tests.relayout import exhaustive
from tests.relayout.sequencing import laid, played, problems, wrong

SLOW = {"a": Link(2e-5, 25e9), "b": Link(1e-5, 400e9), "c": Link(1e-5, 100e9), "d": Link(1e-5, 400e9)}


@given(problems(), st.booleans())
@settings(max_examples=60)
def test_every_rank_has_its_target_and_receives_what_is_said(
    case: tuple[tuple[int, ...], str, Mesh, str], slow: bool
) -> None:
    shape, before, mesh, after = case
    source, target = Layout.parse(before).bind(shape), Layout.parse(after).bind(shape)
    links = tuple((axis, SLOW[axis]) for axis in mesh.axes) if slow else None
    steps = sequence(shape, source, target, mesh, 1, links)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    found, elements = played(steps, laid(whole, source, mesh), mesh)
    assert wrong(found, whole, target, mesh) == []
    assert received(steps) == pytest.approx(elements)


@pytest.mark.parametrize(
    ("mesh", "before", "after"),
    [
        ("a=3 b=3", "x/a y", "x/b y"),  # replicas give to each other, and none takes what it has
        ("a=2 b=2 c=2", "x/a y/b", "x/c y/a"),
        ("a=2 b=3", "x/a y", "x y sum:a sum:b"),  # some are padded and some forget theirs, in one step
        ("a=2 b=3", "x/a/b y", "x/b/a y"),  # digits that do not nest
        ("a=2 b=2 | c=4", "x y sum:c", "x y"),  # no axis of another view helps that shares ranks
        ("a=2 b=2 | c=4", "x/c y", "x/a y"),
        ("a=4 b=2", "(2 x/b)/a y", "x y/a"),  # an axis that is two digits
    ],
)
def test_cases(mesh: str, before: str, after: str) -> None:
    shape, own = (36, 72), Mesh.parse(mesh)
    if "2 x" in before:
        shape = (32, 72)
    source, target = Layout.parse(before).bind(shape), Layout.parse(after).bind(shape)
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
    found = sequence(shape, source, target, own)
    have, elements = played(found, laid(whole, source, own), own)
    assert wrong(have, whole, target, own) == []
    assert received(found) == pytest.approx(elements)


@given(problems())
@settings(max_examples=30)
def test_the_layout_after_each_step_is_what_ranks_have_then(case: tuple[tuple[int, ...], str, Mesh, str]) -> None:
    shape, before, mesh, after = case
    source, target = Layout.parse(before).bind(shape), Layout.parse(after).bind(shape)
    steps = sequence(shape, source, target, mesh)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    have = laid(whole, source, mesh)
    for step in steps:
        have, _ = played([step], have, mesh)
        assert wrong(have, whole, step.layout, mesh) == []


@pytest.mark.parametrize(
    ("shape", "ks"),
    [
        ((12, 4), (4,)),
        ((6, 6), (3,)),
        ((4, 4), (2, 2)),
        ((8,), (2, 2)),
        ((8, 4), (2, 4)),
        ((6, 4), (3, 2)),
        ((4, 4), (4, 4)),
        ((16,), (4, 2)),
        ((2, 2, 2), (2, 2)),
    ],
)
def test_no_sequence_of_any_length_receives_less(shape: tuple[int, ...], ks: tuple[int, ...]) -> None:
    every, best = exhaustive.costs(shape, ks)
    assert len(every) > 4
    for (i, a), (j, b) in itertools.product(enumerate(every), enumerate(every)):
        found = cheapest(exhaustive.problem(shape, ks, a, b))
        assert received(found) == pytest.approx(best[i, j]), (a, b, [str(step) for step in found])
        assert bool(found) == (a != b)


def steps(shape: tuple[int, ...], mesh: str, before: str, after: str, **links: Link) -> list[str]:
    own = Mesh.parse(mesh)
    source, target = Layout.parse(before).bind(shape), Layout.parse(after).bind(shape)
    found = sequence(shape, source, target, own, 1, tuple(links.items()) or None)
    return [f"{step.collective} {' '.join(step.axes)} -> {step.layout}" for step in found]


def test_peers_gather_first_and_here_is_one_all_to_all() -> None:
    assert steps((8, 8), "a=2 b=2 c=2", "x/a/b/c y", "x y/a/b/c") == ["all-to-all a b c -> 8 8/a/b/c"]
    assert steps((8, 8, 8), "a=2 b=2 c=2", "x/a y/b z/c", "x/c y/a z/b") == ["permute a b c -> 8/c 8/a 8/b"]


def test_sums_are_scattered_where_the_target_is_cut() -> None:
    assert steps((8, 8), "a=2 b=2", "x/a y sum:b", "x y/b") == [
        "reduce-scatter b -> 8/a 8/b",
        "all-gather a -> 8 8/b",
    ]
    assert steps((8, 8), "a=2 b=2", "x y sum:a sum:b", "x y") == ["all-reduce a b -> 8 8"]


def test_replicas_share_what_is_to_be_reduced() -> None:
    assert steps((8, 8), "a=2 b=4", "x y sum:b", "x y") == [
        "slice a -> 8/a 8 sum:b",
        "all-reduce b -> 8/a 8",
        "all-gather a -> 8 8",
    ]


def test_slow_links_carry_parts() -> None:
    slow, fast = Link(2e-5, 25e9), Link(1e-5, 400e9)
    shape = (1 << 14, 1 << 14)
    assert steps(shape, "n=8 g=8", "x y sum:n sum:g", "x y", n=slow, g=fast) == [
        "reduce-scatter g -> (8 2048/g) 16384 sum:n",
        "all-reduce n -> (8 2048/g) 16384",
        "all-gather g -> 16384 16384",
    ]
    assert steps((8, 8), "n=8 g=8", "x y sum:n sum:g", "x y", n=slow, g=fast) == ["all-reduce n g -> 8 8"]


def test_a_factor_in_a_dim_is_cut_where_it_stands() -> None:
    assert steps((8, 8), "a=2", "(2 x/a) y", "x y") == ["all-gather a -> 8 8"]
    assert steps((8, 8), "a=2", "(2 x/a) y", "(2 x)/a y") == ["all-to-all a -> 8/a 8"]
    assert steps((8, 8), "a=4 b=2", "(2 x/b)/a y", "(2/a.0 4/b/a.1) y".replace("/a.0", "").replace("/a.1", "")) == [
        "all-gather a.0 a.1 -> (2 4/b) 8"
    ]


def test_a_plan_is_made_once() -> None:
    shape, mesh = (8, 8), Mesh.parse("a=2")
    source, target = Layout.parse("x/a y").bind(shape), Layout.parse("x y").bind(shape)
    assert sequence(shape, source, target, mesh) is sequence(shape, source, target, mesh)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("x/a y", "x y/b", "/b does not cut into 3 even parts"),
        ("x/a:zigzag y", "x y", "only even chunks have a sequence of collectives"),
        ("x y //a", "x y", "a flat cut or @"),
        ("x y @a=0", "x y", "a flat cut or @"),
        ("(4/a + 4) y", "x y", "is cut inside a sum of factors"),
        ("x y max:a", "x y", "only sums are reduced here"),
        ("x/c y", "x y", "no axis 'c'"),
    ],
)
def test_refusals(before: str, after: str, sentence: str) -> None:
    shape, mesh = (8, 8), Mesh.parse("a=2 b=3")
    with pytest.raises(UserError, match=sentence):
        sequence(shape, Layout.parse(before).bind(shape), Layout.parse(after).bind(shape), mesh)


def test_axes_that_do_not_nest_are_refused() -> None:
    with pytest.raises(UserError, match="do not nest"):
        steps((36, 36), "a=2 b=3 | c=3 d=2", "x/a y", "x/c y")
    assert steps((36, 36), "a=4 b=3 | c=2 d=2 e=3", "x/a y", "x/c y") == ["all-gather a.1 -> 36/a.0 36"]
