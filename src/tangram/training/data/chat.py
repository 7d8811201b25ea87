"""Conversations as tokens of which only the answers are in the loss: what `Tokens` is for text.

A row of a source is a conversation by what it holds: `messages` (or `conversations`), `prompt` and `completion`, or
`text`. Conversations are rendered by the tokenizer's own template. Which of it is an answer is the difference of two
renderings, with an answer and without it: stock templates have no marks of their own. What the model is given at that
turn, the generation prompt included, is no answer; all that follows of the turn is, its end included, and where it has
none, the token of the next turn at which the model stops, as GLM's do.

A token that is no answer is written as `vocabulary` more than it is (`Split.context`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tangram.errors import UserError
from tangram.schema.job import DataPlan
from tangram.training.data.files import LEFT_OUT, ROW
from tangram.training.data.sources import EMPTY
from tangram.training.data.tokens import BadDocument, TokenArray, Tokens

KINDS = "conversations"
CUT = "cut"
OPEN = "answers"
VERSION = 4
"""To be raised when the same rows come to give other tokens."""

IntArray, BoolArray = npt.NDArray[np.int64], npt.NDArray[np.bool_]
C = TypeVar("C", bound="ChatTokens")
Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""The text of some messages; whether what asks for an answer follows them."""
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_NEAR_END = 3
"""Tokens; behind a special one there may be white space."""
_MARK = "\ue000"  # of no language
_COLUMNS = ("messages", "conversations", "prompt", "completion", "text")


class Rendered(NamedTuple):
    """The text of a sample, and from where to where it is answers."""

    text: str
    answers: list[tuple[int, int]]
    lost: int = 0
    """Answers that the template writes otherwise in the middle of a conversation, so that they are in no loss."""
    bare: bool = False
    """Without begin and end, which are added: no template wrote it."""


