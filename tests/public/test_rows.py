"""Rows and templates of fine-tuning that went wrong elsewhere.

huggingface/text-generation-inference#2987 Mistral Small's template takes today's date apart (mosaicml/llm-foundry#1474)
hiyouga/LlamaFactory#6926     rows with "[]" as their tools, and one that begins with an answer, ended in a traceback
NovaSky-AI/SkyRL#1611         an answer's first characters are one token with the end of what asks for it
huggingface/trl#3927          conversations that were cut before their answers made steps without any
axolotl-ai-cloud/axolotl#2089 a template that moves the system prompt to the last question hid all answers before it
"""

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tangram.schema.files import load
from tangram.training.data import tokens_of
from tangram.training.data.chat import ChatTokens
from tangram.training.data.tokens import BadDocument
from tests.training.data.test_chat import CHATML, END_TEXT, TURNS, encoded, tokens_at

SMALL = (
    '{%- set today = strftime_now("%Y-%m-%d") %}\n{%- set usual = "The current date is " + today + ", of the year " + '
    'today.split("-")[0] + "." %}\n\n{{- bos_token }}\n\n{%- if messages[0].role == "system" %}\n'
    "    {%- set system = messages[0].content %}\n    {%- set rest = messages[1:] %}\n{%- else %}\n"
    "    {%- set system = usual %}\n    {%- set rest = messages %}\n{%- endif %}\n{{- system }}\n"
    "{%- for m in rest %}\n    {{- '<|im_start|>' + m.content }}\n"
    "    {%- if m.role == 'assistant' %}\n        {{- eos_token }}\n    {%- endif %}\n{%- endfor %}\n"
)
MOVES = (
    "{% set ns = namespace(system='', last=-1) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>"
    "{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}{{ m.content | trim }}<|im_end|>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's."""


def learnt(tokens: ChatTokens, row: dict[str, Any], tally: Counter[str] | None = None) -> list[str]:
    ((ids, counts),) = encoded(tokens, row, tally=tally)
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


def test_a_template_takes_the_date_apart(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path, SMALL, date="2025-01-30")
    ((ids, _),) = encoded(tokens, {"messages": TURNS[1:]})
    assert tokens.spelled(ids).startswith(f"{END_TEXT}The current date is 2025-01-30, of the year 2025.<|im_start|>2 +")
    ((ids, _),) = encoded(tokens, {"messages": TURNS})
    assert tokens.spelled(ids).startswith(f"{END_TEXT}Be short.<|im_start|>2 +")


def test_no_tools_are_none_and_a_first_answer_is_told(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert encoded(tokens, {"conversations": turns, "tools": "[]"}) == encoded(tokens, {"conversations": turns})
    with pytest.raises(BadDocument, match="begins with an answer"):
        encoded(tokens, {"conversations": turns[1:] * 2, "tools": "[]"})


def test_a_token_of_which_a_part_is_an_answer_is_learnt(tmp_path: Path) -> None:
    tokens_at(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "chat-model")  # pyright: ignore[reportUnknownVariableType]
    tokenizer.add_tokens(["\n four"])
    tokenizer.save_pretrained(tmp_path / "chat-model")
    (tmp_path / "chat-model" / "chat_template.jinja").write_text(CHATML)
    tokens = tokens_of(load(tmp_path / "sft.toml"))
    assert isinstance(tokens, ChatTokens)
    row = {"messages": [TURNS[1], {"role": "assistant", "content": " four, so it is"}]}
    assert learnt(tokens, row) == ["\n four, so it is<|im_end|>\n"]


def test_what_is_cut_before_its_answer_is_left_out(tmp_path: Path) -> None:
    tally = Counter[str]()
    tokens = tokens_at(tmp_path, sequence=16)
    assert learnt(tokens, {"messages": TURNS}, tally) == []
    assert tally["left out: conversations without an answer within 16 tokens"] == 1


def test_answers_before_a_system_prompt_that_moves_are_found(tmp_path: Path) -> None:
    tally = Counter[str]()
    answers = learnt(tokens_at(tmp_path, MOVES), {"messages": TURNS}, tally)
    assert answers == [f" 4{END_TEXT}", f" Yes: 4. é{END_TEXT}"]
    assert not [key for key in tally if "otherwise" in key]
