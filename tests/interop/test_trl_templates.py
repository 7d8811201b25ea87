"""TRL's templates for training as the oracle of which tokens are answers: the stock ones beside them have no marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tangram.training.data.chat import ChatTokens, in_parts, takes_parts
from tangram.training.data.tokens import BadDocument
from tests.training.data.test_chat import encoded, tokens_at
from tests.training.data.test_templates import ASKED, CALL, answered

pytestmark = pytest.mark.filterwarnings("ignore")
SPECIAL = re.compile(r"<[|｜][^|｜<>{}\n]+[|｜]>|<\|\w+>|<\w+\|>|<\w+_of_\w+>|\[/?INST\]|</?s>|\[gMASK\]|<sop>")
"""Special tokens, as templates name them."""
TURNS = [ASKED, answered("12."), {"role": "user", "content": "Sure?"}, answered("Yes."), ASKED, answered("12.")]
RESULT = {"role": "tool", "name": "times", "tool_call_id": "call", "content": "12"}
TOOL = {"type": "function", "function": {"name": "times", "description": "Multiplies.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"],
}}}  # fmt: skip
CALLS = [ASKED, answered("", tool_calls=[{**CALL, "id": "call"}]), RESULT, answered("It is 12.")]
ROWS: Mapping[str, Any] = {
    "turns": {"messages": TURNS},
    "a system prompt": {"messages": [{"role": "system", "content": "Be short."}, *TURNS[:2]]},
    "calls": {"messages": CALLS, "tools": [TOOL]},
    "text beside a call": {
        "messages": [*CALLS, ASKED, answered("I ask.", tool_calls=CALLS[1]["tool_calls"]), *CALLS[2:]], "tools": [TOOL],
    },
    "thoughts": {"messages": [ASKED, answered("12.", reasoning_content="Three fours.")]},
}  # fmt: skip
GIVEN = re.compile(r"(<\|start\|>assistant|<[|｜][\w▁]+[|｜]>|</?think>|\s)*")
"""What answers begin with that is given to the model, which TRL takes as theirs: roles, the begin of thoughts, or that
there are none, which stock templates write of the last turn only."""
UNWRITTEN = {
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3",
    "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
"""Which write no calls of tools: such a conversation is refused here."""
REFUSED: Mapping[str, set[str]] = {
    "calls": UNWRITTEN, "text beside a call": UNWRITTEN | {"diffusion_gemma"}, "a system prompt": {"gemma"},
}  # fmt: skip
ASKED_WITH_NOTHING = "<|turn>model\n"
STOPS_AT = "<|tool_response>"
"""Of DiffusionGemma: behind a result its template asks with nothing, so that the model has to write its turn's begin,
and a call ends with the begin of the result, at which models stop."""


@pytest.mark.parametrize("row", ROWS)
def test_answers_are_those_that_trl_marks(tmp_path: Path, row: str) -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    refused, names = set[str](), [one.name.removesuffix("_training.jinja") for one in folder.glob("*_training.jinja")]
    for name in names:
        stock, training = ((folder / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
        tokens = _tokens(tmp_path / name, stock, training)
        try:
            (own,) = encoded(tokens, ROWS[row])
        except BadDocument:
            refused.add(name)
            continue
        tokenizer: Any = tokens._tokenizer  # pyright: ignore[reportPrivateUsage]
        messages = ROWS[row]["messages"]
        found = tokenizer.apply_chat_template(
            in_parts(messages) if takes_parts(tokenizer, stock) else messages, tools=ROWS[row].get("tools"),
            chat_template=training, return_assistant_tokens_mask=True, return_dict=True,
        )  # fmt: skip
        theirs = _answers(tokens, found["input_ids"], found["assistant_masks"])
        assert all(theirs)
        assert _answers(tokens, *own) == theirs, name
    assert len(names) > 25
    assert refused == REFUSED.get(row, set())


def _tokens(folder: Path, stock: str, training: str) -> ChatTokens:
    """Of a model whose tokenizer knows the special tokens of a template."""
    (folder / "chat-model").mkdir(parents=True)
    tokens = tokens_at(folder, stock, sequence=8192)
    tokenizer: Any = tokens._tokenizer  # pyright: ignore[reportPrivateUsage]
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(stock + training)})})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    turns = ["<|user|>", "<|observation|>"] if "<|observation|>" in stock else []
    ends: list[int] = tokenizer.convert_tokens_to_ids(turns)
    return replace(tokens, vocabulary=len(tokenizer), stops=tuple(ends))


def _answers(tokens: ChatTokens, ids: Sequence[int], marks: Sequence[int]) -> list[str]:
    runs = groupby(zip(ids, marks, strict=True), lambda one: bool(one[1]))
    texts = (
        tokens.spelled([i for i, _ in some]).removeprefix(ASKED_WITH_NOTHING).removesuffix(STOPS_AT)
        for counted, some in runs
        if counted
    )
    return [text[_given(text) :].strip() for text in texts]


def _given(text: str) -> int:
    found = GIVEN.match(text)
    return found.end() if found else 0
