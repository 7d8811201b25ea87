"""A shuffle that is a function: which element stands at place i of a permutation of range(n), for any i alone.

A Feistel network over the bits of n permutes a power of two; places that land beyond n walk on until they fall inside
(cycle walking, less than two steps on average). So an order of a billion samples takes no memory, and a rank computes
only the places it needs. The trade-off: it is a good shuffle, not one drawn evenly from all n! orders.
"""

import hashlib

import numpy as np
import numpy.typing as npt

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
