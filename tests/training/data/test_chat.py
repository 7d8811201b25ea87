"""Conversations as tokens: which are in the loss, beside transformers' own marks, and what is refused of rows."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tangram.errors import UserError
from tangram.schema.files import load
from tangram.training.data import IGNORE, Corpus, Split, open_corpus, prepare, step_batches, tokens_of
from tangram.training.data.chat import ChatTokens, Rendered, answers_of
from tangram.training.data.tokens import BadDocument
from tangram.training.state.checkpointer import Progress
from tangram.training.state.export_hf import END_TEXT, byte_tokenizer
from tangram.training.step import loop
from tests.training.small import small_plan

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Its marks are the oracle; ours takes no notice of them."""
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As stock templates do: the last answer is written with its thoughts, those before without."""
CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
"""As stock templates do: what ends the whole conversation stands behind the last answer only."""
RETURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' and loop.last else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As stock templates do: the last answer has another end than those before."""
ASKS_TO_THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>"
    "{% if loop.last %}\nwell\n{% endif %}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As stock templates do: the model is asked with the begin of thoughts, which answers before the last have not."""
MEASURED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and not loop.last %} of {{ m.content | length }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{% endfor %}"
)
COUNTING = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure? é"},
    {"role": "assistant", "content": "Yes: 4. é"},
]


