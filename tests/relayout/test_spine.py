"""The spine of the project: fused QKV between Hugging Face at one TP and Megatron at another, and back, bit for bit.

Buffers are cut by hand with numpy here, on both sides, so nothing of the layout room is taken on trust either.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tangram.relayout import TensorSpec, bind, execute, inverse, plan, shard
from tests.relayout.moving import Array, Buffers, Side, chunk, move, numbered, opposite, same_bits

QKV = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
HF = {"q": "(g/tp r d)/dp h", "k": "(g/tp d)/dp h", "v": "(g/tp d)/dp h"}


def separate(g: int, r: int, d: int, h: int) -> dict[str, Array]:
    q, k, v = numbered(g * r * d, h), numbered(g * d, h, start=10_000), numbered(g * d, h, start=-10_000)
    k[0, 0], v[0, 0] = np.nan, -0.0
    return {"q": q, "k": k, "v": v}


def megatron(s: dict[str, Array], g: int, d: int) -> Array:
    """Group after group: its queries, its key, its value."""
    r = s["q"].shape[0] // (g * d)
    rows: list[Array] = []
    for group in range(g):
        rows += [s["q"][group * r * d : (group + 1) * r * d]]
        rows += [s[x][group * d : (group + 1) * d] for x in "kv"]
    return np.concatenate(rows)


def hf_rank(s: dict[str, Array], g: int, dp: int, tp: int) -> dict[str, Array]:
    """Rank (dp, tp) of dp=2 tp=2: whole groups by tp, then rows by dp (FSDP inside TP)."""

    def rows(x: Array) -> Array:
        by_group = x.reshape(g, x.shape[0] // g, x.shape[1])
        return chunk(chunk(by_group, 2, tp).reshape(-1, x.shape[1]), 2, dp)

    return {name: rows(x) for name, x in s.items()}


def megatron_rank(fused: Array, g: int, tp: int, dp: int) -> Array:
    """Rank (tp, dp) of tp=4 dp=2: whole groups by tp, columns by dp."""
    h = fused.shape[1]
    return chunk(chunk(fused.reshape(g, -1, h), 4, tp).reshape(-1, h), 2, dp, axis=1)


def buffers(ranks: dict[int, dict[str, Array]]) -> Buffers:
    return {(rank, name): a for rank, parts in ranks.items() for name, a in parts.items()}


def fill_and_compare(run: Callable[[Buffers], None], expected: Buffers, as_torch: bool) -> None:
    got = {key: opposite(np.ascontiguousarray(a)) for key, a in expected.items()}
    run({key: torch.from_numpy(a) if as_torch else a for key, a in got.items()})
    for key, a in got.items():
        assert same_bits(a, np.ascontiguousarray(expected[key])), key


@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize(
    ("g", "r", "d", "h"), [(4, 2, 3, 5), (8, 4, 2, 1), (4, 1, 2, 3), (5, 3, 1, 4), (6, 2, 3, 7), (1, 2, 3, 2)]
)
def test_hugging_face_tp2_to_megatron_tp4_and_back(g: int, r: int, d: int, h: int, as_torch: bool) -> None:
    parts = separate(g, r, d, h)
    fused = megatron(parts, g, d)
    bound = bind(QKV, {name: TensorSpec(a.shape) for name, a in parts.items()}, g=g)
    assert bound.target.specs == {"qkv": TensorSpec(fused.shape)}
    hf = shard("dp=2 tp=2", HF, bound.source, g=g, d=d)
    meg = shard("tp=4 dp=2", {"qkv": "(g/tp (r + 1 + 1) d) h/dp"}, bound.target, g=g, d=d)
    have = buffers({2 * dp + tp: hf_rank(parts, g, dp, tp) for dp in range(2) for tp in range(2)})
    want = buffers({2 * tp + dp: {"qkv": megatron_rank(fused, g, tp, dp)} for tp in range(4) for dp in range(2)})
    for rank in range(8):
        pieces = meg.pieces(rank)
        fill_and_compare(
            lambda got, pieces=pieces: execute(plan(bound, hf, pieces), have, got),
            {key: want[key] for key in [(p.place, p.tensor) for p in pieces]},
            as_torch,
        )
    back = bind(inverse(QKV), {"qkv": TensorSpec(fused.shape)}, g=g, r=r)
    hf2, meg2 = shard("dp=2 tp=2", HF, back.target, g=g, d=d), shard(meg.mesh, meg.layouts, back.source)
    for rank in range(4):
        pieces = hf2.pieces(rank)
        fill_and_compare(
            lambda got, pieces=pieces: execute(plan(back, meg2, pieces), want, got),
            {key: have[key] for key in [(p.place, p.tensor) for p in pieces]},
            as_torch,
        )


@pytest.mark.parametrize(("g", "r", "d", "h"), [(4, 2, 3, 5), (5, 3, 2, 3), (8, 4, 1, 1)])
@pytest.mark.parametrize(
    ("mesh", "layouts"),
    [
        ("dp=3 tp=2", {"qkv": "(g/tp (r + 1 + 1) d)/dp h"}),
        ("dp=3", {"qkv": "o/dp h"}),
        ("dp=2 tp=3", {"qkv": "(g (r/tp + 1 + 1) d) h/dp"}),
        ("dp=2 tp=2", {"qkv": "o/tp h //dp"}),
    ],
)
def test_other_layouts_of_the_fused_weight(g: int, r: int, d: int, h: int, mesh: str, layouts: dict[str, str]) -> None:
    parts = separate(g, r, d, h)
    fused = {"qkv": megatron(parts, g, d)}
    sizes = {"g": g, "r": r, "d": d}
    move(
        QKV,
        Side(parts, {"q": "o/dp h", "k": "o h", "v": "o h/dp"}, "dp=3"),
        Side(fused, layouts, mesh, sizes),
        **sizes,
    )


def test_more_tensor_ranks_than_groups_of_keys() -> None:
    """TP 4 over two groups: pairs of ranks share keys and values and part the queries; a second view names them."""
    g, r, d, h = 2, 4, 3, 2
    parts = separate(g, r, d, h)
    fused = megatron(parts, g, d)
    bound = bind(QKV, {name: TensorSpec(a.shape) for name, a in parts.items()}, g=g)
    mesh = "dp=2 tp=4 | dp=2 kv=2 rep=2"
    meg = shard(mesh, {"qkv": "(g/kv (r/rep + 1 + 1) d) h/dp"}, bound.target, g=g, d=d)
    hf = shard("dp=2 tp=2", HF, bound.source, g=g, d=d)
    have = buffers({2 * dp + tp: hf_rank(parts, g, dp, tp) for dp in range(2) for tp in range(2)})
    by_head = fused.reshape(g, r + 2, d, h)
    for rank in range(8):
        dp, kv, rep = rank // 4, rank // 2 % 2, rank % 2
        mine = by_head[kv, [2 * rep, 2 * rep + 1, r, r + 1]].reshape(-1, h)
        pieces = meg.pieces(rank)
        fill_and_compare(
            lambda got, pieces=pieces: execute(plan(bound, hf, pieces), have, got),
            {(rank, "qkv"): chunk(mine, 2, dp, axis=1)},
            True,
        )
    sizes = {"g": g, "r": r, "d": d}
    move(QKV, Side(parts, HF, "dp=2 tp=2", sizes), Side({"qkv": fused}, dict(meg.layouts), mesh, sizes), **sizes)


def test_query_key_value_blocks_for_each_tensor_rank_of_the_writer() -> None:
    """[q|k|v] of rank 0, then of rank 1, as a writer with TP 2 stores it."""
    g, r, d, h = 4, 2, 3, 5
    parts = separate(g, r, d, h)
    fused = np.concatenate([np.concatenate([chunk(parts[x], 2, t) for x in "qkv"]) for t in range(2)])
    move(
        "q: (t a) h, k: (t b) h, v: (t b) h -> qkv: (t (q a + k b + v b)) h",
        Side(parts, HF, "dp=2 tp=2", {"g": g, "d": d}),
        Side({"qkv": fused}, {"qkv": "(t/tp o)/dp h"}, "dp=3 tp=2", {"t": 2}),
        t=2,
        a=g * r * d // 2,
    )


def test_each_rank_reads_the_replica_that_is_its_own() -> None:
    """Where source and target ranks are the same machines, a rank that holds what it wants asks nobody."""
    parts = separate(4, 2, 3, 5)
    bound = bind(QKV, {name: TensorSpec(a.shape) for name, a in parts.items()}, g=4)
    whole = shard("dp=4", dict.fromkeys("qkv", "..."), bound.source)
    wanted = shard("dp=4", {"qkv": "o/dp h"}, bound.target)
    pieces = [p for rank in range(4) for p in whole.pieces(rank)]
    for rank in range(4):
        for source in (whole, pieces):
            copies = plan(bound, source, wanted.pieces(rank)).copies
            assert {c.source.place for c in copies if c.source} == {rank}
