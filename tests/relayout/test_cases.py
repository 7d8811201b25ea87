"""The cases that the notation must carry, each against plain numpy: dense weights and other structures."""

import numpy as np
import pytest
from einops import rearrange

from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec, bind, execute, plan, shard
from tests.relayout.moving import Array, Side, chunk, mask_of, move, numbered, specs

# ---------------------------------------------------------------- gate and up


@pytest.mark.parametrize(
    ("dims", "layout", "axis", "interleaved"),
    [
        ("((gate + up) f) h", "(2 f/tp)/dp h", 0, False),
        ("(f (gate + up)) h", "(f/tp 2) h/dp", 0, True),
        ("h ((gate + up) f)", "h/dp (2 f/tp)", 1, False),
        ("h (f (gate + up))", "h (f/tp 2)/dp", 1, True),
    ],
)
@pytest.mark.parametrize("f", [7, 8, 2])
def test_gate_and_up(dims: str, layout: str, axis: int, interleaved: bool, f: int) -> None:
    gate, up = numbered(f, 3), numbered(f, 3, start=500)
    fused = np.stack([gate, up], 1).reshape(2 * f, 3) if interleaved else np.concatenate([gate, up])
    move(
        f"gate: f h, up: f h -> w1: {dims}",
        Side({"gate": gate, "up": up}, {"gate": "f/tp/dp h", "up": "f/tp h"}, "dp=2 tp=2"),
        Side({"w1": np.ascontiguousarray(fused.T) if axis else fused}, {"w1": layout}, "dp=2 tp=4", {"f": f}),
        f=f,
    )


