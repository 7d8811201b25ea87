"""What is said or refused of a fine-tuning job early: adapters to begin with, and what a configuration claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tests.training.tuning_tasks import write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for


def words_of(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """All that a run of one step says, whether it ends well or not."""
    some = (f'data.cache="{folder / "cache"}"', "run.steps=1", "data.sequence=64", "data.global_batch=2", *more)
    sets = [word for one in some for word in ("--set", one)]
    main(["train", str(folder / "sft.toml"), "--out", str(folder / "run"), *sets])
    out, err = capsys.readouterr()
    return " ".join(f"{out} {err}".split())


def test_adapters_that_do_not_fit_are_refused_before_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two adapters of one model, as peft saves them: the folder of both names each, and one has another rank."""
    folder = write_folder(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model")
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"), adapter_name="first")
    model.add_adapter("second", LoraConfig(r=8, target_modules="all-linear"))
    model.save_pretrained(folder / "both")
    for start, said in {
        "both": f'give one of those that it has, "{folder / "both" / "first"}" or "{folder / "both" / "second"}"',
        "both/second": "have rank 8, and lora.rank is 4: take theirs",
        "chat-model": "has no adapter_config.json: give a directory that peft has written",
    }.items():
        found = words_of(folder, capsys, f'lora.start="{folder / start}"')
        assert said in found
        assert "Plans for" not in found
        assert not (folder / "run").exists()


@pytest.mark.parametrize("base", ["parameters", "int8"])
def test_plain_weights_that_are_said_to_be_quantised_are_told(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merged model often keeps the configuration of the quantised one that its adapters were trained beside."""
    folder = write_folder(tmp_path)
    file = folder / "chat-model" / "config.json"
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": how}))
    found = words_of(folder, capsys, f'lora.base="{base}"')
    assert "are quantised (bitsandbytes), and those of chat-model are plain numbers" in found
    assert "quantization_config" not in json.loads((folder / "run" / "export" / "config.json").read_text())
