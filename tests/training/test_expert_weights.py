"""Weights whose structure is not the module's: experts one by one, other names; there, cut, and back bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import Source
from tangram.training.data import BYTES
from tangram.training.run.launch import run_ranks
from tangram.training.state.checkpointer import JobState, load
from tangram.training.state.export_hf import byte_tokenizer
from tangram.training.state.export_hf import export as export_model
from tangram.training.state.load_weights import load_pretrained
from tests.training.experts import LARGE, MOE, NEOX, Found, build, export, files, two_ranks
from tests.training.saving import plan_of
from tests.training.small import small_tables, write_text

PLAN = plan_of(ranks=1)
FILE = "model.safetensors"
MLA = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "mixtral": {**{key: MOE[key] for key in MOE if key != "num_experts"}, "num_local_experts": 4},
    "deepseek_v3": {**{key: MOE[key] for key in MOE if key not in ("num_experts", "head_dim")}, **MLA},
    "granitemoe": {**{key: MOE[key] for key in MOE if key != "num_experts"}, "num_local_experts": 4},
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def change(folder: Path, *drop: str, tensors: dict[str, Tensor] | None = None) -> Path:
    """Other tensors in the one file."""
    save_file({k: v for k, v in files(folder).items() if k not in drop} | (tensors or {}), folder / FILE)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_transformers_loads(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder = export(cast(nn.Module, build(kind, KINDS[kind], 0)).to(dtype), tmp_path / "model", max_shard_size="6KB")
    assert not (folder / FILE).exists(), "the experts are spread over several files"
    model = build(kind, KINDS[kind], 1)
    assert files(folder).keys() != model.state_dict().keys()
    load_pretrained(folder, model, PLAN, None)
    oracle = cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, oracle[name]), name


def source_in(folder: Path, model: nn.Module) -> Source:
    """What training began from."""
    return Source(folder.name, cast(Any, model).config, folder, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("original", [True, False], ids=["original", "as the module"])
def test_the_export_has_the_structure_of_the_weights(tmp_path: Path, kind: str, original: bool) -> None:
    folder = export(build(kind, KINDS[kind], 0), tmp_path / "model", save_original_format=original)
    model = build(kind, KINDS[kind], 1)
    load_pretrained(folder, model, PLAN, None)
    export_model(model, tmp_path / "export", BYTES, source_in(folder, model))
    before, after = files(folder), files(tmp_path / "export")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_directory_that_is_gone_leaves_the_declared_structure(tmp_path: Path) -> None:
    model = build("qwen3_moe", MOE, 0)
    export_model(model, tmp_path / "export", BYTES, source_in(tmp_path / "gone", model))
    assert EXPERT in files(tmp_path / "export")


# ---------------------------------------------------------------- over two ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Found]]:
    folder = tmp_path_factory.mktemp("experts")
    export(build("qwen3_moe", MOE, 0), folder / "small", max_shard_size="6KB")
    export(build("qwen3_moe", LARGE, 0), folder / "large")
    export(build("gpt_neox", NEOX, 0), folder / "neox")
    return folder, run_ranks(two_ranks, folder, world=2, on_event=print, device="cpu")


def test_each_rank_its_experts(ranks: tuple[Path, Sequence[Found]]) -> None:
    whole = dict(build("qwen3_moe", MOE, 0).named_parameters())
    for found in ranks[1]:
        assert found.local == (2, 16, 16)
        assert found.loaded.keys() == whole.keys()
        for name, tensor in whole.items():
            assert np.array_equal(found.loaded[name], tensor.detach().numpy()), name


def test_names_that_are_declared_for_a_class_are_found_under_fsdp(ranks: tuple[Path, Sequence[Found]]) -> None:
    assert "embed_out.weight" in files(ranks[0] / "neox")
    whole = dict(build("gpt_neox", NEOX, 0).named_parameters())
    for found in ranks[1]:
        assert found.renamed.keys() == whole.keys()
        assert all(np.array_equal(found.renamed[name], tensor.detach().numpy()) for name, tensor in whole.items())


def test_the_checkpoint_goes_on_and_exports_the_bytes_it_began_from(
    ranks: tuple[Path, Sequence[Found]], tmp_path: Path
) -> None:
    folder, found = ranks
    for one in found:
        assert all(np.array_equal(one.loaded[name], one.again[name]) for name in one.loaded)
        assert one.moments
    model = build("qwen3_moe", MOE, 5)
    load(folder / "checkpoint" / "step-00000001", JobState(model, None), PLAN, None)
    export_model(model, tmp_path / "export", BYTES, source_in(folder / "small", model))
    before, after = files(folder / "small"), files(tmp_path / "export")
    assert EXPERT in before
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_rank_reads_the_experts_that_it_holds(ranks: tuple[Path, Sequence[Found]]) -> None:
    folder, found = ranks
    size = (folder / "large" / FILE).stat().st_size
    held = [{int(name.split("experts.")[1].split(".")[0]) for name in one.read if "experts." in name} for one in found]
    assert held == [set(range(4)), set(range(4, 8))]
    for one in found:
        assert 0.4 * size <= one.touched <= 0.7 * size, (one.touched, size)


# ---------------------------------------------------------------- directories of something else


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(build("qwen3_moe", MOE, 0), tmp_path / "model")


def refused(folder: Path, message: str, **fields: Any) -> None:
    model = build("qwen3_moe", {**MOE, **fields}, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_pretrained(folder, model, PLAN, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_missing_expert(folder: Path) -> None:
    refused(change(folder, EXPERT), rf"do not fit a Qwen3MoeForCausalLM: it lacks {EXPERT}$")


def test_experts_that_are_missing_altogether(folder: Path) -> None:
    names = [EXPERT.replace(".2.up", f".{e}.{word}") for e in range(4) for word in ("gate", "up")]
    refused(change(folder, *names), r"it lacks model.layers.1.mlp.experts.gate_up_proj$")


def test_an_expert_too_many(folder: Path) -> None:
    surplus = EXPERT.replace(".2.", ".4.")
    refused(change(folder, tensors={surplus: torch.ones(8, 16)}), rf"it has {surplus} that the model has not$")


def test_a_model_of_fewer_or_more_experts(folder: Path) -> None:
    refused(
        folder,
        r"gate.weight has the shape|it has .*experts.3.gate_proj.weight, .* that the model has not",
        num_experts=3,
    )
    refused(folder, r"it lacks model.layers.0.mlp.experts.4.down_proj.weight, .* and 3 more", num_experts=5)


def test_an_expert_of_another_shape(folder: Path) -> None:
    refused(change(folder, tensors={EXPERT: torch.ones(8, 15)}), rf"{EXPERT} has the shape \[8, 15\], not \[8, 16\]")


def test_experts_of_another_size(folder: Path) -> None:
    refused(
        folder,
        r"experts.0.gate_proj.weight, of which model.layers.0.mlp.experts.gate_up_proj is made, would give it the "
        r"shape \[4, 16, 16\], not \[4, 20, 16\]",
        moe_intermediate_size=10,
    )


def test_an_expert_of_another_type(folder: Path) -> None:
    change(folder, tensors={EXPERT: torch.ones(8, 16, dtype=torch.bfloat16)})
    refused(folder, rf"is stored as float32, but {EXPERT}, which is a part of the same tensor, as bfloat16")
    change(folder, tensors={EXPERT: torch.ones(8, 16, dtype=torch.int8)})
    refused(folder, rf"{EXPERT} in .* is stored as int8, not as float32: where the weights are quantised")


def test_both_structures_at_once(folder: Path) -> None:
    stack = torch.ones(4, 16, 16)
    refused(
        change(folder, tensors={"model.layers.1.mlp.experts.gate_up_proj": stack}), r"it has .* that the model has not"
    )


def test_weights_that_are_quantised_in_another_structure(folder: Path) -> None:
    change(folder, tensors={EXPERT.replace("weight", "weight_scale_inv"): torch.ones(1, 1)})
    refused(
        folder,
        r"up_proj.weight_scale_inv that the model has not \(by its configuration they are quantised, with fp8: "
        r"`tangram checkpoint convert DIR NEW --to hf --dequantise`",
        quantization_config={"quant_method": "fp8"},
    )


def test_codes_name_the_command_that_makes_weights_of_them(folder: Path) -> None:
    change(folder, tensors={f"{EXPERT}_scale_inv": torch.ones(1, 1), EXPERT: torch.ones(8, 16).to(torch.float8_e4m3fn)})
    refused(folder, rf"are quantised \({EXPERT} is codes\): `tangram checkpoint convert DIR NEW --to hf --dequantise`")


# ---------------------------------------------------------------- the whole way


@pytest.mark.slow
def test_train_resume_and_export(tmp_path: Path) -> None:
    """Steps too small to change a bit: what was trained, resumed and exported is what it began from."""
    model = build("qwen3_moe", {**MOE, "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}, 0)
    export(model, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    write_text(tmp_path / "text")
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    tables = small_tables(
        tmp_path / "text", optimiser={"lr": 1e-30, "weight_decay": 0.0}, checkpoint={"every_steps": 1}
    )
    tables["model"] = {"path": str(tmp_path / "model")}
    for steps, resume in ((2, []), (4, ["--resume"])):
        plan.write_text(tomli_w.dumps({**tables, "run": {**tables["run"], "steps": steps}}))
        assert main(["train", str(plan), "--out", str(out), *resume]) == 0
        before, after = files(tmp_path / "model"), files(out / "export")
        assert EXPERT in before
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
