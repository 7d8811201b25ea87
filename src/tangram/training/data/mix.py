"""The order of a job's samples as functions: which source sample k comes from, and which of a source stands at place i.

Weights become whole numbers of slots in a cycle, and the order of the cycle is fixed and smooth: after any number of
samples each source has had its exact share to within less than one sample (Tijdeman's solution of the chairman
assignment problem). So the mix holds in every global batch, not only on average, and k is found without a history.

The shuffle of a source (`permuted`) is a Feistel network over the bits of n, which permutes a power of two; places that
land beyond n walk on until they fall inside (cycle walking, less than two steps on average). So an order of a billion
samples takes no memory, and a rank computes only the places it needs.

Trade-offs: a cycle has at most `MOST_SLOTS` slots, so weights like 1 : pi are rounded, and very small ones refused; and
it is a good shuffle, not one drawn evenly from all n! orders.
"""

# ruff: noqa: N815  a tensor carries its dims in its name

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tangram.errors import UserError

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # even, so that halves of unequal width end where they began


def permuted(indices: npt.ArrayLike, n: int, key: str) -> Ints:
    """The elements at places `indices` of the permutation of range(n) that `key` chooses."""
    places = np.asarray(indices, np.int64)
    if n < 1 or (places.size and not (int(places.min()) >= 0 and int(places.max()) < n)):
        raise ValueError(f"places of a permutation of {n} lie in range({n})")
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), "<u8")
    flat = places.ravel().astype(np.uint64)
    limit, width = np.uint64(n), (n - 1).bit_length()
    flat = _feistel(flat, width, keys)
    outside = np.flatnonzero(flat >= limit)
    while outside.size:
        flat[outside] = _feistel(flat[outside], width, keys)
        outside = outside[flat[outside] >= limit]
    return flat.astype(np.int64).reshape(places.shape)


def _feistel(words: _Words, width: int, keys: _Words) -> _Words:
    """A permutation of range(2**width): each round hashes one half of the bits into the other and swaps them."""
    low = width - width // 2
    high = width - low
    for key in keys:
        right = words & np.uint64((1 << low) - 1)
        left = words >> np.uint64(low)
        mixed = (left ^ _hash(right ^ key)) & np.uint64((1 << high) - 1)
        words = (right << np.uint64(high)) | mixed
        low, high = high, low
    return words


def _hash(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of a word changes every other."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


MOST_SLOTS = 4096


@dataclass(frozen=True)
class Mix:
    """One cycle: the source of each slot, the how-manieth of that source it is, and the slots of each source."""

    source_W: Ints
    turn_W: Ints
    slots_N: Ints

    def places(self, samples: npt.ArrayLike) -> tuple[Ints, Ints]:
        """For samples of the job: the source of each, and its number within the source."""
        cycle, slot = np.divmod(np.asarray(samples, np.int64), len(self.source_W))
        source = self.source_W[slot]
        return source, cycle * self.slots_N[source] + self.turn_W[slot]


@lru_cache(maxsize=16)  # every step of a job asks for the same one
def make_mix(weights: tuple[float, ...]) -> Mix:
    slots = _slots(weights)
    order = _order(slots)
    turns = np.zeros(len(order), np.int64)
    for source in range(len(slots)):
        turns[order == source] = np.arange(slots[source])
    return Mix(order, turns, np.array(slots, np.int64))


def _slots(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights, exact where a cycle is long enough for that."""
    shares = np.array(weights, np.float64) / np.max(weights)
    shares /= shares.sum()
    for length in range(len(weights), MOST_SLOTS + 1):
        counts = np.rint(shares * length)
        if np.all(np.abs(counts - shares * length) <= 1e-9 * shares * length):
            return [int(count) for count in counts]
    length = max(MOST_SLOTS, len(weights))
    counts = np.floor(shares * length)
    by_rest = np.argsort(counts - shares * length, kind="stable")
    counts[by_rest[: length - int(counts.sum())]] += 1
    if not counts.all():
        least = int(np.argmin(shares))
        raise UserError(
            f"the weight {weights[least]} in data.sources is less than one sample in {length}: raise it, or leave the "
            "source out"
        )
    return [int(count) for count in counts]


def _order(slots: Sequence[int]) -> Ints:
    """Of the sources that may come without being ahead by one, the one that would first be behind by one."""
    sources, length = len(slots), sum(slots)
    order = np.zeros(length, np.int64)
    if sources == 1:
        return order
    shares, counts = np.array(slots, np.float64) / length, np.zeros(sources)
    slack = 1 / (2 * sources - 2)
    for slot in range(length):
        behind = shares * (slot + 1) - counts
        deadline = np.where(behind >= slack - 1e-9, (1 - slack - behind) / shares, np.inf)
        order[slot] = source = int(np.argmin(deadline))
        counts[source] += 1
    return order
