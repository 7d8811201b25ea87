"""Paddle's own statements (AOA, of its flexible checkpoint), carried out by Paddle, beside the same in our notation.

Paddle is large, so it is an extra and these tests are skipped where it is absent. To run them:

    pip install -e '.[dev,paddle]' && python -m pytest tests/interop/test_paddle.py

Paddle loads in one process here; it has no collectives on a CPU that its load over several ranks could use.
"""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tangram.layout import Region
from tangram.relayout import Piece, bind, execute, inverse, plan
from tests.relayout.moving import Array, numbered, same_bits, specs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    paddle = pytest.importorskip("paddle", reason="the extra `paddle` is not installed")
    import paddle.distributed as dist
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Array]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Paddle reports every step of a load."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def weight(name: str, a: Array) -> "ShardedWeight":
    return ShardedWeight(name, paddle.to_tensor(a), a.shape, a.shape, (0,) * a.ndim)


def by_paddle(folder: Path, statements: list[str], source: State, like: State) -> State:
    """Save the source, and load it into tensors of the target's shapes through the statements."""
    dist.save_state_dict({name: weight(name, a) for name, a in source.items()}, str(folder))
    out = {name: weight(name, np.full(a.shape, 77, a.dtype)) for name, a in like.items()}
    dist.load_state_dict(out, str(folder), aoa_config={"aoa_statements": statements})
    return {name: w.local_tensor.numpy() for name, w in out.items()}


def by_us(mapping: str, source: State, sizes: dict[str, int]) -> State:
    bound = bind(mapping, specs(source), partial=True, **sizes)
    held = [Piece(0, name, Region.full(a.shape)) for name, a in source.items() if name in bound.source]
    out = {name: np.zeros(spec.shape, spec.dtype) for name, spec in bound.target.specs.items()}
    wanted = [Piece(0, name, Region.full(a.shape)) for name, a in out.items()]
    execute(
        plan(bound, held, wanted),
        {(0, name): a for name, a in source.items()},
        {(0, name): a for name, a in out.items()},
    )
    return out


@dataclass(frozen=True)
class Case:
    """Paddle's statements, our mapping, what it is applied to; `back`: Paddle's statements for the way back."""

    paddle: list[str]
    ours: str
    source: State
    sizes: dict[str, int] = field(default_factory=dict)
    back: list[str] = field(default_factory=list)


def qkv(heads: int, groups: int, d: int, h: int, axis: int) -> State:
    def one(n: int, start: int) -> Array:
        return numbered(*((h, n * d) if axis else (n * d, h)), start=start)

    return {"q": one(heads, 1), "k": one(groups, 5000), "v": one(groups, 9000)}


def experts(n: int) -> State:
    return {f"experts.{e}.w": numbered(3, 4, start=100 * e) for e in range(n)}


LAYERS = {f"layers.{i}.w": numbered(2, 3, start=100 * i) for i in range(4)}

CASES = {
    "fused_qkv, grouped, Paddle's [in, out]": Case(
        ["q,k,v -> qkv, fused_qkv, num_heads=8, num_key_value_groups=2, axis=1"],
        "q: h (g r d), k: h (g d), v: h (g d) -> qkv: h (g (q r + k + v) d)",
        qkv(8, 2, 3, 5, 1),
        {"g": 2, "d": 3},
        ["qkv -> q,k,v, fused_qkv, num_heads=8, num_key_value_groups=2, axis=1"],
    ),
    "fused_qkv, one query a group, torch's [out, in]": Case(
        ["q,k,v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=4, axis=0"],
        "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h",
        qkv(4, 4, 2, 3, 0),
        {"g": 4, "r": 1},
        ["qkv -> q,k,v, fused_qkv, num_heads=4, num_key_value_groups=4, axis=0"],
    ),
    "transposed and fused": Case(
        ["q^T -> a", "k^T -> b", "v^T -> c", "a,b,c -> qkv, fused_qkv, num_heads=6, num_key_value_groups=3, axis=1"],
        "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: h (g (q r + k + v) d)",
        qkv(6, 3, 2, 4, 0),
        {"g": 3},
    ),
    "fused_ffn": Case(
        ["gate,up -> w, fused_ffn, axis=1"],
        "gate: h f, up: h f -> w: h ((gate + up) f)",
        {"gate": numbered(3, 8), "up": numbered(3, 8, start=500)},
        {},
        ["w -> gate,up, fused_ffn, axis=1"],
    ),
    "what fused_ffn expands to from TP 2 to TP 4": Case(
        [
            "w -> g0,g1,u0,u1,g2,g3,u2,u3, axis=1",
            "g0,u0,g1,u1,g2,u2,g3,u3 -> w4, axis=1",
        ],
        "w: h (t kind s f) -> w4: h (t s kind f)",
        {"w": numbered(3, 16)},
        {"t": 2, "kind": 2, "s": 2},
    ),
    "experts stacked": Case(
        ["experts.*.w -> stacked, axis=0"],
        "experts.{e}.w: i o -> stacked: (e i) o",
        experts(12),
    ),
    "experts transposed": Case(
        ["experts.$EXPERT_ID.w^T -> moe.$EXPERT_ID.w"],
        "experts.{e}.w: i o -> moe.{e}.w: o i",
        experts(3),
    ),
    "permute": Case(["x -> y, permute='[2,0,1]'"], "x: a b c -> y: c a b", {"x": numbered(2, 3, 4)}),
    "concatenation": Case(
        ["a,b -> c, axis=0"],
        "a: n h, b: m h -> c: (a n + b m) h",
        {"a": numbered(2, 3), "b": numbered(4, 3, start=50)},
    ),
    "split into equal parts": Case(
        ["x -> a,b,c, axis=1"],
        "x: h ((a + b + c) n) -> a: h n, b: h n, c: h n",
        {"x": numbered(2, 12)},
        {},
        ["a,b,c -> x, axis=1"],
    ),
    "layers renamed": Case(
        ["layers.$LAYER_ID.w -> decoder.$LAYER_ID.weight"], "layers.{l}.w -> decoder.{l}.weight", LAYERS
    ),
    "a cast": Case(
        ["x -> y, src_dtype='float32', dst_dtype='float16'"],
        "x -> y; cast=float32:float16",
        {"x": numbered(3, 2)},
    ),
    "one dropped": Case(["x -> y", "z -> _"], "x -> y\nz -> _", {"x": numbered(3, 2), "z": numbered(2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_paddle_and_we_agree(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = by_us(case.ours, case.source, case.sizes)
    theirs = by_paddle(tmp_path / "there", case.paddle, case.source, ours)
    for key, a in ours.items():
        assert same_bits(a, theirs[key]), key
    if case.back:
        again = by_us(str(inverse(case.ours)), ours, case.sizes)
        theirs = by_paddle(tmp_path / "back", case.back, ours, again)
        for key, a in case.source.items():
            assert same_bits(a, again[key]), key
            assert same_bits(a, theirs[key]), key
