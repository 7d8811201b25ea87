"""Conversations as tokens of which only the answers are in the loss: what `Tokens` is for text.

A row of a source is a conversation by what it holds: `messages` (or `conversations`), `prompt` and `completion`, or
`text`. Conversations are rendered by the tokenizer's own template, and answers found in that (`answers`). What the
model is given at a turn, the generation prompt included, is no answer; all that follows of the turn is, its end
included, and where it has none, the token of the next turn at which the model stops, as GLM's do.

A token that is no answer is written as `vocabulary` more than it is (`Split.context`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tangram.errors import UserError
from tangram.schema.job import DataPlan
from tangram.training.data.answers import Render, Rendered, answers_of, asks_always, begins_next, fitted, unwritten
from tangram.training.data.files import LEFT_OUT, ROW
from tangram.training.data.messages import INSTRUCTIONS, BadRow, Message, parsed, sample_of, tools_of
from tangram.training.data.sources import EMPTY
from tangram.training.data.tokens import BadDocument, TokenArray, Tokens

KINDS = "conversations"
CUT = "cut"
OPEN = "answers"
ASKED = "beside answers"
NOTHING = "answers that say nothing"
DATE = "date"
USUAL_DATE = date(2024, 7, 26)
"""What templates of Llama 3 write where they are told no other and have no clock."""
VERSION = 10
"""To be raised when the same rows come to give other tokens."""

IntArray, BoolArray = npt.NDArray[np.int64], npt.NDArray[np.bool_]
C = TypeVar("C", bound="ChatTokens")
_CLOCK = "strftime_now"
_PROBE = "?!"
_NEAR_END = 3
"""Tokens; behind a special one there may be white space."""


@dataclass(frozen=True)
class ChatTokens(Tokens):
    """Tokens of conversations, by a tokenizer with a template."""

    sequence: int = 0
    """The most tokens of a sample."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    stops: tuple[int, ...] = ()
    """Tokens at which the model beside the tokenizer ends what it writes."""
    day: date | None = None
    """What a template that asks for the date writes; None: `USUAL_DATE`."""

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
        """The conversations that a row is: one, or none where it is left out."""
        kind, parts = sample_of(row)
        self._count_kind(kind, parts, tally)
        if kind == "text":
            return (Rendered(parts[0], [(0, len(parts[0]))], bare=True),)
        if kind == "prompt and completion":
            return (Rendered(parts[0] + parts[1], [(len(parts[0]), len(parts[0]) + len(parts[1]))], bare=True),)
        if kind == INSTRUCTIONS and not parts[-1]["content"].strip():
            tally[f"{LEFT_OUT}: {INSTRUCTIONS} without an answer"] += 1
            return ()
        render = self._template(row, tally)
        parts = fitted(render, parts)
        found = answers_of(render, parts, [*_special(self._tokenizer).values()])
        self._count_unwritten(render, parts, found.text, row, tally)
        if found.lost:
            tally[f"{LEFT_OUT}: answers that the template writes otherwise before later turns"] += found.lost
        if found.marked:
            tally[f"{ASKED}: messages"] += found.marked
        if found.empty:
            tally[f"{NOTHING}: all"] += found.empty
        return (found,)

    def _joined(self, some: tuple[Rendered, ...], tally: Counter[str]) -> TokenArray:
        """The tokens of all of them, none where they are left out."""
        return self._row(some[0], tally) if some else np.zeros(0, np.uint32)

    def _count_kind(self, kind: str, parts: Sequence[str | Message], tally: Counter[str]) -> None:
        """Count a row. Raises BadRow for one of another kind than those before it, and for special tokens in it."""
        others = [key for key in tally if key.startswith(f"{KINDS}: ") and key != f"{KINDS}: {kind}"]
        if others:
            before = others[0].partition(": ")[2]
            raise BadRow(f"has {kind}, and rows before it {before}: give each kind a source of its own")
        tally[f"{KINDS}: {kind}"] += 1
        self._refuse_special(parts)

    def _count_unwritten(
        self, render: Render, messages: Sequence[Message], text: str, row: dict[str, Any], tally: Counter[str]
    ) -> None:
        """Count what the template leaves out of a row. Raises BadRow for a message of which it writes nothing."""
        for what, count in unwritten(render, messages, tools_of(row), text).items():
            if count:
                tally[f"{LEFT_OUT}: {what} that the template does not write"] += count

    def _template(self, row: dict[str, Any], tally: Counter[str]) -> Render:
        """The tokenizer's own, with what stands beside the messages of a row. Raises BadRow, as does what it gives."""
        tools = tools_of(row)
        options: dict[str, Any] = {"date_string": self.day.strftime("%d %b %Y")} if self.day else {}
        options |= parsed(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
        tokenizer = cast(Any, self._tokenizer)
        if not tokenizer.chat_template:
            raise BadRow(
                f"has messages, and the tokenizer {self.name} has no chat template: take the one of a model that was "
                "made for chat (data.tokenizer), or give rows of prompt and completion"
            )

        if asks_for_date := _CLOCK in str(tokenizer.chat_template):
            tally[f"{DATE}: {self.day or USUAL_DATE}"] = 1

        def render(messages: Sequence[Message], asks: bool) -> str:
            try:
                template = tokenizer.get_chat_template(tools=tools)
                template = _stopped_clock(self.day or USUAL_DATE) + template if asks_for_date else template
                text = tokenizer.apply_chat_template(
                    in_parts(messages) if takes_parts(tokenizer, template) else list(messages),
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=asks,
                    **options,
                )
                if asks:
                    return text
                text = text.removesuffix(always_prompt(tokenizer, template, self.stops))
                return text + end_of(tokenizer, template, self.stops, messages[-1])
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
            text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
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
            lacks = f"within {self.sequence:,} tokens" if one.answers else "that is to be learnt"
            tally[f"{LEFT_OUT}: conversations without an answer {lacks}"] += 1
            return np.zeros(0, np.uint32)
        return np.where(counted, ids, ids + self.vocabulary).astype(np.uint32)

    def _learn_stops(self, ids: IntArray, counted: BoolArray, special: Container[int]) -> None:
        """Count, too, what begins the turn behind an answer that has no end, where that is what models stop at."""
        for at in np.flatnonzero(counted[:-1] & ~counted[1:]).tolist():
            if ids[at + 1] in self.stops and not any(n in special for n in ids[max(0, at + 1 - _NEAR_END) : at + 1]):
                counted[at + 1] = True


@lru_cache(2)
def _stopped_clock(day: date) -> str:
    """A macro in front of a template, in the place of the function by which it asks for today's date."""
    codes = [f"%{fill}{letter}" for fill in ("", "-") for letter in "aAbBcdDeFGgHIjklmMnpPrRsSTuUVwWxXyYzZ"]
    values = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in [*codes, "%%"])
    return "{% macro " + _CLOCK + "(format) %}{{ format" + values + " }}{% endmacro %}\n"


