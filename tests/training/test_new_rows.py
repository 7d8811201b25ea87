"""Tokens that were added get rows of embeddings and head: the mean of the stored ones, on any layout, tied or not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.errors import UserError
from tangram.schema.plan import Plan
from tangram.training.data import load_tokens
from tangram.training.run.end_proofs import same_export
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import build_unsharded, source_of
from tangram.training.state.export_hf import export
from tangram.training.state.new_embedding_rows import untrained_rows
from tests.training.chat import write_chat
from tests.training.grown import load_grown
from tests.training.saving import plan_of
from tests.training.small import small_tables, write_text

CPU = torch.device("cpu")
ADDED = ("<think>", "</think>", "<tool>")
STORED, ROWS = 259, 262
PROMPT = torch.tensor([list(b"value_1 = 1")])


def plan(folder: Path, model: Path, rows: int | None = ROWS, **tables: Any) -> Plan:
    keys: dict[str, Any] = {"path": str(model), "change": {} if rows is None else {"vocab_size": rows}}
    found = small_tables(write_text(folder / "text"), data={"tokenizer": "model"}, **tables)
    return Plan.model_validate({**found, "model": keys})


def whole(asked: Plan) -> nn.Module:
    return build_unsharded(asked, source_of(asked, load_tokens(asked.data, asked.model.path)), CPU, values=True)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "chat"
    return write_chat(folder, added=ADDED, fields={"tie_word_embeddings": request.param})


def test_the_advice_works_when_typed(chat: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"makes {ROWS} tokens") as refused:
        whole(plan(tmp_path, chat, None))
    advice = str(refused.value).split("set ")[1].split(" (or more)")[0]
    assert advice == f"model.change.vocab_size = {ROWS}"
    model = whole(plan(tmp_path, chat, int(advice.split()[-1])))
    stored = load_file(chat / "model.safetensors")
    for name, parameter in model.named_parameters():
        old = stored[name]
        assert torch.equal(parameter[: len(old)], old), name
        if len(parameter) > len(old):
            mean = old.double().mean(0).to(old.dtype)
            assert torch.equal(parameter[STORED:], mean.expand(ROWS - STORED, -1)), name


def test_any_layout_has_the_same_rows(chat: Path, tmp_path: Path) -> None:
    """Rows over two ranks, columns over two, and heads and vocabulary over a tensor axis."""
    layouts = {"rows": "_/dp ...", "columns": "_ _/dp"}
    plans = {
        name: plan(tmp_path / name, chat, layouts={"parameters": {"*.weight": text} if name == "rows" else {
            "{*embed*,lm_head*}": text, "*": "_/dp ...",
        }})
        for name, text in layouts.items()
    }  # fmt: skip
    right = {name: parameter.detach().numpy() for name, parameter in whole(plans["rows"]).named_parameters()}
    for found in run_ranks(load_grown, plans, world=2, on_event=print, device="cpu"):
        for name, tensors in found.items():
            assert tensors.keys() == right.keys()
            assert all(np.array_equal(tensors[key], right[key]) for key in right), name


def test_it_is_exported_with_its_vocabulary_and_tokenizer(chat: Path, tmp_path: Path) -> None:
    asked = plan(tmp_path, chat)
    tokens = load_tokens(asked.data, asked.model.path)
    source, model = source_of(asked, tokens), whole(asked)
    export(model, tmp_path / "export", tokens, source)
    assert same_export(model, tmp_path / "export", source, tokens, PROMPT) == (0.0, True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.config.vocab_size == len(loaded.get_input_embeddings().weight) == ROWS


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    """Phi's head has a bias, a number for each token."""
    from tangram.training.state.load_weights import load_pretrained

    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    }  # fmt: skip
    small, large = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", vocab_size=n, **sizes)) for n in (30, 33)
    )
    nn.init.normal_(small.lm_head.bias)
    small.save_pretrained(tmp_path)
    load_pretrained(tmp_path, large, plan_of(ranks=1), None)
    assert torch.equal(large.lm_head.bias[:30], small.lm_head.bias)
    assert torch.equal(large.lm_head.bias[30:], small.lm_head.bias.double().mean().float().expand(3))


def test_a_vocabulary_does_not_shrink(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "chat", fields={"vocab_size": 300})
    with pytest.raises(UserError, match=r"has 300 rows and the model 280: .* set model.change.vocab_size to 300"):
        whole(plan(tmp_path, folder, 280))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, ["embed_tokens", "lm_head"]),
        ({"modules_to_save": ["embed_tokens"]}, ["lm_head"]),
        ({"trainable_token_indices": [STORED, STORED + 1, STORED + 2]}, ["lm_head"]),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, None),
        ({"targets": ["embed_tokens", "lm_head"]}, None),
    ],
)
def test_rows_that_adapters_leave_as_they_begin_are_told(
    chat: Path, tmp_path: Path, keys: dict[str, Any], named: list[str] | None
) -> None:
    """Not those of padding, which no token has, and of all parameters none."""
    tied = AutoConfig.from_pretrained(chat).tie_word_embeddings
    if tied and keys and "trainable_token_indices" not in keys:
        return  # refused: adapters of an embedding that the head is tied to
    asked = plan(tmp_path, chat, lora={"rank": 2, **keys})
    words = untrained_rows(whole(asked), asked, ROWS)
    left = named and [name for name in named if not tied or (name == "embed_tokens" and not keys)]
    assert (words or "").count("3 tokens") == bool(left)
    for name in ("embed_tokens", "lm_head"):
        assert (f"{name}.weight" in (words or "")) == (name in (left or [])), words
    if words:
        own = f"name {' and '.join(left or [])} in lora.modules_to_save"
        rows = f"give {STORED} to {ROWS - 1} in lora.trainable_token_indices"
        assert words.endswith(f": {rows if tied else own}, if the data have these tokens")
    assert untrained_rows(whole(asked), asked, STORED) is None
    full = plan(tmp_path, chat)
    assert untrained_rows(whole(full), full, ROWS) is None
