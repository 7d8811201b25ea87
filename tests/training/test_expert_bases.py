"""Adapters beside experts that are codes: those of a formula, the losses of one process on any mesh, fp8 as stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tangram.checkpoint.store.commits import read_manifest
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Layout, Mesh, region
from tangram.layout.blocks import in_blocks
from tangram.models.lora.bases import BASES
from tangram.planner.local.model_costs import Counted
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS, LoraPlan
from tangram.training.data import tokens_of
from tangram.training.parallel.quantised_base import QuantisedWeight
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training import tuning_tasks
from tests.training.stored import write_quantised
from tests.training.test_byte_bases import by_hand as byte_by_hand
from tests.training.test_expert_adapters import WAYS
from tests.training.test_quantised_base import made_by_hand
from tests.training.tuning_tasks import Traced, oracle, planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

SET = {"data.sequence": "96", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
FIELDS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "hidden_size": 192, "head_dim": 64}
BOTH = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
ONE = ("q_proj", "experts.gate_up_proj")
"""Of which the other weight of the experts is made for their own code."""
STEPS = 3


def by_hand(base: str, weight: Tensor) -> Tensor:
    """Rows of all experts together, but for the squares, which are of each."""
    if base == "fp8":
        return torch.stack([byte_by_hand(base, one) for one in weight])
    flat = weight.flatten(0, 1)
    made = torch.from_numpy(made_by_hand(flat.numpy())) if base == "nf4" else byte_by_hand(base, flat)
    return made.view(weight.shape)


class Kept(nn.Module):
    """Experts of which this rank has a part."""

    def __init__(self, base: str, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        for kind, value in kept.items():
            if kind in BASES[base].tensors:
                self.register_parameter(f"up_{kind}", nn.Parameter(value, requires_grad=False))
            else:
                self.register_buffer(f"up_{kind}", value)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("cut", ["e/a i o", "e i/a o", "e i o/a", "e/a i/b o", "e (2 f/a) o"])
def test_a_part_stands_for_the_part_of_what_a_formula_makes(base: str, cut: str) -> None:
    """150 rows of an expert are a square and a part of one, and no whole group of scales."""
    shape, mesh = (4, 150, 384), Mesh.parse("a=2 b=2")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    expected = by_hand(base, weight)
    layout, form = Layout.parse(cut).bind(shape), BASES[base]
    unlike = 0
    for rank in range(mesh.size):
        own = region(layout, mesh, rank).boxes[0]

        def picked(kind: str, whole: Tensor, rank: int = rank) -> Tensor:
            for dim, some in enumerate(region(in_blocks(layout, COLUMNS[kind], mesh), mesh, rank).boxes[0]):
                every = shape[dim] // (COLUMNS[kind] if dim == 2 else 1)
                times = whole.shape[dim] // every  # of codes that are made here, whole columns
                whole = torch.cat([whole.narrow(dim, times * a, times * (b - a)) for a, b in some], dim)
            return whole

        layer = Kept(base, form.keep(weight, picked))
        places = region(in_blocks(layout, form.block, mesh), mesh, rank).boxes[0]
        made = QuantisedWeight(form, "x.up", shape, places, torch.float32, torch.float32).made(layer)
        its = expected
        for dim, some in enumerate(own):
            its = torch.cat([its.narrow(dim, a, b - a) for a, b in some], dim)
        torch.testing.assert_close(made, its, rtol=3e-5, atol=1e-9)
        first = tuple(((0, sum(b - a for a, b in some)),) for some in places)  # as if it were the first part
        unlike += not torch.equal(
            QuantisedWeight(form, "x.up", shape, first, torch.float32, torch.float32).made(layer), made
        )
    assert unlike or (base, cut) == ("int8", "e i o/a")  # whose scales are of whole rows


# ---------------------------------------------------------------- on ranks


def planned(folder: Path, model: str, lora: LoraPlan, way: str) -> Plan:
    asked = load(folder / "sft.toml", {**SET, "model.path": str(folder / model), "data.cache": str(folder / "cache")})
    asked = asked.model_copy(update={"lora": lora, "run": asked.run.model_copy(update={"steps": STEPS})})
    return planned_by(WAYS[way], asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("experts"), family="qwen3_moe", fields=FIELDS)
    write_quantised(folder / "chat-model", "fp8")
    return folder


NF4 = LoraPlan(rank=4, alpha=16.0, targets=BOTH, base="nf4")
FP8 = LoraPlan(rank=4, alpha=16.0, targets=ONE, base="fp8")
MORE = ("ep", "tp", "pp")


@pytest.fixture(scope="module")
def ran(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Traced]:
    plans = {("nf4", way): planned(folder, "chat-model", NF4, way) for way in WAYS if way not in MORE}
    plans |= {("stored", way): planned(folder, "fp8", FP8, way) for way in ("one", "ep")}
    plans["fp8", "one"] = planned(folder, "chat-model", FP8, "one")
    return {key: ranks[0] for key, ranks in run_each(plans, tmp_path_factory.mktemp("runs")).items()}


def test_any_mesh_has_the_losses_of_one_process(ran: dict[tuple[str, str], Traced]) -> None:
    for (of, way), own in ran.items():
        expected = ran["fp8" if of == "stored" else of, "one"]
        assert own.losses == pytest.approx(expected.losses, rel=1e-6), (of, way)
        assert own.norms == pytest.approx(expected.norms, rel=1e-5), (of, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", MORE)
def test_more_meshes_have_the_losses_of_one_process(
    folder: Path, ran: dict[tuple[str, str], Traced], way: str, tmp_path: Path
) -> None:
    plans = {("nf4", way): planned(folder, "chat-model", NF4, way)}
    plans["stored", way] = planned(folder, "fp8", FP8, way)
    for (of, _), (first, *_) in run_each(plans, tmp_path).items():
        assert first.losses == pytest.approx(ran["fp8" if of == "stored" else of, "one"].losses, rel=1e-6), of


def test_losses_are_those_of_peft_beside_the_same_weights(
    folder: Path, ran: dict[tuple[str, str], Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = AutoModelForCausalLM.from_pretrained

    def quantised(*args: Any, **kwargs: Any) -> Any:
        model: Any = found(*args, **kwargs)
        for name, own in model.named_parameters():
            if name.endswith(("_proj", "_proj.weight")):
                weight = own.detach()
                own.data = by_hand("nf4", weight if weight.dim() == 3 else weight[None]).view(weight.shape)
        return model

    monkeypatch.setattr(tuning_tasks.AutoModelForCausalLM, "from_pretrained", quantised)
    expected = oracle(planned(folder, "chat-model", NF4, "one"))
    assert ran["nf4", "one"].losses == pytest.approx(expected.losses, rel=3e-5)
    assert ran["nf4", "one"].norms[0] == pytest.approx(expected.norms[0], rel=1e-4)  # later, tokens may go elsewhere
    assert ran["nf4", "one"].losses != pytest.approx(ran["fp8", "one"].losses, rel=1e-4)


def test_what_is_kept_is_what_is_counted(folder: Path, ran: dict[tuple[str, str], Traced]) -> None:
    plan = planned(folder, "chat-model", NF4, "one")
    counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
    trained = sum(p.numel() for p in counted.model.parameters() if p.requires_grad)
    packed = sum(p.size for p in counted.costs(2).parameters if p.quantised)
    plain = sum(p.numel() for p in counted.model.parameters()) - trained - packed
    assert packed > 2 * 4 * 3 * 192 * 128  # of experts alone
    expected = 0.5159 * packed + 4 * plain + 12 * trained
    assert ran["nf4", "one"].kept_bytes == pytest.approx(expected, rel=0.01)


def test_codes_of_experts_are_taken_as_they_are_stored(folder: Path) -> None:
    kept: list[dict[str, Tensor]] = []
    for model in ("fp8", "chat-model"):
        plan = planned(folder, model, FP8, "one")
        whole = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
        kept.append(whole.state_dict())
    assert kept[0].keys() == kept[1].keys()
    assert any("experts.base_layer.gate_up_proj_fp8" in name for name in kept[0])
    assert any("experts.base_layer.down_proj_squares" in name for name in kept[0])
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


def test_experts_whose_squares_would_be_cut_are_refused(tmp_path: Path) -> None:
    """96 rows of each of two weights are a square each, and one and a half together."""
    folder = write_folder(tmp_path / "f", family="qwen3_moe", fields={**FIELDS, "moe_intermediate_size": 96})
    write_quantised(folder / "chat-model", "fp8")
    plan = planned(folder, "fp8", FP8, "one")
    with pytest.raises(UserError, match=r"experts\.0\.\w+_proj\.weight .* whose codes cannot be put together"):
        build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)


@pytest.mark.slow
def test_a_whole_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On from codes that two ranks have saved, on one; what is exported is what they stand for, and the adapters."""
    monkeypatch.chdir(folder)
    out = tmp_path / "run"
    some = {**SET, "data.cache": str(folder / "cache"), "lora.base": '"nf4"'}
    words = [word for key, value in some.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "sft.toml", "--steps", "1", "-n", "2", "--out", str(out), *words]) == 0
    assert main(["train", "sft.toml", "--steps", "2", "-n", "1", "--out", str(out), "--resume", *words]) == 0
    first, last = sorted((out / "checkpoint").iterdir())
    tensors = read_manifest(first).tensors
    codes = [name for name in tensors if "experts" in name and name.endswith(("_nf4", "_absmax", "_groups", "_mean"))]
    assert len(codes) == 2 * 2 * 4
    assert all(tensors[name].digest == read_manifest(last).tensors[name].digest for name in codes)
    exported = AutoModelForCausalLM.from_pretrained(out / "export").state_dict()["model.layers.0.mlp.experts.down_proj"]
    before = AutoModelForCausalLM.from_pretrained(folder / "chat-model").state_dict()
    update = exported - by_hand("nf4", before["model.layers.0.mlp.experts.down_proj"])
    assert 0 < update.abs().max() < 0.01
