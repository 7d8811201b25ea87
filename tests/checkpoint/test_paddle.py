"""Paddle's flex checkpoint: what Paddle wrote is read, what is written is read back, and what is wrong is refused.

The fixtures are Paddle's own, of two ranks (`peers/paddle_save.py`); `tests/interop/test_paddle_checkpoint.py` has
Paddle write new ones, and load what is written here.
"""

import contextlib
import itertools
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, ConvertOptions, restructure
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.formats.paddle import flex
from tangram.checkpoint.formats.paddle.pickles import MODULE, Stored, metadata, read_metadata
from tangram.checkpoint.formats.paddle.step_count import power, step_of, with_betas
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, RelayoutError, bind, execute, plan
from tangram.relayout.mapping.states import ADAM_8BIT
from tests.checkpoint.peers.models import save

FIXTURES = Path(__file__).parent / "fixtures" / "paddle"
KINDS = ("safetensors", "pickled", "copies")
SHAPES = {"q_proj.weight": (6, 8), "o_proj.weight": (8, 6), "norm.weight": (6,), "odd.weight": (5, 3)}
TENSORS = {
    "wide": torch.randn(30, 100),
    "half": torch.randn(33, 7).to(torch.bfloat16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "scale": torch.tensor(2.0),
}


def tensors(source: OpenCheckpoint) -> dict[str, Tensor]:
    """All of a checkpoint, through the engine."""
    bound = bind(IDENTITY, source.specs)
    out = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in source.specs.items()}
    read = {(piece.place, piece.tensor): source.read(piece.place, piece.tensor) for piece in source.pieces}
    wanted = [Piece("out", name, Region.full(spec.shape)) for name, spec in source.specs.items()]
    execute(plan(bound, source.pieces, wanted), read, {("out", name): tensor for name, tensor in out.items()})
    return out


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a)


def held(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What the ranks had in memory when they saved, put together by numpy."""
    whole: dict[str, np.ndarray[Any, Any]] = {}
    for rank in (0, 1):
        for key, values in np.load(folder / f"held-{rank}.npz").items():
            name, _, where = key.partition("|")
            begin = [int(n) for n in where.split(",")]
            base = name if name in SHAPES else name.rpartition(".")[0]
            shape = SHAPES.get(base, (3, 5) if name == "flat.weight" else values.shape)
            if "beta" in name:
                shape = (1,)
            out = whole.setdefault(name, np.full(shape, np.nan, values.dtype) if values.dtype.kind == "f" else values)
            if name == "flat.weight":
                out.reshape(-1)[begin[2] : begin[2] + len(values)] = values
            else:
                out[tuple(slice(a, a + n) for a, n in zip(begin, values.shape, strict=True))] = values
    return whole


def check_saved(folder: Path) -> None:
    """Every tensor of the three checkpoints that `paddle_save.py` leaves is what the ranks held."""
    expected = held(folder)
    assert not any(np.isnan(one).any() for one in expected.values() if one.dtype.kind == "f")
    for kind in KINDS:
        found = tensors(open_any(folder / kind))
        raw = {_raw(name): tensor for name, tensor in found.items()}
        assert set(raw) == set(expected)
        for name, tensor in raw.items():
            assert np.array_equal(
                tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy(), expected[name]
            ), name
        assert found["q_proj.weight"].dtype == torch.bfloat16
        assert torch.equal(found["q_proj.weight"], found["q_proj.weight.master"].to(torch.bfloat16))
        assert {tensor.dtype for name, tensor in found.items() if "exp_avg" in name} == {torch.float32}
        counts = tensors(with_betas(open_any(folder / kind), (0.9, 0.95)))
        assert {name: float(tensor) for name, tensor in counts.items() if name.endswith(".step")} == {
            f"{name}.step": 3.0 for name in SHAPES
        }
        assert not [name for name in counts if "_pow" in name]


def _raw(name: str) -> str:
    param, _, state = name.rpartition(".")
    return f"{param}.{flex.SUFFIXES[state]}" if state in flex.SUFFIXES else name


def folder_of(path: Path, found: Mapping[str, Tensor] = TENSORS, config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(dict(found), path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["checkpoint", "convert", *map(str, arguments)]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


# ------------------------------------------------------------ what Paddle wrote


def test_what_paddle_saved_on_two_ranks_is_read() -> None:
    check_saved(FIXTURES)


def test_a_checkpoint_of_paddles_goes_to_torch_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the optimiser: to a DCP with counts of steps, and back to the same bits of powers."""
    before = tensors(open_any(FIXTURES / "safetensors"))
    there = said(capsys, FIXTURES / "pickled", tmp_path / "dcp", "--to", "dcp", "--betas", "0.9,0.95")
    assert "names kept" in there
    middle = tensors(open_any(tmp_path / "dcp"))
    assert middle["odd.weight.step"] == 3
    # A DCP that was read says nothing of betas or states: they are given.
    source = open_any(tmp_path / "dcp")
    states = {key: flex.STATES[key] for key in ("exp_avg", "exp_avg_sq", "master", "step")}
    known = with_betas(replace(source, states=states), (0.9, 0.95))
    restructure(known, bind(IDENTITY, known.specs), tmp_path / "back", "paddle", ConvertOptions(shard=300))
    after = open_any(tmp_path / "back")
    assert same(tensors(after), before)
    assert set(after.states) == {"exp_avg", "exp_avg_sq", "master", "beta1_pow", "beta2_pow"}


def test_without_betas_the_powers_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, FIXTURES / "copies", tmp_path / "out", "--to", "paddle")
    assert same(tensors(open_any(tmp_path / "out")), tensors(open_any(FIXTURES / "copies")))
    assert "is no power of the beta 0.999" in said(
        capsys, FIXTURES / "copies", tmp_path / "x", "--to", "dcp", "--betas", "0.9,0.999", code=2
    )
    assert not (tmp_path / "x").exists()


