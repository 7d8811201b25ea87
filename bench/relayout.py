"""Copy plans for a trillion parameters, and the speed of moving bytes in memory and between ranks.

The model is a mixture of experts of 61 layers and 384 experts (latent attention, one trillion parameters), with bf16
weights and fp32 master weights and AdamW moments, ZeRO-1 over the data axes, held by 4,096 ranks under Hugging Face
names. 1,024 ranks want it at another tensor, pipeline and expert parallelism, experts stacked and gate/up fused.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable

import torch

from bench import _relayout
from bench._trillion import mapping, sharding, specs
from tangram.hardware.measuring.measure import Row, interleaved, once
from tangram.layout import Region
from tangram.relayout import BoundMapping, CopyPlan, Piece, Sharding, TensorSpec, bind, execute, plan, shard
from tangram.training.run.launch import run_ranks


def rows(quick: bool) -> Iterable[Row]:
    """The figures; `quick` plans 64 of the 1,024 ranks and copies smaller tensors."""
    yield from _copies(quick)
    yield from _between_ranks(1024 if quick else 4096, None if quick else 1)
    yield from _plans(64 if quick else 1024)


def _plans(ranks: int) -> Iterable[Row]:
    tensors = specs()
    start = time.perf_counter()
    bound = bind(mapping(tensors), tensors)
    bind_s = time.perf_counter() - start
    parameters = sum(_count(s.shape) for name, s in tensors.items() if not name.startswith("optim."))
    yield Row("parameters of the model", "10^12", parameters / 1e12)
    yield Row(f"bind the mapping to {len(tensors):,} tensors", "s", bind_s)
    source, target = sharding(bound, "source"), sharding(bound, "target")
    start = time.perf_counter()
    _plan_of(bound, source, target, 300)
    yield Row("plan of one rank, first", "s", time.perf_counter() - start, target=1)
    seconds = interleaved({"ours": lambda: _plan_of(bound, source, target, 700)}, repeats=5)["ours"]
    yield Row("plan of one rank, later", "s", seconds, target=1)
    source, target = sharding(bound, "source"), sharding(bound, "target")
    plans: list[CopyPlan] = []
    whole = once(lambda: plans.extend(_plan_of(bound, source, target, r) for r in range(ranks)))
    elements = sum(p.size for p in plans)
    name = (
        f"plan of all {ranks:,} ranks ({sum(len(p.copies) for p in plans):,} copies, {elements / 1e12:.2f} T elements)"
    )
    yield Row(name, "s", whole, target=10 * ranks / 1024)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    yield Row("peak memory of the process", "GB", peak / 1e9, target=4)


def _plan_of(bound: BoundMapping, source: Sharding, target: Sharding, rank: int) -> CopyPlan:
    return plan(bound, source, target.pieces(rank))


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for m in shape:
        n *= m
    return n


# ---------------------------------------------------------------- moving bytes


def _copies(quick: bool) -> Iterable[Row]:
    h = 1024 if quick else 4096
    yield from _compared("fused QKV, one TP 4 rank from two of TP 2", *_qkv(2 * h))
    yield from _compared("the same, small enough for the cache", *_qkv(h), target=None)
    yield from _compared("gate/up halves into one", *_gate_up(h))
    yield from _compared("a transpose", *_transpose(h))
    yield from _compared("experts into a stack, columns cut", *_stack(h))


def _between_ranks(side: int, target: float | None) -> Iterable[Row]:
    """The slowest rank counts: nobody goes on before it."""
    found = run_ranks(_relayout.seconds, side, world=_relayout.RANKS, on_event=lambda event: None, device="cpu")
    times = {name: max(of[name] for of in found) * 1e3 for name in found[0]}
    ours, dtensor, plain = (times[name] for name in (_relayout.OURS, _relayout.DTENSOR, _relayout.BYTES))
    what = f"{_relayout.RANKS} ranks over gloo turn rows into columns ({4 * side * side / 1e6:.0f} MB)"
    yield Row(what, "ms", ours, peers={_relayout.DTENSOR: dtensor}, target_ratio=target)
    yield Row("the same, beside its bytes alone in one all-to-all", "ms", ours, limit=plain)


Job = tuple[Callable[[], None], Callable[[], None], int]
"""(ours, the same copies written by hand in torch, bytes)."""


def _compared(
    what: str, ours: Callable[[], None], plain: Callable[[], None], nbytes: int, target: float | None = 0.7
) -> Iterable[Row]:
    times = interleaved({"ours": ours, "torch": plain}, repeats=9)
    speeds = {name: nbytes / seconds / 1e9 for name, seconds in times.items()}
    yield Row(
        f"copy {what} ({nbytes / 1e6:.0f} MB)",
        "GB/s",
        speeds["ours"],
        limit=speeds["torch"],
        target_ratio=target,
        better="higher",
    )


def _qkv(h: int) -> Job:
    g, r, d = 8, 4, h // 32
    shapes = {"q": (g * r * d, h), "k": (g * d, h), "v": (g * d, h)}
    sizes = {"g": g, "d": d}
    text = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
    bound = bind(text, {k: TensorSpec(s) for k, s in shapes.items()}, sizes=sizes)
    source = shard("tp=2", {"q": "(g/tp r d) h", "k": "(g/tp d) h", "v": "(g/tp d) h"}, bound.source, **sizes)
    target = shard("tp=4", {"qkv": "(g/tp (r + 1 + 1) d) h"}, bound.target, **sizes)
    have = {(t, p.tensor): torch.randn(p.region.local_shape or ()) for t in range(2) for p in source.pieces(t)}
    mine = target.piece("qkv", 1)
    out = {(1, "qkv"): torch.empty(mine.region.local_shape or ())}
    copies = plan(bound, source, [mine])
    parts = [have[0, name].view(g // 2, -1, h)[2:] for name in "qkv"]
    views = torch.split(out[1, "qkv"].view(g // 4, -1, h), [r * d, d, d], 1)

    def plain() -> None:
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)

    return lambda: execute(copies, have, out), plain, out[1, "qkv"].nbytes


def _gate_up(h: int) -> Job:
    f = 2 * h
    bound = bind("gate: f h, up: f h -> w1: ((gate + up) f) h", {k: TensorSpec((f, h)) for k in ("gate", "up")})
    have = {(0, k): torch.randn(f, h) for k in ("gate", "up")}
    out = {(0, "w1"): torch.empty(2 * f, h)}
    copies = plan(
        bound, [Piece(0, k, Region.full((f, h))) for k in ("gate", "up")], [Piece(0, "w1", Region.full((2 * f, h)))]
    )

    def plain() -> None:
        out[0, "w1"][:f].copy_(have[0, "gate"])
        out[0, "w1"][f:].copy_(have[0, "up"])

    return lambda: execute(copies, have, out), plain, out[0, "w1"].nbytes


def _transpose(h: int) -> Job:
    bound = bind("a: o i -> b: i o", {"a": TensorSpec((h, 2 * h))})
    have, out = {(0, "a"): torch.randn(h, 2 * h)}, {(0, "b"): torch.empty(2 * h, h)}
    copies = plan(bound, [Piece(0, "a", Region.full((h, 2 * h)))], [Piece(0, "b", Region.full((2 * h, h)))])

    def plain() -> None:
        out[0, "b"].copy_(have[0, "a"].T)

    return lambda: execute(copies, have, out), plain, out[0, "b"].nbytes


def _stack(h: int) -> Job:
    experts, f = 16, h // 4
    specs = {f"e.{e}.w": TensorSpec((h, f)) for e in range(experts)}
    bound = bind("e.{e}.w: h f -> w: e h f", specs)
    target = shard("tp=2", {"w": "e h f/tp"}, bound.target)
    have = {(0, name): torch.randn(h, f) for name in specs}
    mine = target.piece("w", 1)
    out = {(1, "w"): torch.empty(mine.region.local_shape or ())}
    copies = plan(bound, [Piece(0, name, Region.full((h, f))) for name in specs], [mine])

    def plain() -> None:
        for e in range(experts):
            out[1, "w"][e].copy_(have[0, f"e.{e}.w"][:, f // 2 :])

    return lambda: execute(copies, have, out), plain, out[1, "w"].nbytes
