"""The figures of the database: how many entries each side gets right, and the bytes of what both get right.

An entry counts by its worst cut. Bytes are all that both ranks receive, forward and backward, with the same end on both
sides: pending results are reduced, cut ones stay cut, each gradient lies as its tensor does. A cut that one side gets
wrong or refuses counts against that side's entry, and is in no sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bench._sharding.cases import Case
from bench._sharding.sides import Cases, by_dtensor, by_us
from tangram.hardware.measuring.measure import Row

QUICK = 12
"""Every so-manyeth entry."""
PEER = "torch DTensor"


def rows(quick: bool) -> Iterator[Row]:
    """Run both sides and sum up."""
    every = QUICK if quick else 1
    yield from summed(by_us(every), by_dtensor(every))


def verdict(cases: Cases | None) -> str:
    """Of an entry: `right`, `whole` (right, but never without gathering), `wrong`, `raises`, or `untested`."""
    if cases is None:
        return "raises"
    kinds = {one.kind for one in cases.values()}
    if "right" not in kinds or len(kinds) > 1:
        return next((kind for kind in ("wrong", "raises") if kind in kinds), "untested")
    return "whole" if all(one.whole for one in cases.values()) else "right"


def summed(ours: Mapping[str, Cases | None], theirs: Mapping[str, Cases | None]) -> Iterator[Row]:
    """The rows, from what each side found by entry."""
    tested = [name for name in ours if any(side.get(name) for side in (ours, theirs))]
    own, other = ([verdict(side.get(name)) for name in tested] for side in (ours, theirs))

    def counted(figure: str, kinds: tuple[str, ...], target: float | None, *, higher: bool = False) -> Row:
        peers = {PEER: float(sum(kind in kinds for kind in other))}
        better = "higher" if higher else "lower"
        return Row(figure, "entries", sum(kind in kinds for kind in own), peers, target=target, better=better)

    what = f"of {len(tested)} entries of torch's database"
    yield counted(f"{what}: right in every cut, forward and backward", ("right", "whole"), len(tested), higher=True)
    yield counted(f"{what}: wrong in some cut", ("wrong",), 0)
    yield counted(f"{what}: refused or raising in some cut", ("raises",), 0)
    yield counted(f"{what}: right, but never without gathering", ("whole",), None)
    yield from _bytes(ours, theirs)


def _bytes(ours: Mapping[str, Cases | None], theirs: Mapping[str, Cases | None]) -> Iterator[Row]:
    pairs: dict[str, list[tuple[Case, Case]]] = {}
    left = 0
    for name, cases in ours.items():
        peer = theirs.get(name) or {}
        for key, one in (cases or {}).items():
            if key in peer and one.kind == peer[key].kind == "right":
                pairs.setdefault(name, []).append((one, peer[key]))
            else:
                left += 1
    both = [pair for some in pairs.values() for pair in some]
    what = f"{len(both)} cuts that both get right ({left} not)"
    sums = [sum(pair[side].nbytes for pair in both) for side in (0, 1)]
    yield Row(f"bytes that ranks receive, {what}", "B", sums[0], {PEER: sums[1]}, target_ratio=1.0)
    parts = {
        "forward": "operators, forward",
        "backward": "operators, backward",
        "closing": "pending results reduced, gradients brought home",
    }
    for part, said in parts.items():
        yield Row(f"of these: {said}", "B", sum(getattr(a, part) for a, _ in both),
                  {PEER: sum(getattr(b, part) for _, b in both)})  # fmt: skip
    more = {name: [sum(pair[side].nbytes for pair in some) for side in (0, 1)] for name, some in pairs.items()}
    listed = sorted(((a - b, name) for name, (a, b) in more.items() if a > b * (1 + 1e-9)), reverse=True)
    yield Row("entries in which ours receives more", "entries", len(listed))
    for _, name in listed:
        yield Row(f"more: {name}", "B", more[name][0], {PEER: more[name][1]})
