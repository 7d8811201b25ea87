"""From text to batches on one core, ours beside `datasets`; both tokenise bytes, and one core has one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bench._training.job import GLOBAL_BATCH, SEQUENCE, job
from tangram.hardware.measuring.measure import Row, paired
from tangram.schema.job import DataPlan
from tangram.training import data

BATCHES = 2000


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows(3 if quick else 15, folder)
    finally:
        torch.set_num_threads(before)


def _rows(turns: int, folder: Path) -> Iterable[Row]:
    plan = job(folder).data
    listed = data.list_files(plan.sources[0])
    files, size = [listed.path(i) for i in range(len(listed.files))], listed.size + 2 * len(listed.files)
    made: list[tuple[float, float]] = []
    for turn in range(turns):
        own = plan.model_copy(update={"cache": str(folder / f"ours-{turn}")})
        made.append((_once(lambda own=own: data.prepare(own, data.BYTES, lambda event: None)),
                     _once(lambda turn=turn: packed(files, folder / f"theirs-{turn}"))))  # fmt: skip
    found = paired(made[1:] or made)
    yield Row("text to packed tokens, once", "million tokens/s", size / found.ours / 1e6,
              {"datasets, two maps": size / found.peer / 1e6}, target_ratio=1.0, better="higher")  # fmt: skip
    ours, theirs = own_batches(plan), their_batches(packed(files, folder / "theirs"))
    tokens = GLOBAL_BATCH * SEQUENCE * BATCHES
    taken = [(_once(lambda: _take(ours)), _once(lambda: _take(theirs))) for _ in range(turns + 1)]
    found = paired(taken[1:])
    yield Row("packed tokens to batches, shuffled", "million tokens/s", tokens / found.ours / 1e6,
              {"datasets, a loader": tokens / found.peer / 1e6}, target_ratio=1.0, better="higher")  # fmt: skip


def _once(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _take(batches: Iterable[object]) -> None:
    for _ in itertools.islice(batches, BATCHES):
        pass


def own_batches(plan: DataPlan) -> Iterable[object]:
    """Ours: an endless stream."""
    data.prepare(plan, data.BYTES, lambda event: None)
    return data.Stream(data.open_corpus(plan, data.BYTES), plan)


def packed(files: list[Path], cache: Path) -> Any:
    """As transformers' own examples do it: a map that tokenises, a map that packs, both kept on the disk."""
    import datasets as datasets_  # pyright: ignore[reportMissingTypeStubs]

    datasets: Any = datasets_

    datasets.disable_progress_bars()
    texts = datasets.Dataset.from_dict({"text": [path.read_text(errors="replace") for path in files]})
    cache.mkdir()

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        found = [np.frombuffer(b"\0" + text.encode() + b"\0", np.uint8) for text in rows["text"]]
        return {"ids": [ids.astype(np.int32) for ids in found]}

    def pack(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        whole = np.concatenate([np.asarray(ids, np.int32) for ids in rows["ids"]])
        return {"input_ids": [*whole[: len(whole) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)]}

    ids = texts.map(tokenise, batched=True, remove_columns=["text"], cache_file_name=str(cache / "ids.arrow"))
    return ids.map(pack, batched=True, remove_columns=["ids"], cache_file_name=str(cache / "packed.arrow"))


def their_batches(found: Any) -> Iterable[object]:
    """The loader, over and over."""
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    loader = DataLoader(found, GLOBAL_BATCH, shuffle=True, collate_fn=cast(Any, default_data_collator))
    while True:
        yield from loader
