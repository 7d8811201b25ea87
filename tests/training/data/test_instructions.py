"""Rows of instructions and answers, as most public sets are; functions of an older kind; pairs as labelled answers."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangram.schema.files import load
from tangram.training.data import tokens_of
from tangram.training.data.tokens import BadDocument
from tests.training.data import test_pairs as pairs
from tests.training.data.test_chat import CHATML, encoded, tokens_at
from tests.training.data.test_messages import CALLS, RESULT, SAID, SYSTEM, TOOLS, assistant, calls, user

ALPACA = "### Instruction:\none\n\n### Input:\ntwo\n\n### Response:\nthree"
BEFORE = [user("a"), assistant("b")]
SAME: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "instruction": ({"instruction": "one two", "output": "three"}, SAID),
    "no input": ({"instruction": "one two", "input": "", "output": "three", "text": "", "prompt": ""}, SAID),
    "null as input": ({"instruction": "one two", "input": None, "output": "three"}, SAID),
    "input": ({"instruction": "one", "input": "two", "output": "three"}, [user("one\n\ntwo"), SAID[1]]),
    "input alone": ({"instruction": "", "input": "one two", "output": "three"}, SAID),
    "as published": ({"instruction": "one", "input": "two", "output": "three", "text": ALPACA},
                     [user("one\n\ntwo"), SAID[1]]),
    "context": ({"instruction": "one", "context": "two", "response": "three", "category": "x"},
                [user("one\n\ntwo"), SAID[1]]),
    "query": ({"query": "one two", "response": "three", "type": "x"}, SAID),
    "question": ({"question": "one two", "answer": "three"}, SAID),
    "prompt": ({"prompt": "one two", "response": "three"}, SAID),
    "system": ({"system": "Be short.", "instruction": "one two", "output": "three"}, [SYSTEM, *SAID]),
    "system prompt": ({"system_prompt": "Be short.", "question": "one two", "response": "three"}, [SYSTEM, *SAID]),
    "history": ({"system": "Be short.", "history": [["a", "b"]], "instruction": "one two", "output": "three"},
                [SYSTEM, *BEFORE, *SAID]),
    "history as JSON": ({"history": '[["a", "b"]]', "instruction": "one two", "output": "three"}, [*BEFORE, *SAID]),
    "no history": ({"history": [], "instruction": "one two", "output": "three"}, SAID),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_instructions_are_what_a_user_says(tmp_path: Path, case: str) -> None:
    row, messages = SAME[case]
    tally = Counter[str]()
    assert encoded(tokens_at(tmp_path), row, tally=tally) == encoded(tokens_at(tmp_path), {"messages": messages})
    assert tally["conversations: instructions"] == 1


def test_those_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    tally = Counter[str]()
    rows = [{"instruction": "one two", "output": text} for text in ("three", "", " \n")]
    found = encoded(tokens_at(tmp_path), *rows, tally=tally)
    assert [len(ids) > 0 for ids, _ in found] == [True, False, False]
    assert tally["left out: instructions without an answer"] == 2


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "two that ask": ({"instruction": "a", "question": "b", "answer": "c"}, 'has "instruction" and "question"'),
    "two answers": ({"instruction": "a", "output": "b", "response": "c"}, 'has "output" and "response"'),
    "two beside": ({"instruction": "a", "input": "b", "context": "c", "output": "d"}, 'has "input" and "context"'),
    "another text": ({"question": "a?", "answer": "b", "text": "of c"}, 'a "text" that does not hold both'),
    "no text": ({"instruction": "a", "input": 3, "output": "b"}, 'has an "input" that is no text'),
    "an answer of no text": ({"question": "a", "answer": {"text": "b"}}, 'has an "answer" that is no text'),
    "nothing": ({"instruction": " ", "input": "", "output": "b"}, 'has nothing as its "instruction"'),
    "a history of words": ({"instruction": "a", "history": ["b", "c"], "output": "d"}, 'a "history" that is no list'),
    "images": ({"messages": SAID, "images": ["a.png"]}, 'has "images", and only text is trained on'),
    "an image": ({"instruction": "a", "image": {"path": "a.png"}, "output": "d"}, 'has "image", and only text'),
    "two system prompts": ({"system": "a", "system_prompt": "b", "messages": SAID}, 'has "system" and "system_prompt"'),
    "functions beside tools": ({"messages": SAID, "functions": [{"name": "look"}], "tools": TOOLS}, "leave one of the"),
    "no columns": ({"instructions": "a", "output": "b"}, 'did you mean "instruction"?'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_be_meant_in_two_ways_is_refused(tmp_path: Path, case: str) -> None:
    row, why = REFUSED[case]
    with pytest.raises(BadDocument) as refused:
        encoded(tokens_at(tmp_path), row)
    assert why in str(refused.value)


def test_nothing_else_beside_rows_changes_them(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path)
    more: dict[str, Any] = {"images": [], "image": None, "functions": [], "question": "x"}
    assert encoded(tokens, {"messages": SAID, **more}) == encoded(tokens, {"messages": SAID})
    beside: list[dict[str, Any]] = [{}, {"question": "x"}, {"instruction": ""}, {"question": 3}, {"answer": 3}]
    texts = [encoded(tokens_at(tmp_path), {"text": "one", **more}) for more in beside]
    assert all(one == texts[0] for one in texts)


def test_functions_are_tools(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": "a"}'}}
    result = {"role": "function", "name": "look", "content": "42"}
    older = {"messages": [user("q"), called, result, assistant("done")], "functions": [TOOLS[0]["function"]]}
    newer = [user("q"), assistant(tool_calls=calls({"at": "a"})), {**RESULT, "name": "look"}, assistant("done")]
    tally = Counter[str]()
    tokens = tokens_at(tmp_path, CALLS)
    found = encoded(tokens, older, tally=tally)
    assert found == encoded(tokens, {"messages": newer, "tools": TOOLS})
    assert "look;" in tokens.spelled(found[0][0])
    encoded(tokens_at(tmp_path, CHATML), {"messages": SAID, "functions": [TOOLS[0]["function"]]}, tally=tally)
    assert tally["left out: tools that the template does not write"] == 1


def test_pairs_answer_an_instruction(tmp_path: Path) -> None:
    tokens = pairs.tokens_at(tmp_path)
    asked = {"system": "Be short.", "question": "2 + 2?"}
    (prompt, good), (_, bad) = pairs.sides(tokens, {**asked, "chosen": "so 4", "rejected": "so five"})
    assert prompt.endswith(pairs.SAID)
    assert "system\nBe short." in prompt
    assert (good, bad) == ("so 4<|im_end|>\n", "so five<|im_end|>\n")
    turns = [user("a"), assistant("b"), user("2 + 2?")]  # of which the question is the last, beside them
    both = {side: [*turns, assistant(text)] for side, text in (("chosen", "so 4"), ("rejected", "so five"))}
    assert pairs.sides(tokens, {"question": "2 + 2?", **both}) == pairs.sides(tokens, both)
    apart = {side: turns[-1:] for side, turns in both.items()}
    assert pairs.sides(tokens, {**asked, **apart})[0][1] == "so 4<|im_end|>\n"
    longer = {side: both[side][1:] for side in both}
    assert pairs.sides(tokens, {"question": "a", **longer}) == pairs.sides(tokens, both)
    ((prompt, _), _) = pairs.sides(tokens, {**asked, "history": [["a", "b"]], "chosen": "so 4", "rejected": "so five"})
    assert "user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n2 + 2?" in prompt
    with pytest.raises(BadDocument, match='has "image", and only text'):
        pairs.sides(tokens, {**asked, "image": {"path": "a.png"}, "chosen": "a", "rejected": "b"})
    with pytest.raises(BadDocument, match='has "instruction" and "question"'):
        pairs.sides(tokens, {**asked, "instruction": "x", "chosen": "a", "rejected": "b"})


@pytest.mark.parametrize("case", ["messages with a prompt", "messages that begin alike"])
def test_a_pair_is_a_good_answer_and_a_bad_one(tmp_path: Path, case: str) -> None:
    pairs.tokens_at(tmp_path)
    file = tmp_path / "dpo.toml"
    file.write_text(file.read_text().replace('"dpo"', '"kto"'))
    tokens = tokens_of(load(file))
    (pair,) = tokens.encode([json.dumps(pairs.ROWS[case]).encode()])
    answers = (pairs.GOOD, pairs.BAD)
    rows: list[dict[str, Any]] = [
        {"prompt": [pairs.USER], "completion": [one], "label": one is pairs.GOOD} for one in answers
    ]
    rows[0] |= {"chosen": None, "rejected": None}  # as a table has columns of others
    single = [tokens.encode([json.dumps(row).encode()])[0] for row in rows]
    documents = tokens.documents(pair)
    assert len(documents) == 2
    assert all(np.array_equal(a, b) for a, b in zip(documents, single, strict=True))
    assert [len(tokens.documents(one)) for one in single] == [1, 1]
    with pytest.raises(BadDocument, match='has a "label" beside'):
        tokens.encode([json.dumps({**pairs.ROWS[case], "label": True}).encode()])