@given(st.integers(0, 5000), st.sampled_from([0.9, 0.95, 0.99, 0.999, 0.85]), st.sampled_from([0.95, 0.999, 0.98]))
def test_a_count_of_steps_is_found_in_the_bits_of_powers(step: int, one: float, two: float) -> None:
    smallest = float(np.finfo(np.float32).smallest_normal)
    values = [(power(beta, step, "x"), beta) for beta in (one, two)]
    oracle = np.float32(two)
    for _ in range(step):
        oracle = np.float32(two) * oracle
    assert values[1][0] == float(oracle)
    if max(value for value, _ in values) < smallest:
        with pytest.raises(UserError, match="say no more how many steps"):
            step_of(values, "x")
    else:
        assert step_of(values, "x") == step
        if one != two and values[0][0] > smallest < values[1][0]:
            with pytest.raises(UserError):
                step_of([values[0], (power(two, step + 1, "x"), two)], "x")


# ------------------------------------------------------------ what is written


def test_files_of_a_size_and_large_tensors_in_blocks(tmp_path: Path) -> None:
    hf = open_any(folder_of(tmp_path / "hf"))
    restructure(hf, bind(IDENTITY, hf.specs), tmp_path / "out", "paddle", ConvertOptions(shard=1000))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) >= 12
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 1000 for file in files)
    assert same(tensors(open_any(tmp_path / "out")), TENSORS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shapes_cuts_and_ranks(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Files as any ranks would have them, in blocks, flat ranges and copies: read, written anew, and read again."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "a").mkdir()
    whole: dict[str, Tensor] = {}
    files: dict[str, dict[str, Tensor]] = {}
    pieces: list[Stored] = []
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(number == 0, 5), max_size=3)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        values = (torch.randn(shape) * 9).to(dtype)
        name = f"t{number}.weight"
        whole[name] = values
        ranks = data.draw(st.integers(1, 4))
        cut = data.draw(st.integers(0, len(shape) - 1)) if shape else None
        step = -(-shape[cut] // ranks) if cut is not None else 0
        copies = data.draw(st.integers(1, 2))
        for rank in range(ranks):
            block, offset = values, (0,) * len(shape)
            if cut is None and rank:
                break
            if cut is not None:
                first, last = min(rank * step, shape[cut]), min((rank + 1) * step, shape[cut])
                block = values.narrow(cut, first, last - first)
                offset = tuple(first if dim == cut else 0 for dim in range(len(shape)))
                if first == last and (rank or math.prod(shape)):
                    continue
            flats = sorted(data.draw(st.lists(st.integers(0, block.numel()), max_size=2)))
            ends = [0, *flats, block.numel()]
            flat = data.draw(st.booleans())
            for part, (a, b) in enumerate(itertools.pairwise(ends)) if flat else [(0, (0, 0))]:
                for copy in range(copies):
                    file = f"{rank * 10 + part + 100 * copy}_0.safetensors"
                    mine = block.reshape(-1)[a:b] if flat else block
                    files.setdefault(file, {})[name] = mine.contiguous().clone()
                    kind, size = str(dtype).removeprefix("torch."), tuple(block.shape)
                    pieces.append(Stored(name, offset, size, kind, shape, (a, b) if flat else None, file, copy))
    for file, some in files.items():
        save_file(some, folder / "a" / file)
    (folder / "a" / "0.metadata").write_bytes(metadata(pieces))
    assert same(tensors(open_any(folder / "a")), whole)
    source = open_any(folder / "a")
    shard = data.draw(st.integers(1, 200))
    some = {name: tensor for name, tensor in whole.items() if tensor.numel()}
    text = "\n".join(f"{name} -> {name if name in some else '_'}" for name in whole)
    restructure(source, bind(text, source.specs), folder / "b", "paddle", ConvertOptions(shard=shard))
    assert same(tensors(open_any(folder / "b")), some)


# ------------------------------------------------------------ structures


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "tied"), [("qwen3", False), ("llama", True), ("qwen3_moe", False)])
def test_a_model_of_transformers_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, tied: bool, fused: bool
) -> None:
    """The weights of Linear layers transposed, all else as it is; fused where the configuration says so."""
    save(name, tmp_path / "hf", tie_word_embeddings=tied)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config |= {"fuse_attention_qkv": fused, "fuse_attention_ffn": fused}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    said(capsys, tmp_path / "hf", tmp_path / "there", "--to", "paddle", "--shard-size", "20KB")
    said(capsys, tmp_path / "there", tmp_path / "back", "--to", "hf")
    before, there = load_file(tmp_path / "hf/model.safetensors"), tensors(open_any(tmp_path / "there"))
    assert same(load_file(tmp_path / "back/model.safetensors"), before)
    at = "model.layers.1."
    assert torch.equal(there[at + "self_attn.o_proj.weight"], before[at + "self_attn.o_proj.weight"].T)
    assert torch.equal(there["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    q, k, v = (before[f"{at}self_attn.{one}_proj.weight"] for one in "qkv")
    if fused:
        groups = config["num_key_value_heads"]
        parts = [one.reshape(groups, -1, one.shape[1]) for one in (q, k, v)]
        assert torch.equal(there[at + "self_attn.qkv_proj.weight"], torch.cat(parts, 1).reshape(-1, q.shape[1]).T)
    else:
        assert torch.equal(there[at + "self_attn.q_proj.weight"], q.T)
    if name == "qwen3_moe":
        assert torch.equal(there[at + "mlp.gate.weight"], before[at + "mlp.gate.weight"].T)


def test_states_follow_their_parameters_through_a_transpose(tmp_path: Path) -> None:
    """From Paddle's [in, out] to torch's, with the moments, the master and the powers."""
    source = open_any(FIXTURES / "safetensors")
    (tmp_path / "mine").write_text("{at*}_proj.weight: i o -> {at*}_proj.weight: o i\n{rest*} -> {rest*}\n")
    text = "\n".join(f"{one}_proj.weight: i o -> {one}.w: o i" for one in "qo")
    rest = ("norm.weight", "odd.weight", "flat.weight", "count")
    chosen = choose(source, "dcp", None, text="\n".join([text, *(f"{one} -> {one}" for one in rest)]))
    restructure(source, chosen.bound, tmp_path / "out", "dcp")
    before, after = tensors(source), tensors(open_any(tmp_path / "out"))
    for state in ("", ".exp_avg", ".exp_avg_sq", ".master"):
        assert torch.equal(after[f"q.w{state}"], before[f"q_proj.weight{state}"].T)
    assert torch.equal(after["q.w.beta1_pow"], before["q_proj.weight.beta1_pow"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_there_and_back_for_any_heads(
    tmp_path_factory: pytest.TempPathFactory, layers: int, groups: int, repeats: int, size: int, qkv: bool, ffn: bool,
    bias: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("heads")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": groups, "num_attention_heads": groups * repeats,
        "head_dim": size, "fuse_attention_qkv": qkv, "fuse_attention_ffn": ffn,
    }  # fmt: skip
    heads, h, f = groups * repeats * size, 5, 4
    shapes = {"model.embed_tokens.weight": (7, h), "model.norm.weight": (h,), "lm_head.weight": (7, h)}
    for i in range(layers):
        at = f"model.layers.{i}."
        linear = {"q": (heads, h), "k": (groups * size, h), "v": (groups * size, h), "o": (h, heads)}
        shapes |= {f"{at}self_attn.{key}_proj.weight": shape for key, shape in linear.items()}
        shapes |= {f"{at}self_attn.{key}_proj.bias": linear[key][:1] for key in "qkv"} if bias else {}
        shapes |= {f"{at}mlp.gate_proj.weight": (f, h), f"{at}mlp.up_proj.weight": (f, h)}
        shapes |= {f"{at}mlp.down_proj.weight": (h, f), f"{at}input_layernorm.weight": (h,)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {f"{name}.exp_avg": torch.randn(shape) for name, shape in shapes.items()}
    hf = open_any(folder_of(folder / "hf", {**values, **moments}, config))
    trained = replace(hf, states={"exp_avg": flex.STATES["exp_avg"]})
    restructure(
        trained, choose(trained, "paddle", config).bound, folder / "there", "paddle", ConvertOptions(dtype="float64")
    )
    there = open_any(folder / "there")
    made = tensors(there)
    assert {one.dtype for name, one in made.items() if name.endswith(".exp_avg")} == {torch.float32}
    at = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(made[f"{at}.exp_avg"], moments[f"{at}.exp_avg"].T)
    back = choose(there, "hf", config)
    assert set(back.left) == {name for name in made if name.endswith(".exp_avg")}
    restructure(back.source, back.bound, folder / "back", "hf", ConvertOptions(dtype="float32", rounded=True))
    assert same(load_file(folder / "back/model.safetensors"), values)


# ------------------------------------------------------------ what is wrong


ONE = Stored("w", (0, 0), (2, 3), "float32", (4, 3), None, "0_0.safetensors")
TWO = replace(ONE, offset=(2, 0), file="1_0.safetensors")


def bad(folder: Path, pieces: list[Stored], **files: Tensor) -> Path:
    folder.mkdir()
    for name, values in files.items():
        save_file({"w": values}, folder / f"{name[1:]}_0.safetensors")
    (folder / "0.metadata").write_bytes(metadata(pieces))
    return folder


HALF = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("pieces", "files", "words"),
    [
        ([ONE, TWO], {"_0": HALF}, "is not whole: its file 1_0.safetensors is not there"),
        ([ONE], {"_0": HALF}, "no piece has [2:4 0:3] of w"),
        ([ONE, replace(TWO, name="v")], {"_0": HALF, "_1": HALF}, "says that v is in 1_0.safetensors, but it is not"),
        ([ONE, TWO], {"_0": HALF, "_1": torch.ones(3, 3)}, "has the shape [3, 3], but [2, 3] by the metadata"),
        ([ONE, TWO], {"_0": HALF, "_1": HALF.double()}, "is float64, but float32 by the metadata"),
        ([ONE, replace(TWO, offset=(3, 0))], {"_0": HALF, "_1": HALF}, "lies outside of its shape [4, 3]"),
        ([ONE, replace(TWO, full_shape=(5, 3))], {"_0": HALF, "_1": HALF}, "are of tensors that are not alike"),
        ([replace(ONE, dtype="float7")], {}, "has the type 'float7', which this version does not read"),
        ([replace(ONE, file="../w.safetensors")], {}, "is no name of a file beside it"),
        ([replace(ONE, file="w.bin")], {}, "is no name of a file beside it"),
        ([replace(ONE, shape=(2,))], {}, "has 2 offsets but 1 sizes"),
        ([replace(ONE, shape=(2, -3))], {}, "where there should be sizes"),
        ([replace(ONE, flat=(4, 2))], {}, "has the flat range [4, 2]"),
        ([replace(ONE, flat=(4, 9))], {"_0": torch.ones(5)}, "has the elements 4 to 9 of 6"),
        ([ONE, replace(TWO, file="0_0.safetensors")], {"_0": HALF}, "two pieces of w are in 0_0.safetensors"),
    ],
)
def test_metadata_that_does_not_fit_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pieces: list[Stored], files: dict[str, Tensor], words: str
) -> None:
    folder = bad(tmp_path / "bad", pieces, **files)
    told = said(capsys, folder, tmp_path / "out", "--to", "dcp", code=2)
    assert words in told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_pieces_that_overlap_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    over = replace(ONE, offset=(1, 0), shape=(3, 3), file="1_0.safetensors")
    folder = bad(tmp_path / "good", [ONE, over], _0=whole[:2].clone(), _1=whole[1:].clone())
    assert torch.equal(tensors(open_any(folder))["w"], whole)
    other = whole[1:].clone()
    other[0, 1] = -0.0 if other[0, 1] else 1
    folder = bad(tmp_path / "bad", [ONE, over], _0=whole[:2].clone(), _1=other)
    told = said(capsys, folder, tmp_path / "out", "--to", "dcp", code=2)
    assert "which both have [1:2 0:3] of, has other values in" in told
    copies = [replace(ONE, shape=(4, 3)), replace(ONE, shape=(4, 3), file="1_0.safetensors", copy=1)]
    folder = bad(tmp_path / "copies", copies, _0=whole, _1=whole + 1)
    assert "has other values in" in said(capsys, folder, tmp_path / "out", "--to", "dcp", code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "to", "words"),
    [
        (FIXTURES / "safetensors", "hf", "keeps weights of Linear layers transposed, and there is no config.json"),
        (FIXTURES / "safetensors", "torch_dist", "convert by way of --to hf"),
        ({"w": torch.ones(2, 2)}, "paddle", "transposed, and there is no config.json"),
        (
            {"w": torch.ones(2, dtype=torch.complex64)},
            "paddle",
            "nothing says how Paddle keeps the architecture Strange",
        ),
    ],
)
def test_structures_that_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, to: str, words: str
) -> None:
    config = {"architectures": ["Strange"]} if "Strange" in words else None
    source = make if isinstance(make, Path) else folder_of(tmp_path / "hf", make, config)
    assert words in said(capsys, source, tmp_path / "out", "--to", to, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["0.metadata", "0_0", "1_0"])
def test_files_that_are_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str) -> None:
    shutil.copytree(FIXTURES / kind, tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob(f"{name}*" if "." in name else f"{name}.*")
    data = file.read_bytes()
    for size in (0, 1, 7, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        told = said(capsys, tmp_path / "cut", tmp_path / "out", "--to", "dcp", code=2)
        assert told.count("\n") == 1
        assert not (tmp_path / "out").exists()


class Evil:
    """Would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("tree", [Evil(), {"w": Evil()}])
def test_nothing_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Any) -> None:
    monkeypatch.chdir(tmp_path)
    file = replace(ONE, shape=(4, 3), file="0_0.distcp")
    (tmp_path / "0.metadata").write_bytes(metadata([file]))
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps(tree, protocol=4))
    with pytest.raises(UserError):
        open_any(tmp_path)
    (tmp_path / "0.metadata").write_bytes(pickle.dumps(tree, protocol=4))
    with pytest.raises(UserError):
        open_any(tmp_path)
    assert not (tmp_path / "ran").exists()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["0.metadata", "0_0.distcp"]),
    st.binary(min_size=1, max_size=8),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_damaged_pickles_are_refused_or_read(tmp_path: Path, name: str, noise: bytes, at: int, insert: bool) -> None:
    folder = tmp_path / "x"
    if not folder.exists():
        shutil.copytree(FIXTURES / "pickled", folder)
    data = bytearray((FIXTURES / "pickled" / name).read_bytes())
    at %= len(data)
    data[at : at if insert else at + len(noise)] = noise
    (folder / name).write_bytes(data)
    with contextlib.suppress(UserError):  # and nothing else is raised
        source = open_any(folder)
        for piece in source.pieces:
            source.read(piece.place, piece.tensor)
    shutil.copy(FIXTURES / "pickled" / name, folder / name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(st.none() | st.integers(-2, 5) | st.text(max_size=3) | st.tuples(st.integers(0, 3)), st.lists))
def test_metadata_of_anything(tmp_path: Path, value: Any) -> None:
    """Fields of other kinds than Paddle's."""
    file = tmp_path / "0.metadata"
    for field in ("offset", "shape", "dtype", "full_shape", "flat", "file"):
        file.write_bytes(metadata([replace(ONE, **{field: value})]))
        with contextlib.suppress(UserError):
            read_metadata(file)


def test_large_arrays_are_left_in_their_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((300, 500)).astype(np.float32)
    table = {"w": values, "StructuredToParameterName@@": {"w": "linear_0.w_0"}}
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps(table, protocol=4))
    piece = Stored("w", (0, 0), (300, 500), "float32", (300, 500), None, "0_0.distcp")
    (tmp_path / "0.metadata").write_bytes(metadata([piece]))
    source = open_any(tmp_path)
    assert np.array_equal(tensors(source)["w"].numpy(), values)
    source.release()
    assert np.array_equal(tensors(source)["w"].numpy(), values)


# ------------------------------------------------------------ where Paddle's own way is silently wrong


def test_tied_weights_are_both_made(tmp_path: Path) -> None:
    """Paddle's `w -> a` ; `w -> b` leaves a as it was."""
    source = open_any(folder_of(tmp_path / "hf", {"w": torch.randn(3, 2)}))
    restructure(source, bind("w -> a = b", source.specs), tmp_path / "out", "paddle")
    w = load_file(tmp_path / "hf/model.safetensors")["w"]
    assert same(tensors(open_any(tmp_path / "out")), {"a": w, "b": w})
    with pytest.raises(RelayoutError):
        bind("w -> a\nw -> b", source.specs)


def test_unequal_parts_are_cut_where_they_are_said_to_be(tmp_path: Path) -> None:
    """Paddle splits into equal parts, whatever the targets' sizes."""
    source = open_any(folder_of(tmp_path / "hf", {"w": torch.arange(8.0)}))
    bound = bind("w: (a n + b m) -> a: n, b: m", source.specs, sizes={"n": 3, "m": 5})
    restructure(source, bound, tmp_path / "out", "paddle")
    expected = {"a": torch.arange(3.0), "b": torch.arange(3.0, 8.0)}
    assert same(tensors(open_any(tmp_path / "out")), expected)


def test_another_shape_than_the_source_has_is_refused(tmp_path: Path) -> None:
    """Paddle leaves the tail of a larger target as it was, and half fills one that lacks its transpose."""
    source = open_any(folder_of(tmp_path / "hf", {"w": torch.randn(2, 4)}))
    for shape in ((3, 4), (4, 2)):
        wanted = {"w": replace(source.specs["w"], shape=shape)}
        with pytest.raises(UserError, match="but the tensor has"):
            bind("w -> w", source.specs, wanted)
    with pytest.raises(UserError, match="transposed"):  # nobody says which are Linear: no silent copy as it is
        choose(source, "paddle", None)


def test_the_module_that_metadata_names() -> None:
    assert MODULE.encode() in (FIXTURES / "safetensors" / "0.metadata").read_bytes()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"w": torch.ones(2, dtype=torch.uint16)}, "w is uint16, which Paddle's flex checkpoint cannot hold"),
        ({"w": torch.ones(2, 0)}, "w has no elements, and Paddle reads no such"),
        ({"w": torch.ones(2), "w.step": torch.tensor(3.0)}, "give --betas, as 0.9,0.95"),
        ({"w": torch.ones(2), "w.step": torch.tensor(2.5)}, "is 2.5, which is no number of steps"),
        ({"w": torch.ones(2), "w.absmax1": torch.ones(2)}, "Paddle has no name for the state absmax1"),
        (
            {"w": torch.ones(2), "w.exp_avg": torch.ones(2), "w.moment1_0": torch.ones(2)},
            "would have Paddle's name w.mom",
        ),
    ],
)
def test_what_paddle_has_no_place_for(tmp_path: Path, found: Mapping[str, Tensor], words: str) -> None:
    source = open_any(folder_of(tmp_path / "hf", found))
    states = {**flex.STATES, **ADAM_8BIT}
    known = replace(source, states={k: v for k, v in states.items() if f"w.{k}" in found})
    known = with_betas(known, (0.9, 0.95)) if "2.5" in words else known
    with pytest.raises(UserError, match=re.escape(words)):
        restructure(known, bind(IDENTITY, known.specs), tmp_path / "out", "paddle")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["0.9", "a,b", "0.9,0.95,0.99", "1,2"])
def test_betas_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    told = said(capsys, FIXTURES / "pickled", tmp_path / "out", "--to", "dcp", "--betas", given, code=2)
    assert "--betas" in told
    assert not (tmp_path / "out").exists()
