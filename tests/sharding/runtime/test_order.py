"""Steps over several axes, one after the other and at once, give each rank its part: cuts under cuts too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.layout import Mesh
from tangram.relayout.collectives.one_collective import RankPlacement, dual, joined, parted
from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM, State, cut
from tangram.sharding.derive.transitions import Joint, change, costs, ordered, states_to_change
from tangram.training.mesh.local_parts import own_part
from tests.relayout.sequencing import played

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
        place = RankPlacement(*source)
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


trained = st.tuples(*[st.sampled_from([*STATES, SEVERAL])] * 3).map(lambda own: dict(zip("abc", own, strict=True)))


def summed(parts: Sequence[Tensor], lies: Mapping[str, State]) -> list[Tensor]:
    """What each rank has where pending sums are taken."""
    axes = [axis for axis, state in lies.items() if state == SUM]
    return [torch.stack([parts[r] for r in MESH.peers(rank, *axes)]).sum(0) if axes else parts[rank]
            for rank in range(MESH.size)]  # fmt: skip


def arrives(joint: Joint, source: Mapping[str, State], target: Mapping[str, State], *, back: bool) -> float:
    """Play one way of a change on all ranks; the bytes that a rank has received."""
    whole = torch.arange(24 * 12.0).reshape(SHAPE)
    steps = (joint.back or ()) if back else joint.there
    found, received = played(steps, parts_of(whole, source), MESH)
    for part, want in zip(summed(found, target), summed(parts_of(whole, target), target), strict=True):
        assert torch.equal(part, want)
    return 4 * received


@settings(max_examples=200, deadline=None)
@given(trained.filter(fits), trained.filter(fits), st.booleans())
@example(every(SAME, cut(0), cut(0)), every(SAME, SEVERAL, cut(0)), True)  # under the cut of an inner axis
@example(every(cut(0), cut(1), SAME), every(cut(1), cut(0), SAME), True)  # an exchange
@example(every(SUM, cut(0), SUM), every(cut(0), SEVERAL, cut(1)), True)
def test_what_is_done_at_once_arrives_with_its_gradient_and_costs_less(
    source: dict[str, State], target: dict[str, State], differentiable: bool
) -> None:
    goals = states_to_change(source, target, differentiable=differentiable)
    lies = {**source, **goals}
    if not fits(lies):
        return  # what is not wanted stays as it is, and leaves no even cut
    found = change(SHAPE, 4, source, goals, MESH, differentiable=differentiable)
    if not any(isinstance(one, Joint) for one in found):
        return
    (joint,) = found
    assert isinstance(joint, Joint)
    received = arrives(joint, source, lies, back=False)
    if differentiable:
        there, back = ({axis: dual(state) for axis, state in own.items()} for own in (lies, source))
        received += arrives(joint, there, back, back=True)
    sizes = {axis: MESH.axes[axis][0] for axis in "abc"}
    sides = [[*costs(one, 4.0 * 24 * 12, source, sizes, differentiable=differentiable)] for one in (found, joint.apart)]
    at_once, apart = (sum(one.forward_bytes + one.backward_bytes for one in side) for side in sides)
    assert abs(at_once - received) < 1e-6
    assert at_once <= apart


WHOLE = 4.0 * 24 * 12
KNOWN = {
    "an exchange": ((cut(1), cut(0)), (cut(0), cut(1)), [("permute", "permute", WHOLE / 8, WHOLE / 8)]),
    "hidden parts to tokens": (
        (cut(1), cut(0)), (cut(0), cut(0)), [("all-to-all", "all-to-all", 3 * WHOLE / 16, 3 * WHOLE / 16)],
    ),
    "under the cut of an inner axis": (
        (cut(0), cut(0)), (SEVERAL, cut(0)),
        [("all-to-all", "reduce-scatter + permute", 3 * WHOLE / 8, 3 * WHOLE / 8)],
    ),
    "two sums": ((SUM, SUM), (cut(0), cut(1)), [("reduce-scatter", "all-gather", 3 * WHOLE / 4, 3 * WHOLE / 4)]),
    "as cheap one after the other": (
        (SAME, SUM), (SEVERAL, cut(0)),
        [("reduce-scatter", "all-gather", WHOLE / 2, WHOLE / 2), ("", "all-reduce", 0, WHOLE / 2)],
    ),
    "one axis, parts of another": (
        (cut(1), SUM), (cut(1), cut(0)), [("reduce-scatter", "all-gather", WHOLE / 4, WHOLE / 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_done_and_what_it_costs(name: str) -> None:
    source, goals, expected = KNOWN[name]
    lies, goes = (dict(zip("ab", own, strict=True)) for own in (source, goals))
    found = change(SHAPE, 4, lies, states_to_change(lies, goes, differentiable=True), MESH, differentiable=True)
    assert [tuple(one[1:]) for one in costs(found, WHOLE, lies, {"a": 2, "b": 2}, differentiable=True)] == expected
