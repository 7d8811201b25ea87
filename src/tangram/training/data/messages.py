"""The messages of a row: its columns, names of roles and parts of text, before any template writes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

Message = dict[str, Any]
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
_CALL = "function_call"
"""The role of a turn that is a call of a tool, as JSON (ShareGPT)."""
_COLUMNS = ("messages", "conversations", "prompt", "completion", "text")
_ASKS = ("instruction", "query", "question", "prompt")
_BESIDE = ("input", "context")
_ANSWERS = ("output", "response", "answer", "completion")
_LEARNT = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message of which 0 and false say that it is not to be learnt, as files for others have them."""
_NO_TEXT = ("images", "image", "videos", "video", "audios", "audio")
INSTRUCTIONS = "instructions"


class BadRow(ValueError):
    """What a row is or holds, as the end of a sentence about it."""


def sample_of(row: dict[str, Any]) -> tuple[str, list[Any]]:
    """What kind of sample a row is, and its messages, or its texts. Raises BadRow."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise BadRow('has chosen and rejected answers, which the task "dpo" takes: give conversations')
    refuse_images(row)
    for key in ("messages", "conversations"):
        if key in row:
            return "messages", behind_system(row, messages_of(row[key], key, row))
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise BadRow('has nothing as its "completion": every row needs an answer')
            return "prompt and completion", bare(row, [prompt, completion])
        turns = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt]
        turns += [[{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion]
        asked, answered = (messages_of(part, key) for part, key in zip(turns, _COLUMNS[2:4], strict=True))
        return "messages", behind_system(row, [*map(_context, asked), *answered])
    if _has(row, _ASKS) and _has(row, _ANSWERS) and (question := question_of(row)):
        text, answer = row.get("text"), _only(row, _ANSWERS)
        both = (*question[0], answer)
        if isinstance(text, str) and text.strip() and not all(row[key].strip() in text for key in both):
            raise BadRow(
                f'has "{question[0][0]}" and "{answer}", and a "text" that does not hold both: leave out the '
                "columns that are not meant"
            )
        turns = [*history_of(row), {"role": "user", "content": question[1]}]
        return INSTRUCTIONS, behind_system(row, [*turns, {"role": "assistant", "content": row[answer]}])
    if isinstance(row.get("text"), str):
        return "text", bare(row, [row["text"]])
    known = (*_COLUMNS, *_ASKS, *_ANSWERS)
    near = [name for key in row if key not in known for name in difflib.get_close_matches(key, known, n=1)]
    hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(row) or 'nothing'}"
    raise BadRow(
        f'has no "messages", no "prompt" with "completion", no "instruction" with "output" and no "text": {hint}'
    )


def refuse_images(row: Mapping[str, Any]) -> None:
    """Raise BadRow for what stands beside text, is none, and would not be trained on."""
    if other := next((key for key in _NO_TEXT if row.get(key)), None):
        raise BadRow(f'has "{other}", and only text is trained on: leave the row out, or that column')


def question_of(row: Mapping[str, Any]) -> tuple[list[str], str] | None:
    """What a row asks in a column of its own, with what that is about, and the columns it stands in. Raises BadRow."""
    if not _has(row, _ASKS):
        return None
    asks = _only(row, _ASKS)
    columns = [asks, *([_only(row, _BESIDE)] if _has(row, _BESIDE) else [])]
    text = "\n\n".join(row[key] for key in columns if row[key].strip())
    if not text:
        raise BadRow(f'has nothing as its "{asks}"')
    return columns, text


def _has(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return any(row.get(key) is not None for key in columns)


def _only(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Which one of some columns a row has, with text. Raises BadRow for several, and for something else in it."""
    there = [key for key in columns if row.get(key)] or [key for key in columns if row.get(key) is not None][:1]
    if len(there) > 1:
        raise BadRow(f'has "{there[0]}" and "{there[1]}", of which either may be meant: leave one of the two out')
    if not isinstance(row[there[0]], str):
        raise BadRow(f'has {"an" if there[0][0] in "aio" else "a"} "{there[0]}" that is no text')
    return there[0]


def history_of(row: Mapping[str, Any]) -> list[Message]:
    """The turns before an instruction, as pairs of what was asked and answered. Raises BadRow."""
    pairs: Any = parsed(row.get("history"), "history") or []
    turns: list[Message] = []
    for pair in cast("list[Any]", pairs) if isinstance(pairs, list) else [pairs]:
        texts = cast("list[Any]", pair) if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise BadRow('has a "history" that is no list of pairs of an instruction and its answer')
        turns += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return turns


def tools_of(row: Mapping[str, Any]) -> Any:
    """The tools beside messages, also as the functions that OpenAI had before them; None for none. Raises BadRow."""
    tools, functions = (parsed(row.get(key), key) for key in ("tools", "functions"))
    if tools and functions:
        raise BadRow('has "tools" and "functions": leave one of the two out')
    return tools or (functions and [{"type": "function", "function": one} for one in functions])


def parsed(value: Any, what: str) -> Any:
    """What stands beside messages, which a table may have as JSON; None for nothing. Raises BadRow."""
    try:
        return (json.loads(value) if isinstance(value, str) and value.strip() else value) or None
    except ValueError:
        raise BadRow(f"has {what} that are no JSON") from None


