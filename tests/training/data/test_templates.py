"""What templates want of messages, and what of a conversation is context: beside what the template itself writes."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tangram.schema.files import load
from tangram.training.data.tasks import pair_tokens
from tests.training.data.test_chat import CHATML, TURNS, encoded, marked, tokens_at

BY_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}CONTENT<|im_end|>\n"
    "{% endgeneration %}{% else %}CONTENT<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EACH = BY_PARTS.replace("CONTENT", "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}")
FIRST = BY_PARTS.replace("CONTENT", "{{ m.content[0]['text'] }}")
EITHER = BY_PARTS.replace(
    "CONTENT", "{{ m.content if m.content is string else 'in parts: ' + (m.content | map(attribute='text') | join) }}"
)
ROLES = (
    "{% set begins = {'user': '<|im_start|>', 'tool': '<|im_end|>', 'assistant': '<as>'} %}"
    "{% for m in messages %}{{ begins[m.role] }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}ENDS{% endfor %}"
    "{% if add_generation_prompt %}<as>{% endif %}"
)
"""As GLM's: a turn begins with a token of its role, and nothing ends it."""
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' of ' + messages[loop.index0 - 1].tool_calls[0].function.name "
    "if m.role == 'tool' }}\n{% if m.tool_calls %}{{ m.content if loop.index0 > messages | length - 3 }}"
    "<call>{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}</call>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As gpt-oss's: text beside a call goes once an answer follows, and the name stands with the result, too."""
ASKED: dict[str, Any] = {"role": "user", "content": "3 x 4?"}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "times", "arguments": {"a": 3, "b": 4}}}


def answered(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def learnt(folder: Path, template: str, row: dict[str, Any], **data: Any) -> list[str]:
    tokens = tokens_at(folder, template, **data)
    ((ids, counts),) = encoded(tokens, row)
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


@pytest.mark.parametrize("template", [EACH, FIRST])
@pytest.mark.parametrize("by_parts", [False, True])
def test_text_comes_in_parts_where_a_template_wants_parts(tmp_path: Path, template: str, by_parts: bool) -> None:
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TURNS]
    tokens = tokens_at(tmp_path, template)
    (own,) = encoded(tokens, {"messages": parts if by_parts else TURNS})
    assert own == marked(tokens, parts)  # pyright: ignore[reportArgumentType]
    assert "2 + 2?" in tokens.spelled(own[0])


@pytest.mark.parametrize("template", [CHATML, EITHER])
def test_text_stays_text_where_a_template_takes_it(tmp_path: Path, template: str) -> None:
    tokens = tokens_at(tmp_path, template)
    assert encoded(tokens, {"messages": TURNS}) == [marked(tokens, TURNS)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, ["Yes: 4. é<|im_end|>\n"]),
        ({"prompt": [{**one, "train": True} for one in TURNS[:4]], "completion": TURNS[4:]}, None),
        ({"prompt": TURNS[:2], "completion": TURNS[2:]}, ["4<|im_end|>\n", "Yes: 4. é<|im_end|>\n"]),
    ],
)
def test_answers_of_a_prompt_are_context(tmp_path: Path, row: dict[str, Any], expected: list[str] | None) -> None:
    """As in TRL; those of a completion are learnt, and what in a prompt asks to be."""
    found = learnt(tmp_path, CHATML, row)
    assert found == expected if expected else "4<|im_end|>\n" in "".join(found)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize(("ends", "stops"), [("", [256, 257, 258]), ("<end>", [256, 257, 258]), ("", [256])])
def test_the_last_answer_ends_with_what_would_begin_the_next_turn(
    tmp_path: Path, calls: bool, ends: str, stops: list[int]
) -> None:
    """257 and 258 are the begins of what a tool says and of what a user says."""
    (tmp_path / "chat-model").mkdir()
    (tmp_path / "chat-model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    template = ROLES.replace("ENDS", "<|endoftext|>" if ends else "")
    last = answered("", tool_calls=[CALL]) if calls else answered("12")
    text = '<call>times {"a": 3, "b": 4}</call>' if calls else "12"
    end = "<|endoftext|>" if ends else ("<|im_end|>" if calls else "<|im_start|>") if 257 in stops else ""
    assert learnt(tmp_path, template, {"messages": [ASKED, last]}) == [f"\n{text}{end}"]
    pairs = pair_tokens(tokens_at(tmp_path, template), load(tmp_path / "sft.toml").data)
    (both,) = pairs.encode([json.dumps({"prompt": [ASKED], "chosen": [last], "rejected": [answered("7")]}).encode()])
    chosen = pairs.documents(both)[0]
    assert pairs.spelled(n % pairs.vocabulary for n in chosen.tolist()).endswith(f"{text}{end}")


def test_a_call_with_numbers_alone_is_learnt_where_text_beside_it_goes(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "12"}
    turns = [ASKED, answered("I ask.", tool_calls=[CALL]), result, answered("It is 12."), ASKED, answered("12 again")]
    call = '<call>times {"a": 3, "b": 4}</call><|im_end|>\n'
    assert learnt(tmp_path, REWRITES, {"messages": turns}) == [call, "It is 12.<|im_end|>\n", "12 again<|im_end|>\n"]