@dataclass(frozen=True)
class ChatTokens(Tokens):
    """Tokens of conversations, by a tokenizer with a template."""

    sequence: int = 0
    """The most tokens of a sample."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    stops: tuple[int, ...] = ()
    """Tokens at which the model beside the tokenizer ends what it writes."""

    @property
    def context(self) -> int | None:
        return self.vocabulary

    @property
    def numbers(self) -> int:
        return 2 * self.vocabulary

    def column(self, field: str) -> str:
        return ROW

    def document(self, row: TokenArray) -> TokenArray:
        return row

    def encode(self, documents: Sequence[bytes], tally: Counter[str] | None = None) -> list[TokenArray]:
        """The tokens of each conversation, none where no answer is left. Raises BadDocument."""
        tally = Counter() if tally is None else tally
        rendered: list[tuple[Rendered, ...]] = []
        for number, document in enumerate(documents):
            try:
                rendered.append(self._rendered(json.loads(document), tally))
            except BadRow as error:
                raise BadDocument(number, str(error)) from None
        rows: list[TokenArray] = []
        for number, some in enumerate(rendered):
            try:
                rows.append(self._joined(some, tally))
            except BadRow as error:
                raise BadDocument(number, str(error)) from None
        return rows

    def _rendered(self, row: dict[str, Any], tally: Counter[str]) -> tuple[Rendered, ...]:
        """The conversations that a row is: one."""
        kind, parts = sample_of(row)
        self._count_kind(kind, parts, tally)
        if kind == "text":
            return (Rendered(parts[0], [(0, len(parts[0]))], bare=True),)
        if kind == "prompt and completion":
            return (Rendered(parts[0] + parts[1], [(len(parts[0]), len(parts[0]) + len(parts[1]))], bare=True),)
        found = answers_of(self._template(row.get("tools")), parts, [*_special(self._tokenizer).values()])
        if found.lost:
            tally[f"{LEFT_OUT}: answers that the template writes otherwise before later turns"] += found.lost
        return (found,)

    def _joined(self, some: tuple[Rendered, ...], tally: Counter[str]) -> TokenArray:
        """The tokens of all of them, none where they are left out."""
        return self._row(some[0], tally)

    def _count_kind(self, kind: str, parts: Sequence[str | Message], tally: Counter[str]) -> None:
        """Count a row. Raises BadRow for one of another kind than those before it, and for special tokens in it."""
        others = [key for key in tally if key.startswith(f"{KINDS}: ") and key != f"{KINDS}: {kind}"]
        if others:
            before = others[0].partition(": ")[2]
            raise BadRow(f"has {kind}, and rows before it {before}: give each kind a source of its own")
        tally[f"{KINDS}: {kind}"] += 1
        self._refuse_special(parts)

    def _template(self, tools: Any) -> Render:
        """The tokenizer's own, with the tools of a row. Raises BadRow, as does what it gives."""
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
        tokenizer = cast(Any, self._tokenizer)
        if not tokenizer.chat_template:
            raise BadRow(
                f"has messages, and the tokenizer {self.name} has no chat template: take the one of a model that was "
                "made for chat (data.tokenizer), or give rows of prompt and completion"
            )

        def render(messages: Sequence[Message], asks: bool) -> str:
            try:
                return tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=asks
                )
            except Exception as error:  # a template is a program of somebody's
                why = " ".join(str(error).split()) or type(error).__name__
                raise BadRow(f"is refused by the chat template of the tokenizer {self.name}: {why}") from error

        return render

    def _refuse_special(self, parts: Sequence[str | Message]) -> None:
        """Text that would become a special token of its own, as the end of a turn in the middle of one."""
        if self.special == "parse":
            return
        if self.special == "text":
            raise UserError(
                'data.special_tokens = "text" is for documents: of conversations take "refuse", or "parse" where what '
                "they hold of special tokens is meant as such"
            )
        names = cast("list[str]", cast(Any, self._tokenizer).all_special_tokens)
        for part in parts:
            text = part if isinstance(part, str) else str(part.get("content") or "")
            if named := next((name for name in names if name in text), None):
                raise BadRow(
                    f"holds {named!r}, a special token of the tokenizer: leave the row out, or set "
                    'data.special_tokens = "parse" if it is meant as that token'
                )

    def _row(self, one: Rendered, tally: Counter[str]) -> TokenArray:
        """The tokens of a sample; of those that are no answer, so much more."""
        if not one.text:
            tally[EMPTY] += 1
            return np.zeros(0, np.uint32)
        found = cast(Any, self._tokenizer)(one.text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(found["input_ids"], np.int64)
        spans = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
        counted = np.zeros(len(ids), bool)
        for start, stop in one.answers:
            counted |= (spans[:, 1] > start) & (spans[:, 0] < stop)
        special = _special(self._tokenizer)
        if not one.bare:
            self._learn_stops(ids, counted, special)
        if not one.bare and counted.any() and not any(n in special for n in ids[counted][-_NEAR_END:].tolist()):
            tally[f"{OPEN}: without an end"] += 1
        if one.bare:  # of the two what the text has by itself is not written twice
            begin = [] if self.begin is None or ids[0] == self.begin else [self.begin]
            end = [] if ids[-1] == self.end else [self.end]
            ids = np.concatenate([np.array(begin, np.int64), ids, np.array(end, np.int64)])
            counted = np.concatenate([np.zeros(len(begin), bool), counted, np.ones(len(end), bool)])
        if len(ids) > self.sequence:
            if self.too_long == "refuse":
                raise BadRow(
                    f"has {len(ids):,} tokens, more than data.sequence = {self.sequence:,}: raise it, or set "
                    'data.too_long to "cut" or "drop"'
                )
            if self.too_long == "drop":
                tally[f"{LEFT_OUT}: conversations of more than {self.sequence:,} tokens"] += 1
                return np.zeros(0, np.uint32)
            tally[f"{CUT}: after {self.sequence:,} tokens"] += 1
            ids, counted = ids[: self.sequence], counted[: self.sequence]
        if not counted[1:].any():
            tally[f"{LEFT_OUT}: conversations without an answer within {self.sequence:,} tokens"] += 1
            return np.zeros(0, np.uint32)
        return np.where(counted, ids, ids + self.vocabulary).astype(np.uint32)

    def _learn_stops(self, ids: IntArray, counted: BoolArray, special: Container[int]) -> None:
        """Count, too, what begins the turn behind an answer that has no end, where that is what models stop at."""
        for at in np.flatnonzero(counted[:-1] & ~counted[1:]).tolist():
            if ids[at + 1] in self.stops and not any(n in special for n in ids[max(0, at + 1 - _NEAR_END) : at + 1]):
                counted[at + 1] = True


@lru_cache(2)
def _special(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, by number; the longest first, which begin others."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    named |= {n: one.content for n, one in tokenizer.added_tokens_decoder.items() if one.special}
    return dict(sorted(named.items(), key=lambda one: -len(one[1])))


class BadRow(ValueError):
    """What a row is or holds, as the end of a sentence about it."""


def chat_tokens(tokens: Tokens, data: DataPlan) -> ChatTokens:
    """The tokens of conversations. Raises UserError for a tokenizer that does not say where its tokens stand."""
    return with_template(ChatTokens, tokens, data, VERSION)


def with_template(kind: type[C], tokens: Tokens, data: DataPlan, version: object) -> C:
    """The tokens of rows of a kind. `version`: of the rules by which they are made. Raises UserError as above."""
    tokenizer = cast(Any, tokens)._tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        raise UserError(
            "answers are trained on by a tokenizer that says which characters a token stands for (tokenizer.json), and "
            f"{tokens.name} is none: set data.tokenizer to a directory of one"
        )
    stops = _stops_of(tokens.folder)
    settings = [tokens.digest, str(tokenizer.chat_template), data.sequence, data.too_long, version, stops]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
    own = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(kind(**own), digest=digest, sequence=data.sequence, too_long=data.too_long, stops=stops)


def _stops_of(folder: Path | None) -> tuple[int, ...]:
    """What `generation_config.json` says; nothing where there is none that can be read."""
    try:
        said: Any = json.loads((folder / "generation_config.json").read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return ()
    ends: Any = cast("dict[str, Any]", said).get("eos_token_id") if isinstance(said, dict) else None
    return tuple(n for n in (cast("list[Any]", ends) if isinstance(ends, list) else [ends]) if isinstance(n, int))


def sample_of(row: dict[str, Any]) -> tuple[str, list[Any]]:
    """What kind of sample a row is, and its messages, or its texts. Raises BadRow."""
    if "chosen" in row and "rejected" in row:
        raise BadRow('has chosen and rejected answers, which the task "dpo" takes: give conversations')
    for key in ("messages", "conversations"):
        if key in row:
            return "messages", messages_of(row[key], key)
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise BadRow('has nothing as its "completion": every row needs an answer')
            return "prompt and completion", [prompt, completion]
        turns = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt]
        turns += [[{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion]
        return "messages", [
            one for part, key in zip(turns, _COLUMNS[2:4], strict=True) for one in messages_of(part, key)
        ]
    if isinstance(row.get("text"), str):
        return "text", [row["text"]]
    near = [name for key in row for name in difflib.get_close_matches(key, _COLUMNS, n=1)]
    hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(row) or 'nothing'}"
    raise BadRow(f'has no "messages", no "prompt" with "completion" and no "text": {hint}')


def messages_of(value: Any, key: str) -> list[Message]:
    """The messages of a column, with the usual names of roles. Raises BadRow."""
    if isinstance(value, str):  # of a table of cells
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow(f'has a "{key}" that is no JSON') from None
    if not isinstance(value, list) or not value:
        raise BadRow(f'has a "{key}" that is no list of messages')
    messages: list[Message] = []
    for one in cast("list[Any]", value):
        if not isinstance(one, dict):
            raise BadRow(f'has a "{key}" with {json.dumps(one)[:40]} in it, which is no message: give role and content')
        message = {name: x for name, x in cast(Message, one).items() if x is not None}
        if "from" in message and "value" in message:
            message = {"role": message.pop("from"), "content": message.pop("value"), **message}
        role = message.get("role")
        message["role"] = _ROLES.get(str(role), role)
        content = message.get("content", "" if "tool_calls" in message else None)
        if not (isinstance(role, str) and isinstance(content, str)):
            raise BadRow(f'has a message without a role or without text as its content ("{key}")')
        messages.append(message)
    return messages


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
        if messages[turn].get("weight") == 0:  # as OpenAI's files say that an answer is not to be learnt
            continue
        before, prompt = render(messages[:turn], False), render(messages[:turn], True)
        until = text if turn == len(messages) - 1 else render(messages[: turn + 1], False)
        start = alike(prompt, until)
        if start < len(before):
            raise BadRow(
                f"is written by the chat template so that turn {turn + 1} changes what stands before it: its answers "
                "cannot be told from what they answer"
            )
        if text.startswith(until):
            answers.append((start, len(until)))
        elif (place := _in_the_middle(render, messages, turn, until, ends)) is not None:
            answers.append(place)
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
    render: Render, messages: Sequence[Message], turn: int, until: str, ends: Sequence[str]
) -> tuple[int, int] | None:
    """Where an answer stands that is written otherwise as the last turn, without its thoughts or with another end;
    None where that cannot be told.

    Its content is what changes when a mark stands in its place. Behind it is the end that it has as the last turn, or
    else one of `ends`.
    """
    content = str(messages[turn].get("content", "")).strip()
    text, prompt = render(messages, False), render(messages[:turn], True)
    marked = render([*messages[:turn], {**messages[turn], "content": _MARK}, *messages[turn + 1 :]], False)
    first, behind = alike(text, marked), alike(text[::-1], marked[::-1])
    start, stop = min(alike(text, prompt), first), len(text) - behind
    if not content or marked[first:] != _MARK + text[stop:] or text[:start] != until[:start]:
        return None
    for end in (until.rpartition(content)[2], *ends):
        if end and text.startswith(end, stop):
            return start, stop + len(end)
    return None
