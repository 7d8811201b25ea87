"""Fine-tuning of models that are quantised already, and of which some layers have other adapters or none.

huggingface/transformers#46736      beside a frozen base in fp8 gradients did not reach the layers before it
haotian-liu/LLaVA#1380              names of layers of text reached those of the model that sees images
tiiuae/Falcon-H1#13                 adapters beside a convolution could be trained, and never merged
axolotl-ai-cloud/axolotl#3673       ranks of some layers by an expression with alternatives and an end
unslothai/unsloth#9331              embeddings and the head that is tied to them, both trained whole: one was lost
hiyouga/LlamaFactory#6749           the same with tokens that were added
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapters import Adapters, adapted_layers, add_adapters
from tangram.schema.files import load
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.public.test_adapters import adapted, is_merged
from tests.training.small import SMALL_MODEL
from tests.training.stored import write_quantised
from tests.training.test_stored_codes import ONE, WIDE, planned
from tests.training.tuning_tasks import write_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
]


def test_gradients_reach_the_layers_before_a_base_in_fp8(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, fields=WIDE)
    write_quantised(folder / "chat-model", "fp8")
    plan = planned(folder, "fp8", LoraPlan(rank=2, base="fp8"), ONE)
    model: Any = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model", dtype=torch.float32)
    for name, stored in load_file(folder / "fp8" / "model.safetensors").items():
        if name.endswith("weight_scale_inv"):
            weight = plain.get_parameter(name.removesuffix("_scale_inv"))
            codes = load_file(folder / "fp8" / "model.safetensors")[name.removesuffix("_scale_inv")].float()
            scales = stored.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight.data = codes * scales[: codes.shape[0], : codes.shape[1]]
    add_adapters(plain, Adapters(rank=2, alpha=8.0))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.1
            module, _, key = name.rpartition(".")
            plain.get_submodule(module).register_parameter(key, torch.nn.Parameter(parameter.data.clone()))
    ids = torch.arange(24)[None]
    for one in (model, plain):
        one.train()(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert any("layers.0." in name and float(grad.abs().max()) > 1e-6 for name, grad in found.items())
    for name, grad in found.items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_layers_of_another_part_of_the_model_are_left_out() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "llava", text_config={"model_type": "llama", **SMALL_MODEL, "vocab_size": 64},
        vision_config={"model_type": "clip_vision_model", **vision, "image_size": 16, "patch_size": 8},
    )  # fmt: skip
    for options, seen in (({}, True), ({"exclude": ["vision_tower"]}, False)):
        model = build_on_meta(config, AutoModelForImageTextToText)
        add_adapters(model, Adapters(rank=2, alpha=2.0, targets=["q_proj", "v_proj"], **options))
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert any("language_model" in name for name in trained)
        assert any("vision_tower" in name for name in trained) == seen


def test_a_convolution_gets_no_adapter() -> None:
    sizes = {
        **SMALL_MODEL,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "vocab_size": 64,
    }
    config = AutoConfig.for_model("falcon_h1", **sizes)
    model = build_on_meta(config)
    add_adapters(model, Adapters(rank=2, alpha=2.0))
    have, have_none = adapted_layers(model)
    assert "mamba.in_proj" in have
    assert "mamba.out_proj" in have_none  # which peft refuses: kernels read its weight
    assert not any("conv1d" in name for name in (*have, *have_none))
    with pytest.raises(UserError, match="conv1d, a Conv1d: adapters stand beside linear layers"):
        add_adapters(build_on_meta(config), Adapters(rank=2, alpha=2.0, targets=["conv1d"]))


def test_ranks_by_an_expression_with_alternatives(tmp_path: Path) -> None:
    key = r".*\.layers\.1\..*(q_proj|v_proj)$"
    options = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {key: 4}, "alpha_pattern": {key: 32}}
    is_merged(tmp_path, adapted(tmp_path, "llama", options))


def test_what_is_tied_is_trained_whole_when_it_is_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, tied=True)
    whole = 'lora.modules_to_save=["embed_tokens", "lm_head"]'
    some = ["--set", whole, "--set", f'data.cache="{tmp_path / "cache"}"', "--set", "data.sequence=96"]
    words = ["train", str(folder / "sft.toml"), "-n", "1", "--steps", "1", "--out", str(tmp_path / "o"), *some]
    assert main(words) == 2
    assert "model.change.tie_word_embeddings = false" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--set", "model.change.tie_word_embeddings=false"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "o" / "export")
    assert not exported.config.tie_word_embeddings
    assert not torch.equal(exported.get_input_embeddings().weight, exported.get_output_embeddings().weight)
    asked = load(folder / "sft.toml")
    assert source_of(asked, tokens_of(asked)).config.tie_word_embeddings  # what was given stays as it was
