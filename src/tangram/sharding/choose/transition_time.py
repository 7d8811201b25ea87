"""Seconds of bringing tensors from how they lie to how they are needed, over all axes at once, for many pairs.

Over each axis it is the collective of a derivation, forward and backward, on what the other axes leave of the tensor;
axes are taken in the order that takes the least time. Where an axis changes under a cut of a later one in the same
blocks of a dim, ranks do not hold what follows each other: the later cut is undone and made again, and that is paid.

    plain       what operators give and take
    standing    what is made of parameters alone: the sum of its gradient is of a parameter's
    kept        from how a parameter is kept to how it is used: gathered twice, as FSDP does, its gradient
                scattered; whole on ranks that each use it for something of their own, its gradient summed once a step

Collectives of parameters are put together by every runtime, so they have no latency here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tangram.hardware.catalogue.cluster import Cluster, collective_seconds
from tangram.layout import Mesh
from tangram.relayout.collectives.one_collective import ALL_GATHER, ALL_TO_ALL
from tangram.sharding.choose.options import States
from tangram.sharding.derive.problem.states import State, part_dim, way

Kind = Literal["plain", "standing", "kept"]
Array = NDArray[np.float64]
_NEVER = float("inf")


@dataclass
class StepTimes:
    """Prices on a cluster, each remembered."""

    cluster: Cluster
    mesh: Mesh
    axes: tuple[str, ...]
    micro_batches: int
    known: dict[tuple[object, ...], tuple[float, float]] = field(
        default_factory=dict[tuple[object, ...], tuple[float, float]]
    )
    tables: dict[tuple[object, ...], Array] = field(default_factory=dict[tuple[object, ...], Array])

    def seconds(
        self, sources: Sequence[States], targets: Sequence[States], nbytes: float, kind: Kind, *, differentiable: bool
    ) -> Array:
        """What each pair costs, of a tensor of `nbytes`; infinite where there is no way."""
        key = (tuple(sources), tuple(targets), nbytes, kind, differentiable)
        if key not in self.tables:
            self.tables[key] = self._table(sources, targets, nbytes, kind, differentiable)
        return self.tables[key]

    def _table(
        self, sources: Sequence[States], targets: Sequence[States], nbytes: float, kind: Kind, differentiable: bool
    ) -> Array:
        shape = (len(sources), len(targets))
        a_of = [_Side([s[i] for s in sources], self._k(i)) for i in range(len(self.axes))]
        b_of = [_Side([s[i] for s in targets], self._k(i)) for i in range(len(self.axes))]
        pairs = [self._alone(i, a_of[i], b_of[i], kind, differentiable) for i in range(len(self.axes))]
        best = np.full(shape, _NEVER)
        for order in itertools.permutations(range(len(self.axes))):
            total = np.zeros(shape)
            for place, i in enumerate(order):
                latency, rate, again, dims = pairs[i]
                share = np.ones(shape)
                more = np.zeros(shape)
                for j in range(len(self.axes)):
                    if j == i:
                        continue
                    after = j in order[:place]  # the other axis has been brought to its target before
                    side, turn = (b_of[j], (1, -1)) if after else (a_of[j], (-1, 1))
                    part = side.part.reshape(turn)
                    if j > i:  # a later axis
                        place_of = side.place.reshape(turn)
                        under = again & ((dims[0].reshape(-1, 1) == place_of) | (dims[1].reshape(1, -1) == place_of))
                        under &= place_of >= 0
                        part = np.where(under, 1.0, part)
                        there = self._collective(ALL_GATHER, nbytes, j)
                        more += np.where(under, there * (2.0 if differentiable else 1.0), 0.0)
                    share = share * part
                total += latency + rate * (nbytes * share) + more
            best = np.minimum(best, total)
        return best

    def _k(self, i: int) -> int:
        return self.mesh.axes[self.axes[i]][0]

    def _collective(self, what: str, nbytes: float, i: int) -> float:
        k, stride = self.mesh.axes[self.axes[i]]
        return collective_seconds(self.cluster, what, nbytes / k if what == ALL_TO_ALL else nbytes, k, stride)

    def _alone(
        self, i: int, a: _Side, b: _Side, kind: Kind, differentiable: bool
    ) -> tuple[Array, Array, NDArray[np.bool_], tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Over one axis: latency, seconds of a byte, whether anything of a cut changes; the places of the cuts."""
        latency, rate = np.zeros((len(a.own), len(b.own))), np.zeros((len(a.own), len(b.own)))
        changes = np.zeros(latency.shape, dtype=bool)
        for x, source in enumerate(a.own):
            for y, target in enumerate(b.own):
                latency[x, y], rate[x, y] = self._pair(i, source, target, kind, differentiable)
                changes[x, y] = source != target and "cut" in (source.kind, target.kind)
        index = np.ix_(a.index, b.index)
        return latency[index], rate[index], changes[index], (a.place, b.place)

    def _pair(self, i: int, source: State, target: State, kind: Kind, differentiable: bool) -> tuple[float, float]:
        key = (i, source, target, kind, differentiable)
        if key not in self.known:
            self.known[key] = self._priced(i, source, target, kind, differentiable)
        return self.known[key]

    def _priced(self, i: int, source: State, target: State, kind: Kind, differentiable: bool) -> tuple[float, float]:
        found = way(source, target)
        if found is None:
            return _NEVER, 0.0
        there = self._line(found.forward, i)
        back = self._line(found.backward, i) if differentiable else (0.0, 0.0)
        if kind == "plain":
            return there[0] + back[0], there[1] + back[1]
        if source != target and "cut" in (source.kind, target.kind):
            if kind == "standing" or target.kind not in ("same", "several"):
                return _NEVER, 0.0
            return 0.0, 2 * there[1] + back[1]  # once for the forward and once for the backward
        return 0.0, there[1] + back[1] / self.micro_batches

    def _line(self, what: str, i: int) -> tuple[float, float]:
        latency = self._collective(what, 0.0, i)
        return latency, (self._collective(what, 1e9, i) - latency) / 1e9


class _Side:
    """The states over one axis of many tensors."""

    def __init__(self, states: Sequence[State], k: int) -> None:
        self.own = list(dict.fromkeys(states))
        at = {state: i for i, state in enumerate(self.own)}
        self.index = np.array([at[state] for state in states], dtype=np.intp)
        self.part = np.array([1 / k if part_dim(state) is not None else 1.0 for state in states])
        self.place = np.array([state.dim * (1 << 40) + state.outer if state.kind == "cut" else -1 for state in states])
