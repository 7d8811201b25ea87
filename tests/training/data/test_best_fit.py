"""Whole documents share samples: how full these are, that nothing is lost, doubled or seen by another document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.schema.files import load
from tangram.training.data import IGNORE, Split, open_corpus, padding, prepare, step_batches, tokens_of
from tangram.training.data.samples import Batch, best_fit, collate
from tests.training.small import SMALL_MODEL
from tests.training.tuning_tasks import write_folder

CPU, FILL = torch.device("cpu"), 7


def split_of(lengths: Sequence[int], context: int | None = None) -> Split:
    """Documents of these lengths, of tokens of which no two are alike."""
    every = np.arange(100, 100 + sum(lengths))
    if context is not None:  # every third is no answer
        every = np.where(np.arange(len(every)) % 3 == 0, every + context, every)
    return Split(len(every), np.cumsum(lengths), lambda a, b: every[a:b], context, best_fit=True)


def rows_of(split: Split, sequence: int) -> list[Batch]:
    return [collate([(split, one)], sequence, FILL, CPU) for one in range(split.windows(sequence))]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(2, 17), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_label_is_counted_once_beside_its_own_document(lengths: list[int], sequence: int, chat: bool) -> None:
    split = split_of(lengths, 1 << 20 if chat else None)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen: list[int] = []
    for window, batch in enumerate(rows_of(split, sequence)):
        assert batch.positions_BS is not None
        inputs, labels, positions = (x[0].tolist() for x in (batch.inputs_BS, batch.labels_BS, batch.positions_BS))
        assert positions[0] == 0
        for at in range(sequence):
            if inputs[at] == FILL:
                assert labels[at] == IGNORE
                continue
            if at and positions[at]:
                assert positions[at] == positions[at - 1] + 1
                assert inputs[at] == inputs[at - 1] + 1
            if labels[at] != IGNORE:
                assert labels[at] == inputs[at] + 1
                assert document[labels[at] - 100] == document[inputs[at] - 100]
                seen.append(labels[at])
        filled = [at for at in range(sequence) if inputs[at] == FILL]
        assert [positions[at] for at in filled] == list(range(len(filled)))
        assert split.labels([window], sequence).tolist() == [sum(label != IGNORE for label in labels)]
    alone = [
        collate([(split, n)], sequence, FILL, CPU, single=True) for n in range(split.windows(sequence, single=True))
    ]
    expected = [label for batch in alone for label in batch.labels_BS[0].tolist() if label != IGNORE]
    assert sorted(seen) == sorted(expected)


def test_conversations_fill_their_samples() -> None:
    """Lengths as chat has them: long-tailed, and cut at the length of a sample."""
    sizes = np.minimum(np.random.default_rng(0).lognormal(5.2, 0.9, 4000).astype(np.int64) + 8, 1023)
    packs = best_fit(sizes, 1024)
    assert sorted(packs.members_M.tolist()) == list(range(len(sizes)))
    each = [sizes[packs.of(one)].sum() for one in range(len(packs.first_W) - 1)]
    assert max(each) <= 1024
    assert sizes.sum() / (1024 * len(each)) >= 0.97
    assert sizes.sum() / (1024 * len(sizes)) < 0.5  # one to a sample
    in_turn, room = 1, 1024
    for size in sizes.tolist():  # as they come
        in_turn, room = (in_turn + 1, 1024 - size) if size > room else (in_turn, room - size)
    assert len(each) < 0.9 * in_turn


def test_no_document_sees_another() -> None:
    """The losses of a model that knows documents by positions are those of each alone; not without the positions."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **{**SMALL_MODEL, "vocab_size": 600}))
    split = split_of([9, 30, 4, 21, 12, 33, 7, 2, 18, 25])

    def losses(batches: list[Batch], *, told: bool) -> float:
        total = 0.0
        for one in batches:
            positions = {"position_ids": one.positions_BS} if told else {}
            logits = model(input_ids=one.inputs_BS, use_cache=False, **positions).logits
            total += float(torch.nn.functional.cross_entropy(logits[0], one.labels_BS[0], reduction="sum"))
        return total

    with torch.no_grad():
        alone = [collate([(split, n)], 40, FILL, CPU, single=True) for n in range(split.windows(40, single=True))]
        expected, packed = losses(alone, told=False), rows_of(split, 40)
        assert len(packed) == 4 < len(alone)
        assert losses(packed, told=True) == pytest.approx(expected, rel=1e-6)
        assert losses(packed, told=False) != pytest.approx(expected, rel=1e-5)


def test_a_job_of_conversations_shares_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `tangram data show` prints, what a step counts, and how full samples are."""
    folder = write_folder(tmp_path)
    more = {
        "data.packing": '"best-fit"',
        "data.sequence": "512",
        "data.cache": str(folder / "cache"),
        "data.global_batch": "2",
    }
    job = load(folder / "sft.toml", more)
    prepare(job.data, tokens_of(job), lambda event: None)
    corpus = open_corpus(job.data, tokens_of(job))
    (split,) = corpus.training
    assert split.windows(512) < 0.5 * split.windows(512, single=True) == 20
    assert padding(corpus, job.data) < 0.1
    batches = step_batches(
        corpus, job.data, seed=0, first_sample=0, index=0, size=1, micro_steps=2, device=CPU
    )  # fmt: skip
    assert batches.counted == sum(int((one.labels_BS != IGNORE).sum()) for one in batches.micro)
    words = [word for key, value in more.items() for word in ("--set", f"{key}={value}")]
    assert main(["data", "show", str(folder / "sft.toml"), "--samples", "1", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("<|im_start|>assistant\n[[") == shown.count("<|im_start|>assistant") > 3
    with pytest.raises(UserError, match='take "best-fit", or "single"'):
        load(folder / "sft.toml", {"data.packing": '"packed"'})