def behind_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Messages behind what the column `system` of a row says. Raises BadRow where both have such a turn."""
    system = _system_of(row)
    if not system:
        return messages
    turn = {"role": "system", "content": system}
    if messages[0] == turn:
        return messages
    if messages[0]["role"] == "system":
        raise BadRow('has a "system" and a message of that role that says something else: leave one of the two out')
    return [turn, *messages]


def _system_of(row: Mapping[str, Any]) -> str | None:
    """What a system prompt beside a row says."""
    columns = ("system", "system_prompt")
    return row[_only(row, columns)] if _has(row, columns) else None


def bare(row: Mapping[str, Any], texts: list[str]) -> list[str]:
    """Texts that no template writes. Raises BadRow for a row with a system prompt."""
    if _system_of(row):
        raise BadRow('has a "system" beside text, which no template writes: put it into the text, or give messages')
    return texts


def messages_of(value: Any, key: str, row: Mapping[str, Any] = MappingProxyType({})) -> list[Message]:
    """The messages of a column, with the usual names of roles, and what `loss_mask` beside it says. Raises BadRow."""
    if isinstance(value, str):  # of a table of cells
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow(f'has a "{key}" that is no JSON') from None
    value = [cast(Message, value)] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise BadRow(f'has a "{key}" that is no list of messages')
    messages: list[Message] = []
    for one, learnt in zip(cast("list[Any]", value), _mask_of(row, len(cast("list[Any]", value))), strict=True):
        if not isinstance(one, dict):
            raise BadRow(f'has a "{key}" with {json.dumps(one)[:40]} in it, which is no message: give role and content')
        message = {
            name: x for name, x in cast(Message, one).items() if x is not None and (name, x) != ("tool_calls", [])
        }
        if "from" in message and "value" in message:
            message = {"role": message.pop("from"), "content": message.pop("value"), **message}
        calls = message.get("role") == _CALL
        if calls:
            message |= Message(role="assistant", content="", tool_calls=_calls_in(message.get("content")))
        if "function_call" in message:  # as OpenAI had it before there were tools
            message["tool_calls"] = _calls_in(message.pop("function_call"))
        role = message.get("role")
        message["role"] = _ROLES.get(str(role), role)
        message["content"] = _text_of(message.get("content", "" if "tool_calls" in message else None))
        if not (isinstance(role, str) and isinstance(message["content"], str)):
            raise BadRow(f'has a message without a role or without text as its content ("{key}")')
        if half := [one for one in _LEARNT if message.get(one, 1) not in (0, 1)] or [
            *{"train_detail"} & message.keys()
        ]:
            raise BadRow(f'has "{half[0]}" of a part of an answer: give it of a message, as 0 or 1')
        if not learnt:
            message["loss_mask"] = 0
        _append(messages, message, calls)
    return messages


def _append(messages: list[Message], message: Message, calls: bool) -> None:
    """`calls`: it is a call as a row of its own (ShareGPT), which goes on an answer before it that is learnt alike."""
    last = messages[-1] if messages else message
    if calls and last["role"] == "assistant" and [last.get(k) for k in _LEARNT] == [message.get(k) for k in _LEARNT]:
        before = messages.pop() if messages else {}
        message = {**message, **before, "tool_calls": [*before.get("tool_calls", []), *message["tool_calls"]]}
    messages.append(message)


def is_learnt(message: Message) -> bool:
    """Whether a message may be in the loss, by what it says of itself."""
    return all(message.get(key, 1) != 0 for key in _LEARNT)


def is_to_learn(message: Message) -> bool:
    """Whether a message that is no answer says of itself that it is to be learnt; "weight" is of answers alone."""
    return message["role"] != "assistant" and is_learnt(message) and any(message.get(key) == 1 for key in _LEARNT[1:])


def _context(message: Message) -> Message:
    """A message of a prompt: no answer in it is learnt that does not ask for it."""
    says = message["role"] != "assistant" or any(key in message for key in _LEARNT)
    return message if says else {**message, "weight": 0}


def _mask_of(row: Mapping[str, Any], count: int) -> list[int]:
    """What `loss_mask` beside so many messages says of each. Raises BadRow."""
    mask: Any = parsed(row.get("loss_mask"), "loss_mask")
    if mask is None:
        return [1] * count
    numbers = cast("list[Any]", mask) if isinstance(mask, list) else []
    if len(numbers) != count or any(one not in (0, 1) for one in numbers):
        raise BadRow(f'has a "loss_mask" that is no list of a 0 or 1 for each of its {count} messages')
    return numbers


def _text_of(content: Any) -> Any:
    """The text of content that comes in parts, as it was for content of another kind. Raises BadRow."""
    if not isinstance(content, list) or not content:
        return cast(Any, content)
    parts = [cast(Message, one) if isinstance(one, dict) else {"text": one} for one in cast("list[Any]", content)]
    if other := next((one for one in parts if one.get("type", "text") != "text"), None):
        raise BadRow(f"has a part of the type {json.dumps(other['type'])[:40]} in a message: only text is trained on")
    if half := [key for key in _LEARNT for one in parts if one.get(key) is not None and not one[key]]:
        raise BadRow(f'has "{half[0]}" of a part of an answer: give it of a message, as 0 or 1')
    texts = [one["text"] for one in parts if isinstance(one.get("text"), str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _calls_in(value: Any) -> list[Message]:
    """The calls of tools that a turn is. Raises BadRow."""
    try:
        calls: Any = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        calls = None
    calls = cast("list[Any]", calls) if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in calls):
        raise BadRow(f'has a turn "{_CALL}" that is no JSON of a name and arguments')
    return [{"type": "function", "function": one} for one in calls]


def functions_called(messages: Sequence[Message]) -> list[Message]:
    """The name and arguments of each call of a tool, in order."""
    calls = [one for message in messages for one in message.get("tool_calls") or ()]
    return [one.get("function", one) for one in calls if isinstance(one, dict)]
