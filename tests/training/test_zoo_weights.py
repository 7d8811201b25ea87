"""Weights of every causal language model of transformers: what transformers itself loads, and the same bytes back."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tangram.models.building.conversions import keep_names
from tangram.training.state.load_weights import load_pretrained
from tests.training.experts import export, files
from tests.training.saving import plan_of
from tests.training.zoo import ELSEWHERE, KINDS, tiny

PLAN = plan_of(ranks=1)
OVERWRITTEN = {
    "youtu": ("lm_head.weight", "model.embed_tokens.weight"),
    "zaya": ("model.layers.0.mlp.gate.balancing_biases", "model.layers.1.mlp.gate.balancing_biases"),
}
"""What transformers gives values of its own after loading; ours are those of the directory."""


def again(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and configuration with other values."""
    torch.manual_seed(1)
    return cast(PreTrainedModel, cast(Any, type(model))._from_config(copy.deepcopy(model.config), dtype=torch.float32))


def check(kind: str, folder: Path) -> None:
    model = tiny(kind, 0)
    for original in (True, False):
        saved = export(model, folder / f"float32-{original}", save_original_format=original)
        found = again(model)
        load_pretrained(saved, found, PLAN, None)
        state, right = found.state_dict(), model.state_dict()
        assert all(torch.equal(state[name], right[name]) for name in right), kind
        keep_names(found, files(saved))
        back = files(export(found, folder / f"back-{original}"))
        assert back.keys() == files(saved).keys(), kind
        assert all(torch.equal(back[name], tensor) for name, tensor in files(saved).items()), kind
    for dtype in (torch.float32, torch.bfloat16):
        saved = export(cast(nn.Module, model).to(dtype), folder / str(dtype))
        found = again(model)
        load_pretrained(saved, found, PLAN, None)
        oracle = cast(Any, type(model)).from_pretrained(saved, dtype=torch.float32).state_dict()
        for name, tensor in found.state_dict().items():
            assert name in OVERWRITTEN.get(kind, ()) or torch.equal(tensor, oracle[name]), (kind, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs, of configurations this small
@pytest.mark.parametrize("kind", KINDS)
def test_every_causal_language_model(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


def test_the_types_that_are_left_out_exist() -> None:
    assert ELSEWHERE.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert len(KINDS) > 150
