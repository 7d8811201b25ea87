"""Configurations in which fields vary by layer, as Gemma 4's: transformers raises where they are read off the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, Gemma4Config, Gemma4TextConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig, Gemma4VisionConfig

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import Source, build_on_meta
from tangram.models.building.fields import of_layer, values
from tangram.models.building.masks import has_windows
from tangram.models.building.strict import mistakes
from tangram.models.outlines.outlined import outlined
from tangram.planner.legality.check_plan import heads_of, refused_heads
from tangram.schema.files import load
from tangram.training.objective.packing import respects_documents
from tangram.training.state.build_model import shallow

SIZES = {
    "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 16,
    "hidden_size_per_layer_input": 0, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
}  # fmt: skip
WIDE = {"head_dim": 32, "num_key_value_heads": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
SHARED = {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8}
"""The later layers attend to the keys of earlier ones."""
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64,
}  # fmt: skip
EARS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "output_proj_dims": 32}


def text(**changes: Any) -> Gemma4TextConfig:
    """Every third layer has no window, and wider heads."""
    return Gemma4TextConfig(**{**SIZES, "per_layer_config": {2: WIDE, 5: WIDE}, **changes})


def saved(config: Any, path: Path) -> str:
    config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, **EXPERTS}, SHARED])
def test_they_are_planned_with_the_parameters_of_the_model(changes: dict[str, Any], tmp_path: Path) -> None:
    config = text(**changes)
    numbers = sum(one.numel() for one in build_on_meta(config).parameters())
    assert outlined(saved(config, tmp_path)).numbers == pytest.approx(numbers, rel=0.005)


@pytest.mark.parametrize("hears", [False, True])
def test_those_that_see_are_planned_as_their_directory_has_them(hears: bool, tmp_path: Path) -> None:
    """The configuration of a public Gemma 4: the text's within that of all; the small ones hear, too."""
    beside = {"audio_config": Gemma4AudioConfig(**EARS).to_dict()} if hears else {}
    config = Gemma4Config(
        text_config=text(**(SHARED if hears else {})).to_dict(),
        vision_config=Gemma4VisionConfig(**TOWER).to_dict(), **beside,
    )  # fmt: skip
    found, own = outlined(saved(config, tmp_path / "sees")), outlined(saved(config.text_config, tmp_path / "reads"))
    assert found.image == 280
    assert found.runs[-len(own.runs) :] == own.runs
    assert sum(count for block, count in found.runs if block.name == "image") == TOWER["num_hidden_layers"]


def test_one_without_a_tower_is_planned_as_its_text(tmp_path: Path) -> None:
    config = Gemma4Config(text_config=text().to_dict())
    assert config.vision_config is None
    found, own = outlined(saved(config, tmp_path / "all")), outlined(saved(text(), tmp_path / "text"))
    assert found.runs == own.runs


def test_ranks_have_to_divide_the_heads_of_every_layer() -> None:
    config = text()
    assert heads_of(config) == ((4,), (4, 2))
    assert refused_heads(config, tensor=[("tp", 2)]) == ()
    (why,) = refused_heads(config, tensor=[("tp", 4)])
    assert "the 2 key-value heads" in str(why)


def test_numbers_are_checked_of_every_layer() -> None:
    config = text(per_layer_config={2: {"num_key_value_heads": 3}})
    wrong = [*mistakes(config.to_dict(), config)]
    assert wrong == ["num_key_value_heads of 3 do not divide num_attention_heads of 4"]


def test_a_window_of_some_layers_is_a_window() -> None:
    config = AutoConfig.for_model(
        "mistral", num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, sliding_window=None,
        per_layer_config={0: {"sliding_window": 8}, 1: {"sliding_window": None, "head_dim": 4}},
    )  # fmt: skip
    with pytest.raises(RuntimeError):
        _ = config.sliding_window
    assert values(config, "sliding_window") == [8]
    assert of_layer(config, 1).sliding_window is None
    module = nn.Module()
    module.config = config
    assert has_windows(module)


def test_packing_is_tried_on_a_block_of_each_kind() -> None:
    """A layer that takes the keys of an earlier one needs that one, though it looks as others do."""
    job = load(Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml")
    model = shallow(job, Source("gemma4_text", text(**SHARED), None))
    assert respects_documents(model)
    with pytest.raises(UserError, match="too many to be tried here"):
        shallow(job, Source("gemma4_text", text(**SHARED), None), 1000)


def test_the_command_plans_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = saved(text(), tmp_path / "gemma")
    assert main(["plan", name, "--cluster", "h100-8x8", "--gpus", "8", "--tokens-per-batch", "64K", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]