def test_gate_and_up_under_fsdp_cut_by_hand() -> None:
    """Rank (dp, tp): gate and up rows of tp, then half of that block by dp: dp=0 holds gate rows only."""
    f, h = 8, 3
    gate, up = numbered(f, h), numbered(f, h, start=500)
    bound = bind("gate: f h, up: f h -> w1: ((gate + up) f) h", specs({"gate": gate, "up": up}))
    t = shard("dp=2 tp=2", {"w1": "(2 f/tp)/dp h"}, bound.target, f=f)
    whole = shard("x=1", {"gate": "...", "up": "..."}, bound.source)
    for rank in range(4):
        got = np.zeros((4, h), np.float32)
        execute(plan(bound, whole, t.pieces(rank)), {(0, "gate"): gate, (0, "up"): up}, {(rank, "w1"): got})
        np.testing.assert_array_equal(got, chunk((gate, up)[rank // 2], 2, rank % 2))


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(("tp", "padded"), [(4, 12), (8, 16), (3, 10)])
def test_vocabulary_padded_to_what_tensor_ranks_divide(tp: int, padded: int) -> None:
    emb = numbered(10, 3)
    words = np.concatenate([emb, np.zeros((padded - 10, 3), np.float32)])
    pad = f" + _={padded - 10}" if padded > 10 else ""
    move(
        f"emb: v h -> words: (v{pad}) h; fill=0",
        Side({"emb": emb}, {"emb": "v/tp h"}, "tp=3"),
        Side({"words": words}, {"words": "v/tp h/dp"}, f"dp=2 tp={tp}"),
    )


def test_tied_embeddings_on_two_stages_with_padding() -> None:
    emb = numbered(10, 3)
    words = np.concatenate([emb, np.full((2, 3), -1, np.float32)])
    move(
        "emb: v h -> words: (v + _=2) h = head: h (v + _=2); fill=-1",
        Side({"emb": emb}, {"emb": "v/tp h"}, "tp=3"),
        Side(
            {"words": words, "head": np.ascontiguousarray(words.T)},
            {"words": "v/tp h @pp=0", "head": "h v/tp @pp=3"},
            "pp=4 tp=2",
        ),
    )


def test_ranks_outside_at_hold_nothing() -> None:
    bound = bind("emb -> head", {"emb": TensorSpec((5, 2))})
    s = shard("pp=4 tp=2", {"emb": "v/tp h @pp=0,3"}, bound.source)
    held = {rank: [str(p.region) for p in s.pieces(rank)] for rank in range(8)}
    first, second = ["[0:3 0:2]"], ["[3:5 0:2]"]
    assert held == {0: first, 1: second, 2: [], 3: [], 4: [], 5: [], 6: first, 7: second}
    for rank in range(8):  # a rank that holds what it wants reads it there, the others from either stage
        copies = plan(bound, s, [Piece(rank, "head", Region.parse("[0:1 0:2]"))]).copies
        assert [c.source.place for c in copies if c.source] in ([0], [6])
    assert plan(bound, s, [Piece(6, "head", Region.parse("[0:1 0:2]"))]).copies[0].source == s.piece("emb", 6)


def test_padding_that_follows_from_the_target() -> None:
    emb, words = numbered(5, 2), np.zeros((7, 2), np.float32)
    words[:5] = emb
    sides = Side({"emb": emb}, {"emb": "..."}, "x=1"), Side({"words": words}, {"words": "v/x h"}, "x=2")
    move("emb: v h -> words: (v + _) h; fill=0", *sides, derive=False)


# ---------------------------------------------------------------- other structures


def test_multi_head_latent_attention() -> None:
    heads, n, v, c, p, h = 4, 3, 5, 5, 2, 6
    kv_a, pe, k, w = (
        numbered(c, h),
        numbered(p, h, start=100),
        numbered(heads * n, c, start=200),
        numbered(heads * v, c, start=300),
    )
    kv_b = np.concatenate([k.reshape(heads, n, c), w.reshape(heads, v, c)], 1).reshape(-1, c)
    move(
        """
        c_proj: c h, pe: p h -> kv_a: (c_proj c + pe p) h
        k: (H n) c, v: (H d) c -> kv_b: (H (k n + v d)) c
        """,
        Side(
            {"c_proj": kv_a, "pe": pe, "k": k, "v": w},
            {"c_proj": "c/dp h", "pe": "p h", "k": "(H/tp n) c", "v": "o/tp c/dp"},
            "dp=2 tp=2",
            {"H": heads},
        ),
        Side(
            {"kv_a": np.concatenate([kv_a, pe]), "kv_b": kv_b},
            {"kv_a": "o/dp h", "kv_b": "(H/tp o)/dp c"},
            "dp=3 tp=4",
            {"H": heads},
        ),
        H=heads,
    )


def test_mamba_in_projection() -> None:
    sizes = {"z": 4, "x": 6, "B": 3, "C": 3, "dt": 2}
    parts = {name: numbered(n, 2, start=100 * i) for i, (name, n) in enumerate(sizes.items())}
    whole = np.concatenate(list(parts.values()))
    layout = "(z/tp + x/tp + B + C + dt/tp) h"
    text = "z: a h, x: b h, B: c h, C: d h, dt: e h -> in_proj: (z a + x b + B c + C d + dt e) h"
    bound = move(
        text,
        Side(parts, dict.fromkeys(parts, "o/x h"), "x=3"),
        Side({"in_proj": whole}, {"in_proj": layout}, "tp=2", sizes),
    )
    s = shard("tp=2", {"in_proj": layout}, bound.target, **sizes)
    for rank in range(2):
        cut = [chunk(a, 2, rank) if name in ("z", "x", "dt") else a for name, a in parts.items()]
        np.testing.assert_array_equal(
            whole[mask_of(s.pieces(rank)[0].region, whole.shape)], np.concatenate(cut).ravel()
        )


@pytest.mark.parametrize("layout", ["(2/tp + 3) h //dp", "(2/tp + 3)/dp h", "(2/tp/dp + 3) h", "h (3 + 2/tp) //dp"])
def test_a_cut_term_beside_one_that_all_hold(layout: str) -> None:
    """What a rank holds of the cut term moves what it holds of the other: replicas have the element elsewhere."""
    x = numbered(5, 5)
    side = Side({"a": x}, {"a": layout}, "dp=2 tp=2")
    move("a: n m -> b: m n", side, Side({"b": x.T.copy()}, {"b": "m/x n"}, "x=3"))


@pytest.mark.parametrize(("text", "axis"), [("(a + b + c) h", 0), ("h (a + b + c)", 1)])
@pytest.mark.parametrize("cut", ["k/x h", "k h/x"])
def test_parts_of_one_row(text: str, axis: int, cut: str) -> None:
    """A part that is one element of a dim has no factor there, only a place."""
    parts = {name: numbered(5, start=10 * i) for i, name in enumerate("abc")}
    stacked = Side({"w": np.stack(list(parts.values()), axis)}, {"w": cut}, "x=2")
    move(f"a: h, b: h, c: h -> w: {text}", Side(parts, dict.fromkeys(parts, "h/y"), "y=3"), stacked)


def test_pairs_that_a_cut_takes_apart() -> None:
    """One rank holds every first row of the pairs, the other every second: neighbours there are not neighbours here."""
    gate, up = numbered(5, 2), numbered(5, 2, start=50)
    pairs = np.stack([gate, up], 1).reshape(-1, 2)
    move(
        "gate: f h, up: f h -> w1: (f (gate + up)) h",
        Side({"gate": gate, "up": up}, {"gate": "f/y h", "up": "f h/y"}, "y=2"),
        Side({"w1": pairs}, {"w1": "(f 2/x) h"}, "x=2"),
        f=5,
    )


def test_rotary_halves_to_pairs_and_norm_plus_one() -> None:
    q, norm = numbered(2 * 2 * 3, 4), numbered(6)
    pairs = rearrange(q, "(heads two half) h -> (heads half two) h", heads=2, two=2)
    move(
        """
        q: (heads two half) h -> q2: (heads half two) h
        norm: h -> ln: h; add=-1
        """,
        Side({"q": q, "norm": norm}, {"q": "o/x h", "norm": "h/x"}, "x=5"),
        Side({"q2": pairs, "ln": norm - 1}, {"q2": "o h/x", "ln": "h"}, "x=3"),
        heads=2,
        two=2,
    )


def test_four_bit_weights_and_their_block_scales() -> None:
    """Two nibbles to a byte, a scale for each block of bytes: fused alike, they still belong together."""
    g, r, d, blocks, j = 2, 2, 3, 4, 8
    rng = np.random.default_rng(0)
    rows = {"q": g * r * d, "k": g * d}
    codes = {name: rng.integers(0, 256, (n, blocks * j), dtype=np.uint8) for name, n in rows.items()}
    scales = {f"{name}.scale": rng.standard_normal((n, blocks), dtype=np.float32) for name, n in rows.items()}

    def fuse(q: Array, k: Array) -> Array:
        return np.concatenate([q.reshape(g, r * d, -1), k.reshape(g, d, -1)], 1).reshape(g * (r + 1) * d, -1)

    target = {"qk": fuse(codes["q"], codes["k"]), "qk.scale": fuse(scales["q.scale"], scales["k.scale"])}
    move(
        """
        q: (g r d) (b j), k: (g d) (b j) -> qk: (g (q r + k) d) (b j)
        q.scale as q: (g r d) b, k.scale as k: (g d) b -> qk.scale: (g (q r + k) d) b
        """,
        Side(
            codes | scales,
            {"q": "o/dp (b/tp j)", "k": "o/dp (b/tp j)", "q.scale": "o/dp b/tp", "k.scale": "o/dp b/tp"},
            "dp=3 tp=2",
            {"b": blocks},
        ),
        Side(
            target,
            {"qk": "(g/tp (r + 1) d) (b/dp j)", "qk.scale": "(g/tp (r + 1) d) b/dp"},
            "dp=2 tp=2",
            {"g": g, "r": r, "b": blocks},
        ),
        g=g,
        r=r,
        b=blocks,
    )

    def dequantised(q: Array, s: Array) -> Array:
        nibbles = np.stack([q & 15, q >> 4], -1).reshape(len(q), -1)
        return nibbles * np.repeat(s, 2 * j, 1)

    apart = fuse(*[dequantised(codes[x], scales[f"{x}.scale"]) for x in "qk"])
    np.testing.assert_array_equal(dequantised(target["qk"], target["qk.scale"]), apart)


def test_complex_zero_size_and_scalar() -> None:
    z = (numbered(5, 2) + 1j * numbered(5, 2, start=50)).astype(np.complex64)
    empty, step = np.zeros((0, 4), np.float32), np.array(3, np.int64)
    move(
        """
        z: n m -> z2: m n
        e: n m -> e2: m n
        step -> state.step
        """,
        Side({"z": z, "e": empty, "step": step}, {"z": "n/x m", "e": "n/x m", "step": ""}, "x=3"),
        Side(
            {"z2": z.T.copy(), "e2": empty.T.copy(), "state.step": step},
            {"z2": "m n/x", "e2": "m/x n", "state.step": ""},
            "x=2",
        ),
    )


def test_context_parallel_zigzag_over_packed_documents() -> None:
    x = numbered(4, 16, 2)
    docs = (5, 8, 0, 3)
    move(
        "cache: b s h -> kv: b h s",
        Side({"cache": x}, {"cache": "b/dp s/cp:zigzag[docs] h"}, "dp=2 cp=2", {"docs": docs}),
        Side({"kv": x.transpose(0, 2, 1)}, {"kv": "b h s/cp:zigzag"}, "cp=3"),
    )
