"""Rows as people have them: columns, roles, parts of text, calls of tools; what a template leaves out of them."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import gt
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from tangram.cli import main
from tangram.schema.files import load
from tangram.training.data.chat import always_prompt
from tangram.training.data.messages import BadRow
from tangram.training.data.tasks import pair_of, pair_tokens
from tangram.training.data.tokens import BadDocument
from tests.training.data.test_chat import CHATML, COUNTING, encoded, tokens_at

AS_JSON = "{{ c.function.arguments | tojson }}"
AS_THEY_ARE = "{{ c.function.arguments }}"
BY_KEYS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
IN_PIECES = "{{ 'with ' + c.function.arguments }}"
CALLING = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{{ '\n' if m.content and m.tool_calls }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quick %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: thoughts are written of what follows the last question, and of the last turn even where it has none."""
CALLS = CALLING.replace("ARGUMENTS", AS_JSON)
WITHOUT_CALLS = CALLS.replace("m.tool_calls or []", "[]")
ONE_CALL = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
UNTOLD = CALLS.replace("for t in tools or []", "for t in []").replace(
    "{{ m.content }}", "{{ '' if m.tool_calls else m.content }}"
)
ORDERED = (
    "{% set ns = namespace(last=-1, called=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ raise_exception('nobody called') if m.role == 'tool' and not ns.called }}"
    "<|im_start|>{{ m.role }}{{ ' of ' + ns.called if m.role == 'tool' }}\n"
    "{% if m.thinking and loop.index0 >= ns.last %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% set ns.called = m.tool_calls[0].function.name if m.tool_calls else ns.called if m.role == 'tool' else '' %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As gpt-oss's: results only of what was called, by its name, and thoughts only where no answer follows them."""
CLOSING = (
    "{% set ns = namespace(open=false, begun=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '' if ns.begun else '<outs>' }}<out>{{ m.content }}</out>{% set ns.open = true %}{% set ns.begun = true %}"
    "{% elif m.tool_calls %}{{ '\n' if ns.begun else m.role + '\n' }}{% set ns.open = false %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>{% else %}{{ '</outs>' if ns.open else m.role + '\n' }}{% set ns.open = false %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{{ '</outs>' if ns.open else 'assistant\n' if add_generation_prompt }}"
)
"""As DeepSeek-V3's: what closes results stands behind the last one alone, and not before calls."""
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


RESULT = {"role": "tool", "content": "42"}
CALL = '<call>look {"at": "a"}</call>'


def learnt(folder: Path, template: str, row: object, tally: Counter[str] | None = None) -> list[str]:
    tokens = tokens_at(folder, template)
    ((ids, counts),) = encoded(tokens, row, tally=tally)
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    return [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]


def written(folder: Path, template: str, row: object) -> str:
    tokens = tokens_at(folder, template)
    ((ids, _),) = encoded(tokens, row)
    return tokens.spelled(ids)


TURNS: Mapping[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a call without a word": (
        [user("q"), assistant(tool_calls=calls({"at": "a"})), RESULT, assistant("done")],
        [f"{CALL}<|im_end|>\n", "<think>\n\n</think>\n\ndone<|im_end|>\n"],
    ),
    "thoughts dropped before an answer": (
        [user("q"), assistant(tool_calls=calls({"at": "a"}), reasoning_content="hm"), RESULT,
         assistant("done", reasoning_content="well"), user("more"), assistant("end")],
        [f"{CALL}<|im_end|>\n", "done<|im_end|>\n", "<think>\n\n</think>\n\nend<|im_end|>\n"],
    ),
    "words, then a call": (
        [user("q"), assistant("let me", tool_calls=calls({"at": "a"})), RESULT, assistant("let me"), user("q"),
         assistant("let me")],
        [f"let me\n{CALL}<|im_end|>\n", "let me<|im_end|>\n", "<think>\n\n</think>\n\nlet me<|im_end|>\n"],
    ),
    "nothing said": (
        [user("q"), assistant(), user("q"), assistant("end")],
        ["<|im_end|>\n", "<think>\n\n</think>\n\nend<|im_end|>\n"],
    ),
    "two answers in a row": (
        [user("q"), assistant("one"), assistant("two")],
        ["one<|im_end|>\n", "<think>\n\n</think>\n\ntwo<|im_end|>\n"],
    ),
    "one not to be learnt": (
        [user("q"), assistant("one", train=False), user("q"), assistant("two")],
        ["<think>\n\n</think>\n\ntwo<|im_end|>\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS)
def test_only_answers_are_learnt_where_a_template_shortens_those_before_them(tmp_path: Path, case: str) -> None:
    messages, answers = TURNS[case]
    tally = Counter[str]()
    assert learnt(tmp_path, CALLS, {"messages": messages, "tools": TOOLS}, tally) == answers
    assert not [key for key in tally if "otherwise" in key]


@pytest.mark.parametrize("arguments", [{"at": "a"}, {"at": "a", "by": 3}])
@pytest.mark.parametrize("template", [ORDERED, ORDERED.replace("' of ' + ns.called", "''")])
def test_calls_are_learnt_whose_thoughts_an_answer_shortens(
    tmp_path: Path, template: str, arguments: dict[str, Any]
) -> None:
    asked = assistant(tool_calls=calls(arguments), thinking="so")
    row = {"messages": [user("q"), asked, RESULT, asked, RESULT, assistant("done", thinking="so")]}
    call = f"<call>look {json.dumps(arguments)}</call><|im_end|>\n"
    tally = Counter[str]()
    assert learnt(tmp_path, template, row, tally) == [call, call, "<think>so</think>done<|im_end|>\n"]
    assert not [key for key in tally if "otherwise" in key]


@pytest.mark.parametrize("form", [AS_JSON, AS_THEY_ARE, BY_KEYS, IN_PIECES])
@pytest.mark.parametrize("arguments", [{"at": "a"}, '{"at": "a"}', {}, "{}"])
def test_arguments_of_calls_are_written_once(tmp_path: Path, form: str, arguments: Any) -> None:
    row = {"messages": [user("q"), assistant(tool_calls=calls(arguments)), RESULT, assistant("done")]}
    inside = '{"at": "a"}' if "at" in arguments else "{}"
    inside = {BY_KEYS: "at=a" if "at" in arguments else "", IN_PIECES: f"with {inside}"}.get(form, inside)
    assert f"<call>look {inside}</call>" in written(tmp_path, CALLING.replace("ARGUMENTS", form), row)


SAID = [user("one two"), assistant("three")]
SYSTEM = {"role": "system", "content": "Be short."}
SAME: Mapping[str, tuple[object, list[dict[str, Any]]]] = {
    "parts": (
        {"messages": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]),
                      assistant([{"type": "text", "text": "three", "image": None}])]}, SAID,
    ),
    "a system prompt beside turns": (
        {"system": "Be short.", "conversations": [{"from": "human", "value": "one two"},
                                                  {"from": "gpt", "value": "three"}]}, [SYSTEM, *SAID],
    ),
    "the same system prompt twice": ({"system": "Be short.", "messages": [SYSTEM, *SAID]}, [SYSTEM, *SAID]),
    "a system prompt beside a prompt": (
        {"system": "Be short.", "prompt": "one two", "completion": SAID[1:]}, [SYSTEM, *SAID],
    ),
    "no system prompt": ({"system": "", "messages": SAID}, SAID),
    "calls by their roles": (
        {"conversations": [{"from": "human", "value": "one two"},
                           {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "a"}}'},
                           {"from": "observation", "value": "42"}, {"from": "gpt", "value": "three"}]},
        [SAID[0], assistant(tool_calls=calls({"at": "a"})), RESULT, SAID[1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_columns_and_roles_by_other_names(tmp_path: Path, case: str) -> None:
    row, messages = SAME[case]
    tokens = tokens_at(tmp_path, CALLS)
    assert encoded(tokens, row) == encoded(tokens, {"messages": messages})


def test_options_of_a_row_reach_its_template(tmp_path: Path) -> None:
    row = {"messages": SAID, "chat_template_kwargs": {"quick": True}}
    assert learnt(tmp_path, CALLS, row) == ["three<|im_end|>\n"]


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "an unknown role": (CALLS, {"messages": [{"role": "developer", "content": "o"}, *SAID]}, 'the role "developer"'),
    "no calls": (CHATML, {"messages": [SAID[0], assistant(tool_calls=calls({"at": "a"}))]}, 'a call of "look", which'),
    "an image": (
        CHATML, {"messages": [user([{"type": "image"}, {"type": "text", "text": "x"}]), SAID[1]]},
        'a part of the type "image" in a message',
    ),
    "two system prompts": (CHATML, {"system": "x", "messages": [SYSTEM, *SAID]}, "leave one of the two out"),
    "a call of no name": (CHATML, {"messages": [SAID[0], {"role": "function_call", "content": "x"}]}, "no JSON of a"),
    "an end in thoughts": (CALLS, {"messages": [SAID[0], assistant("x", reasoning_content="<|im_end|>")]}, "holds '<|"),
    "options that are no JSON": (CALLS, {"messages": SAID, "chat_template_kwargs": "x"}, "that are no JSON"),
    "calls of which only tools speak": (
        WITHOUT_CALLS, {"messages": [SAID[0], assistant(tool_calls=calls({"at": "a"}))], "tools": TOOLS},
        'a call of "look", which',
    ),
    "the second of two calls": (
        ONE_CALL, {"messages": [SAID[0], assistant(tool_calls=calls({"at": "a"}) * 2)]}, 'a call of "look", which',
    ),
    "a result that an answer repeats": (
        CALLS.replace(", 'tool'", ""), {"messages": [SAID[0], assistant("I look"), RESULT, assistant("It is 42.")]},
        'the role "tool", of which',
    ),
    "results that close where no call follows": (
        CLOSING, {"messages": [SAID[0], *[assistant(tool_calls=calls({"at": "a"})), RESULT] * 2, assistant("o")]},
        "turn 4 changes what stands before it",
    ),
    "a template that rewrites": (COUNTING, {"messages": SAID}, "changes what stands before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_left_out_without_a_word_is_refused(tmp_path: Path, case: str) -> None:
    template, row, why = REFUSED[case]
    with pytest.raises(BadDocument) as refused:
        encoded(tokens_at(tmp_path, template), row)
    assert why in str(refused.value)


def test_texts_and_tools_that_a_template_leaves_out_beside_calls_are_told(tmp_path: Path) -> None:
    row = {
        "messages": [user("q"), assistant("let me", tool_calls=calls({})), RESULT, assistant("done")],
        "tools": TOOLS,
    }
    for template, count in ((UNTOLD, 1), (CALLS, 0)):
        tally = Counter[str]()
        encoded(tokens_at(tmp_path, template), row, tally=tally)
        for what in ("texts beside calls", "tools"):
            assert tally[f"left out: {what} that the template does not write"] == count


@pytest.mark.parametrize(("template", "thoughts", "tools"), [(CALLS, 1, 0), (CHATML, 2, 1)])
def test_thoughts_and_tools_that_a_template_does_not_write_are_told(
    tmp_path: Path, template: str, thoughts: int, tools: int
) -> None:
    tally = Counter[str]()
    turns = [user("q"), assistant("a", reasoning_content="first"), user("q"), assistant("b", thinking="second")]
    inline = [user("q"), assistant("<think>\nfirst\n</think>\n\na")]
    rows: list[dict[str, Any]] = [{"messages": turns, "tools": TOOLS}, {"messages": inline}]
    encoded(tokens_at(tmp_path, template), *rows, tally=tally)
    found = [tally[f"left out: {what} that the template does not write"] for what in ("thoughts", "tools")]
    assert found == [thoughts, tools]


# ---------------------------------------------------------------- what says of itself that it is to be learnt

ASKING: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?", "train": True},
    {"role": "assistant", "content": "4", "train": False},
    {"role": "user", "content": "Sure?", "weight": 1},
    {"role": "assistant", "content": "Yes."},
]


def test_what_asks_to_be_learnt_is_with_its_end(tmp_path: Path) -> None:
    for template in (CHATML, CALLS):
        tokens, tally = tokens_at(tmp_path, template), Counter[str]()
        (row,) = tokens.encode([json.dumps({"messages": ASKING}).encode()], tally)
        runs = groupby(row.tolist(), partial(gt, tokens.vocabulary))
        learnt = [tokens.spelled([*some]) for counted, some in runs if counted]
        assert learnt[0] == "2 + 2?<|im_end|>"
        assert [one[-len("Yes.<|im_end|>\n") :] for one in learnt[1:]] == ["Yes.<|im_end|>\n"]
        assert tally["beside answers: messages"] == 1
    counted = "{% else %}{{ m.content }}", "{% else %}{{ m.content }} of {{ m.content | length }}"
    tokens, tally = tokens_at(tmp_path, CHATML.replace(*counted)), Counter[str]()
    tokens.encode([json.dumps({"messages": ASKING}).encode()], tally)
    assert tally["left out: answers that the template writes otherwise before later turns"] == 1


ALWAYS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ '<r>' + m.content + '</r>' if m.role == 'assistant' "
    "else m.content }}<|im_end|>{% endfor %}<|im_start|>assistant:"
)
"""As Cohere's do: the model is asked behind the last turn, which is an answer's, too."""


@pytest.mark.parametrize(("stops", "begun"), [((257,), ""), ((), "<|im_start|>")])
def test_what_is_asked_behind_the_last_answer_is_none_of_it(tmp_path: Path, stops: tuple[int, ...], begun: str) -> None:
    """Where nothing says what ends a turn, what follows any turn is learnt with it."""
    tokens = replace(tokens_at(tmp_path, ALWAYS), stops=stops)
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    ((ids, counts),) = encoded(tokens, {"messages": turns})
    runs = groupby(zip(ids, counts, strict=True), lambda one: one[1])
    learnt = [tokens.spelled([i for i, _ in some]) for counted, some in runs if counted]
    assert learnt == [f"<r>assistant {n}</r><|im_end|>{begun}" for n in range(2)]
    pairs = replace(pair_tokens(tokens, load(tmp_path / "sft.toml").data), stops=stops)
    row = {"prompt": turns[:1], "chosen": turns[1:2], "rejected": turns[3:]}
    (both,) = pairs.encode([json.dumps(row).encode()])
    answers = [
        [n for n in side.tolist() if n % (2 * pairs.vocabulary) < pairs.vocabulary] for side in pairs.documents(both)
    ]
    assert [pairs.spelled(n % pairs.vocabulary for n in one) for one in answers] == learnt


@pytest.mark.parametrize(
    "template",
    [CHATML, CALLS, ORDERED, CLOSING, "{% for m in messages %}[{{ m.content }}]{{ eos_token }} {% endfor %}"],
)
def test_templates_that_ask_when_they_are_to_have_nothing_behind_the_last_turn(tmp_path: Path, template: str) -> None:
    tokens_at(tmp_path, template)
    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(tmp_path / "chat-model")
    assert always_prompt(tokenizer, tokenizer.chat_template, ()) == ""


def test_a_prompt_that_asks_to_be_learnt_is_refused_of_preferences() -> None:
    row = {"prompt": ASKING[:2], "chosen": ASKING[4:], "rejected": ASKING[4:]}
    with pytest.raises(BadRow, match="a message that is to be learnt in its prompt"):
        pair_of(row)
    assert pair_of({**row, "prompt": [ASKING[0], ASKING[3]]})[0] == [ASKING[0], ASKING[3]]


def test_answers_that_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are learnt, as an end; what thinks, calls or is context says something."""
    call: dict[str, Any] = {"type": "function", "function": {"name": "look", "arguments": {}}}
    answers: list[dict[str, Any]] = [
        {"content": " "}, {"content": "", "train": False}, {"content": "", "tool_calls": [call]},
        {"content": "", "reasoning_content": "so"}, {"content": "4"},
    ]  # fmt: skip
    rows = [{"messages": [ASKING[0], ASKING[3], {"role": "assistant", **one}, *ASKING[3:]]} for one in answers]
    tokens_at(tmp_path, CALLS, cache=str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["data", "show", str(tmp_path / "sft.toml")]) == 0
    assert "1 answers say nothing, which is learnt: leave" in " ".join(capsys.readouterr().out.split())


def test_a_row_of_which_nothing_is_to_be_learnt_says_so(tmp_path: Path) -> None:
    tokens, tally = tokens_at(tmp_path, CHATML), Counter[str]()
    tokens.encode([json.dumps({"messages": [ASKING[0], ASKING[3], ASKING[2]]}).encode()], tally)
    assert tally["left out: conversations without an answer that is to be learnt"] == 1
    with pytest.raises(BadDocument, match=r'no turn of the role "assistant" \(it has user, Assistant\)'):
        encoded(tokens, {"messages": [ASKING[3], {"role": "Assistant", "content": "4"}]})
