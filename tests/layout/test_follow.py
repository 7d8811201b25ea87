"""Companions: what a rank holds of the scales is what belongs to its weights, else `follow` refuses."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given

from tangram.layout import Cut, Dim, Layout, LayoutError, Mesh, region
from tangram.layout.blocks import follow
from tests.layout import oracle
from tests.layout.strategies import drawn, examples, random_mesh, some


@pytest.mark.parametrize(
    ("base", "dims", "want"),
    [
        ("(heads/tp d) i/dp", "(heads d)", "(heads/tp d)"),
        ("(heads/tp d) i/dp", "i", "i/dp"),
        ("(heads/tp d) i/dp", "(heads d) rank", "(heads/tp d) rank"),
        ("(heads/tp d) i/dp", "rank i", "rank i/dp"),
        ("(heads/tp d) i/dp", "", ""),
        ("(heads/tp d)/dp i @pp=1", "(heads d) rank", "(heads/tp d)/dp rank @pp=1"),
        ("(heads/tp d)/dp i", "((heads) d) rank", "((heads/tp) d)/dp rank"),
        ("o/dp (b/tp j)", "o b", "o/dp b/tp"),
        ("(g/tp (r + 1) d) (b/dp j)", "(g (r + 1) d) b", "(g/tp (r + 1) d) b/dp"),
        ("(z/tp + x/tp + B)/dp h", "(z + x + B)", "(z/tp + x/tp + B)/dp"),
        ("(2 f/tp) h", "f", "f/tp"),
        ("o/dp:zigzag[4 4] i sum:tp", "o", "o/dp:zigzag[4 4]"),
        ("_/dp h/tp", "h _", "h/tp _"),
    ],
)
def test_factors_keep_their_cuts(base: str, dims: str, want: str) -> None:
    assert str(follow(Layout.parse(base), dims)) == want
    assert str(follow(Layout.parse(base), Layout.parse(dims).dims)) == want


@pytest.mark.parametrize(
    ("base", "dims", "sentence"),
    [
        ("o (b j)/tp", "o b", r"\(b j\)/tp: the cut goes through factors that 'o b' lacks"),
        ("(heads/tp d)/dp i", "heads", "the cut goes through factors that 'heads' lacks"),
        ("(2 f/tp)/dp h", "f", r"\(2 f/tp\)/dp: .* no such bracket"),
        ("(heads d)/dp h", "heads d", r"\(heads d\)/dp: .* no such bracket"),
        ("(heads d)/dp h", "(d heads)", "no such bracket"),
        ("(a + b)/dp h", "(a b)", "no such bracket"),
        ("(a b)/dp h", "(a + b)", "no such bracket"),
        ("(f/tp + f) h", "f", "f has two ways of being cut"),
        ("(2/tp f) h", "(2 f)", "a factor without a name is cut"),
        ("out in //dp", "out", "a flat cut goes through all factors"),
    ],
)
def test_what_does_not_follow_is_refused(base: str, dims: str, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        follow(Layout.parse(base), dims)


def test_scales_of_four_bit_blocks() -> None:
    """Rows and blocks that a rank has of the scales are those that it has of the weights; 16 bytes make a block."""
    base = Layout.parse("o/dp (b/tp j)")
    weights, scales = base.bind((5, 48), j=16), follow(base, "o b").bind((5, 3))
    mesh = Mesh.parse("dp=2 tp=2")
    for rank in range(mesh.size):
        (rows, columns), (scale_rows, blocks) = (
            region(weights, mesh, rank).boxes[0],
            region(scales, mesh, rank).boxes[0],
        )
        assert rows == scale_rows
        assert columns == tuple((16 * a, 16 * b) for a, b in blocks)


Case = tuple[Mesh, Layout, tuple[Dim, ...]]


def random_case(rng: Random, size: int) -> Case:
    """A layout of named factors, and a companion of some of them in the same brackets."""
    mesh = random_mesh(rng, rng.randint(1, 3))
    free, names = [axis for axis, _ in mesh.views[0]], iter("abcdefghi")

    def cuts() -> tuple[Cut, ...]:
        return (Cut(free.pop(rng.randrange(len(free)))),) if free and rng.randrange(2) else ()

    def factor() -> Dim:
        return Dim(next(names), rng.randint(1, 5), cuts=cuts())

    def dim() -> Dim:
        if rng.randrange(3) == 0:
            return factor()
        inner = some(rng, factor, 3, 1)
        return Dim(terms=(inner,), cuts=cuts())

    base = some(rng, dim, size, 1)
    companion: list[Dim] = []
    for d in base:
        if not d.terms:
            companion += [d.uncut()] if rng.randrange(4) else []
            continue
        kept = tuple(x for x in d.uncut().terms[0] if rng.randrange(4))
        if kept:
            companion += kept if rng.randrange(4) == 0 else [Dim(terms=(kept,))]
    return mesh, Layout(base), tuple(companion)


def held(layout: Layout, mesh: Mesh, rank: int, names: list[str]) -> set[tuple[int, ...]]:
    """What a rank holds, as tuples of the indices of some factors. Every dim is a product."""
    leaves = [leaf for dim in layout.dims for leaf in dim.leaves]
    flat = np.array(oracle.elements(layout, mesh, rank), int)
    index = np.unravel_index(flat, [leaf.n for leaf in leaves]) if leaves else ()
    columns = {leaf.name: column.tolist() for leaf, column in zip(leaves, index, strict=True)}
    return set(zip(*[columns[n] for n in names], strict=True)) if names else {()} if len(flat) else set()


@examples(600)
@given(drawn(random_case))
def test_a_companion_holds_what_belongs_to_the_base(case: Case) -> None:
    mesh, base, dims = case
    names = [leaf.name for dim in dims for leaf in dim.leaves]
    brackets = [d for d in base.dims if d.terms and d.cuts]
    broken = [d for d in brackets if {x.name for x in d.leaves} & set(names) and d.uncut() not in dims]
    try:
        companion = follow(base, dims)
    except LayoutError:
        assert broken, "refused only where a cut bracket is not there whole"
        return
    assert not broken
    assert Layout(tuple(d.uncut() for d in companion.dims)).dims == dims
    for rank in range(mesh.size):
        mine = held(base, mesh, rank, names)
        theirs = held(companion, mesh, rank, names)
        assert mine <= theirs
        assert mine == theirs or not mine, f"{base} -> {companion} on {mesh}, rank {rank}"


def test_the_random_cases_are_of_both_kinds() -> None:
    refused = 0
    for seed, size in itertools.product(range(100), (1, 2, 3)):
        _, base, dims = random_case(Random(seed), size)
        try:
            follow(base, dims)
        except LayoutError:
            refused += 1
    assert 30 < refused < 270
