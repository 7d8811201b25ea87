"""Optimiser states follow their parameters by spec; what does not follow is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout import Piece, RelayoutError, TensorSpec, bind, execute, invert, plan
from tangram.relayout.mapping.states import (
    ADAFACTOR,
    ADAFACTOR_HF,
    ADAM_4BIT,
    ADAM_8BIT,
    ADAMW,
    COLUMN,
    MUON,
    ROW,
    ROWWISE_8BIT,
    SAME,
    SHARED,
    States,
    StateSpec,
    state_layout,
    with_states,
)

QKV = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
Tensors = dict[str, torch.Tensor]


def convert(mapping: str, states: States, source: Tensors, name: str = "{param}.{state}", **sizes: int) -> Tensors:
    """Relayout a whole state dict in one place; then back, which must give the source bit for bit."""
    specs = {k: TensorSpec(tuple(t.shape), str(t.dtype)[6:]) for k, t in source.items()}
    text = with_states(mapping, specs, states, name=name, **sizes)
    bound = bind(text, specs, **sizes)
    out = _run(bound, source)
    again = _run(invert(bound), out)
    assert again.keys() == source.keys()
    for key, t in again.items():
        assert torch.equal(t, source[key]), key
    return out


def _run(bound, source: Tensors) -> Tensors:
    pieces = [Piece(0, k, Region.full(t.shape)) for k, t in source.items()]
    out = {k: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for k, s in bound.target.specs.items()}
    wanted = [Piece(0, k, Region.full(t.shape)) for k, t in out.items()]
    execute(plan(bound, pieces, wanted), {(0, k): t for k, t in source.items()}, {(0, k): t for k, t in out.items()})
    return out


def trained(optimiser: type[torch.optim.Optimizer], shapes: dict[str, tuple[int, ...]], **options: object) -> Tensors:
    """Real states of a real optimiser after two steps, as `{name: tensor}` and `{name.state: tensor}`."""
    torch.manual_seed(0)
    params = {k: torch.nn.Parameter(torch.randn(*s)) for k, s in shapes.items()}
    opt = optimiser(params.values(), **options)
    for _ in range(2):
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.step()
    out = {k: p.detach() for k, p in params.items()}
    for k, p in params.items():
        out |= {f"{k}.{s}": t for s, t in opt.state[p].items() if isinstance(t, torch.Tensor)}
    return out


def fuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: int) -> torch.Tensor:
    """Grouped [q|k|v] by plain reshapes, over dim 0."""
    return torch.cat([x.reshape(g, -1, *x.shape[1:]) for x in (q, k, v)], 1).reshape(-1, *q.shape[1:])


SHAPES = {"q": (2 * 3 * 4, 6), "k": (2 * 4, 6), "v": (2 * 4, 6)}


def test_adamw_moments_and_step_of_a_fused_tensor() -> None:
    source = trained(torch.optim.AdamW, SHAPES)
    out = convert(QKV, ADAMW, source, g=2)
    for state in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(out[f"qkv.{state}"], fuse(*(source[f"{x}.{state}"] for x in "qkv"), g=2))
    assert out["qkv.step"] == 2


def test_steps_that_differ_are_refused() -> None:
    source = trained(torch.optim.AdamW, SHAPES)
    source["k.step"] += 1
    with pytest.raises(RelayoutError, match=r"q\.step .* k\.step .* are tied"):
        convert(QKV, ADAMW, source, g=2)


def test_a_state_that_only_one_part_has_is_refused() -> None:
    source = trained(torch.optim.AdamW, SHAPES)
    del source["v.exp_avg"]
    with pytest.raises(RelayoutError, match="q has it, but v does not"):
        convert(QKV, ADAMW, source, g=2)


def test_muon_momentum() -> None:
    source = trained(torch.optim.Muon, SHAPES)
    out = convert(QKV, MUON, source, g=2)
    assert torch.equal(out["qkv.momentum_buffer"], fuse(*(source[f"{x}.momentum_buffer"] for x in "qkv"), g=2))


def test_adafactor_rows_follow_a_fused_tensor_but_columns_do_not() -> None:
    source = trained(torch.optim.Adafactor, SHAPES)
    assert source["q.row_var"].shape == (24, 1)
    assert source["q.col_var"].shape == (1, 6)
    with pytest.raises(RelayoutError, match="col_var does not follow"):
        convert(QKV, ADAFACTOR, source, g=2)
    rows = {k: t for k, t in source.items() if "col_var" not in k}
    out = convert(QKV, ADAFACTOR, rows, g=2)
    assert torch.equal(out["qkv.row_var"], fuse(*(source[f"{x}.row_var"] for x in "qkv"), g=2))


@pytest.mark.parametrize(
    ("states", "row", "col"), [(ADAFACTOR, "row_var", "col_var"), (ADAFACTOR_HF, "exp_avg_sq_row", "exp_avg_sq_col")]
)
def test_a_transpose_turns_rows_into_columns(states: States, row: str, col: str) -> None:
    keep = states[row].keepdim
    source = {
        "a": torch.randn(4, 6),
        f"a.{row}": torch.randn((4, 1) if keep else (4,)),
        f"a.{col}": torch.randn((1, 6) if keep else (6,)),
    }
    out = convert("a: o i -> b: i o", states, source)
    assert torch.equal(out[f"b.{col}"].flatten(), source[f"a.{row}"].flatten())
    assert torch.equal(out[f"b.{row}"].flatten(), source[f"a.{col}"].flatten())
    assert out[f"b.{col}"].shape == ((1, 4) if keep else (4,))


def test_one_dimensional_adafactor_state() -> None:
    source = trained(torch.optim.Adafactor, {"n": (8,)})
    out = convert("n: (a b) -> m: (b a)", ADAFACTOR, source, a=2)
    assert torch.equal(out["m.variance"], source["n.variance"].reshape(2, 4).T.reshape(-1))


def quantised(shape: tuple[int, ...], block: int) -> Tensors:
    n = int(np.prod(shape))
    made = {"": torch.randn(shape), ".state1": torch.randint(0, 255, shape, dtype=torch.uint8)}
    return made | {".absmax1": torch.randn(-(-n // block)), ".qmap1": torch.arange(256.0), ".step": torch.tensor(3.0)}


def test_8bit_adam_scales_follow_in_whole_blocks() -> None:
    shapes = {"q": (2 * 3 * 4, 512), "k": (2 * 4, 512), "v": (2 * 4, 512)}
    source = {k + s: t for k, shape in shapes.items() for s, t in quantised(shape, 256).items()}
    out = convert(QKV, ADAM_8BIT, source, g=2)
    scales = [source[f"{x}.absmax1"].reshape(-1, 2) for x in "qkv"]
    assert torch.equal(out["qkv.absmax1"], fuse(*scales, g=2).reshape(-1))
    assert torch.equal(out["qkv.state1"], fuse(*(source[f"{x}.state1"] for x in "qkv"), g=2))
    assert torch.equal(out["qkv.qmap1"], torch.arange(256.0))


def test_8bit_adam_blocks_may_span_rows_that_stay_together() -> None:
    shapes = {"q": (2 * 3 * 4, 64), "k": (2 * 4, 64), "v": (2 * 4, 64)}  # d = 4 rows of 64: one block
    source = {k + s: t for k, shape in shapes.items() for s, t in quantised(shape, 256).items()}
    out = convert(QKV, ADAM_8BIT, source, g=2)
    assert torch.equal(out["qkv.absmax1"], fuse(*(source[f"{x}.absmax1"] for x in "qkv"), g=2))


@pytest.mark.parametrize(
    ("mapping", "shape", "why"),
    [
        ("a: o i -> b: i o", (512, 512), "hold other elements"),
        ("a: (g x) h, c: (g x) h -> b: (g (a + c) x) h", (6, 64), "do not end where"),
    ],
)
def test_blocks_that_a_mapping_tears_are_refused(mapping: str, shape: tuple[int, ...], why: str) -> None:
    names = ["a", "c"] if "c:" in mapping else ["a"]
    source = {k + s: t for k in names for s, t in quantised(shape, 256).items()}
    with pytest.raises(RelayoutError, match=f"absmax1 does not follow.*{why}"):
        convert(mapping, ADAM_8BIT, source, **({"g": 2} if "c" in names else {}))


def test_a_rename_takes_ragged_blocks_along() -> None:
    source = {"a" + s: t for s, t in quantised((5, 77), 256).items()}
    out = convert("a: o i -> b: o i", ADAM_8BIT, source)
    assert torch.equal(out["b.absmax1"], source["a.absmax1"])


def test_4bit_adam_packs_two_values_a_byte() -> None:
    shapes = {"gate": (6, 256), "up": (6, 256)}
    source: Tensors = {}
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        source |= {name: torch.randn(shape), f"{name}.step": torch.tensor(1.0)}
        for moment in ("exp_avg", "exp_avg_sq"):
            source |= {
                f"{name}.{moment}.codes": torch.randint(0, 255, (n // 2,), dtype=torch.uint8),
                f"{name}.{moment}.scale": torch.randn(n // 128),
                f"{name}.{moment}.qmap": torch.arange(16.0),
            }
    out = convert("gate: f h, up: f h -> w1: (f (gate + up)) h", ADAM_4BIT, source)
    for state, per_row in (("codes", 128), ("scale", 2)):
        a, b = (source[f"{x}.exp_avg.{state}"].reshape(6, per_row) for x in ("gate", "up"))
        assert torch.equal(out[f"w1.exp_avg.{state}"], torch.stack([a, b], 1).reshape(-1))


def test_rowwise_scales() -> None:
    source = {k: torch.randn(s) for k, s in SHAPES.items()}
    source |= {f"{k}.codes": torch.randint(-127, 127, s, dtype=torch.int8) for k, s in SHAPES.items()}
    source |= {f"{k}.scale": torch.randn(s[0]) for k, s in SHAPES.items()}
    out = convert(QKV, ROWWISE_8BIT, source, g=2)
    assert torch.equal(out["qkv.scale"], fuse(*(source[f"{x}.scale"] for x in "qkv"), g=2))


def test_stacked_experts_share_one_step() -> None:
    mapping = "l.{l}.e.{e}.gate as gate: f h, l.{l}.e.{e}.up as up: f h -> x.{l}.w13: e ((gate + up) f) h"
    shapes = {f"l.{i}.e.{e}.{n}": (3, 2) for i in range(2) for e in range(4) for n in ("gate", "up")}
    source = trained(torch.optim.AdamW, shapes)
    out = convert(mapping, ADAMW, source)
    assert out["x.1.w13.step"] == 2
    want = torch.stack([torch.cat([source[f"l.1.e.{e}.{n}.exp_avg"] for n in ("gate", "up")]) for e in range(4)])
    assert torch.equal(out["x.1.w13.exp_avg"], want)


def test_interleaved_stages_keep_their_own_step() -> None:
    mapping = "layers.{(c p k)}.w: o i -> stage{p}.chunk{c}.{k}.w: i o"
    source = trained(torch.optim.AdamW, {f"layers.{i}.w": (2, 3) for i in range(8)})
    out = convert(mapping, ADAMW, source, c=2, p=2)
    assert torch.equal(out["stage1.chunk0.1.w.exp_avg"], source["layers.3.w.exp_avg"].T)
    assert out["stage1.chunk1.0.w.step"] == 2


def test_padded_vocabulary_and_other_state_names() -> None:
    source = {"emb": torch.randn(10, 3), "optim.exp_avg.emb": torch.randn(10, 3), "optim.step.emb": torch.tensor(7.0)}
    out = convert("emb: v h -> words: (v + _=2) h", ADAMW, source, name="optim.{state}.{param}")
    assert torch.equal(out["optim.exp_avg.words"][:10], source["optim.exp_avg.emb"])
    assert not out["optim.exp_avg.words"][10:].any()
    assert out["optim.step.words"] == 7


def test_a_shift_leaves_the_moments_alone_and_a_scale_is_refused() -> None:
    source = {"a": torch.arange(4.0), "a.exp_avg": torch.randn(4), "a.exp_avg_sq": torch.randn(4)}
    out = convert("a: h -> b: h; add=-1", ADAMW, source)
    assert torch.equal(out["b"], torch.arange(4.0) - 1)
    assert torch.equal(out["b.exp_avg"], source["a.exp_avg"])
    with pytest.raises(RelayoutError, match="mul changes the values"):
        convert("a: h -> b: h; mul=2", ADAMW, source)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("tp=3", "(heads/tp d) h"),
        ("dp=2 tp=3", "(heads/tp d)/dp h"),
        ("dp=2", "(heads d) h/dp"),
        ("dp=2 tp=2", "(heads d)/tp h/dp"),
        ("dp=3", "(heads d) h/dp"),
        ("pp=2 tp=3", "(heads/tp d) h @pp=1"),
    ],
)
@pytest.mark.parametrize(
    "spec", [SAME, ROW, COLUMN, SHARED, StateSpec("blocks", block=4), StateSpec("blocks", block=16)]
)
def test_what_a_rank_holds_of_a_state_belongs_to_what_it_holds_of_the_parameter(
    mesh: str, layout: str, spec: StateSpec
) -> None:
    shape, grid = (12, 8), Mesh.parse(mesh)
    base = Layout.parse(layout).bind(shape, **({"d": 4} if "d)" in layout else {}))
    index = np.arange(96).reshape(shape)
    made = {  # which parameter elements stand behind each element of the state
        "same": index[..., None],
        "reduced": index if spec.dims == (-1,) else index.T,
        "blocks": index.reshape(-1, spec.block),
        "shared": index.reshape(1, -1)[0],
    }[spec.kind]
    try:
        state = state_layout(base, grid, spec)
    except RelayoutError:
        assert (spec.kind, "/dp" in layout, spec.block == 16 or mesh == "dp=3") == ("blocks", True, True)
        return
    state = state.bind(made.shape[:-1])
    held = np.zeros(made.shape[:-1], bool)
    for r in range(grid.size):
        mine, param = np.zeros(made.shape[:-1], bool), np.zeros(shape, bool)
        for mask, reg in ((mine, region(state, grid, r)), (param, region(base, grid, r))):
            for box in reg.boxes:
                mask[np.ix_(*[[i for a, b in s for i in range(a, b)] for s in box])] = True
        held |= mine
        behind = param.reshape(-1)[made]  # a rank that holds any element behind a value holds the value
        assert (mine >= behind.any(-1)).all()
        if spec.kind in ("same", "blocks"):
            assert (mine == behind.all(-1)).all()
    assert held.all()
