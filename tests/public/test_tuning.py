"""Fine-tuning that went wrong elsewhere without a word.

PrimeIntellect-ai/prime-rl#2644     an answer ends with what begins the next turn, which was in no loss: models went on
THUDM/slime#1008                    calls of tools were rendered a message at a time, without the tools
NVIDIA-NeMo/Megatron-Bridge#2598    a template has no marks of what an answer is
unslothai/unsloth#2648              text that a template has rendered begins with BOS, and got another
huggingface/transformers#45127      adapters of a head and of the embedding that it is tied to: one was lost when saved
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tests.training.data.test_chat import END_TEXT, encoded, tokens_at
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
    assert found == [f"\nassistant 1{ends[0]}", f"\nassistant 3{ends[1]}", "\nassistant 5"]


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


@pytest.mark.parametrize("key", ["lora.targets", "lora.modules_to_save"])
def test_one_of_two_tied_weights_is_not_tuned_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    folder = write_folder(tmp_path, tied=True)
    words = ["--set", f'{key}=["lm_head"]', "--set", f'data.cache="{tmp_path / "cache"}"', "--out", str(tmp_path / "o")]
    assert main(["train", str(folder / "sft.toml"), "-n", "1", *words]) == 2
    assert "has its weights together with" in capsys.readouterr().err
