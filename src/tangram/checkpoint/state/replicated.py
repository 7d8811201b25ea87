"""Tensors without a layout, of which every rank that has one is taken to have the same: who has them, and whether so.

Nothing says of a plain tensor that it is a part, as those of FSDP1 or of layers cut by hand are, or that the ranks have
come apart. So a few elements of each are compared before a save; what differs elsewhere alone is not seen. Parameters,
the states of optimisers and large tensors have to agree; of what is small, as running statistics and states of
generators, the first rank's are kept and a warning names them, for ranks may well differ there; of what is no tensor,
too.
"""

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.state.entries import StateEntry
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.exchange.peers import Peers

_SAMPLED = 32
"""Elements of a tensor that are compared."""
_SMALL = 1 << 20
"""Bytes of what may differ, and is written by the first rank that has it."""


def with_replicas(
    entries: list[StateEntry], objects: Mapping[str, Any], peers: Peers, trained: Collection[str], *, compare: bool
) -> list[StateEntry]:
    """Fill in who holds the same of the entries whose layout does not say it: their `replicas` are empty.

    `objects`: what else is saved and the first rank's is kept of. `trained`: names of parameters and states of
    optimisers. Raises UserError on all ranks where such tensors differ between ranks, unless `compare` is False. Mostly
    every rank has the same, which a few bytes tell; only else are names exchanged.
    """
    loose = [entry for entry in entries if not entry.replicas]
    names, keys = [entry.name for entry in loose], [f"{entry.name} {entry.region}" for entry in loose]
    samples = [_sample(entry.local) if compare else "" for entry in loose]
    values = {name: _digest(json.dumps(value).encode()) for name, value in objects.items() if compare}
    word = _digest(json.dumps([keys, samples, values]).encode())
    if len(set(peers.all_words(word))) == 1 and all(e.region == Region.full(e.spec.shape) for e in loose):
        known = dict.fromkeys(keys, tuple(range(peers.size)))
    else:
        columns = [[*names, *values], [*keys, *[""] * len(values)], [*samples, *values.values()]]
        by_rank = peers.all_words(columns)
        found: dict[str, list[int]] = {}
        for rank, (_, theirs, _) in enumerate(by_rank):
            for key in theirs:
                found.setdefault(key, []).append(rank)
        known = {key: tuple(ranks) for key, ranks in found.items()}
        if compare:
            _warn(
                peers,
                _compare(by_rank, {e.name for e in loose if e.name not in trained and _is_small(e)} | values.keys()),
            )
    filled: dict[int, StateEntry] = {}
    for key, entry in zip(keys, loose, strict=True):
        ranks = known[key] if entry.name in trained or not _is_small(entry) else known[key][:1]
        filled[id(entry)] = replace(entry, replicas=ranks)
    return [filled.get(id(entry), entry) for entry in entries]


def _is_small(entry: StateEntry) -> bool:
    return entry.nbytes <= _SMALL


def _compare(by_rank: list[tuple[list[str], list[str], list[str]]], may_differ: set[str]) -> set[str]:
    """The names of what differs and may. `by_rank`: names, what is compared of them at once, and their samples."""
    first: dict[str, tuple[int, str, str]] = {}
    other: dict[str, tuple[int, int]] = {}
    for rank, columns in enumerate(by_rank):
        for name, key, sample in zip(*columns, strict=True):
            one = first.setdefault(name, (rank, key, sample))
            if one[1:] != (key, sample):
                other.setdefault(name, (one[0], rank))
    wrong = [name for name in other if name not in may_differ]
    if wrong:
        a, b = other[wrong[0]]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{wrong[0]}{more} differs between ranks {a} and {b}: a tensor without a layout is taken to be the same on "
            "all ranks; give parts as DTensors or LocalPart, or make the ranks alike"
        )
    return set(other)


def _warn(peers: Peers, names: set[str]) -> None:
    if names and peers.index == 0:
        warnings.warn(
            f"{', '.join(sorted(names)[:3])}{' and others' if len(names) > 3 else ''}: ranks differ, and what the "
            "first one has is kept; put what every rank needs under a name of its own",
            stacklevel=2,
        )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _sample(local: Tensor) -> str:
    return _digest(some_elements(local).cpu().numpy().tobytes())


def some_elements(x: Tensor) -> Tensor:
    """Up to 32 elements from first to last, as bytes: tensors of other values hardly ever agree in all of them."""
    x = x.detach().resolve_conj()
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    places = torch.linspace(0, x.numel() - 1, min(_SAMPLED, x.numel()), dtype=torch.float64).long()
    taken = x[torch.unravel_index(places.to(x.device), x.shape)] if x.dim() else x.reshape(1)
    return taken.contiguous().view(torch.uint8)
