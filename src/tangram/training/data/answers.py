"""Where a template writes the answers of a conversation, found by what changes when it renders something else.

Stock templates have no marks of what an answer is. It is the difference of two renderings, one that ends where the
model is asked and one with the answer; where a template writes an answer otherwise once turns follow it, the place in
which a mark stands that is put there instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from tangram.training.data.messages import BadRow, Message, functions_called

Render = Callable[[Sequence[Message], bool], str]
"""The text of some messages; whether what asks for an answer follows them."""
_MARK = "\ue000"  # of no language
ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Of which any template writes something, or refuses them."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message, by which templates know what an assistant thought."""


class Rendered(NamedTuple):
    """The text of a sample, and from where to where it is answers."""

    text: str
    answers: list[tuple[int, int]]
    lost: int = 0
    """Answers that the template writes otherwise in the middle of a conversation, so that they are in no loss."""
    bare: bool = False
    """Without begin and end, which are added: no template wrote it."""


def answers_of(render: Render, messages: Sequence[Message], ends: Sequence[str] = ()) -> Rendered:
    """A conversation as the template writes it, and where its answers are. Raises BadRow.

    `ends`: the special tokens with which an answer may end.
    """
    turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if not turns:
        raise BadRow('has no turn of the role "assistant", so there is nothing to train on: leave it out')
    if turns[0] == 0:
        raise BadRow("begins with an answer: give what it answers before it")
    text, answers, lost = render(messages, False), list[tuple[int, int]](), 0
    for turn in turns:
        if messages[turn].get("weight") == 0 or messages[turn].get("train") is False:  # as files of OpenAI, or axolotl
            continue
        before, prompt = render(messages[:turn], False), render(messages[:turn], True)
        until = text if turn == len(messages) - 1 else render(messages[: turn + 1], False)
        start = alike(prompt, until)
        if text.startswith(until) and start >= len(before):
            answers.append((start, len(until)))
        elif (place := _in_the_middle(render, messages, turn, ends)) is not None:
            answers.append(place)
        elif start < len(before):
            raise BadRow(
                f"is written by the chat template so that turn {turn + 1} changes what stands before it: its answers "
                "cannot be told from what they answer"
            )
        else:
            lost += 1
    return Rendered(text, answers, lost)


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or messages, both begin with."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _in_the_middle(
    render: Render, messages: Sequence[Message], turn: int, ends: Sequence[str]
) -> tuple[int, int] | None:
    """Where an answer stands that is written otherwise as the last turn: without its thoughts, with another end, or
    behind turns that it is the first to shorten; None where that cannot be told.

    A turn of a mark alone takes its place: what stands before the mark, up to where the model is asked, and what
    stands behind it is none of the answer. Behind that is the end that a turn has as the last one, or else one of
    `ends`.
    """
    marked = {"role": messages[turn]["role"], "content": _MARK}
    text, before, prompt = render(messages, False), render(messages[:turn], False), render(messages[:turn], True)
    try:
        head, mark, tail = render([*messages[:turn], marked, *messages[turn + 1 :]], False).partition(_MARK)
        end = render([*messages[:turn], marked], False).partition(_MARK)[2]
    except BadRow:  # as of what a tool says that nobody has called
        return None
    begun = alike(before, prompt)
    first = _behind(before[:begun], head)
    if not mark or first is None or not text.endswith(tail):
        return None
    start, stop = first + alike(text[first : len(head)], prompt[begun:]), len(text) - len(tail)
    if text[:start] != head[:start] or stop < start:
        return None
    found = next((one for one in (end, *ends) if one and text.startswith(one, stop)), None)
    return None if found is None else (start, stop + len(found))


def _behind(before: str, head: str) -> int | None:
    """Where the turns that `before` ends with end in another text, which may have shortened those before them."""
    least, most = 0, len(before)  # of characters: if so many are found, fewer are
    while least < most:
        some = (least + most + 1) // 2
        least, most = (some, most) if before[-some:] in head else (least, some - 1)
    return head.rfind(before[-least:]) + least if least else None


def fitted(render: Render, messages: list[Message]) -> list[Message]:
    """Messages with the arguments of their calls in the form that the template takes. Raises BadRow.

    Rows have them as an object or as its JSON, and of templates some write the JSON of what they get, some what they
    get as it is: one form comes out as JSON in JSON, or as a Python dict.
    """
    if not any("arguments" in call for call in functions_called(messages)):
        return messages
    refused: BadRow | None = None
    for form in (messages, _with_arguments(messages, _decoded), _with_arguments(messages, _encoded)):
        try:
            text = render(form, False)
        except BadRow as error:
            refused = refused or error
            continue
        if not any(_garbled(call.get("arguments")) in text for call in functions_called(form)):
            return form
    if refused is not None:
        raise refused
    return messages


def _garbled(arguments: Any) -> str:
    """What is written of arguments in the form that the template does not take."""
    if isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    return str(arguments) if arguments and str(arguments) != json.dumps(arguments, ensure_ascii=False) else _MARK


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _encoded(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(messages: list[Message], form: Callable[[Any], Any]) -> list[Message]:
    def called(one: Message) -> Message:
        if isinstance(one.get("function"), dict):
            return {**one, "function": called(one["function"])}
        return {**one, "arguments": form(one["arguments"])} if "arguments" in one else one

    return [
        {**m, "tool_calls": [called(one) for one in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages
    ]


def refuse_unwritten(render: Render, messages: Sequence[Message], text: str) -> None:
    """Raise BadRow for a message, or a call of a tool, of which the template writes nothing."""
    for number, message in enumerate(messages):
        content = str(message["content"]).strip()
        sure = content in text and message["role"] in ROLES
        if content and not sure and _without(render, messages, number) == text:
            raise BadRow(
                f'has a message of the role "{message["role"]}", of which the chat template writes nothing: give it '
                "another role, or leave it out"
            )
    names = [str(call.get("name", "")) for call in functions_called(messages)]
    if dropped := next((name for name in names if name not in text), None):
        raise BadRow(
            f'has a call of "{dropped}", which the chat template does not write: take a model that calls tools'
        )


def _without(render: Render, messages: Sequence[Message], number: int) -> str | None:
    try:
        return render([one for at, one in enumerate(messages) if at != number], False)
    except BadRow:
        return None


def thoughts_unwritten(messages: Sequence[Message], text: str) -> int:
    """Of how many messages the template does not write what the assistant thought."""
    thoughts = [next((m[key] for key in THOUGHTS if isinstance(m.get(key), str)), "") for m in messages]
    thoughts += [
        m["content"].partition("</think>")[0].rpartition("<think>")[2] for m in messages if "</think>" in m["content"]
    ]
    return sum(bool(one.strip()) and one.strip() not in text for one in thoughts)


def tools_unwritten(tools: Any, text: str) -> int:
    """Of how many tools the template writes nothing."""
    tools = cast("list[Any]", tools) if isinstance(tools, list) else []
    named = [cast(Message, one) for one in tools if isinstance(one, dict)]
    return sum(str(one.get("function", one).get("name", "")) not in text for one in named)