@lru_cache(4)
def always_prompt(tokenizer: Any, template: str, stops: tuple[int, ...]) -> str:
    """With what a template asks the model where it is not to, too."""
    ends = [tokenizer.eos_token or "", *tokenizer.convert_ids_to_tokens(stops)]
    return asks_always(_bare(tokenizer, template), ends, [*_special(tokenizer).values()])


def end_of(tokenizer: Any, template: str, stops: tuple[int, ...], last: Message) -> str:
    """What ends a last turn of which the template writes none: that with which the next one would begin."""
    return "" if last["role"] != "assistant" else _ends(tokenizer, template, stops, bool(last.get("tool_calls")))


@lru_cache(8)
def _ends(tokenizer: Any, template: str, stops: tuple[int, ...], calls: bool) -> str:
    special = [*_special(tokenizer).values()]
    return begins_next(_bare(tokenizer, template), calls, tokenizer.convert_ids_to_tokens(stops), special)


@lru_cache(4)
def takes_parts(tokenizer: Any, template: str) -> bool:
    """Whether a template writes no content but what comes in parts, as those of models that see images do."""

    def writes(content: Any) -> bool:
        try:
            return _PROBE in _bare(tokenizer, template)([Message(role="user", content=content)], False)
        except BadRow:
            return False

    return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])


def in_parts(messages: Sequence[Message]) -> list[Message]:
    return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]


def _bare(tokenizer: Any, template: str) -> Render:
    """The template without what stands beside messages."""

    def render(messages: Sequence[Message], asks: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # a template is a program of somebody's
            raise BadRow(str(error)) from error

    return render


@lru_cache(2)
def _special(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, by number; the longest first, which begin others."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    named |= {n: one.content for n, one in tokenizer.added_tokens_decoder.items() if one.special}
    return dict(sorted(named.items(), key=lambda one: -len(one[1])))


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
    stops, template = _stops_of(tokens.folder), str(tokenizer.chat_template)
    settings = [tokens.digest, template, data.sequence, data.too_long, version, stops]
    if any(name in template for name in (_CLOCK, "date_string")):
        settings.append(str(data.date or USUAL_DATE))
    elif data.date is not None:
        raise UserError(f"the chat template of the tokenizer {tokens.name} writes no date: leave data.date out")
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
    own = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    limits = {"sequence": data.sequence, "too_long": data.too_long}
    return replace(kind(**own), digest=digest, stops=stops, day=data.date, **limits)


def _stops_of(folder: Path | None) -> tuple[int, ...]:
    """What `generation_config.json` says; nothing where there is none that can be read."""
    try:
        said: Any = json.loads((folder / "generation_config.json").read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return ()
    ends: Any = cast("dict[str, Any]", said).get("eos_token_id") if isinstance(said, dict) else None
    return tuple(n for n in (cast("list[Any]", ends) if isinstance(ends, list) else [ends]) if isinstance(n, int))
