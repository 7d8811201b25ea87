"""The bytes of the best sequence of any length between any two even layouts: every layout, every collective, all paths.

Shares nothing with the search but the names of states: what ranks hold are sets of elements, made one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tangram.relayout.collectives.digits import WAITING, DigitProblem, DigitSpot, RankDigit, State


def problem(shape: tuple[int, ...], ks: Sequence[int], source: State, target: State) -> DigitProblem:
    """Two states over axes a, b, ... of these sizes."""
    digits = tuple(RankDigit(int(np.prod(ks[i + 1 :], dtype=int)), k) for i, k in enumerate(ks))
    names = tuple("abc"[: len(ks)])
    return DigitProblem(shape, digits, names, names, source, target)


def states(shape: tuple[int, ...], ks: Sequence[int]) -> list[State]:
    """Every way to lie: whole, pending, cut at any place of any dim."""
    places = [
        [None, WAITING, *(DigitSpot(d, o) for d, n in enumerate(shape) for o in range(1, n) if n % (o * k) == 0)]
        for k in ks
    ]
    return [state for state in itertools.product(*places) if _stands(state, shape, ks)]


def _stands(state: State, shape: tuple[int, ...], ks: Sequence[int]) -> bool:
    """Whether all ranks have equally many elements of each dim, and each has one product of them."""
    cut = [(spot, k) for spot, k in zip(state, ks, strict=True) if spot is not None and spot != WAITING]
    for (a, k), (b, m) in itertools.combinations(cut, 2):
        if a.dim == b.dim and b.outer % (a.outer * k) and a.outer % (b.outer * m):
            return False
    return True


def held(shape: tuple[int, ...], ks: Sequence[int], state: State) -> np.ndarray:
    """By rank and element whether it is there, in a summand or whole."""
    rows: list[np.ndarray] = []
    for at in itertools.product(*[range(k) for k in ks]):
        own = np.ones(shape, dtype=bool)
        for spot, k, i in zip(state, ks, at, strict=True):
            if spot is not None and spot != WAITING:
                n = shape[spot.dim]
                inside = np.arange(n) // (n // (spot.outer * k)) % k == i
                own &= inside.reshape([-1 if d == spot.dim else 1 for d in range(len(shape))])
        rows.append(own.reshape(-1))
    return np.stack(rows)


def costs(shape: tuple[int, ...], ks: Sequence[int]) -> tuple[list[State], np.ndarray]:
    """All states, and the fewest elements that a rank receives, on average, from each to each."""
    every = states(shape, ks)
    number = {state: i for i, state in enumerate(every)}
    have = np.stack([held(shape, ks, state) for state in every]).astype(np.int32)  # state, rank, element
    size = have.sum((1, 2)) / have.shape[1]
    both = np.tensordot(have.reshape(len(every), -1), have.reshape(len(every), -1), (1, 1)) / have.shape[1]
    best = np.full((len(every), len(every)), np.inf)
    for state, i in number.items():
        for after in _free(state, every):
            best[i, number[after]] = 0.0
        waits = [a for a, spot in enumerate(state) if spot == WAITING]
        for j, after in enumerate(every):  # any exchange of what is no sum
            if [a for a, spot in enumerate(after) if spot == WAITING] == waits:
                best[i, j] = min(best[i, j], size[j] - both[i, j])
        for some, after in _reduced(state, waits, every):
            k = int(np.prod([ks[a] for a in some]))
            share = (k - 1) / k * (2 if after[some[0]] is None else 1)
            best[i, number[after]] = min(best[i, number[after]], size[i] * share)
    for m in range(len(every)):  # all paths
        best = np.minimum(best, best[:, m, None] + best[None, m])
    return every, best


def _free(state: State, every: Sequence[State]) -> Iterator[State]:
    """What is not yet a sum becomes one by itself."""
    for after in every:
        if all(a == b or b == WAITING for a, b in zip(state, after, strict=True)):
            yield after


def _reduced(state: State, waits: Sequence[int], every: Sequence[State]) -> Iterator[tuple[tuple[int, ...], State]]:
    """One all-reduce or reduce-scatter over some of the axes that wait."""
    for n in range(1, len(waits) + 1):
        for some in itertools.combinations(waits, n):
            for after in every:
                same = all(a == b for i, (a, b) in enumerate(zip(state, after, strict=True)) if i not in some)
                own = [after[i] for i in some]
                if same and WAITING not in own and (None not in own or not any(own)):
                    yield some, after
