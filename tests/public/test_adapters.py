"""Public reports about merging adapters, each with its input rebuilt small. The oracle is peft's model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from tangram.cli import main
from tests.checkpoint.peers.models import save
from tests.checkpoint.test_adapter_kinds import merged

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),  # of peft about parameters
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(folder: Path, row: str, options: Mapping[str, Any], **changes: Any) -> Any:
    """peft's model with random A and B, saved beside its base as transformers writes it."""
    from peft import LoraConfig, get_peft_model

    model = save(row, folder / "hf", **changes)
    peft: Any = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(1)
    for name, value in peft.named_parameters():
        if "lora_" in name:
            value.data = torch.randn(value.shape) * 0.3
    peft.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return peft.eval()


def is_merged(folder: Path, peft: Any) -> None:
    """The merged directory computes what peft's model does."""
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(merged(folder)(tokens).logits, peft(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("row", "options", "experts"),
    [
        ("mixtral", {"target_modules": "all-linear"}, "block_sparse_moe.experts.3.w1"),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": PARAMETERS}, "mlp.experts.3.gate_proj"),
        ("glm4_moe", {"target_modules": ["o_proj"], "target_parameters": PARAMETERS}, "mlp.experts.3.up_proj"),
    ],
)
def test_an_adapter_of_fused_experts(row: str, options: Mapping[str, Any], experts: str, tmp_path: Path) -> None:
    """unslothai/unsloth-zoo#812: (and huggingface/peft#3009) an adapter is of a tensor that has all experts, and files
    have them one by one: what was trained of them got lost, and nothing said so.

    unslothai/unsloth-zoo#779: and where experts are narrower than the hidden states, it was added the wrong way round.
    """
    peft = adapted(tmp_path, row, options)
    is_merged(tmp_path, peft)
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "merged"))
    name = f"model.layers.1.{experts}.weight"
    assert before.keys() == after.keys()
    assert not torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    ("row", "sizes"),
    [
        ("gpt_oss", {"intermediate_size": 32}),  # down_proj, as in the model that is published: 2880 by 2880
        ("qwen3_moe", {"moe_intermediate_size": 16}),  # gate_up_proj
    ],
)
def test_experts_whose_matrices_are_square(row: str, sizes: Mapping[str, int], tmp_path: Path) -> None:
    """vllm-project/vllm#52194: A and B of experts are of inputs and outputs in an order that the shapes have to tell,
    and a square one does not; the other tensor of the same experts does.
    """
    is_merged(
        tmp_path, adapted(tmp_path, row, {"target_modules": ["q_proj"], "target_parameters": PARAMETERS}, **sizes)
    )


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "dora": ("llama", {"target_modules": ["v_proj"], "use_dora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "a head in full": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": PARAMETERS}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_in_the_checkpoint_of_its_model(kind: str, tmp_path: Path, capsys: Any) -> None:
    """pytorch/pytorch#151556: a DCP has a model of peft's with its optimiser, which nothing made a model of."""
    row, options = KINDS[kind]
    peft = adapted(tmp_path, row, options)
    state = {"app": {"model": peft.state_dict()}, "epoch": 20}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    convert = ["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "merged"), "--to", "hf"]
    assert main([*convert, "--config", str(tmp_path / "hf")]) == 2
    assert "to merge the pairs of LoRA among them, give --adapter DIR" in capsys.readouterr().err
    assert main([*convert, "--config", str(tmp_path / "hf"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert "left out, no tensors" not in capsys.readouterr().out
    tokens = torch.arange(40).view(2, 20)
    loaded: Any = __import__("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, peft(tokens).logits, atol=1e-5, rtol=1e-5)


def test_two_adapters_in_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    """pytorch/pytorch#151556, with a second adapter: which of them is meant is not said anywhere."""
    peft = adapted(tmp_path, "llama", {"target_modules": ["q_proj"]})
    peft.add_adapter("second", peft.peft_config["default"])
    torch.save(peft.state_dict(), tmp_path / "model.pt")
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    names = [str(tmp_path / one) for one in ("model.pt", "merged", "hf", "adapter")]
    assert main(["checkpoint", "convert", *names[:2], "--to", "hf", "--config", names[2], "--adapter", names[3]]) == 2
    assert "has 2 adapters (default, second), and one can be merged" in capsys.readouterr().err


def test_an_alpha_of_0_is_refused(tmp_path: Path, capsys: Any) -> None:
    """verl-project/verl#6380: a configuration was written with lora_alpha = 0, so a merge gave the base, unsaid."""
    adapted(tmp_path, "llama", {"target_modules": "all-linear"}).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    words = ["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "hf"]
    words += ["--adapter", str(tmp_path / "adapter")]
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 0}))
    assert main(words) == 2
    assert "has lora_alpha = 0, by which its adapters would add nothing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [("gemma3", "gemma3_vl"), ("gemma3_vl", "gemma3")])
def test_an_adapter_of_the_model_around_or_within(rows: tuple[str, str], tmp_path: Path, capsys: Any) -> None:
    """vllm-project/vllm#34186: adapters of a text model, given to the model that also sees images (and the other way
    round), are of layers by other names: none of them was used, and nothing said so.
    """
    adapted(tmp_path, rows[0], {"target_modules": ["q_proj"]})
    save(rows[1], tmp_path / "base")
    to = ["--to", "hf", "--adapter", str(tmp_path / "adapter")]
    assert main(["checkpoint", "convert", str(tmp_path / "base"), str(tmp_path / "merged"), *to]) == 2
    assert "no weight of it" in capsys.readouterr().err
