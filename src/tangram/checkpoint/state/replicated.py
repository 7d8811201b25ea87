"""What several ranks are to have alike: whether it is so, and of tensors without a layout who has them.

Nothing says of a plain tensor that it is a part, as those of FSDP1 or of layers cut by hand are, or that the ranks have
come apart. So all bytes of each are compared before a save, by a number for each tensor. Parameters, the states of
optimisers and large tensors have to agree; of what is small, as running statistics and states of generators, the first
rank's are kept and a warning names them, for ranks may well differ there; of what is no tensor, too.

Of a tensor with a layout, as of HSDP, the ranks that hold the same part are compared, too: one replica is saved, and
which one is no matter only while they are alike. A warning names the rank that is not.
"""

import hashlib
import json
import warnings
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tangram.checkpoint.state.entries import StateEntry
from tangram.checkpoint.store.manifest import checksum
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.exchange.peers import Peers

T = TypeVar("T")
_SMALL = 1 << 20
"""Bytes of what may differ, and is written by the first rank that has it."""
_ROW = 1 << 12
"""Bytes that an accelerator adds up as words of 64 bits, as fast as it reads."""
_SLAB = 1 << 24
"""Bytes of a tensor that are looked at at once: what lies in strides is copied."""


def with_replicas(
    entries: list[StateEntry], objects: Mapping[str, Any], peers: Peers, trained: Collection[str], *, compare: bool
) -> list[StateEntry]:
    """Fill in who holds the same of the entries whose layout does not say it: their `replicas` are empty.

    `objects`: what else is saved and the first rank's is kept of. `trained`: names of parameters and states of
    optimisers. Raises UserError on all ranks where such tensors differ between ranks, unless `compare` is False. Mostly
    every rank has the same, which a few bytes tell; only else are names exchanged.
    """
    loose = [entry for entry in entries if not entry.replicas]
    unsharded = [entry.region == Region.full(entry.spec.shape) for entry in loose]
    keys = [e.name if alone else f"{e.name} {e.region}" for e, alone in zip(loose, unsharded, strict=True)]
    rows: list[_Row] = []
    if peers.size > 1:
        if compare:
            # Who is none of them describes it, too, as of another stage, and holds nothing.
            held = [entry for entry in entries if len(entry.replicas) > 1 and peers.index in entry.replicas]
            _tell_unlike_replicas(held, peers)
        strict = [entry.name in trained or not _is_small(entry) for entry in loose]
        numbers = contents([entry.local for entry in loose]) if compare else [0] * len(loose)
        rows = [(e.name, key, n, must) for e, key, n, must in zip(loose, keys, numbers, strict, strict=True)]
        rows += [(n, "", checksum(json.dumps(value).encode()), False) for n, value in objects.items() if compare]
    known = _holders(rows, peers, all(unsharded)) if peers.size > 1 else {}
    filled: dict[int, StateEntry] = {}
    everyone = tuple(range(peers.size))
    for key, entry in zip(keys, loose, strict=True):
        ranks = known.get(key, everyone)
        ranks = ranks if entry.name in trained or not _is_small(entry) else ranks[:1]
        filled[id(entry)] = replace(entry, replicas=ranks)
    return [filled.get(id(entry), entry) for entry in entries]


def _tell_unlike_replicas(entries: Sequence[StateEntry], peers: Peers) -> None:
    """Warn of parts that several ranks hold and one has other values of; it is named. Collective.

    No more than that: ranks of model axes may update what they all hold by gradients that each has summed for itself.
    """
    held: dict[str, dict[str, int]] = {}
    for entry, number in zip(entries, contents([entry.local for entry in entries]), strict=True):
        held.setdefault(json.dumps(entry.replicas), {})[entry.name] = number
    words: list[dict[str, str]] = peers.all_words({ranks: _digest(sorted(own.items())) for ranks, own in held.items()})
    unlike = [ranks for ranks in {key: 0 for word in words for key in word} if len({*_of(words, ranks)}) > 1]
    told: list[dict[str, dict[str, int]]] = []
    if unlike:  # which all ranks know
        told = peers.all_words({key: held[key] for key in unlike if key in held})
    wrong: list[tuple[str, list[int], list[int]]] = []
    for ranks in unlike:
        for name in {name: 0 for own in _of(told, ranks) for name in own}:
            there = {rank: word[ranks].get(name) for rank, word in enumerate(told) if ranks in word}
            usual = Counter(there.values()).most_common(1)[0][0]
            if off := [rank for rank, number in there.items() if number != usual]:
                wrong.append((name, off, [rank for rank in there if rank not in off]))
    if wrong and peers.index == 0:
        name, off, others = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        warnings.warn(
            f"{name}{more} has other values on {_ranks(off)} than on {_ranks(others)}, which hold the same part of it, "
            "and one of them is saved: more than rounding is silent corruption, so go on from an older checkpoint",
            stacklevel=2,
        )


