"""LoRA beside a base in NF4: the bits of bitsandbytes, the losses of one process on any mesh, never quantised twice."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import norm
from torch import nn
from transformers import AutoModelForCausalLM

from tangram.checkpoint.store.commits import read_manifest
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Layout, Mesh, region
from tangram.layout.blocks import in_blocks
from tangram.models.lora import dynamic_codes, nf4
from tangram.models.lora.bases import BASES
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load, loads
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.parallel.quantised_base import QuantisedWeight, dequantise, quantised_weights
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training import tuning_tasks
from tests.training.tuning_tasks import Traced, oracle, planned_by, run_each, run_in_turn, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

Floats = npt.NDArray[np.float32]


# ---------------------------------------------------------------- the bits


@cache
def tables() -> tuple[Floats, Floats]:
    """The 16 numbers by quantiles of a normal distribution, and the 256 of 8 bits; not as they are made elsewhere."""
    ends = 0.9677083
    up, down = (norm.ppf(np.linspace(ends, 0.5, n)[:-1]) for n in (9, 8))
    sixteen = np.sort(np.concatenate([up, [0.0], -down])) / up.max()
    parts = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(7) for j in range(2**i)]
    return sixteen.astype(np.float32), np.sort([*parts, *(-p for p in parts), 0.0, 1.0]).astype(np.float32)


def nearest(numbers: Floats, table: Floats) -> npt.NDArray[np.int64]:
    return np.abs(numbers[..., None] - table).argmin(-1)


def made_by_hand(weight: Floats) -> Floats:
    """What is left of a weight, with plain numpy."""
    sixteen, many = np.array(nf4.NORMAL, np.float32), tables()[1]
    blocks = weight.reshape(-1, 64)
    most = np.abs(blocks).max(1)
    mean = np.float32(torch.from_numpy(most).mean())  # whose rounding is the sum's
    rest = most - mean
    scales = np.empty_like(rest)
    for first in range(0, rest.size, 256):
        some = rest[first : first + 256]
        high = np.abs(some).max()
        scales[first : first + 256] = many[nearest(some / high, many)] * high + mean
    places = nearest(blocks / np.maximum(most, np.float32(1e-38))[:, None], sixteen)
    return (sixteen[places] * scales[:, None]).reshape(weight.shape)


def kept(weight: torch.Tensor) -> tuple[torch.Tensor, nf4.Scales, torch.Tensor]:
    most = nf4.largest(weight)
    codes, scales = nf4.encode(weight, most), nf4.scales_of(most)
    group = nf4.group_of(*map(torch.arange, most.shape), most.shape[1])
    return codes, scales, nf4.values_of(scales.codes, scales.groups, scales.mean, group)


def some_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * 0.02)


def test_the_tables_are_those_of_their_papers() -> None:
    sixteen, many = tables()
    np.testing.assert_allclose(nf4.NORMAL, sixteen, atol=2e-7)
    np.testing.assert_allclose(dynamic_codes.dynamic_numbers(), many, rtol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(96, 128), (33, 704), (2, 64)])
def test_it_is_what_plain_numpy_makes(rows: int, columns: int) -> None:
    weight = some_weight(rows, columns)
    codes, _, scales = kept(weight)
    assert codes.dtype == torch.uint8
    assert codes.shape == (rows, columns // 2)
    np.testing.assert_allclose(nf4.decode(codes, scales, torch.float32), made_by_hand(weight.numpy()), rtol=3e-5)


def test_the_codes_are_those_of_bitsandbytes() -> None:
    """As its version 0.50.2 gave them; all of its bits are compared in tests/interop."""
    weight = some_weight(160, 320)
    weight[0] = 0  # blocks of which nothing is left
    assert crc32(kept(weight)[0].numpy().tobytes()) == 2290125739
    assert crc32(kept(weight.bfloat16())[0].numpy().tobytes()) == 3220598812


# ---------------------------------------------------------------- parts


MESH = Mesh.parse("dp=2 tp=2")
CUTS = {
    "rows": ("o/tp i", {}),
    "uneven rows": ("o/tp/dp i", {}),
    "columns": ("o i/tp", {}),
    "rows and columns": ("o/dp i/tp", {}),
    "heads of two blocks": ("o (heads/tp d)", {"heads": 3}),
    "two in one": ("(2 f/tp) i", {}),
}


class Kept(nn.Module):
    """A layer that has a part of what keeps a weight."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, all_: nf4.Scales) -> None:
        super().__init__()
        self.weight_nf4, self.weight_absmax = (nn.Parameter(x, requires_grad=False) for x in (codes, scales))
        self.weight_groups, self.weight_mean = nn.Buffer(all_.groups), nn.Buffer(all_.mean)


