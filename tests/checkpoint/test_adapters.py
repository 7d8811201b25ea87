"""LoRA adapters that peft has written, merged as a stream: what peft's own merge gives, and nothing else is changed."""

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.conversion.lora_adapters import with_adapter
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.saving.save import save as save_own
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.layout.intervals import normal, span
from tangram.relayout import Piece, TensorSpec
from tests.checkpoint.making import make, part
from tests.checkpoint.peers.models import save

pytestmark = [
    # What peft says of patterns that fit parameters, and transformers of peft.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

CASES: Mapping[str, tuple[str, torch.dtype, Mapping[str, Any]]] = {
    "some layers, by a list": ("llama", torch.float32, {"target_modules": ["q_proj", "down_proj"], "r": 4}),
    "all linear layers, by an expression": (
        "qwen3", torch.float32, {"target_modules": r".*\.(self_attn|mlp)\..*_proj", "r": 3, "lora_alpha": 7},
    ),
    "patterns and the root of ranks": (
        "qwen3", torch.float32,
        {
            "target_modules": ["k_proj", "o_proj", "lm_head"], "r": 4, "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.k_proj": 9, "o_proj": 2},
            "alpha_pattern": {"k_pro": 77, r"layers\.\d+\.self_attn\.o_proj": 5},  # the first fits no whole name
        },
    ),
    "of 16 bits": ("llama", torch.bfloat16, {"target_modules": "all-linear", "r": 5, "lora_alpha": 3}),
    "fused experts": (
        "qwen3_moe", torch.float32,
        {
            "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj", "mlp.experts.gate_up_proj"],
            "r": 3, "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"0.mlp.experts.gate_up_proj": 11},
        },
    ),
}  # fmt: skip


def adapted(folder: Path, case: str) -> tuple[Any, Any]:
    """A model, saved beside an adapter of random A and B; both as peft has them."""
    from peft import LoraConfig, get_peft_model

    name, dtype, options = CASES[case]
    model: Any = save(name, folder / "hf", dtype=dtype)
    save_own({"model": model}, folder / "own")
    peft: Any = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(1)
    for key, value in peft.named_parameters():
        if "lora_" in key:
            value.data = torch.randn(value.shape).to(value.dtype) * 0.3
    peft.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model, peft.eval()


def convert(*arguments: object) -> None:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0