def _of(words: Sequence[Mapping[str, T]], key: str) -> Iterator[T]:
    return (word[key] for word in words if key in word)


def _ranks(some: Sequence[int]) -> str:
    *most, last = map(str, some)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


_Row = tuple[str, str, int, bool]
"""Of what is compared: its name, that with the region, a number of its content, whether ranks have to agree."""


def _holders(rows: list[_Row], peers: Peers, unsharded: bool) -> dict[str, tuple[int, ...]]:
    """The ranks that have each key; none where all ranks have all. Raises UserError on all ranks, or warns.

    Where all have the same keys, each compares with the first rank, so that a save costs the same on any number.
    """
    keys = _digest([row[:2] for row in rows])
    words = peers.all_words([keys, _digest([row[2] for row in rows]), unsharded])
    if words.count(words[0]) == len(words) and unsharded:
        return {}
    if all(word[0] == keys and word[2] for word in words):
        first = peers.from_first([row[2] for row in rows])
        other = [row for row, number in zip(rows, first, strict=True) if row[2] != number]
        by_rank: list[list[_Row]] = peers.all_words(other)
        _settle([(row, 0, rank) for rank, some in enumerate(by_rank) for row in some], peers)
        return {}
    by_rank = peers.all_words(rows)
    held: dict[str, list[int]] = {}
    one_of: dict[str, tuple[int, _Row]] = {}
    unlike: list[tuple[_Row, int, int]] = []
    for rank, some in enumerate(by_rank):
        for row in some:
            held.setdefault(row[1], []).append(rank)
            least, before = one_of.setdefault(row[0], (rank, row))
            if before[1:3] != row[1:3]:
                unlike.append((row, least, rank))
    _settle(unlike, peers)
    return {key: tuple(ranks) for key, ranks in held.items()}


def _settle(unlike: Sequence[tuple[_Row, int, int]], peers: Peers) -> None:
    """Refuse or warn of what differs between two ranks; every rank knows the same of it."""
    wrong = {row[0]: (a, b) for row, a, b in reversed(unlike) if row[3]}
    if wrong:
        name, (a, b) = next(reversed(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{name}{more} differs between ranks {a} and {b}: a tensor without a layout is taken to be the same on "
            "all ranks; give parts as DTensors or LocalPart, or make the ranks alike"
        )
    names = sorted({row[0] for row, _, _ in unlike})
    if names and peers.index == 0:
        warnings.warn(
            f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: ranks differ, and what the "
            "first one has is kept; put what every rank needs under a name of its own",
            stacklevel=2,
        )


def _is_small(entry: StateEntry) -> bool:
    return entry.nbytes <= _SMALL


def _digest(word: Any) -> str:
    return hashlib.sha256(json.dumps(word).encode()).hexdigest()[:16]


def contents(tensors: Iterable[Tensor]) -> list[int]:
    """A number of the bytes of each tensor, for ranks that have it on the same kind of device; strides do not count.

    It is a checksum; of what is on an accelerator that of sums of its words of 64 bits, over each 4 KiB and over every
    512th word, which are copied in one go: one element that differs changes it, and so does another order.
    """
    plain = [x.detach().resolve_conj().resolve_neg() for x in tensors]
    away = {i: _sums(x) for i, x in enumerate(plain) if x.device.type != "cpu"}
    for device in {x.device for x in away.values()}:
        some = [i for i, x in away.items() if x.device == device]
        joined, sizes = torch.cat([away[i] for i in some]).cpu(), [away[i].numel() for i in some]
        for i, x in zip(some, torch.split(joined, sizes), strict=True):
            plain[i] = x
    return [_number([checksum(_bytes(slab).numpy().data) for slab in _slabs(x)]) for x in plain]


def _number(parts: Sequence[int]) -> int:
    return parts[0] if len(parts) == 1 else checksum(array("Q", parts).tobytes())


def _sums(x: Tensor) -> Tensor:
    """Sums of the words of a tensor, and the bytes that are left, as bytes."""
    found: list[Tensor] = []
    for slab in _slabs(x):
        data = _bytes(slab)
        stop = data.numel() // _ROW * _ROW
        words = (data if data.storage_offset() % 8 == 0 else data.clone())[:stop].view(torch.int64)
        rows = words.view(-1, _ROW // 8)  # added up both ways: a sum alone knows no order
        found += [rows.sum(1).view(torch.uint8), rows.sum(0).view(torch.uint8), data[stop:]]
    return torch.cat(found)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _slabs(x: Tensor) -> Iterator[Tensor]:
    """A tensor in order, cut by its shape alone."""
    if x.nbytes <= _SLAB:
        yield x
    elif x.nbytes > _SLAB * len(x):
        for part in x:
            yield from _slabs(part)
    else:
        yield from x.split(max(1, _SLAB * len(x) // x.nbytes))
