"""Public models by their names, and configurations that are read strictly."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from tangram.errors import UserError
from tangram.models.building.strict import known, known_keys, mistakes
from tangram.models.outlines.catalogue import active_numbers, catalogue, in_catalogue, no_model
from tangram.models.outlines.outlined import outlined

ROWS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("tangram.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
)


def test_sizes_have_the_parameters_that_are_published() -> None:
    assert len(catalogue()) >= 60
    for name, row in ROWS.items():
        found, row = outlined(name), catalogue()[name]
        # Of those with a configuration the billions are those of their names, which are rounded.
        assert found.numbers / 1e9 == pytest.approx(row["billions"], rel=0.01 if "config" in row else 0.002), name
        if "active" in row:  # papers round, and some leave embeddings out
            assert active_numbers(found) / 1e9 == pytest.approx(row["active"], rel=0.2), name


@pytest.mark.parametrize(
    ("preset", "name"),
    [("llama-3-8b", "meta-llama/Meta-Llama-3-8B"), ("llama-3-70b", "llama-3.1-70b"), ("deepseek-v3", "deepseek-r1")],
)
def test_a_name_is_the_model_of_its_configuration(preset: str, name: str) -> None:
    """Blocks as a whole, not numbers alone."""
    known = in_catalogue(name)
    assert known is not None
    made = outlined(preset)
    assert (known.runs, known.vocab, known.tied, known.predictors) == (
        made.runs, made.vocab, made.tied, made.predictors
    )  # fmt: skip


def test_a_configuration_of_the_catalogue_is_planned_as_a_file_with_it(tmp_path: Path) -> None:
    """A mixture whose layers alternate between windows and larger heads: its blocks as a whole, and what is active."""
    known = outlined("google/gemma-4-26b-a4b-it")
    (tmp_path / "config.json").write_text(json.dumps(catalogue()["google/gemma-4-26B-A4B"]["config"]), encoding="utf-8")
    made = outlined(str(tmp_path))
    assert (known.name, known.runs, known.tied) == ("gemma-4-26B-A4B", made.runs, made.tied)
    assert known.tied
    assert len({block.experts for block, _ in known.runs}) == 1
    assert active_numbers(known) / 1e9 == pytest.approx(3.8, rel=0.02)


def test_names_are_found_in_any_case_and_misspelt_ones_told() -> None:
    assert in_catalogue("QWEN3-30b-a3b") == in_catalogue("Qwen/Qwen3-30B-A3B")
    assert in_catalogue("qwen3-31b") is None
    assert "did you mean Qwen/Qwen3-30B-A3B" in str(no_model("Qwen/Qwen3-30B-A8B"))
    assert "hf download" in str(no_model("someone/their-own"))
    assert str(no_model("unsloth/Llama-3.1-8B-Instruct-bnb-4bit")).endswith(
        "give unsloth/Llama-3.1-8B-Instruct, --base nf4 and --lora"
    )
    assert "--base gptq-int8 and" in str(no_model("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8"))
    assert "--base" not in str(no_model("someone/their-own-awq"))


def wrong(**changes: Any) -> list[str]:
    """What is said of a configuration's file with changes."""
    fields = {**json.loads(AutoConfig.for_model("qwen3_moe").to_json_string(use_diff=False)), **changes}
    fields = {key: value for key, value in fields.items() if value is not None}
    return [*mistakes(fields, AutoConfig.for_model(**{key: one for key, one in fields.items() if key != "hiden_size"}))]


def test_tuned_models_have_the_sizes_of_what_they_began_from() -> None:
    """The most used of them was taken for another that sees images, as the nearest name."""
    for said, name in {
        "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B", "meta-llama/Meta-Llama-3.1-8B-Instruct": "Llama-3.1-8B",
        "Qwen3-30B-A3B-Thinking-2507": "Qwen3-30B-A3B", "meta-llama/Llama-2-7b-chat-hf": "Llama-2-7b-hf",
        "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2.5-VL-7B-Instruct", "llama3.1-8b": "Llama-3.1-8B",
        "Qwen/Qwen1.5-32B-Chat": "Qwen1.5-32B", "THUDM/glm-4-9b-chat": "glm-4-9b",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "DeepSeek-R1-Distill-Qwen-32B",
    }.items():  # fmt: skip
        found = in_catalogue(said)
        assert found is not None
        assert found.name == name
    for said, name in {
        "https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/": "Qwen2.5-7B", "NousResearch/Llama-2-7b-hf": "Llama-2-7b-hf",
        "unsloth/Llama-3.1-8B-Instruct": "Llama-3.1-8B", "EleutherAI/pythia-1b-deduped": "pythia-1b",
        "EleutherAI/gpt-j-6b": "gpt-j-6b", "facebook/opt-1.3b": "opt-1.3b", "bigscience/bloom-7b1": "bloom-7b1",
    }.items():  # fmt: skip
        found = in_catalogue(said)
        assert found is not None, said
        assert found.name == name
    for said in ("someone/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Omni-7B", "instruct", "microsoft/phi-4-mini"):
        assert in_catalogue(said) is None


def test_keys_that_are_misspelt_and_numbers_that_contradict_are_told() -> None:
    assert wrong() == wrong(auto_map={}, aux_loss_alpha=0.1, my_own_switch=True) == []
    (said,) = wrong(hiden_size=1024, hidden_size=None)
    assert said == "the key \"hiden_size\" is none of qwen3_moe (did you mean 'hidden_size'?)"
    assert wrong(num_key_value_heads=5) == ["num_key_value_heads of 5 do not divide num_attention_heads of 32"]
    both = wrong(num_local_experts=4, num_experts_per_tok=8, num_key_value_heads=5)
    assert len(both) == 2


def test_keys_of_a_type_are_those_of_its_class() -> None:
    """Read from its source; as the class itself says when it is imported, with those that it is made of."""
    assert {"hidden_size", "num_hidden_layers", "head_dim", "id2label"} <= (known_keys("qwen3") or frozenset())
    assert known_keys("my-own") is None
    assert known_keys("../llama") is None
    some = ("llama", "qwen3_moe", "deepseek_v3", "gemma3", "gpt2", "mixtral", "bamba", "gpt_oss", "llama4", "qwen2_vl")
    for kind in some:
        assert known_keys(kind) == known(CONFIG_MAPPING[kind]), kind


@pytest.mark.slow
def test_keys_of_all_types_are_those_of_their_classes() -> None:
    types = {kind: keys for kind in CONFIG_MAPPING if (keys := known_keys(kind)) is not None}
    assert len(types) > 300
    assert sorted(kind for kind, keys in types.items() if keys != known(CONFIG_MAPPING[kind])) == [
        "layoutlm",
        "patchtst",
    ]


def test_a_misspelt_key_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """It took what importing torch and transformers takes, 5 s; with what contradicts in the file itself."""
    numbers = {"num_attention_heads": 24, "num_key_value_heads": 7}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hiden_size": 1024, **numbers}))
    command = ["plan", "cluster", str(tmp_path), "--cluster", "h100x8", "--tokens-per-batch", "64k", "--seq", "4k"]
    script = f"import sys; from tangram.cli import main; print(main({command!r}), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "2 False\n"
    assert (
        "did you mean 'hidden_size'?); num_key_value_heads of 7 do not divide num_attention_heads of 24" in told.stderr
    )


def test_a_file_that_is_strange_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hiden_size": 1024}), encoding="utf-8")
    with pytest.raises(UserError, match="did you mean 'hidden_size'"):
        outlined(str(tmp_path))