def values_of(source: OpenCheckpoint) -> dict[str, Tensor]:
    """All elements, by plain indexing; pieces of any region."""
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in source.specs.items()}
    for piece in source.pieces:
        shape = source.specs[piece.tensor].shape
        where = torch.cat([torch.arange(a, b) for a, b in piece.region.runs(shape)] or [torch.arange(0)])
        found[piece.tensor].view(-1)[where] = source.read(piece.place, piece.tensor).reshape(-1)
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_pefts_own_merge_gives(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    model, peft = adapted(tmp_path, case)
    exact = doubled(peft)
    before = open_any(tmp_path / "own")
    old = {name: value.clone() for name, value in values_of(before).items()}
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        attached = peft(tokens).logits
    merged = peft.merge_and_unload()
    theirs = merged.state_dict()

    capsys.readouterr()
    convert(
        tmp_path / "own",
        tmp_path / "merged",
        "--to",
        "hf",
        "--adapter",
        tmp_path / "adapter",
        "--config",
        tmp_path / "hf",
    )
    assert f'"{tmp_path}/adapter" merged into {len(exact)} tensors' in capsys.readouterr().out
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert ours.keys() == theirs.keys() == old.keys()
    for name, value in ours.items():
        if name not in exact:
            assert torch.equal(value, old[name]), name
            continue
        assert not torch.equal(value, old[name]), name
        off, off_theirs = ((one.double() - exact[name]).abs() for one in (value, theirs[name]))
        if value.dtype == torch.float32:
            assert (off <= 1e-6 * exact[name].abs().max()).all(), name
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)
        else:
            assert (off <= off_theirs + 1e-6 * exact[name].abs()).all(), name
            step = torch.finfo(value.dtype).eps * exact[name].abs()
            assert ((value.double() - theirs[name].double()).abs() <= 2 * step).all(), name
            assert (off <= step / 2 * 1.001).all(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=model.dtype).eval()
    if model.dtype == torch.float32:
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, attached, rtol=1e-5, atol=1e-5)

    trail = json.loads((tmp_path / "merged" / "provenance.json").read_text())
    digest = hashlib.sha256((tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert trail["adapter"] == {"folder": "adapter", "sha256": digest, "tensors": len(exact)}


def doubled(peft: Any) -> dict[str, Tensor]:
    """What the merge is in float64: by peft's own increments, or for 16 bits, which it rounds, by the formula."""
    found: dict[str, Tensor] = {}
    for name, module in peft.base_model.model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        inside = name.replace(".base_layer", "")
        key = f"{inside}.{getattr(module, 'parameter_name', 'weight')}"
        a, b = (one["default"].weight.detach().double() for one in (module.lora_A, module.lora_B))
        weight = module.get_base_layer()
        weight = getattr(weight, getattr(module, "parameter_name", "weight")).detach().double()
        if weight.ndim == 3:
            a, b = a.view(len(weight), -1, a.shape[1]), b.view(len(b), -1, len(weight))
            found[key] = weight + module.scaling["default"] * torch.einsum("ore,eri->eoi", b, a)
        else:
            found[key] = weight + module.scaling["default"] * (b @ a)
    return found


# ------------------------------------------------------------ any pieces


def written(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """An adapter's directory, by hand."""
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(
        {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def opened(name: str, tensor: Tensor, pieces: list[Region]) -> OpenCheckpoint:
    """A source in memory, cut as one likes; the places are numbers."""
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    held = [part(tensor, region) for region in pieces]
    placed = tuple(Piece(at, name, region) for at, region in enumerate(pieces))
    return OpenCheckpoint(
        "memory", Path("memory"), {name: spec}, placed, lambda at, _: held[cast("int", at)], lambda: None
    )


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A tensor in stretches of its flat elements, or in products of any sets of indices."""
    if draw(st.booleans()):
        size = math.prod(shape)
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
        return [Region.flat(shape, a, b) for a, b in itertools.pairwise(ends)]
    sets: list[list[Any]] = []
    for n in shape:
        homes = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
        sets.append([normal((i, i + 1) for i in range(n) if homes[i] == home) for home in set(homes)])
    return [Region.of([box]) for box in itertools.product(*sets)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pieces_ranks_scales_and_blocks(tmp_path: Path, data: st.DataObject) -> None:
    draw = data.draw
    experts, m, n = draw(st.integers(0, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    if experts and m == n:
        n += 1
    rank, turned = draw(st.integers(1, 4)), bool(experts) and draw(st.booleans())
    dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"])))
    of_adapter = getattr(torch, draw(st.sampled_from(["float32", "bfloat16"])))
    root, alpha = draw(st.booleans()), draw(st.sampled_from([1, 0.5, 16, -3]))
    torch.manual_seed(draw(st.integers(0, 99)))
    shape = (*([experts] if experts else []), m, n)
    rows, columns = (n, m) if turned else (m, n)
    weight = torch.randn(shape).to(dtype)
    a, b = (
        torch.randn(rank * (experts or 1), columns).to(of_adapter),
        torch.randn(rows, rank * (experts or 1)).to(of_adapter),
    )
    name = "x.experts.up" if experts else "x.weight"
    module = "x.experts" if experts else "x"
    both = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    folder = written(
        tmp_path / "adapter", both, r=rank, lora_alpha=alpha, use_rslora=root, target_parameters=["experts.up"]
    )
    block = draw(st.sampled_from([1, 16, 100, 1 << 20]))
    source = with_adapter(opened(name, weight, draw(cuts(shape))), folder, block=block)
    width = max(4, dtype.itemsize)
    for piece in source.pieces:
        (box,) = piece.region.boxes
        assert piece.region.nbytes(width) <= block or intervals.size(box[-2]) == 1

    scale = alpha / (math.sqrt(rank) if root else rank)
    wide_a, wide_b = a.double(), b.double()
    if experts:
        added = torch.einsum("ore,eri->eoi", wide_b.view(rows, rank, experts), wide_a.view(experts, rank, columns))
        added = added.transpose(1, 2) if turned else added
    else:
        added = wide_b @ wide_a
    exact = weight.double() + scale * added
    found = values_of(source)[name]
    again = values_of(source)[name]  # from what is kept, in part
    assert torch.equal(found, again)
    largest = weight.double().abs() + abs(scale) * (wide_b.abs().amax() * wide_a.abs().amax() * rank)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= largest * 1e-6 + torch.finfo(dtype).eps / 2 * exact.abs() * 1.001).all()


# ------------------------------------------------------------ other targets and sources


def test_every_target_and_source_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = save("qwen3", tmp_path / "hf")
    optimiser = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step()
    save_own({"model": model, "optim": optimiser}, tmp_path / "own")
    model.save_pretrained(tmp_path / "hf")
    torch.manual_seed(2)
    fields = {"r": 3, "lora_alpha": 5}
    pairs: dict[str, Tensor] = {}
    for at, rows in (
        ("layers.0.self_attn.q_proj", 64),
        ("layers.1.self_attn.v_proj", 32),
        ("layers.1.mlp.up_proj", 48),
    ):
        pairs[f"model.{at}.lora_A.weight"] = torch.randn(3, 32)
        pairs[f"model.{at}.lora_B.weight"] = torch.randn(rows, 3)
    adapter = ("--adapter", written(tmp_path / "adapter", pairs, **fields))
    convert(tmp_path / "hf", tmp_path / "merged", "--to", "hf", *adapter)
    merged = load_file(tmp_path / "merged" / "model.safetensors")

    capsys.readouterr()
    convert(tmp_path / "own", tmp_path / "own-merged", "--to", "tangram", *adapter, "--config", tmp_path / "hf")
    assert "75 tensors of optimiser states not converted" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "own-merged")]) == 0
    convert(tmp_path / "own", tmp_path / "dcp", "--to", "dcp", "--model-only")
    convert(tmp_path / "dcp", tmp_path / "dcp-merged", "--to", "dcp", *adapter)
    for other in ("own-merged", "dcp-merged"):
        found = values_of(open_any(tmp_path / other))
        assert found.keys() == merged.keys()
        assert all(torch.equal(found[name], value) for name, value in merged.items()), other

    # Queries, keys and values are fused, gate and up joined: of merged blocks as of merged files.
    convert(tmp_path / "hf", tmp_path / "core", "--to", "torch_dist", *adapter)
    convert(tmp_path / "merged", tmp_path / "core-of-merged", "--to", "torch_dist")
    at_once, later = (values_of(open_any(tmp_path / one)) for one in ("core", "core-of-merged"))
    assert at_once.keys() == later.keys()
    assert all(torch.equal(at_once[name], value) for name, value in later.items())
    q, k, v = (merged[f"model.layers.0.self_attn.{x}_proj.weight"].view(2, -1, 16, 32) for x in "qkv")
    fused = torch.cat([q, k, v], 1).reshape(-1, 32)
    assert torch.equal(at_once["decoder.layers.0.self_attention.linear_qkv.weight"], fused)

    capsys.readouterr()
    assert (
        main(["checkpoint", "convert", str(tmp_path / "core"), str(tmp_path / "x"), "--to", "hf", *map(str, adapter)])
        == 2
    )
    assert "has the names of Megatron-core, and adapters have those of transformers" in capsys.readouterr().err
    assert (
        main(
            [
                "checkpoint",
                "convert",
                str(tmp_path / "hf"),
                str(tmp_path / "x"),
                "--to",
                "hf",
                "--dry-run",
                *map(str, adapter),
            ]
        )
        == 0
    )
    assert "merged into 3 tensors" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


MEASURE = """
import resource, sys
from pathlib import Path
from tangram.cli import main
for name in ("small", "large"):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = Path(sys.argv[1]) / name
    options = ["--to", "hf", "--memory", "128MiB", "--json", "--adapter", str(folder / "adapter")]
    assert main(["checkpoint", "convert", str(folder / "hf"), str(folder / "merged"), *options]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    for name, rows in (("small", 4096), ("large", 65536)):
        (tmp_path / name / "hf").mkdir(parents=True)
        weight = torch.ones(rows, 4096, dtype=torch.bfloat16)
        save_file({"x.weight": weight}, tmp_path / name / "hf" / "model.safetensors")
        pair = {"x.lora_A.weight": torch.ones(2, 4096), "x.lora_B.weight": torch.ones(rows, 2)}
        written(tmp_path / name / "adapter", pair)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) * 1024 < (128 << 20) < weight.nbytes // 4 * 3
    merged = load_file(tmp_path / "large" / "merged" / "model.safetensors")["x.weight"]
    assert torch.equal(merged, weight * 5)


# ------------------------------------------------------------ what is refused

Q = "model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
GOOD = {A: torch.ones(2, 32), B: torch.ones(64, 2)}
SAID: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no magnitudes": ({"use_dora": True}, "no magnitude, and use_dora is true: it is not whole"),
    "tokens": ({"trainable_token_indices": [3]}, "says trainable_token_indices, and has no rows of them"),
    "what nobody knows yet": ({"wings": 2}, "has wings = 2, and only LoRA and DoRA are merged"),
    "another kind": ({"peft_type": "IA3"}, "is of the type 'IA3': only LORA is merged"),
    "weights that it changed": ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa", which may have changed'),
    "no rank": ({"r": None}, "does not say ranks and alphas as numbers"),
    "no number": ({"alpha_pattern": {"q_proj": "8"}}, "does not say ranks and alphas as numbers"),
    "another rank": ({"rank_pattern": {"q_proj": 8}}, f"has rank 2 for {Q}, and its adapter_config.json says 8"),
    "a bad pattern": ({"alpha_pattern": {"(": 8}}, "has a pattern that is none"),
}  # fmt: skip
HELD: Mapping[str, tuple[Mapping[str, Tensor], str]] = {
    "nothing": ({}, "has no tensors"),
    "no B": ({A: GOOD[A]}, f"has {Q}.lora_A without the other of A and B"),
    "no A": ({B: GOOD[B]}, f"has {Q}.lora_B without the other of A and B"),
    "another shape": ({A: GOOD[A], B: torch.ones(63, 2)}, f"{Q}.weight [64, 32] is of another shape"),
    "two ranks": ({A: GOOD[A], B: torch.ones(64, 3)}, "A [2, 32] and B [64, 3]"),
    "no such module": ({"a.lora_A.weight": GOOD[A], "a.lora_B.weight": GOOD[B]}, "no weight of it"),
    "half an embedding": ({"model.embed_tokens.lora_embedding_A": GOOD[A]}, "without the other of A and B"),
    "biases of pairs": ({**GOOD, f"{Q}.lora_B.bias": torch.ones(64)}, "a bias, and lora_bias is false"),
    "a weight of another shape": ({**GOOD, "model.norm.weight": torch.ones(33)}, "has model.norm.weight as [33], and"),
    "a weight of nothing": ({**GOOD, "model.nrm.weight": torch.ones(32)}, "has model.nrm.weight, and"),
    "a magnitude": ({**GOOD, f"{Q}.lora_magnitude_vector": torch.ones(64)}, "a magnitude, and use_dora is false"),
    "numbers that are none": ({A: GOOD[A] * math.nan, B: GOOD[B]}, f"has numbers in base_model.model.{A} that are not"),
    "whole numbers": ({A: torch.ones(2, 32, dtype=torch.int32), B: GOOD[B]}, "torch.int32 [2, 32]: no matrix of LoRA"),
    "other dims": ({A: torch.ones(2, 32, 1, 1), B: GOOD[B]}, "[2, 32, 1, 1]: no matrix of LoRA"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "hf"
    save("llama", folder)
    return folder


@pytest.fixture
def refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said of an adapter; of the target nothing is there then."""

    def say(source: Path = base) -> str:
        capsys.readouterr()
        before = {path.name for path in tmp_path.iterdir()}
        arguments = [source, tmp_path / "x", "--to", "hf", "--adapter", tmp_path / "adapter"]
        assert main(["checkpoint", "convert", *map(str, arguments)]) == 2
        assert {path.name for path in tmp_path.iterdir()} == before
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return say


@pytest.mark.parametrize("what", SAID)
def test_what_a_configuration_says_is_refused(tmp_path: Path, refused: Callable[..., str], what: str) -> None:
    fields, sentence = SAID[what]
    written(tmp_path / "adapter", GOOD, **fields)
    assert sentence in refused()


@pytest.mark.parametrize("what", HELD)
def test_tensors_that_are_no_pairs_are_refused(tmp_path: Path, refused: Callable[..., str], what: str) -> None:
    tensors, sentence = HELD[what]
    written(tmp_path / "adapter", tensors)
    assert sentence in refused()


def test_files_that_are_not_whole_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = tmp_path / "adapter"
    assert "has no adapter_config.json" in refused()
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    written(folder, GOOD)
    data = weights.read_bytes()
    for damaged, sentence in ((data[:-4], "bytes by its shape"), (data[:5], "damaged or cut off"), (b"", "is empty")):
        weights.write_bytes(damaged)
        assert sentence in refused()
    weights.rename(folder / "adapter_model.bin")
    assert "has no adapter_model.safetensors (its adapter_model.bin is pickled and is not read)" in refused()
    config.write_text("{")
    assert "cannot be read" in refused()
    config.write_text("[]")
    assert "is no table" in refused()


def test_weights_into_which_nothing_is_merged(base: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    written(tmp_path / "adapter", GOOD)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, f"{Q}.weight": tensors[f"{Q}.weight"].to(torch.float8_e4m3fn)}, other / "model.safetensors")
    assert f"{Q}.weight is float8_e4m3fn, into which nothing is merged" in refused(other)
    save_file({**tensors, f"{Q}.weight": torch.full((64, 32), 65000.0).half()}, other / "model.safetensors")
    written(tmp_path / "adapter", {A: GOOD[A] * 1000, B: GOOD[B]})
    assert f"{Q}.weight with the adapter has numbers that its type torch.float16 does not" in refused(other)


def test_fused_experts_only_where_it_is_plain_how(tmp_path: Path, refused: Callable[..., str]) -> None:
    own = tmp_path / "own"
    both = {"x.experts.lora_A.weight": torch.ones(4, 6), "x.experts.lora_B.weight": torch.ones(6, 4)}
    written(tmp_path / "adapter", both, target_parameters=["experts.up"])
    make(own, {"model.x.experts.up": torch.ones(2, 6, 6)})
    assert "the shapes of x.experts in the adapter" in refused(own)
    shutil.rmtree(own)
    make(own, {"model.x.experts.0.up.weight": torch.ones(6, 6)})
    assert "there the experts lie one by one, and the adapter is of all together" in refused(own)


def test_parts_among_each_other_are_refused(tmp_path: Path) -> None:
    odd, even = (normal([(at, at + 1), (at + 2, at + 3)]) for at in (1, 0))
    region = Region.of([(even, span(0, 2)), (odd, span(2, 4))])
    folder = written(tmp_path / "adapter", {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(4, 2)})
    with pytest.raises(UserError, match="whose parts lie among each other"):
        with_adapter(opened("x.weight", torch.ones(4, 4), [region, Region.full((4, 4)) - region]), folder)
