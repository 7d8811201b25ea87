"""Weights of a Hugging Face directory: what transformers itself loads, whole or cut; what does not fit is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tangram.errors import UserError
from tangram.schema.job import ModelPlan
from tangram.training.run.launch import run_ranks
from tangram.training.state.load_weights import load_pretrained
from tests.training.saving import load_cut, net, plan_of

PLAN = plan_of(ranks=1)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
FILE = "model.safetensors"


def build(kind: str, fields: Mapping[str, Any], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)))


def export(model: nn.Module, folder: Path, **options: Any) -> Path:
    logging.disable_progress_bar()
    cast(Any, model).save_pretrained(folder, **options)
    logging.enable_progress_bar()
    return folder


def change(folder: Path, drop: str = "", **tensors: Tensor) -> Path:
    """Other tensors in the one file; a name is written with `__` for its dots."""
    found = {name: tensor for name, tensor in load_file(folder / FILE).items() if name != drop}
    save_file(found | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / FILE)
    return folder


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", SMALL), ("qwen3", {**SMALL, "tie_word_embeddings": True}), ("gpt2", GPT2), ("gemma3_text", SMALL)],
)
@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_what_transformers_loads(tmp_path: Path, kind: str, fields: dict[str, Any], shard: str) -> None:
    folder = export(build(kind, fields, 0), tmp_path / "model", max_shard_size=shard)
    assert (folder / FILE).exists() == (shard == "5GB")
    model = build(kind, fields, 1)
    load_pretrained(folder, model, PLAN, None)
    oracle = cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder))
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_model_without_its_head_has_shorter_names(tmp_path: Path) -> None:
    model = build("gpt2", GPT2, 0)
    folder = export(model.base_model, tmp_path / "base")
    assert "h.0.ln_1.weight" in load_file(folder / FILE)
    found = build("gpt2", GPT2, 1)
    load_pretrained(folder, found, PLAN, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


def test_masks_of_old_directories_mean_nothing(tmp_path: Path) -> None:
    folder = export(build("gpt2", GPT2, 0), tmp_path / "model")
    change(folder, transformer__h__0__attn__bias=torch.ones(4, 4))
    load_pretrained(folder, build("gpt2", GPT2, 1), PLAN, None)


def test_rotary_tables_of_old_directories_mean_nothing(tmp_path: Path) -> None:
    folder = export(build("llama", SMALL, 0), tmp_path / "model")
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_pretrained(folder, build("llama", SMALL, 1), PLAN, None)


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    folder = export(cast(nn.Module, build("qwen3", SMALL, 0)).bfloat16(), tmp_path / "model")
    stored = load_file(folder / FILE)
    model = build("qwen3", SMALL, 1)
    load_pretrained(folder, model, PLAN, None)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(parameter, stored[name].float()), name


def test_tied_parameters_stored_twice(tmp_path: Path) -> None:
    fields = {**SMALL, "tie_word_embeddings": True}
    folder = export(build("qwen3", fields, 0), tmp_path / "model")
    words = load_file(folder / FILE)["model.embed_tokens.weight"]
    model = build("qwen3", fields, 1)
    load_pretrained(change(folder, lm_head__weight=words.clone()), model, PLAN, None)
    assert torch.equal(model.get_parameter("lm_head.weight"), words)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    with pytest.raises(UserError, match=r"are tied, but 1024 of the 1024 elements compared differ"):
        load_pretrained(change(folder, lm_head__weight=words + 1), model, PLAN, None)


def test_tied_parameters_stored_under_the_other_name(tmp_path: Path) -> None:
    fields = {**SMALL, "tie_word_embeddings": True}
    folder = export(build("qwen3", fields, 0), tmp_path / "model")
    words = load_file(folder / FILE)["model.embed_tokens.weight"]
    change(folder, drop="model.embed_tokens.weight", lm_head__weight=words)
    model = build("qwen3", fields, 1)
    load_pretrained(folder, model, PLAN, None)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), words)


@pytest.mark.parametrize(("kind", "fields"), [("qwen3", SMALL), ("gpt2", GPT2)])
def test_a_job_that_unties_begins_with_a_head_that_is_the_embeddings(
    kind: str, fields: Mapping[str, Any], tmp_path: Path
) -> None:
    folder = export(build(kind, {**fields, "tie_word_embeddings": True}, 0), tmp_path / "model")
    assert "lm_head.weight" not in load_file(folder / FILE)
    model = build(kind, {**fields, "tie_word_embeddings": False}, 1)
    with pytest.raises(UserError, match=r"it lacks lm_head\.weight"):
        load_pretrained(folder, model, PLAN, None)
    untied = PLAN.model_copy(update={"model": ModelPlan(path="model", change={"tie_word_embeddings": False})})
    load_pretrained(folder, model, untied, None)
    head, words = cast(Any, model).get_output_embeddings().weight, cast(Any, model).get_input_embeddings().weight
    assert head is not words
    assert torch.equal(head, words)
    with torch.no_grad():
        head.add_(1)
    assert not torch.equal(head, words)


def test_buffers_outside_the_state_are_left(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    model = build("qwen3", SMALL, 1)
    table = model.get_buffer("model.rotary_emb.inv_freq")
    table.fill_(5)
    load_pretrained(folder, model, PLAN, None)
    assert table.eq(5).all()


# ---------------------------------------------------------------- cut over ranks


def test_each_rank_its_part(tmp_path: Path) -> None:
    model = net(0)
    model.seen.mul_(3)
    tensors = {name: t.detach().to(torch.bfloat16) for name, t in model.state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / FILE)
    for rank in run_ranks(load_cut, tmp_path, world=2, on_event=print, device="cpu"):
        for layout in rank:
            assert layout.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert np.array_equal(layout[name], tensor.float().numpy()), name


# ---------------------------------------------------------------- directories of something else


def test_missing_and_unknown_names(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    change(folder, drop="model.norm.weight", surprise=torch.ones(2))
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM: it lacks model.norm.weight; it has surprise that the"):
        load_pretrained(folder, build("qwen3", SMALL, 1), PLAN, None)


def test_another_model(tmp_path: Path) -> None:
    folder = export(build("gpt2", GPT2, 0), tmp_path / "model")
    with pytest.raises(UserError, match=r"do not fit a Qwen3ForCausalLM: it lacks .*, .*, .* and \d+ more; it has"):
        load_pretrained(folder, build("qwen3", SMALL, 1), PLAN, None)


def test_another_size(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    with pytest.raises(UserError, match=r"gate_proj.weight has the shape \[24, 16\], not \[32, 16\]"):
        load_pretrained(folder, build("qwen3", {**SMALL, "intermediate_size": 32}, 1), PLAN, None)


def test_quantised_weights(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    change(folder, model__norm__weight=torch.ones(16, dtype=torch.int8))
    with pytest.raises(UserError, match=r"model.norm.weight in .* is stored as int8, not as float32: .* quantised"):
        load_pretrained(folder, build("qwen3", SMALL, 1), PLAN, None)


def test_nothing_changes_when_it_does_not_fit(tmp_path: Path) -> None:
    folder = export(build("qwen3", SMALL, 0), tmp_path / "model")
    change(folder, drop="lm_head.weight")
    model = build("qwen3", SMALL, 1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=r"it lacks lm_head.weight"):
        load_pretrained(folder, model, PLAN, None)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
