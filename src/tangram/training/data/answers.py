"""Where a template writes the answers of a conversation, found by what changes when it renders something else.

Stock templates have no marks of what an answer is. It is the difference of two renderings, one that ends where the
model is asked and one with the answer; where a template writes an answer otherwise once turns follow it, the place in
which a mark stands that is put there instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from tangram.training.data.messages import BadRow, Message, functions_called, is_learnt, is_to_learn

Render = Callable[[Sequence[Message], bool], str]
"""The text of some messages; whether what asks for an answer follows them."""
_MARK = "\ue000"  # of no language
_NUMBER = 314159265358  # the same of calls that have numbers alone
ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Of which templates write something, or refuse them."""
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
    marked: int = 0
    """Messages that are no answers, and are to be learnt as they say."""
    empty: int = 0
    """Answers that say, think and call nothing."""


def answers_of(render: Render, messages: Sequence[Message], ends: Sequence[str] = ()) -> Rendered:
    """A conversation as the template writes it, and where its answers are. Raises BadRow.

    `ends`: the special tokens with which an answer may end.
    """
    roles = [one["role"] for one in messages]
    turns = [number for number, role in enumerate(roles) if role == "assistant"]
    if not turns:
        have = ", ".join(dict.fromkeys(roles))
        raise BadRow(
            f'has no turn of the role "assistant" (it has {have}), so there is nothing to train on: leave it out'
        )
    if turns[0] == 0:
        raise BadRow("begins with an answer: give what it answers before it")
    text, answers, lost = render(messages, False), list[tuple[int, int]](), 0
    for turn in turns:
        if not is_learnt(messages[turn]):
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
    asked = [_contents(render, messages, number, ends) for number, one in enumerate(messages) if is_to_learn(one)]
    answers += (place for place in asked if place is not None)
    empty = sum(is_learnt(messages[n]) and _says_nothing(messages[n]) for n in turns)
    return Rendered(text, answers, lost + asked.count(None), marked=len(asked), empty=empty)