def tokenizer_of(folder: Path, template: str | None = CHATML, *, adds_begin: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    tokenizer.pad_token = tokenizer.eos_token  # which must not hide the end from the loss
    if adds_begin:
        special = [(END_TEXT, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{END_TEXT} $A", special_tokens=special)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def tokens_at(folder: Path, template: str | None = CHATML, **data: Any) -> ChatTokens:
    (folder / "chat-model").mkdir(exist_ok=True)
    tokenizer_of(folder / "chat-model", template)
    lines = "".join(f"data.{key} = {json.dumps(value)}\n" for key, value in data.items())
    (folder / "sft.toml").write_text(
        'version = 3\ntask = "sft"\nmodel.path = "chat-model"\ndata.sources = [{ path = "rows" }]\nrun.steps = 1\n'
        + lines
    )
    found = tokens_of(load(folder / "sft.toml"))
    assert isinstance(found, ChatTokens)
    return found


def encoded(tokens: ChatTokens, *rows: object, tally: Counter[str] | None = None) -> list[tuple[list[int], list[bool]]]:
    """The tokens of rows, and which of them are in the loss."""
    found = tokens.encode([json.dumps(row).encode() for row in rows], tally)
    return [((row % tokens.vocabulary).tolist(), (row < tokens.vocabulary).tolist()) for row in found]


def marked(tokens: ChatTokens, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[bool]]:
    """The same by transformers, of a template that has marks."""
    tokenizer: Any = tokens._tokenizer  # pyright: ignore[reportPrivateUsage]
    found = tokenizer.apply_chat_template(list(messages), return_assistant_tokens_mask=True, return_dict=True)
    return list(found["input_ids"]), [bool(x) for x in found["assistant_masks"]]


class Shifted(ChatTokens):
    def _row(self, one: Rendered, tally: Counter[str]) -> Any:
        row = super()._row(one, tally).astype(np.int64)
        shifted = np.roll(row < self.vocabulary, 1)
        return np.where(shifted, row % self.vocabulary, row % self.vocabulary + self.vocabulary)


class Twice(ChatTokens):
    def _row(self, one: Rendered, tally: Counter[str]) -> Any:
        said = [{"role": "user", "content": one.text}, {"role": "assistant", "content": one.text}]
        return super()._row(answers_of(self._template({}, tally), said), tally)


class Begun(ChatTokens):
    def _row(self, one: Rendered, tally: Counter[str]) -> Any:
        return np.concatenate([[self.begin + self.vocabulary], super()._row(one, tally)])  # pyright: ignore[reportOptionalOperand]


def test_the_difference_of_two_renderings_is_what_marks_say_and_mistakes_are_not(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path)
    some = [TURNS, TURNS[1:3], TURNS[:3], [*TURNS, {"role": "user", "content": "no answer"}]]
    for messages in some:
        (row,) = encoded(tokens, {"messages": messages})
        assert row == marked(tokens, messages)
        assert row[0].count(tokens.begin) == 1  # the template wrote it, and the tokenizer adds none
    for kind in (Shifted, Twice, Begun):
        wrong = kind(**vars(tokens))
        assert encoded(wrong, {"messages": TURNS}) != [marked(tokens, TURNS)], kind.__name__


def test_answers_that_a_template_writes_otherwise_before_later_turns_are_found(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path, THOUGHTS)
    ((ids, counted),) = encoded(tokens, {"messages": TURNS})
    answers = bytes(i if i < 256 else 35 for i, own in zip(ids, counted, strict=True) if own).decode()
    assert answers == "4#\n<think>\n\n</think>\n\nYes: 4. é#\n"  # "#": the end of a turn
    tally = Counter[str]()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "four"}, *TURNS[3:]]
    encoded(tokens_at(tmp_path, MEASURED), {"messages": turns}, tally=tally)  # what stands behind it is of it, too
    assert tally["left out: answers that the template writes otherwise before later turns"] == 1


def test_kinds_of_rows(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path)
    begin, end = tokens.begin, tokens.end
    (pair,) = encoded(tokens, {"prompt": "ab", "completion": "cd"})
    assert pair == ([begin, 97, 98, 99, 100, end], [False] * 3 + [True] * 3)
    tokens = tokens_at(tmp_path)
    (text,) = encoded(tokens, {"text": "ab", "id": 3})
    assert text == ([begin, 97, 98, end], [False, True, True, True])
    said = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    same: list[object] = [
        {"messages": TURNS[1:3]},
        {"conversations": said},
        {"messages": json.dumps(TURNS[1:3])},
        {"prompt": TURNS[1:2], "completion": TURNS[2:3]},
        {"prompt": "2 + 2?", "completion": TURNS[2:3]},
    ]
    rows = encoded(tokens, *same)
    assert all(row == rows[0] == marked(tokens, TURNS[1:3]) for row in rows)


LONG = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 200}]}
REFUSED: Mapping[str, tuple[str, list[object], str]] = {
    "no answer": (CHATML, [{"messages": TURNS[:2]}], 'has no turn of the role "assistant"'),
    "an answer first": (CHATML, [{"messages": TURNS[2:]}], "begins with an answer"),
    "a template that fails": (STRICT, [{"messages": TURNS}], "chat template of the tokenizer chat-model: no system"),
    "mixed": (CHATML, [{"messages": TURNS}, {"text": "x"}], "has text, and rows before it messages"),
    "preferences": (CHATML, [{"chosen": "a", "rejected": "b"}], "has chosen and rejected answers"),
    "a misspelt column": (CHATML, [{"mesages": TURNS}], 'did you mean "messages"?'),
    "no text": (CHATML, [{"messages": [{"role": "user", "content": 3}]}], "without a role or without text"),
    "an end in the middle": (CHATML, [{"prompt": "a", "completion": "<|im_end|>"}], "holds '<|im_end|>'"),
    "too long": (CHATML, [LONG], "more than data.sequence = 64"),
    "a template that rewrites": (COUNTING, [{"messages": TURNS}], "changes what stands before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_refused(tmp_path: Path, case: str) -> None:
    template, rows, why = REFUSED[case]
    tokens = tokens_at(tmp_path, template, sequence=64, too_long="refuse")
    with pytest.raises(BadDocument) as refused:
        encoded(tokens, *rows)
    assert why in str(refused.value)
    assert refused.value.document == len(rows) - 1


def test_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="has no chat template"):
        encoded(tokens_at(tmp_path, None), {"messages": TURNS})


def write_rows(folder: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        (folder / "a.json").write_text(json.dumps(rows))
    elif kind == "csv":
        cells = [
            "id,messages",
            *(f'{i},"' + json.dumps(r["messages"]).replace('"', '""') + '"' for i, r in enumerate(rows)),
        ]
        (folder / "a.csv").write_text("\n".join(cells))
    elif kind == "parquet":
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.Table.from_pylist(rows), folder / "a.parquet")
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(folder))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "datasets"])
def test_files_of_any_kind_are_the_same_samples_and_what_was_left_out_is_told(tmp_path: Path, kind: str) -> None:
    tokens = tokens_at(tmp_path, cache=str(tmp_path / "cache"), sequence=64, global_batch=4)
    job = load(tmp_path / "sft.toml")
    rows = [{"messages": [TURNS[1], {"role": "assistant", "content": "y" * n}]} for n in (3, 3, 40, 5, 9)]
    rows.append({"messages": [{"role": "user", "content": "x" * 70}, TURNS[2]]})
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows", kind, rows)
    prepare(job.data, tokens, lambda event: None)
    corpus = open_corpus(job.data, tokens)
    (split,) = corpus.training
    ids, counted = marked(tokens, rows[0]["messages"])
    assert split.read(0, len(ids)).tolist() == [
        i + (not c) * tokens.vocabulary for i, c in zip(ids, counted, strict=True)
    ]
    assert len(split.end_D) == 5
    (line,) = corpus.read
    assert "each of messages; cut: 2 after 64 tokens (data.too_long)" in line
    assert "1 conversations without an answer within 64 tokens" in line
    whole = step_batches(
        corpus, job.data, seed=0, first_sample=0, index=0, size=1, micro_steps=4, device=torch.device("cpu")
    )
    halves = [
        step_batches(
            corpus, job.data, seed=0, first_sample=0, index=i, size=2, micro_steps=2, device=torch.device("cpu")
        )
        for i in (0, 1)
    ]
    labels = torch.cat([micro.labels_BS for micro in whole.micro])
    assert torch.equal(labels, torch.cat([micro.labels_BS for half in halves for micro in half.micro]))
    counts = int((labels != IGNORE).sum())
    assert whole.counted == halves[0].counted == halves[1].counted == counts > 0
    inputs = torch.cat([micro.inputs_BS for micro in whole.micro])
    assert int(inputs.max()) < tokens.vocabulary


