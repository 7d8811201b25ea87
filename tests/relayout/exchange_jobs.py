"""What ranks move in the tests of the exchange: mappings of small tensors, laid over four ranks before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tangram.relayout import BoundMapping, Sharding, TensorSpec, bind, shard

Job = tuple[BoundMapping, Any, Any, dict[tuple[int, str], torch.Tensor]]
"""A mapping, who holds what, who wants what, and the buffers of all ranks."""
SAME = "{x*} -> {x*}"


def job(text: str, specs: dict[str, str], mesh: str, have: dict[str, str], want: dict[str, str], **sizes: int) -> Job:
    """Tensors of random bits, `specs` their shapes and dtypes as in `7 9 int8`, laid over one mesh or two."""
    bound = bind(text, {name: spec(words) for name, words in specs.items()}, **sizes)
    before, after = (mesh.split(" -> ") * 2)[:2]
    source, target = shard(before, have, bound.source, **sizes), shard(after, want, bound.target, **sizes)
    return bound, source, target, buffers(bound, source)


def spec(text: str) -> TensorSpec:
    words = text.split()
    return TensorSpec(tuple(int(x) for x in words if x.isdigit()), *[x for x in words if not x.isdigit()])


def buffers(bound: BoundMapping, source: Sharding) -> dict[tuple[int, str], torch.Tensor]:
    """What each rank of a source holds of tensors of random bits; replicas are alike, and so are `emb` and `head`."""
    made = torch.Generator()
    out: dict[tuple[int, str], torch.Tensor] = {}
    for number, (name, family) in enumerate(bound.source.families.items()):
        made.manual_seed(9 if name in ("emb", "head") else number)
        dtype = getattr(torch, family.spec.dtype)
        n = int(np.prod(family.spec.shape)) * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        whole = torch.randint(0, high, (n,), dtype=torch.uint8, generator=made).view(dtype).reshape(family.spec.shape)
        for rank in range(source.mesh.size):
            region = source.piece(name, rank).region
            if region:
                elements = torch.zeros(whole.shape, dtype=torch.bool)
                for box in region.boxes:
                    elements[np.ix_(*[[i for a, b in s for i in range(a, b)] for s in box])] = True
                one = len(region.boxes) == 1
                shape = [sum(b - a for a, b in s) for s in region.boxes[0]] if one else [region.size]
                out[rank, name] = whole[elements].reshape(shape)
    return out


def rows() -> dict[str, Job]:
    """By the transport that fits it: a job of four ranks that share nothing."""
    specs = {"w": "16 48", "b": "5 int8"}
    cut, whole = {"w": "a/x b", "b": "a/x"}, {"w": "a b", "b": "a"}
    still = job(SAME, specs, "x=4", cut, cut)
    bound, source, _, have = still
    turned = [replace(piece, place=rank) for rank in range(4) for piece in source.pieces((rank + 1) % 4)]
    return {
        "nothing": still,
        "broadcast": job(SAME, specs, "x=4", {"w": "a b @x=0", "b": "a @x=0"}, whole),
        "all-gather": job(SAME, {"w": "16 48", "b": "4 int8"}, "x=4", cut, whole),
        "all-to-all": job(SAME, specs, "x=4", cut, {"w": "a b/x", "b": "a"}),
        "pairs": (bound, source, turned, have),
    }


QKV = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
_HEADS = {"q": "(g/tp r d)/dp h", "k": "(g/tp d)/dp h", "v": "(g/tp d)/dp h"}
_FUSED = {"qkv": "(g/tp (r + 1 + 1) d) h"}
_ROWS, _COLUMNS = {"w": "a/x b"}, {"w": "a b/x"}
_TIED = {"emb": "6 4", "head": "6 4"}
_MIXED = {"a": "39 int8", "b": "47 float64", "c": "3 3 int16", "d": "2 complex128"}

JOBS: dict[str, Callable[[], Job]] = {
    "fused": lambda: job(QKV, {"q": "24 8", "k": "12 8", "v": "12 8"}, "dp=2 tp=2 -> tp=4", _HEADS, _FUSED, g=4, d=3),
    "narrower": lambda: job("w: a b -> w: a b; cast=float32:bfloat16 mul=3", {"w": "7 9"}, "x=4", _ROWS, _COLUMNS),
    "wider": lambda: job(
        "w: a b -> w2: b a; cast=bfloat16:float32 mul=3", {"w": "7 9 bfloat16"}, "x=4", _ROWS, {"w2": "b a/x"}
    ),
    "added": lambda: job("w -> w; add=-1", {"w": "9 float16"}, "x=4", {"w": "a/x"}, {"w": "a"}),
    "nibbles": lambda: job("w -> w; swap_nibbles", {"w": "3 5 uint8"}, "x=3 -> x=4", _ROWS, _COLUMNS),
    "padded": lambda: job(
        "w: v h -> words: (v + _=3) h; fill=7", {"w": "6 4 int16"}, "x=4", _ROWS, {"words": "(6 + 3)/x h"}
    ),
    "created": lambda: job(
        "_ -> bias: n; fill=2\nw -> w", {"w": "4 complex64"}, "x=4", {"w": "a/x"}, {"bias": "n", "w": "a @x=3"}, n=5
    ),
    "empty": lambda: job(
        SAME,
        {"w": "0 4", "s": "", "m": "1 3 bool"},
        "x=4",
        {"w": "a/x b", "s": "@x=2", "m": "a/x b"},
        {"w": "a b/x", "s": "", "m": "a b/x"},
    ),
    "of several lengths": lambda: job(
        SAME,
        _MIXED,
        "x=4",
        {"a": "a/x", "b": "a/x", "c": "a b/x", "d": "a @x=1"},
        {"a": "a @x=3", "b": "a", "c": "a/x b", "d": "a/x"},
    ),
    "flat": lambda: job(SAME, {"w": "5 7"}, "x=2 y=2", {"w": "a b/y //x"}, {"w": "a/x b //y"}),
    "axes of one": lambda: job(SAME, {"w": "5 7"}, "o=1 x=4 -> x=2 p=1 y=2", {"w": "a/o b/x"}, {"w": "a/p/y b/x"}),
    "tied": lambda: job(
        "emb: v h = head: v h -> words: v h", _TIED, "x=4", {"emb": "v/x h", "head": "v h/x"}, {"words": "v h"}
    ),
    "tied targets": lambda: job("w: v h -> a: v h = b: h v", {"w": "6 4"}, "x=4", _ROWS, {"a": "v h/x", "b": "h v/x"}),
}
