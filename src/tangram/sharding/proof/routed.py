"""What ranks that are all here do with rows that each has sorted for itself, to prove what is derived.

Written apart from what real ranks do (`relayout.collectives.grouped_rows`): there every row is looked for among all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tangram.layout import Mesh
from tangram.sharding.derive.layouts import layout_of
from tangram.sharding.derive.problem.states import (
    OWN,
    OWN_IDS,
    SENT,
    SENT_ENDS,
    SENT_IDS,
    SORTED,
    Routed,
    State,
    part_dim,
)
from tangram.sharding.derive.transitions import ordered
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.simulate import World, cut, of_parts, together


def is_routed(states: Mapping[str, State]) -> bool:
    """Whether rows lie in an order of their own over some axis."""
    return any(isinstance(state, Routed) for state in states.values())


class Routes:
    """The rows that ranks of a mesh have sorted last, by axis and region."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ids: dict[tuple[str, int], list[Tensor]] = {}

    def brought(
        self, parts: Sequence[Tensor], source: Mapping[str, State], target: Mapping[str, State]
    ) -> list[Tensor]:
        """What all ranks have of a tensor where it lies as `target`."""
        wanted = {axis: target.get(axis, state) for axis, state in source.items()}
        now = [*parts]
        for axis, a, b in ordered(source, wanted, {axis: n for axis, (n, _) in self._mesh.axes.items()}):
            if isinstance(a, Routed) and (a.kind, b.kind) == (SORTED, OWN_IDS):
                self._ids[axis, a.region] = now
                continue
            for ranks in self._along(axis):
                own = [now[r] for r in ranks]
                if isinstance(a, Routed):
                    made = _routed(own, [self._ids[axis, a.region][r] for r in ranks], a, b)
                else:
                    made = _moved(own, a, b)
                for r, one in zip(ranks, made, strict=True):
                    now[r] = one
        return now

    def _along(self, axis: str) -> list[list[int]]:
        """Ranks that differ in one axis alone, in the order of it."""
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self._mesh.size):
            at = self._mesh.coords(rank)
            found.setdefault(tuple((a, i) for a, i in sorted(at.items()) if a != axis), []).append(rank)
        return [*found.values()]


def _moved(parts: Sequence[Tensor], source: State, target: State) -> list[Tensor]:
    world = World(Mesh((((_ONE, len(parts)),),)), builtin())
    shape = [*parts[0].shape]
    if (dim := part_dim(source)) is not None:
        shape[dim] *= len(parts)
    whole = together(of_parts(shape, parts, layout_of(shape, {_ONE: source}), world))
    return cut(whole, layout_of(shape, {_ONE: target}), world).parts


_ONE = "x"


def _routed(parts: Sequence[Tensor], ids: Sequence[Tensor], source: Routed, target: State) -> list[Tensor]:
    """Over one axis: `ids` are the groups of the rows that each rank has sorted."""
    k, own = len(parts), source.groups // len(parts)
    every = torch.cat([*ids])
    order = torch.argsort(every, stable=True)
    index = [order[every[order] // own == r] for r in range(k)]
    if target.kind == SENT:
        rows = torch.cat([*parts])
        return [rows[i] for i in index]
    if (source.kind, target.kind) == (SENT, OWN):
        back = torch.argsort(torch.cat(index))
        return [*torch.cat([*parts])[back].split([len(one) for one in ids])]
    if target.kind == SENT_IDS:
        return [every[i] % own for i in index]
    assert target.kind == SENT_ENDS
    counts = [torch.bincount(every[i] % own, minlength=own) for i in index]
    return [one.cumsum(0).to(part.dtype) for one, part in zip(counts, parts, strict=True)]