@pytest.mark.parametrize("cut", CUTS)
def test_a_part_stands_for_the_part(cut: str) -> None:
    """Groups of scales cross rows and parts: 5 blocks to a row, 51 rows and one block to a group."""
    text, sizes = CUTS[cut]
    rows, columns = (150, 384) if sizes or "2" in text or "i/" in text else (151, 320)
    weight = some_weight(rows, columns)
    codes, scales, values = kept(weight)
    whole = nf4.decode(codes, values, torch.float32)
    layout = Layout.parse(text).bind((rows, columns), **sizes)
    mistaken = 0
    for rank in range(MESH.size):
        boxes = [region(in_blocks(layout, n, MESH), MESH, rank).boxes[0] for n in (2, 64)]
        own, blocks = ([torch.cat([torch.arange(*span) for span in some]) for some in box] for box in boxes)
        layer = Kept(codes[own[0]][:, own[1]], scales.codes[blocks[0]][:, blocks[1]], scales)
        one = QuantisedWeight(BASES["nf4"], "x.weight", (rows, columns), tuple(boxes[1]), torch.float32, torch.float32)
        its = [torch.cat([torch.arange(*span) for span in some]) for some in region(layout, MESH, rank).boxes[0]]
        assert torch.equal(one.made(layer), whole[its[0]][:, its[1]])
        alone = replace(one, places=tuple(((0, len(some)),) for some in blocks))  # as if it were the first part
        mistaken += not torch.equal(alone.made(layer), one.made(layer))
        uncut = Kept(layer.weight_nf4.data, scales.codes, scales)
        if blocks[0].numel() < rows or blocks[1].numel() < columns // 64:
            with pytest.raises(RuntimeError, match="has not been gathered"):
                one.made(uncut)
    assert mistaken


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(1, 128), (3, 1, 128)], ids=["a row", "experts of a row"])
def test_a_rank_may_have_no_row(base: str, shape: tuple[int, ...]) -> None:
    """Qwen3-Next's gate of the shared expert has one row, of which the second of two ranks has none."""
    own, whole = BASES[base], torch.randn(shape)
    everything = own.keep(whole, lambda kind, one: one)
    for first, last in ((0, 1), (1, 1)):
        kept = own.keep(whole, lambda kind, one, some=slice(first, last): one[..., some, :])
        for kind in own.tensors:
            assert torch.equal(kept[kind], everything[kind][..., first:last, :])
        layer = nn.Module()
        for kind, value in kept.items():
            value = value if kind in own.tensors else value.clone()
            layer.register_buffer(f"weight_{kind}", value) if kind not in own.tensors else layer.register_parameter(
                f"weight_{kind}", nn.Parameter(value, requires_grad=False)
            )
        places = (*(((0, n),) for n in shape[:-2]), ((first, last),), ((0, 128 // own.block),))
        made = QuantisedWeight(own, "x.weight", shape, places, torch.float32, torch.float32).made(layer)
        assert made.shape == whole[..., first:last, :].shape
        torch.testing.assert_close(made, whole[..., first:last, :], rtol=0, atol=0.5)


# ---------------------------------------------------------------- on ranks


SET = {"data.sequence": "88", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
"""All rows are cut to one length, as a derived model has a program for each."""
STEPS = 6
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "fsdp x tp": Strategy("FSDP x TP", "dp=2 tp=2", ("dp",), (TENSOR,), "dp"),
}
LORA = LoraPlan(rank=4, alpha=16.0, dropout=0.1, base="nf4")
STILL = LORA.model_copy(update={"dropout": 0.0})
RESUMED = {("resumed", "tp"): ("half", "fsdp")}
QUICK = ("one", "fsdp", "tp")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("quantised"), fields=WIDE)


def _plan(folder: Path, lora: LoraPlan, way: str, steps: int = STEPS, **more: str) -> Plan:
    model = {"model.path": str(folder / "chat-model"), "data.cache": str(folder / "cache")}
    asked = load(folder / "sft.toml", {**SET, **model, **more}).model_copy(update={"lora": lora})
    return planned_by(WAYS[way], asked, steps=steps)


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    """Of the first rank; what goes on from a checkpoint does so where the weights that it began with are gone."""
    plans = {("dropout", way): _plan(folder, LORA, way) for way in QUICK}
    again = {"run.recompute": '["model.layers.*"]'}  # of which the backward makes weights, too
    plans["still", "one"] = _plan(folder, STILL, "one", 4, **again)
    plans["half", "fsdp"] = _plan(folder, LORA, "fsdp", 3)
    gone = shutil.copytree(folder / "chat-model", folder / "gone") / "model.safetensors"
    values = {name: torch.zeros_like(one) for name, one in load_file(gone).items()}
    save_file(values, gone, metadata={"format": "pt"})
    plans |= {key: _plan(folder, LORA, key[1], **{"model.path": str(gone.parent)}) for key in RESUMED}
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", RESUMED).items()}


def test_any_mesh_has_the_losses_of_one_process(ran: dict[tuple[str, str], Traced]) -> None:
    one = ran["dropout", "one"]
    assert one.losses[-1] < one.losses[0] - 0.05
    for way in QUICK:
        assert ran["dropout", way].losses == pytest.approx(one.losses, rel=1e-5), way


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pp", "fsdp x tp"])
def test_more_meshes_have_the_losses_of_one_process(folder: Path, ran: dict[tuple[str, str], Traced], way: str) -> None:
    plan = _plan(folder, LORA, way)
    done: list[dict[tuple[str, str], Traced]] = run_ranks(
        run_in_turn, ({("dropout", way): plan}, folder / "runs", {}), world=plan.ranks, on_event=print, device="cpu"
    )
    for rank in done:
        assert rank["dropout", way].losses == pytest.approx(ran["dropout", "one"].losses, rel=1e-5)


def test_it_goes_on_from_the_codes_and_not_from_weights(ran: dict[tuple[str, str], Traced]) -> None:
    assert ran["resumed", "tp"].losses == pytest.approx(ran["dropout", "one"].losses[3:], rel=1e-5)


def test_what_is_kept_is_half_a_byte_a_number(folder: Path, ran: dict[tuple[str, str], Traced]) -> None:
    """Parameters, buffers and states of the first rank, beside what is counted."""
    for way in ("one", "fsdp"):
        plan = _plan(folder, LORA, way)
        counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
        trained = sum(p.numel() for p in counted.model.parameters() if p.requires_grad)
        packed = sum(p.size for p in counted.costs(2).parameters if p.quantised)
        plain = sum(p.numel() for p in counted.model.parameters()) - trained - packed
        expected = (0.5159 * packed + 4 * plain + 12 * trained) / plan.ranks
        assert packed > 4 * plain
        assert ran["dropout", way].kept_bytes <= 1.05 * expected, way
        assert ran["dropout", way].kept_bytes >= 0.95 * expected, way


def _by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch, alpha: float | None = None) -> Traced:
    """What transformers and peft do beside weights that plain numpy has quantised."""
    found = AutoModelForCausalLM.from_pretrained

    def quantised(*args: Any, **kwargs: Any) -> Any:
        model: Any = found(*args, **kwargs)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = torch.from_numpy(made_by_hand(layer.weight.detach().numpy()))
        return model

    monkeypatch.setattr(tuning_tasks.AutoModelForCausalLM, "from_pretrained", quantised)
    return oracle(_plan(folder, STILL, "one", 4), alpha=alpha)


def test_losses_and_gradients_are_those_of_peft_beside_the_same_weights(
    folder: Path, ran: dict[tuple[str, str], Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = oracle(_plan(folder, STILL, "one", 4))
    expected, own = _by_hand(folder, monkeypatch), ran["still", "one"]
    assert own.losses == pytest.approx(expected.losses, rel=1e-5)
    assert own.losses != pytest.approx(plain.losses, rel=1e-4)
    assert own.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        assert np.abs(own.gradients[name] - value).max() <= 1e-5 + 1e-4 * np.abs(value).max(), name
    wrong = _by_hand(folder, monkeypatch, alpha=4.0)  # a scale of 1
    assert own.losses != pytest.approx(wrong.losses, rel=1e-5)


def test_a_whole_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two processes and on with one; what it saves has the codes that it began with, and exports what they mean."""
    monkeypatch.chdir(folder)
    out = tmp_path / "run"
    some = {**SET, "data.cache": str(folder / "cache"), "lora.base": '"nf4"', "checkpoint.every_steps": "1"}
    words = [word for key, value in some.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "sft.toml", "--steps", "1", "-n", "2", "--out", str(out), *words]) == 0
    assert main(["train", "sft.toml", "--steps", "2", "-n", "1", "--out", str(out), "--resume", *words]) == 0
    first, last = sorted((out / "checkpoint").iterdir())
    tensors = read_manifest(first).tensors
    codes = [name for name in tensors if name.endswith(("weight_nf4", "weight_absmax"))]
    assert len(codes) == 2 * 14
    assert {tensors[name].spec.dtype for name in codes} == {"uint8"}
    assert not [name for name in tensors if name.endswith("q_proj.base_layer.weight")]
    for name in [*codes, *(name for name in tensors if name.endswith(("weight_groups", "weight_mean")))]:
        assert tensors[name].digest == read_manifest(last).tensors[name].digest, name
    exported = AutoModelForCausalLM.from_pretrained(out / "export").state_dict()
    plan = loads(read_manifest(last).objects["about"]["plan"])
    assert isinstance(plan, Plan)
    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    dequantise(model)
    base = model.state_dict()["model.layers.0.mlp.down_proj.base_layer.weight"]
    update = exported["model.layers.0.mlp.down_proj.weight"] - base
    assert 0 < update.abs().max() < 0.01


def test_no_rank_has_the_weights_of_all_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is loaded and while it runs, weights are made for one layer at a time, and backwards make anew."""
    plan = _plan(folder, STILL, "one", 4)
    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    made: list[Any] = []
    real = QuantisedWeight.made

    def watched(self: QuantisedWeight, layer: nn.Module) -> torch.Tensor:
        weight = real(self, layer)
        made.append(weakref.ref(weight.untyped_storage()))
        alive.append(sum(1 for one in made if one() is not None))
        return weight

    alive: list[int] = []
    monkeypatch.setattr(QuantisedWeight, "made", watched)
    loss = model(torch.arange(64)[None], labels=torch.arange(64)[None]).loss
    forward = len(made)
    assert forward == len(quantised_weights(model)) == 14
    assert max(alive) == 1
    loss.backward()
    assert len(made) > forward
    assert max(alive) == 1
    assert all(p.grad is None or p.requires_grad for p in model.parameters())


REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "dora": ({"lora.dora": "true"}, "lora.dora reads a base's weights outside of its layers"),
    "compiled": ({"run.compile": "true"}, "compiled blocks would keep the weights"),
    "nothing": ({"lora.base_skip": '["q_prj"]'}, 'lora.base_skip names "q_prj"'),
    "rows": ({"model.change.intermediate_size": "96"}, "mlp.down_proj has rows of 96 numbers"),
}


def test_what_cannot_be_quantised_is_refused(folder: Path) -> None:
    for name, (fields, why) in REFUSED.items():
        with pytest.raises(UserError) as refused:
            _checked(folder, fields)
        assert why in str(refused.value), name
    narrow = {"model.change.intermediate_size": "320"}  # two ranks would have two and a half blocks of each row
    with pytest.raises(UserError, match="cuts blocks of 64 columns apart"):
        _plan(folder, STILL, "tp", **narrow)
    assert _plan(folder, STILL.model_copy(update={"base_skip": ("down_proj",)}), "tp", **narrow)


def _checked(folder: Path, fields: Mapping[str, str]) -> None:
    job = load(folder / "sft.toml", {**SET, "lora.base": '"nf4"', "model.path": str(folder / "chat-model"), **fields})
    plan_of(WAYS["one"], job, Counted(job, source_of(job, tokens_of(job)).config), 2)