def test_plain_text_has_no_rows(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path, cache=str(tmp_path / "cache"))
    job = load(tmp_path / "sft.toml")
    (tmp_path / "rows").write_text("just text")
    with pytest.raises(UserError, match="has no rows: give JSON lines"):
        prepare(job.data, tokens, lambda event: None)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.cli import main

    tokens_at(tmp_path, cache=str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows", "jsonl", [{"messages": TURNS}])
    assert main(["data", "show", str(tmp_path / "sft.toml"), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "sample 0 of" in shown
    assert "<|im_start|>assistant\n[[4<|im_end|>\n]]<|im_start|>user" in shown
    assert "[[Yes: 4. é<|im_end|>\n]]" in shown


def test_a_step_without_an_answer_stops_the_run(tmp_path: Path) -> None:
    """No sample is made without one; whatever brings such a step about, nothing is trained on it."""
    plan: Any = small_plan(tmp_path)
    ends = np.array([400])

    def answers(number: int) -> Any:
        split = Split(400, ends, lambda start, stop: np.full(stop - start, number), context=256)
        here: Any = SimpleNamespace(data_index=0, data_size=2, device=torch.device("cpu"))
        return loop._batches(Corpus((split,), (split,), "", 0), Progress(), plan, here, plan.data.sequence)  # pyright: ignore[reportPrivateUsage]

    assert answers(255).counted > 0
    with pytest.raises(UserError, match="step 1 has no token in its loss"):
        answers(256)


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CLOSED, ["4<|im_end|>", f"Yes: 4. é<|im_end|>\n{END_TEXT}"]),
        (RETURNS, ["4<|im_end|>", f"Yes: 4. é{END_TEXT}"]),
        (ASKS_TO_THINK, ["</think>4<|im_end|>\n", "well\n</think>Yes: 4. é<|im_end|>\n"]),
    ],
)
def test_answers_before_the_last_are_found_where_the_template_ends_them_otherwise(
    tmp_path: Path, template: str, answers: list[str]
) -> None:
    tally = Counter[str]()
    tokens = tokens_at(tmp_path, template)
    ((ids, counts),) = encoded(tokens, {"messages": TURNS}, tally=tally)
    runs = [[i for i, _ in some] for own, some in groupby(zip(ids, counts, strict=True), lambda one: one[1]) if own]
    assert [tokens.spelled(run) for run in runs] == answers
    assert not [key for key in tally if "otherwise" in key or "without an end" in key]


def test_answers_of_weight_0_are_in_no_loss(tmp_path: Path) -> None:
    turns = [dict(turn) for turn in TURNS]
    turns[2] |= {"weight": 0}
    turns[4] |= {"weight": 1}
    tokens = tokens_at(tmp_path)
    ((ids, counts),) = encoded(tokens, {"messages": turns})
    ((whole, _),) = encoded(tokens, {"messages": TURNS})
    assert ids == whole
    assert tokens.spelled([i for i, own in zip(ids, counts, strict=True) if own]) == "Yes: 4. é<|im_end|>\n"


def test_a_source_of_which_all_is_left_out_says_why(tmp_path: Path) -> None:
    tokens_at(tmp_path, sequence=8)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text(json.dumps({"messages": TURNS[:3]}))
    job = load(tmp_path / "sft.toml", {"data.cache": str(tmp_path / "cache")})
    with pytest.raises(UserError, match="all of it is left out: 1 conversations without an answer within"):
        prepare(job.data, tokens_of(job), lambda event: None)


def test_a_template_without_an_end_of_answers_is_told(tmp_path: Path) -> None:
    endless = CHATML.replace("{{ m.content }}<|im_end|>\n{% endgeneration %}", "{{ m.content }}{% endgeneration %}")
    tally = Counter[str]()
    encoded(tokens_at(tmp_path, endless), {"messages": TURNS}, tally=tally)
    assert tally["answers: without an end"] == 1