def _says_nothing(message: Message) -> bool:
    return not any(str(message.get(key) or "").strip() for key in ("content", "tool_calls", *THOUGHTS))


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

    A turn with a mark in its calls, or of a mark alone, takes its place.
    """
    places = (_around(render, messages, turn, marked, ends) for marked in _marked(messages[turn]))
    return next((place for place in places if place is not None), None)


def _marked(message: Message) -> list[Message]:
    """A message with a mark in the name of its first call, or in an argument of text or a number; and a mark alone."""
    alone = Message(role=message["role"], content=_MARK)
    calls = cast("list[Message]", message.get("tool_calls") or [])
    if not calls:
        return [alone]
    changes: list[Message] = [{"name": _MARK}]
    arguments = cast("dict[str, Any] | str | None", calls[0].get("function", calls[0]).get("arguments"))
    if isinstance(arguments, dict):
        marks = {str: _MARK, int: _NUMBER}
        some = [(key, marks[type(x)]) for key, x in arguments.items() if type(x) in marks and x != ""]
        changes += [{"arguments": {**arguments, key: mark}} for key, mark in some]
    return [*({**message, "tool_calls": [_changed(calls[0], one), *calls[1:]]} for one in changes[:2]), alone]


def _changed(call: Message, change: Mapping[str, Any]) -> Message:
    """A call of a tool with another name, or other arguments."""
    function = call.get("function")
    return {**call, "function": {**function, **change}} if isinstance(function, dict) else {**call, **change}


def _around(
    render: Render, messages: Sequence[Message], turn: int, marked: Message, ends: Sequence[str]
) -> tuple[int, int] | None:
    """Where the answer stands in whose place a turn with a mark is put; None where that cannot be told.

    What stands before the mark, up to where the model is asked, and what stands behind it is none of the answer.
    Behind that is the end that a turn has as the last one, or else one of `ends`.
    """
    text, before, prompt = render(messages, False), render(messages[:turn], False), render(messages[:turn], True)
    try:
        behind = ([*messages[:turn], marked, *messages[turn + 1 :]], [*messages[:turn], marked])
        (head, mark, tail), (_, _, end) = (_at_mark(render(some, False)) for some in behind)
    except BadRow:  # as of what a tool says that nobody has called
        return None
    begun = alike(before, prompt)
    last = messages[turn - 1]
    first = _behind(before[:begun], head, "" if last["role"] == "assistant" else last["content"].strip()[-8:])
    if not mark or first is None or not text.endswith(tail):
        return None
    start, stop = first + alike(text[first : len(head)], prompt[begun:]), len(text) - len(tail)
    if text[:start] != head[:start] or stop < start:
        return None
    found = next((one for one in (end, *ends) if one and text.startswith(one, stop)), None)
    return None if found is None else (start, stop + len(found))


def _at_mark(text: str) -> tuple[str, str, str]:
    return text.replace(str(_NUMBER), _MARK).partition(_MARK)


def _contents(render: Render, messages: Sequence[Message], turn: int, ends: Sequence[str]) -> tuple[int, int] | None:
    """Where what a message says stands, and the end behind it; None where that cannot be told."""
    text, marked = render(messages, False), {**messages[turn], "content": _MARK}
    try:
        head, mark, tail = render([*messages[:turn], marked, *messages[turn + 1 :]], False).partition(_MARK)
    except BadRow:
        return None
    start, stop = len(head), len(text) - len(tail)
    if not mark or text[:start] != head or not text.endswith(tail) or stop <= start:
        return None
    return start, stop + len(next((one for one in ends if one and text.startswith(one, stop)), ""))


def _behind(before: str, head: str, last: str) -> int | None:
    """Where the turns that `before` ends with end in another text, which may have shortened those before them.

    None where that is not behind the last thing that they say.
    """
    least, most = 0, len(before)  # of characters: if so many are found, fewer are
    while least < most:
        some = (least + most + 1) // 2
        least, most = (some, most) if before[-some:] in head else (least, some - 1)
    if not least or (last in before and least < len(before) - before.rfind(last)):
        return None
    return head.rfind(before[-least:]) + least


def asks_always(render: Render, stops: Sequence[str], special: Sequence[str]) -> str:
    """With what a template asks behind the last turn, whosever that is, also where it is not to ask (Cohere's do);
    "" where it does not.

    It is what answers begin with and what follows the last turn alone. Before it an answer ends with one of `stops`;
    without any it begins with the token by which what follows another turn is another text.
    """
    user, answer = Message(role="user", content="?"), Message(role="assistant", content=_MARK)
    try:
        prompt, until, later = (render(some, False) for some in ([user], [user, answer], [user, answer, user]))
        asked = render([user], True)
    except BadRow:
        return ""
    if prompt != asked or not until.startswith(prompt) or later.startswith(until):
        return ""
    tail = until[len(until) - alike(prompt[::-1], until[::-1]) :]
    if ends := [tail.rfind(stop) + len(stop) for stop in stops if stop and stop in tail]:
        return tail[max(ends) :]
    begin = max(0, alike(until, later) - len(until) + len(tail))
    within = (tail.find(one, max(0, begin - len(one) + 1)) for one in special)
    return tail[min([begin, *(at for at in within if at >= 0)]) :]


def begins_next(render: Render, calls: bool, stops: Sequence[str], special: Sequence[str]) -> str:
    """The token with which the turn behind an answer begins, or behind one that `calls` a tool, where models stop at it
    and no other ends the answer (GLM's do); "" where that is not so."""
    call = Message(type="function", function={"name": "look", "arguments": {}})
    answer = Message(role="assistant", content="?", **({"tool_calls": [call]} if calls else {}))
    turns = [Message(role="user", content="?"), answer, Message(role="tool" if calls else "user", content="?")]
    try:
        until, later = render(turns[:2], False), render(turns, False)
    except BadRow:
        return ""
    if not later.startswith(until) or until.rstrip().endswith(tuple(special)):
        return ""
    return next((stop for stop in stops if stop and later.startswith(stop, len(until))), "")


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
        function = one.get("function", one)
        return _changed(one, {"arguments": form(function["arguments"])}) if "arguments" in function else one

    return [
        {**m, "tool_calls": [called(one) for one in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages
    ]


def unwritten(render: Render, messages: Sequence[Message], tools: Any, text: str) -> Mapping[str, int]:
    """How many thoughts, texts beside calls and tools of a row the template does not write.

    Raises BadRow for a message, or a call of a tool, of which it writes nothing.
    """
    numbered, sure = _numbered(messages), True
    try:
        shown = render(numbered, False)
    except BadRow:  # as of a call that is none of the tools
        numbered, shown, sure = list(messages), text, False
    beside = 0
    for number, (message, other) in enumerate(zip(messages, numbered, strict=True)):
        content = str(message["content"]).strip()
        if not content or (str(other["content"]).strip() in shown and (sure or message["role"] in ROLES)):
            continue
        if sure and message.get("tool_calls"):
            beside += 1
        elif (sure and content not in text) or _without(render, messages, number) == text:
            raise BadRow(
                f'has a message of the role "{message["role"]}", of which the chat template writes nothing: give it '
                "another role, or leave it out"
            )
    names = [[str(call.get("name", "")) for call in functions_called(some)] for some in (messages, numbered)]
    if dropped := next((name for name, other in zip(*names, strict=True) if other not in shown), None):
        raise BadRow(
            f'has a call of "{dropped}", which the chat template does not write: take a model that calls tools'
        )
    return {
        "thoughts": _thoughts_unwritten(messages, text),
        "texts beside calls": beside,
        "tools": _tools_unwritten(tools, shown),
    }


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Messages of which each says its number in the place of what it says, as do the names of calls."""

    def numbered(number: int, one: Message) -> Message:
        own = {key: f"{_MARK}{number}{_MARK}" for key in ("content", "name") if str(one.get(key, "")).strip()}
        calls = cast("list[Message]", one.get("tool_calls") or [])
        named = [_changed(call, {"name": f"{_MARK}{number}.{at}{_MARK}"}) for at, call in enumerate(calls)]
        return {**one, **own, **({"tool_calls": named} if named else {})}

    return [numbered(number, one) for number, one in enumerate(messages)]


def _without(render: Render, messages: Sequence[Message], number: int) -> str | None:
    try:
        return render([one for at, one in enumerate(messages) if at != number], False)
    except BadRow:
        return None


def _thoughts_unwritten(messages: Sequence[Message], text: str) -> int:
    """Of how many messages the template does not write what the assistant thought."""
    thoughts = [next((m[key] for key in THOUGHTS if isinstance(m.get(key), str)), "") for m in messages]
    thoughts += [
        m["content"].partition("</think>")[0].rpartition("<think>")[2] for m in messages if "</think>" in m["content"]
    ]
    return sum(bool(one.strip()) and one.strip() not in text for one in thoughts)


def _tools_unwritten(tools: Any, text: str) -> int:
    """Of how many tools the template writes nothing."""
    tools = cast("list[Any]", tools) if isinstance(tools, list) else []
    named = [cast(Message, one) for one in tools if isinstance(one, dict)]
    return sum(str(one.get("function", one).get("name", "")) not in text for one in named)
