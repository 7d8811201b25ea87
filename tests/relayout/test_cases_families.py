"""The cases that the notation must carry, each against plain numpy: experts, stages, flat shards and buckets."""

import numpy as np
import pytest

from tangram.layout import Region
from tangram.relayout import CoverageError, Piece, TensorSpec, bind, execute, plan, shard
from tests.relayout.moving import Array, Side, chunk, move, numbered, specs

MESH_8 = "dp=4 tp=2 | edp=2 ep=2 etp=2"


def family(pattern: str, whole: Array, lead: int) -> dict[str, Array]:
    """The members of a family tensor by name; `pattern` takes the numbers by position."""
    return {pattern.format(*index): np.ascontiguousarray(whole[index]) for index in np.ndindex(*whole.shape[:lead])}


# ---------------------------------------------------------------- experts, layers, stages


def test_experts_on_their_own_mesh_beside_dense_layers() -> None:
    layers, experts, f, h = 2, 6, 5, 4
    gate, up = numbered(layers, experts, f, h), numbered(layers, experts, f, h, start=5000)
    dense = numbered(4, 4, start=9000)
    state = {
        **family("layers.{}.experts.{}.gate", gate, 2),
        **family("layers.{}.experts.{}.up", up, 2),
        "dense": dense,
    }
    w13 = np.concatenate([gate, up], 2).transpose(0, 1, 3, 2)
    bound = move(
        """
        layers.{l}.experts.{e}.gate as gate: f h, layers.{l}.experts.{e}.up as up: f h ->
          moe.{l}.w13: e h ((gate + up) f)
        dense -> attention.dense
        """,
        Side(
            state,
            {
                "layers.{l}.experts.{e}.gate": "l e/dp f/tp h",
                "layers.{l}.experts.{e}.up": "l e/dp f h/tp",
                "dense": "o/tp i/dp",
            },
            "dp=4 tp=2",
        ),
        Side(
            {**family("moe.{}.w13", w13, 1), "attention.dense": dense},
            {"moe.{l}.w13": "l e/ep h/edp (2 f/etp)", "attention.dense": "o/tp i/dp"},
            MESH_8,
            {"f": f},
        ),
    )
    assert bound.source.specs["layers.0.experts.3.up"] == TensorSpec((f, h))


def test_one_expert_by_its_real_name() -> None:
    """Pieces may name real tensors: one expert of one layer out of a sharded family, and back into a stack."""
    up = numbered(2, 4, 3, 2)
    bound = bind("layers.{l}.experts.{e}.up: f h -> up: l e f h", specs(family("layers.{}.experts.{}.up", up, 2)))
    s = shard("ep=2 tp=3", {"layers.{l}.experts.{e}.up": "l e/ep f/tp h"}, bound.source)
    have = {
        (ep * 3 + tp, f"layers.{layer}.experts.{e}.up"): up[layer, e, tp : tp + 1]
        for ep in range(2)
        for tp in range(3)
        for layer in range(2)
        for e in (2 * ep, 2 * ep + 1)
    }
    out = np.zeros((1, 1, 3, 2), np.float32)
    want = Piece("here", "up", Region.box((1, 3, 0, 0), (1, 1, 3, 2)))
    execute(plan(bound, s, [want]), have, {("here", "up"): out})
    np.testing.assert_array_equal(out[0, 0], up[1, 3])
    back = bind("up: l e f h -> layers.{l}.experts.{e}.up: f h", {"up": TensorSpec(up.shape)})
    got = np.zeros((3, 2), np.float32)
    member = Piece("here", "layers.0.experts.3.up", Region.full((3, 2)))
    execute(
        plan(back, [Piece(0, "up", Region.full(up.shape))], [member]), {(0, "up"): up}, {("here", member.tensor): got}
    )
    np.testing.assert_array_equal(got, up[0, 3])


def test_redundant_experts_in_slots_by_table() -> None:
    """The escape: slots are no layout, so each is a piece of its own, wanted by the stack's own region."""
    w, table = numbered(4, 3, 2), [2, 0, 0, 3, 1]
    bound = bind("w -> slot", {"w": TensorSpec(w.shape)})
    s = shard("ep=2", {"w": "e/ep f h"}, bound.source)
    slots = np.zeros((5, 3, 2), np.float32)
    wanted = [Piece(i, "slot", Region.box((e, 0, 0), (1, 3, 2))) for i, e in enumerate(table)]
    have = {(rank, "w"): w[2 * rank : 2 * rank + 2] for rank in range(2)}
    execute(plan(bound, s, wanted), have, lambda place, _: slots[place : place + 1])
    np.testing.assert_array_equal(slots, w[table])


