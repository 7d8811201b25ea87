"""Every index map: its parts are a partition, `who` agrees with `holds`, and both do what the documentation says."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.layout import Layout, LayoutError, Mesh, region
from tangram.layout.intervals import MAPS
from tests.layout import oracle
from tests.layout.strategies import as_intervals, as_list, drawn, examples, int_sets, random_set

Case = tuple[str, int, int, tuple[int, ...]]


def random_split(rng: Random, n: int, parts: int) -> tuple[int, ...]:
    """`n` as that many sizes, some of them zero."""
    ends = sorted(rng.choices(range(n + 1), k=parts - 1))
    return tuple(int(d) for d in np.diff([0, *ends, n]))


def random_case(rng: Random, size: int) -> Case:
    """A map, a length, a number of parts and arguments that fit."""
    n, k = rng.randint(0, 12 * size), rng.randint(1, 6)
    name = rng.choice(list(MAPS))
    args: dict[str, tuple[int, ...]] = {
        "": (),
        "zigzag": () if rng.randrange(2) else random_split(rng, n, rng.randint(1, 4)),
        "cyclic": () if rng.randrange(3) == 0 else (rng.randint(1, 5),),
        "strided": (rng.randint(1, 6),),
        "sizes": random_split(rng, n, k),
    }
    return name, n, k, args[name]


def test_every_row_is_drawn() -> None:
    assert set(MAPS) == {"", "zigzag", "cyclic", "strided", "sizes"}, "a new map wants a row in random_case and oracle"


@examples(600)
@given(drawn(random_case))
def test_parts_are_a_partition_and_what_the_oracle_says(case: Case) -> None:
    name, n, k, args = case
    MAPS[name].check(n, k, args)
    parts = [as_list(MAPS[name].holds(n, k, i, args)) for i in range(k)]
    assert sorted(p for part in parts for p in part) == list(range(n))
    for i, part in enumerate(parts):
        assert part == sorted(oracle.part(np.arange(n), k, i, name, args).tolist())


@examples(600)
@given(drawn(lambda rng, size: (case := random_case(rng, size), random_set(rng, case[1]))))
def test_who_agrees_with_holds(drawn_case: tuple[Case, tuple[tuple[int, int], ...]]) -> None:
    (name, n, k, args), wanted = drawn_case
    found = MAPS[name].who(n, k, wanted, args)
    assert len({i for i, _ in found}) == len(found), "each part stands once"
    want = {}
    for i in range(k):
        mine = set(oracle.part(np.arange(n), k, i, name, args).tolist()) & set(as_list(wanted))
        if mine:
            want[i] = sorted(mine)
    assert {i: as_list(s) for i, s in found} == want


@pytest.mark.parametrize("n", [0, 1, 3, 7, 9, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_chunk_is_torch_chunk(n: int, k: int) -> None:
    for i in range(k):
        assert as_list(MAPS[""].holds(n, k, i, ())) == oracle.chunk(np.arange(n), k, i).tolist()


def test_who_costs_the_overlaps_and_not_the_parts() -> None:
    """A million parts and more: only those that are touched are looked at."""
    n, k = 10**12, 10**9
    few = ((5_000, 5_010), (n - 3, n))
    for name, args in {"": (), "zigzag": (), "cyclic": (1000,), "strided": (2,)}.items():
        found = MAPS[name].who(n, k, few, args)
        assert sum(b - a for _, s in found for a, b in s) == 13
        for i, s in found:
            assert 0 <= i < k
            if name != "cyclic":  # whose parts have a thousand intervals each, and more
                held = MAPS[name].holds(n, k, i, args)
                assert all(any(a <= lo and hi <= b for a, b in held) for lo, hi in s)


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        ("cyclic[2 3]", "cyclic takes one block size"),
        ("cyclic[0]", "cyclic takes one block size"),
        ("strided", "strided takes one split factor"),
        ("strided[0]", "strided takes one split factor"),
        ("strided[2 2]", "strided takes one split factor"),
        ("[3 3]", r"sizes \[3, 3\] do not cut 8 elements into 2 parts"),
        ("[3 3 2]", "sizes .* do not cut 8 elements into 2 parts"),
        ("zigzag[4 3]", "zigzag over documents of 7 elements in all, but there are 8 to cut"),
        ("zigzag[docs]", r"names the list 'docs': .*docs=\[\.\.\.\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(cut: str, sentence: str) -> None:
    layout = Layout.parse(f"s/cp:{cut}")
    with pytest.raises(LayoutError, match=sentence):
        region(layout.bind((8,)), Mesh.parse("cp=2"), 0)


def test_a_plain_cut_takes_no_arguments() -> None:
    with pytest.raises(LayoutError, match="takes no arguments"):
        MAPS[""].check(8, 2, (4,))


@examples(100)
@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), int_sets(n))), st.integers(1, 5))
def test_zigzag_gives_each_rank_the_same_share_of_a_causal_mask(case: tuple[int, frozenset[int]], k: int) -> None:
    """The point of zigzag: where 2 k divides the sequence, every rank has the same number of (query, key) pairs."""
    n = case[0] // (2 * k) * 2 * k
    work = {sum(p + 1 for p in as_list(MAPS["zigzag"].holds(n, k, i, ()))) for i in range(k)}
    assert len(work) == 1
    assert as_list(as_intervals(case[1])) == sorted(case[1])
