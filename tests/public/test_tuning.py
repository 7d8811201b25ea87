"""Fine-tuning that went wrong elsewhere without a word.

PrimeIntellect-ai/prime-rl#2644     an answer ends with what begins the next turn, which was in no loss: models went on
THUDM/slime#1008                    calls of tools were rendered a message at a time, without the tools
NVIDIA-NeMo/Megatron-Bridge#2598    a template has no marks of what an answer is
unslothai/unsloth#2648              text that a template has rendered begins with BOS, and got another
huggingface/transformers#45127      adapters of a head and of the embedding that it is tied to: one was lost when saved
NVIDIA-NeMo/Automodel#1151          experts lie in one tensor, and "all linear" layers were attention alone
ml-explore/mlx-lm#571               the same of Qwen3-30B-A3B: 0.02 % of parameters were trained
modelscope/ms-swift#6173            the same of the model that sees images, where that of text alone had them
axolotl-ai-cloud/axolotl#3515       names of layers reached shared experts, and none of those that tokens are sent to
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapters import Adapters, adapted_layers, add_adapters
from tests.training.data.test_chat import END_TEXT, encoded, tokens_at
from tests.training.small import SMALL_MODEL
from tests.training.tuning_tasks import write_folder

GLM = "{% for m in messages %}{{ turn[m.role] }}\n{{ m.content }}{% endfor %}"
TURNS = "{% set turn = {'user': '<|im_start|>', 'tool': '<|im_end|>', 'assistant': '<as>'} %}"
ASKS = "{% if add_generation_prompt %}<as>{% endif %}"
"""As GLM-4.5 has it: a turn begins with a token of its role, and nothing ends it."""
TOOLS = (
    "{% if tools %}tools: {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}({{ c.function.arguments.city }})</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def learnt(folder: Path, template: str, row: dict[str, Any]) -> list[str]:
    tokens = tokens_at(folder, template)
    ((ids, counts),) = encoded(tokens, row)
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


@pytest.mark.parametrize("stops", [[256, 257, 258], 256, None])
def test_an_answer_ends_with_the_begin_of_the_next_turn_where_models_stop_there(tmp_path: Path, stops: Any) -> None:
    """257 and 258 are the begins of what a tool says and of what a user says."""
    roles = ("user", "assistant", "tool", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    (tmp_path / "chat-model").mkdir()
    if stops is not None:
        (tmp_path / "chat-model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    found = learnt(tmp_path, TURNS + GLM + ASKS, {"messages": messages})
    ends = ("<|im_end|>", "<|im_start|>") if isinstance(stops, list) else ("", "")
    assert found == [f"\nassistant 1{ends[0]}", f"\nassistant 3{ends[1]}", f"\nassistant 5{ends[1]}"]


def test_calls_of_tools_are_learnt_and_what_tools_say_is_not(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "It is dry."},
    ]
    row = {"messages": messages, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    assert learnt(tmp_path, TOOLS, row) == ["<call>weather(Oslo)</call><|im_end|>\n", "It is dry.<|im_end|>\n"]
    tokens = tokens_at(tmp_path, TOOLS)
    ((ids, _),) = encoded(tokens, row)
    assert tokens.spelled(ids).startswith("tools: weather\n")


def test_what_an_answer_is_needs_no_marks(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1 + 1"}]
    assert learnt(tmp_path, TOOLS, {"messages": [*messages, {"role": "assistant", "content": "2"}]}) == [
        "2<|im_end|>\n"
    ]


def test_text_that_begins_with_bos_gets_no_other(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path, TOOLS, special_tokens="parse")
    for row in (
        {"prompt": f"{END_TEXT}ask ", "completion": "answer"},
        {"prompt": "ask ", "completion": "answer"},
        {"text": f"{END_TEXT}ask answer{END_TEXT}"},
    ):
        ((ids, _),) = encoded(tokens, row)
        assert tokens.spelled(ids) == f"{END_TEXT}ask answer{END_TEXT}", row


@pytest.mark.parametrize(
    ("key", "some"),
    [("targets", ["lm_head"]), ("modules_to_save", ["lm_head"]), ("modules_to_save", ["embed_tokens", "lm_head"])],
)
def test_one_of_two_tied_weights_is_not_tuned_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, some: list[str]
) -> None:
    folder = write_folder(tmp_path, tied=True)
    words = [
        "--set",
        f"lora.{key}={json.dumps(some)}",
        "--set",
        f'data.cache="{tmp_path / "cache"}"',
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["train", str(folder / "sft.toml"), "-n", "1", *words]) == 2
    assert "lm_head has its weights together with model.embed_tokens" in capsys.readouterr().err


ROUTED = {"experts.gate_up_proj", "experts.down_proj"}


def mixture(family: str) -> PreTrainedModel:
    text = {**SMALL_MODEL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    whole = family.endswith("moe")
    fields = {"text_config": text} if "_vl_" in family or family == "qwen3_5_moe" else text
    head = AutoModelForImageTextToText if "text_config" in fields and whole else AutoModelForCausalLM
    return build_on_meta(AutoConfig.for_model(family, **fields), head)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss", "granitemoe"])
def test_all_linear_layers_are_those_of_experts_too(family: str) -> None:
    model = mixture(family)
    add_adapters(model, Adapters(rank=2, alpha=2.0))
    have, have_none = adapted_layers(model)
    assert {*have} >= ROUTED
    assert not any("experts" in name for name in have_none)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained if ".experts." in name} == {"gate_up_proj", "down_proj"}


def test_experts_that_names_of_layers_do_not_reach_are_told() -> None:
    model = mixture("qwen3_5_moe")
    add_adapters(model, Adapters(rank=2, alpha=2.0, targets=["gate_proj", "up_proj", "down_proj"]))
    have, have_none = adapted_layers(model)
    assert {*have} >= {"shared_expert.gate_proj", "shared_expert.down_proj", "experts.down_proj"}
    assert "experts.gate_up_proj" in have_none
    with pytest.raises(UserError, match=r'names "gate_proj", which fits no module .* did you mean "gate_up_proj"'):
        add_adapters(mixture("qwen3_moe"), Adapters(rank=2, alpha=2.0, targets=["gate_proj", "up_proj"]))
