"""Steps over several axes, done one after the other on all ranks, give each rank its part: cuts under cuts too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.layout import Mesh
from tangram.relayout.collectives import Place, joined, parted
from tangram.sharding.derive.changes import ordered
from tangram.sharding.derive.states import SAME, SUM, State, cut
from tangram.training.derived import own_part

MESH = Mesh.parse("a=2 b=2 c=3")
SHAPE = (24, 12)
STATES = [SAME, SUM, cut(0), cut(1), cut(0, 2)]


def parts_of(whole: Tensor, lies: Mapping[str, State]) -> list[Tensor]:
    """What each rank has; of a sum the first rank of the axis has all."""
    found: list[Tensor] = []
    for rank in range(MESH.size):
        at = MESH.coords(rank)
        part = own_part(whole, {axis: s for axis, s in lies.items() if s.kind == "cut"}, MESH, at)
        first = all(at[axis] == 0 for axis, s in lies.items() if s == SUM)
        found.append(part if first else torch.zeros_like(part))
    return found


def moved(parts: Sequence[Tensor], axis: str, source: State, target: State) -> list[Tensor]:
    """One step on all ranks: what the group of each has is put together and cut again."""
    done: list[Tensor] = []
    for rank in range(MESH.size):
        at = MESH.coords(rank)
        group = [r for r in range(MESH.size) if all(MESH.coords(r)[x] == at[x] for x in at if x != axis)]
        own = torch.stack([parts[r] for r in sorted(group, key=lambda r: MESH.coords(r)[axis])])
        place = Place(*source)
        whole = own.sum(0) if source == SUM else joined(own, place.dim, place.outer) if source.kind == "cut" else own[0]
        if target.kind == "cut":
            done.append(parted(whole, target.dim, target.outer, len(group))[at[axis]])
        else:
            done.append(whole if target == SAME or at[axis] == 0 else torch.zeros_like(whole))
    return done


def fits(lies: Mapping[str, State]) -> bool:
    """Whether every cut is even: sizes are 24 x 12, so two blocks of 12 and 12."""
    for dim, outer in itertools.product((0, 1), (1, 2)):
        k = 1
        for axis, state in lies.items():
            if (state.kind, state.dim, state.outer) == ("cut", dim, outer):
                k *= MESH.axes[axis][0]
        room = 2 if any(s == cut(0, 2) for s in lies.values()) and (dim, outer) == (0, 1) else SHAPE[dim] // outer
        if room % k:
            return False
    return True


lying = st.tuples(*[st.sampled_from(STATES)] * 3).map(lambda own: dict(zip("abc", own, strict=True))).filter(fits)


def every(*states: State) -> dict[str, State]:
    return dict(zip("abc", states, strict=True))


@settings(max_examples=300, deadline=None)
@given(lying, lying)
@example(every(SAME, SAME, cut(0, 2)), every(cut(0), cut(0), cut(0)))  # parts of two axes are no whole blocks
def test_steps_bring_every_rank_its_part(source: dict[str, State], target: dict[str, State]) -> None:
    if any(target[axis] == SUM and source[axis].kind == "cut" for axis in "abc"):
        return  # nothing comes of it in a derivation
    whole = torch.arange(24 * 12.0).reshape(SHAPE)
    parts = parts_of(whole, source)
    for axis, a, b in ordered(source, target, {axis: MESH.axes[axis][0] for axis in "abc"}):
        parts = moved(parts, axis, a, b)
    for part, want in zip(parts, parts_of(whole, target), strict=True):
        assert torch.equal(part, want)
