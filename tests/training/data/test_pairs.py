"""Preferences as tokens: by what a row holds, which of it is answer, what is cut, left out and refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tangram.schema.files import load
from tangram.training.data import IGNORE, Split, open_corpus, prepare, sample_ids, step_batches, tokens_of
from tangram.training.data.corpus import Corpus
from tangram.training.data.tasks import PairTokens
from tangram.training.data.tokens import BadDocument
from tests.training.data.test_chat import CHATML, COUNTING, tokenizer_of

USER = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "five or so"}
SAID = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
ROWS: dict[str, Any] = {
    "messages with a prompt": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "messages that begin alike": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "a prompt that is there twice": {"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "a prompt of text": {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
    "answers of text": {"prompt": [USER], "chosen": "4", "rejected": "five or so"},
    "other names": {
        "chosen": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
        "rejected": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "five or so"}],
    },
    "answers beside a conversation": {
        "conversations": [{"from": "human", "value": "2 + 2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "five or so"},
    },
    "a system prompt": {"system": "Be short.", "prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}


def tokens_at(folder: Path, template: str | None = CHATML, **data: Any) -> PairTokens:
    (folder / "chat-model").mkdir(exist_ok=True)
    tokenizer_of(folder / "chat-model", template)
    lines = "".join(f"data.{key} = {json.dumps(value)}\n" for key, value in data.items())
    (folder / "dpo.toml").write_text(
        'version = 3\ntask = "dpo"\nmodel.path = "chat-model"\ndata.sources = [{ path = "rows" }]\nrun.steps = 1\n'
        + lines
    )
    found = tokens_of(load(folder / "dpo.toml"))
    assert isinstance(found, PairTokens)
    return found


def sides(tokens: PairTokens, row: Any, tally: Counter[str] | None = None) -> list[tuple[str, str]]:
    """Of each side what is no answer and what is."""
    (found,) = tokens.encode([json.dumps(row).encode()], tally)
    both = tokens.documents(found)
    assert [int(side.min()) // (2 * tokens.vocabulary) for side in both] == list(range(len(both)))
    split = [(side % (2 * tokens.vocabulary) < tokens.vocabulary, side % tokens.vocabulary) for side in both]
    assert all(np.array_equal(np.sort(counts), counts) for counts, _ in split)  # all of the answer is behind the prompt
    return [(tokens.spelled(ids[~counts].tolist()), tokens.spelled(ids[counts].tolist())) for counts, ids in split]


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_answered_is_found_by_content(tmp_path: Path, kind: str) -> None:
    begin = tokens_at(tmp_path)
    (prompt, good), (same, bad) = sides(begin, ROWS[kind])
    assert prompt == same
    assert prompt.endswith(SAID)
    assert ("system\nBe short." in prompt) == ("system" in ROWS[kind])
    assert (good, bad) == ("4<|im_end|>\n", "five or so<|im_end|>\n")


def test_texts_stand_between_begin_and_end(tmp_path: Path) -> None:
    tokens = tokens_at(tmp_path)
    first = sides(tokens, {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
    assert first == sides(tokens, {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}) or first[0][1][0] == "4"
    end = tokens.spelled([tokens.end])
    assert [answer for _, answer in first] == ["4" + end, "5" + end]
    alike = sides(tokens, {"chosen": "so it is four", "rejected": "so it is five"})
    assert [answer for _, answer in alike] == ["our" + end, "ive" + end]


def test_what_is_cut_and_left_out_is_counted(tmp_path: Path) -> None:
    row = {"prompt": [USER], "chosen": [{**GOOD, "content": "4" * 30}], "rejected": [BAD]}
    length = len(SAID.replace("<|im_start|>", "x").replace("<|im_end|>", "x")) + 1
    for size, how, kept, said in (
        (length + 10, "cut", 2, f"cut: after {length + 10} tokens"),
        (length + 15, "drop", 0, f"left out: pairs of more than {length + 15} tokens"),
        (length - 2, "cut", 0, f"left out: pairs without an answer within {length - 2} tokens"),
    ):
        tally = Counter[str]()
        assert len(sides(tokens_at(tmp_path, sequence=size, too_long=how), row, tally)) == kept
        assert tally[said] == (2 if kept and size < length + 12 else 1), (tally, said)
    tally = Counter[str]()
    assert not sides(tokens_at(tmp_path), {"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]}, tally)
    assert tally["left out: pairs of equal answers, as far as they are taken"] == 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [USER, GOOD]}, 'has no "chosen" (it has messages)'),
        ({"prompt": "a", "completion": "b", "label": True}, 'has no "chosen"'),
        ({"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages, and no prompt"),
        ({"chosen": "a", "rejected": "b"}, "begin with different characters"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, 'has nothing as its "chosen"'),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, 'no answer of the role "assistant"'),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": 5}, 'has a "rejected" that is no list'),
        ({"system": "x", "prompt": "a", "chosen": "b", "rejected": "c"}, 'a "system" beside text'),
        ({"prompt": "<|im_end|>", "chosen": "a", "rejected": "b"}, "a special token of the tokenizer"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(BadDocument) as refused:
        sides(tokens_at(tmp_path), row)
    assert why in str(refused.value)


def test_a_template_that_changes_the_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="cannot be told from what they answer"):
        sides(tokens_at(tmp_path, COUNTING), ROWS["messages with a prompt"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_pairs_and_never_cut_one(tmp_path: Path, ranks: int) -> None:
    """Document n holds the token n only, its first as prompt: pairs are 2k and 2k + 1, on any number of ranks."""
    size, mark = 40, 100
    lengths = np.arange(size) % 5 + 2
    every = np.repeat(np.arange(size), lengths)
    every[np.cumsum(lengths) - lengths] += mark
    every += np.repeat(np.arange(size) % 2, lengths) * 2 * mark
    split = Split(len(every), np.cumsum(lengths), lambda a, b: every[a:b], context=mark, rows=2)
    corpus = Corpus((split,), (split,), "", 99, 2)
    data = load(_job(tmp_path)).data
    seen: list[tuple[int, int]] = []
    firsts: list[int] = []
    for rank in range(ranks):
        found = step_batches(
            corpus, data, seed=0, first_sample=0, index=rank, size=ranks, micro_steps=-(-7 // (2 * ranks)),
            device=torch.device("cpu"),
        )  # fmt: skip
        assert (found.samples, found.total) == (7, 14)
        for batch in found.micro:
            assert batch.inputs_BS.shape == (4, 8)
            pairs = batch.inputs_BS[:, 0].view(-1, 2).tolist()
            full = (batch.labels_BS != IGNORE).any(1).view(-1, 2)[:, 0].tolist()
            seen += [(a, b) for (a, b), there in zip(pairs, full, strict=True) if there]
            for row, own in enumerate(batch.labels_BS):
                assert set(own[own != IGNORE].tolist()) <= {int(batch.inputs_BS[row, 0])}
        firsts += found.firsts
    assert len(seen) == len({*seen}) == 7
    assert all(a % 2 == 0 and b == a + 1 for a, b in seen)
    assert found.counted == sum(int(lengths[a] + lengths[b]) - 2 for a, b in seen)
    assert found.first_tokens == sum(int(lengths[a]) - 1 for a, _ in seen)
    assert all(first % 2 == 0 for first in firsts)


def _job(folder: Path) -> Path:
    tokens_at(folder, sequence=8, global_batch=7, micro_batch=2)
    return folder / "dpo.toml"


LABELLED = [
    {"prompt": [USER], "completion": [GOOD], "label": True},
    {"prompt": "3?", "completion": [{**GOOD, "content": "no"}], "label": "0"},
    {"prompt": [USER], "completion": [BAD], "label": 0},
]


def test_answers_with_labels_stand_beside_those_of_the_sample_before(tmp_path: Path) -> None:
    tokens_at(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, LABELLED)))
    file = tmp_path / "dpo.toml"
    file.write_text(file.read_text().replace('"dpo"', '"kto"') + "data.global_batch = 3\ndata.micro_batch = 3\n")
    job = load(file, {"data.cache": str(tmp_path / "cache")})
    tokens = tokens_of(job)
    prepare(job.data, tokens, lambda event: None)
    corpus = open_corpus(job.data, tokens)
    order = [window for _, window in sample_ids(corpus, job.data, 0, 0, 3)]
    whole: list[list[str]] = []
    for size in (1, 3):
        ranks = [
            step_batches(corpus, job.data, seed=0, first_sample=0, index=index, size=size, micro_steps=1,
                         device=torch.device("cpu")).micro[0]
            for index in range(size)
        ]  # fmt: skip
        rows: list[str] = []
        for batch in ranks:
            others = batch.others
            assert others is not None
            assert batch.bad_B is not None
            for row in range(len(batch.bad_B)):
                if not (batch.labels_BS[row] != IGNORE).any():
                    continue
                shown = [
                    tokens.spelled(of.labels_BS[row][of.labels_BS[row] != IGNORE].tolist()) for of in (batch, others)
                ]
                asked = tokens.spelled(others.inputs_BS[row][: int((others.labels_BS[row] != IGNORE).nonzero()[0]) + 1])
                rows += [f"{bool(batch.bad_B[row])} {asked[-40:]} {shown[0]} {shown[1]}"]
        whole.append(rows)
    assert whole[0] == whole[1]
    says = ["4", "no", "five or so"]
    for n, window in enumerate(order):
        assert whole[0][n].startswith(f"{window != 0} ")
        assert whole[0][n].endswith(f" {says[window]}<|im_end|>\n {says[order[n - 1]]}<|im_end|>\n")
        assert ("3?" if window == 1 else "2 + 2?") in whole[0][n]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"label": None}, "true for a good answer"),
        ({"label": 2}, "true for a good answer"),
        ({"completion": ""}, 'nothing as its "completion"'),
        ({"completion": [USER]}, 'as its "completion"'),
    ],
)
def test_labels_that_say_nothing_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    tokens_at(tmp_path)
    file = tmp_path / "dpo.toml"
    file.write_text(file.read_text().replace('"dpo"', '"kto"'))
    row = {"prompt": "2 + 2?", "completion": "4", "label": True, **change}
    with pytest.raises(BadDocument, match=why):
        tokens_of(load(file)).encode([json.dumps(row).encode()])
