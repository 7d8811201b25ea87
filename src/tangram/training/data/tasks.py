"""What a job's task makes of the rows of its sources: one row of a table for each task; and preferences as tokens.

Of a row of preferences two conversations are made, that with the chosen answer and that with the rejected one. It has
`chosen` and `rejected`, of text or messages, and a `prompt`, or both begin with what they answer. Only the answers are
in the loss, of several turns all that follows the prompt. A token of a rejected conversation is written as twice
`vocabulary` more than it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from tangram.schema.job import DataPlan, Job
from tangram.schema.tuning import TaskName
from tangram.training.data.answers import Rendered, alike, fitted
from tangram.training.data.chat import ChatTokens, chat_tokens, with_template
from tangram.training.data.files import LEFT_OUT
from tangram.training.data.messages import (
    BadRow,
    Message,
    bare,
    behind_system,
    history_of,
    is_learnt,
    is_to_learn,
    messages_of,
    question_of,
    refuse_images,
)
from tangram.training.data.tokens import TokenArray, Tokens, load_tokens

VERSION = ["pairs", 7]
"""To be raised when the same rows come to give other tokens."""
_SIDES = ("chosen", "rejected")
_COLUMNS: Mapping[str, Sequence[str]] = MappingProxyType({"dpo": _SIDES, "kto": ("prompt", "completion", "label")})
"""By task, what its rows need."""

Messages = list[Message]


@dataclass(frozen=True)
class PairTokens(ChatTokens):
    """Tokens of pairs of answers."""

    @property
    def numbers(self) -> int:
        return 4 * self.vocabulary

    @property
    def rows(self) -> int:
        return 2

    def documents(self, row: TokenArray) -> list[TokenArray]:
        if not len(row):
            return []
        at = int((row < 2 * self.vocabulary).sum())
        return [row[:at], row[at:]]

    def _rendered(self, row: dict[str, Any], tally: Counter[str]) -> tuple[Rendered, ...]:
        found = pair_of(row)
        prompt, *answers = found
        parts = [part for some in found for part in ([some] if isinstance(some, str) else some)]
        self._count_kind(f"chosen and rejected {'text' if isinstance(prompt, str) else 'messages'}", parts, tally)
        return tuple(self._side(prompt, one, row, tally) for one in answers)

    def _joined(self, some: tuple[Rendered, ...], tally: Counter[str]) -> TokenArray:
        own = Counter[str]()
        chosen, rejected = (self._row(one, own) for one in some)
        if lost := [key for key in own if key.startswith(LEFT_OUT)]:
            tally[lost[0].replace("conversations", "pairs")] += 1
        elif np.array_equal(chosen, rejected):
            tally[f"{LEFT_OUT}: pairs of equal answers, as far as they are taken"] += 1
        else:
            tally.update(own)
            return np.concatenate([chosen, rejected + np.uint32(2 * self.vocabulary)])
        return np.zeros(0, np.uint32)

    def _side(
        self, prompt: str | Messages, answer: str | Messages, row: dict[str, Any], tally: Counter[str]
    ) -> Rendered:
        if isinstance(prompt, str):
            text = prompt + cast(str, answer)
            return Rendered(text, [(len(prompt), len(text))], bare=True)
        render = self._template(row, tally)
        messages = fitted(render, [*prompt, *cast(Messages, answer)])
        prompt, text = messages[: len(prompt)], render(messages, False)
        self._count_unwritten(render, messages, text, row, tally)
        start = alike(render(prompt, True), text)
        if start < len(render(prompt, False)):
            raise BadRow(
                "is written by the chat template so that an answer changes what stands before it: the answers cannot "
                "be told from what they answer"
            )
        return Rendered(text, [(start, len(text))])


@dataclass(frozen=True)
class LabelledTokens(PairTokens):
    """Tokens of answers that are good or bad; those of bad ones are written as those of rejected ones."""

    @property
    def labelled(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        return 1

    def documents(self, row: TokenArray) -> list[TokenArray]:
        return [one for one in super().documents(row) if len(one)]

    def _rendered(self, row: dict[str, Any], tally: Counter[str]) -> tuple[Rendered, ...]:
        """A good answer and a bad one, of which one is nothing."""
        if all(row.get(key) is not None for key in _SIDES):
            if row.get("label") is not None:
                raise BadRow('has a "label" beside "chosen" and "rejected": leave out what is not meant')
            return super()._rendered(row, tally)
        prompt, answer = pair_of(row, ("completion",), "kto")
        parts = [part for some in (prompt, answer) for part in ([some] if isinstance(some, str) else some)]
        self._count_kind(f"labelled {'text' if isinstance(prompt, str) else 'messages'}", parts, tally)
        one, none = self._side(prompt, answer, row, tally), Rendered("", [])
        return (one, none) if _is_good(row) else (none, one)

    def _joined(self, some: tuple[Rendered, ...], tally: Counter[str]) -> TokenArray:
        shift = 2 * self.vocabulary
        rows = [self._row(one, tally) + np.uint32(shift * bad) for bad, one in enumerate(some) if one.text]
        return np.concatenate(rows)


def _is_good(row: dict[str, Any]) -> bool:
    """The label of a row, which a table of cells may have as text. Raises BadRow."""
    label = row.get("label")
    label = label.strip().lower() if isinstance(label, str) else label
    if label in (True, "true", "1"):
        return True
    if label in (False, "false", "0"):
        return False
    raise BadRow(f'has {json.dumps(label)[:40]} as its "label": give true for a good answer, false for a bad one')


def labelled_tokens(tokens: Tokens, data: DataPlan) -> LabelledTokens:
    """The tokens of answers with labels. Raises UserError as `pair_tokens`."""
    return with_template(LabelledTokens, tokens, data, ["labelled", 6])


def pair_tokens(tokens: Tokens, data: DataPlan) -> PairTokens:
    """The tokens of pairs. Raises UserError for a tokenizer that does not say where its tokens stand."""
    return with_template(PairTokens, tokens, data, VERSION)


def pair_of(row: dict[str, Any], sides: Sequence[str] = _SIDES, task: TaskName = "dpo") -> list[str] | list[Messages]:
    """What is answered, and the answers, one for each side: all texts, or all messages. Raises BadRow."""
    if lacks := [key for key in _COLUMNS[task] if key not in row]:
        has, takes = ", ".join(row) or "nothing", " and ".join(_COLUMNS[task])
        takes += ", or of chosen and rejected" if task == "kto" else ""
        raise BadRow(f'has no "{lacks[0]}" (it has {has}): the task "{task}" takes rows of {takes}')
    refuse_images(row)
    prompt, answers = row.get("prompt", row.get("conversations")), [row[key] for key in sides]
    texts = all(isinstance(x, str) for x in answers)
    prompt = (_question(row) or None) if texts and prompt is None else prompt
    if texts and (prompt is None or isinstance(prompt, str)):
        return bare(row, _texts(prompt, answers, sides))
    turns = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in answers]
    answers = [messages_of(one, key) for one, key in zip(turns, sides, strict=True)]
    if prompt is None:
        history = answers[0][: alike(answers[0], answers[-1])]
        if not history or history[0]["role"] == "assistant":
            question = _question(row)
            history, answers = [*question, *history], [[*question, *one] for one in answers]
    else:
        history = messages_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, "prompt")
    if all(one[: len(history)] == history for one in answers):
        answers = [one[len(history) :] for one in answers]
    if not history:
        raise BadRow("has answers that begin with different messages, and no prompt: give what they answer")
    history = behind_system(row, history)
    if any(map(is_to_learn, history)):
        raise BadRow("has a message that is to be learnt in its prompt: answers alone are compared")
    for one, key in zip(answers, sides, strict=True):
        if not one or one[0]["role"] != "assistant" or one[-1]["role"] != "assistant":
            raise BadRow(f'has no answer of the role "assistant" after the prompt as its "{key}"')
        if not all(map(is_learnt, one)):
            raise BadRow(f'has a message that is not to be learnt in its "{key}": answers are compared in full')
    return [history, *answers]


def _question(row: dict[str, Any]) -> Messages:
    """What a row asks in a column of its own, behind its history; nothing without one."""
    found = question_of(row)
    return [*history_of(row), {"role": "user", "content": found[1]}] if found else []


def _texts(prompt: str | None, answers: list[str], sides: Sequence[str]) -> list[str]:
    if prompt is None:
        at = alike(answers[0], answers[-1])
        at -= answers[0][:at].endswith(" ")  # which a token takes with the word behind it
        prompt, answers = answers[0][:at], [one[at:] for one in answers]
        if not prompt:
            raise BadRow("has answers that begin with different characters, and no prompt: give what they answer")
    for answer, key in zip(answers, sides, strict=True):
        if not answer:
            raise BadRow(f'has nothing as its "{key}" after the prompt: every row needs an answer there')
    return [prompt, *answers]


TOKENS: Mapping[TaskName, Callable[[Tokens, DataPlan], Tokens]] = MappingProxyType(
    {
        "pretrain": lambda tokens, data: tokens,
        "sft": chat_tokens,
        "dpo": pair_tokens,
        "kto": labelled_tokens,
        "distill": chat_tokens,
    }
)


def tokens_of(job: Job) -> Tokens:
    """The tokens that a job asks for. Raises UserError as `load_tokens`, and where the task cannot take them."""
    task = "pretrain" if job.distill is not None and job.distill.on == "text" else job.task
    return TOKENS[task](load_tokens(job.data, job.model.path), job.data)
