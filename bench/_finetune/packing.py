"""Conversations that share samples: how full these are, and whether one can be seen from another."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench._finetune.job import ALONE, planned, write_job
from bench._finetune.speed import trl
from tangram.hardware.measuring.measure import Row
from tangram.training.data import open_corpus, padding, tokens_of
from tangram.training.objective.packing import respects_documents


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures, and beside them TRL's best fit of the same lengths where it is installed."""
    write_job(folder, large=False, count=200 if quick else 2000)
    single, packed = (planned(folder, ALONE, 4, **{"data.packing": f'"{one}"'}) for one in ("single", "best-fit"))
    corpus = open_corpus(single.data, tokens_of(single))
    yield Row("a conversation to a sample of 1,024: places with a token", "", 1 - padding(corpus, single.data),
              better="higher")  # fmt: skip
    full = 1 - padding(open_corpus(packed.data, tokens_of(packed)), packed.data)
    (split,) = corpus.training
    start, stop = split.spans(np.arange(split.windows(1024, single=True)), 1024, single=True)
    peers = {"TRL": _theirs((stop - start).tolist())} if trl() is not None else {}
    yield Row("best fit: places with a token", "", full, peers, target=0.97, better="higher")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "chat-model", dtype=torch.float32)
    leaks = 0.0 if respects_documents(model) else 1.0
    yield Row("best fit: conversations that see another, by the probe of gradients", "", leaks, target=0.0)


def _theirs(sizes: list[int]) -> float:
    dataset = importlib.import_module("datasets").Dataset
    packs = trl().pack_dataset(dataset.from_dict({"input_ids": [[0] * n for n in sizes]}), 1024, "bfd")
    return sum(sizes) / (1024 * len(packs))