def test_interleaved_stages() -> None:
    chunks, pp, per = 2, 2, 2
    x = numbered(chunks * pp * per, 3, 2)
    megatron = x.reshape(chunks, pp, per, 3, 2).transpose(1, 0, 2, 3, 4)
    move(
        "layers.{(c p k)}.w: o i -> stage{p}.chunk{c}.{k}.w: o i",
        Side(family("layers.{}.w", x, 1), {"layers.{(c p k)}.w": "(c p/dp k) o i"}, "dp=3", {"c": chunks, "p": pp}),
        Side(family("stage{}.chunk{}.{}.w", megatron, 3), {"stage{p}.chunk{c}.{k}.w": "p/pp c k o/tp i"}, "pp=2 tp=2"),
        c=chunks,
        p=pp,
    )


def test_uneven_stages_and_numbers_that_do_not_begin_at_zero() -> None:
    x = numbered(8, 3, 2)
    named = {f"a.{i + 3}.w": x[i] for i in range(8)}
    move(
        "a.{m+3}.w: o i -> b.{m}.w: o i",
        Side(named, {"a.{m+3}.w": "l/pp:[3 5] o/tp i"}, "pp=2 tp=2"),
        Side(family("b.{}.w", x, 1), {"b.{m}.w": "m/dp o i"}, "dp=3"),
    )


def test_first_layers_dense_the_others_experts() -> None:
    """DeepSeek: three dense layers, then layers of experts; one name pattern, two ranges."""
    dense, moe = numbered(3, 4, 2), numbered(2, 4, 2, start=900)
    state = {f"layers.{i}.up": a for i, a in enumerate([*dense, *moe])}
    move(
        """
        layers.{l=3}.up: f h -> dense: l f h
        layers.{m+3}.up: f h -> moe: m h f
        """,
        Side(state, {"layers.{l=3}.up": "l f/x h", "layers.{m+3}.up": "m/x f h"}, "x=2"),
        Side({"dense": dense, "moe": moe.transpose(0, 2, 1)}, {"dense": "...", "moe": "m h f/x"}, "x=3"),
    )


# ---------------------------------------------------------------- flat ZeRO and buckets


def test_flat_zero_of_one_tensor() -> None:
    x = numbered(5, 7)
    sides = Side({"a": x}, {"a": "out/tp in //dp"}, "dp=3 tp=2"), Side({"b": x.T.copy()}, {"b": "i/x o"}, "x=4")
    move("a: o i -> b: i o", *sides)


def test_flat_zero_cuts_each_tensor_of_a_family_by_itself() -> None:
    x = numbered(3, 4, 5)
    move(
        "layers.{l}.w: o i -> w: l i o",
        Side(family("layers.{}.w", x, 1), {"layers.{l}.w": "l/pp o i/tp //dp"}, "pp=2 dp=3 tp=2"),
        Side({"w": x.transpose(0, 2, 1)}, {"w": "l i/x o"}, "x=3"),
    )


def test_a_padded_bucket_as_explicit_regions() -> None:
    """Megatron: local blocks of several tensors in one padded bucket, cut over dp. A region each, no layout."""
    whole = {"a": numbered(5, 7), "b": numbered(4, start=100), "c": numbered(3, 5, start=200)}
    rows = {"a": [slice(0, 3), slice(3, 5)], "b": [slice(0, 4)] * 2, "c": [slice(0, 3)] * 2}
    per, pieces, have = 14, list[Piece](), {}
    for tp in range(2):
        base = 0
        for name, x in whole.items():
            mask = np.zeros(x.shape, bool)
            mask[rows[name][tp]] = True
            inside = np.flatnonzero(mask)
            for dp in range(3):
                mine = inside[max(dp * per - base, 0) : max((dp + 1) * per - base, 0)]
                if len(mine):
                    region = Region.flat(x.shape, int(mine[0]), int(mine[-1]) + 1)
                    pieces.append(Piece((dp, tp), name, region))
                    have[(dp, tp), name] = x.ravel()[mine]
            base += len(inside)
    bound = bind("a -> x.a\nb -> x.b\nc -> x.c", specs(whole))
    t = shard("x=4", {"x.a": "o i/x", "x.b": "o/x", "x.c": "o/x i"}, bound.target)
    for rank in range(4):
        wanted = t.pieces(rank)
        got = {(rank, p.tensor): np.zeros(p.region.local_shape or (), np.float32) for p in wanted}
        execute(plan(bound, pieces, wanted), have, got)
        for name, axis in (("a", 1), ("b", 0), ("c", 0)):
            expected = chunk(whole[name], 4, rank, axis)
            assert expected.size == 0 or np.array_equal(got[rank, f"x.{name}"], expected)
    lost = [p for p in pieces if p.place != (1, 0)]
    with pytest.raises(CoverageError, match="no source holds") as error:
        plan(bound, lost, [p for rank in range(4) for p in t.pieces(rank)])
    assert error.value.tensor == "a"
