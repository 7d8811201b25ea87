"""One run by the loop of `tangram train`, and what it leaves: a JSON file that is written last, and whole.

The rank does what one of `tangram train` does (`training.run.rank`), but for checkpoints, proofs and exports, and every
so often it asks for the largest logit of attention on some held-out samples.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench._convergence import initial
from bench._convergence.settings import BIASES, Run, digest_of, initial_folder, plan_of, settings_of
from tangram.kernels.flash.spans import by_numbers
from tangram.training import data
from tangram.training.data import Batch, held_out_batches
from tangram.training.observe.events import Record
from tangram.training.parallel.fsdp import resharded
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import Begun, RankJob, begin
from tangram.training.state.checkpointer import Checkpointer
from tangram.training.step import loop
from tangram.training.step.evaluate import held_out_loss, logits_of

RESULT = "result.json"
LOOKS = 16
"""How often in a run the largest logit is asked for."""
SAMPLES = 4
"""On how many held-out samples."""


@dataclass(frozen=True)
class Found:
    """What the rank hands back."""

    held_out: float | None
    """None where it is not finite, or where the run was ended."""
    largest: tuple[tuple[int, float], ...]
    """Steps, and the largest logit of attention after each."""
    ended: str | None
    """Why it ended before its last step."""
    asked_to_stop: bool


class StoppedError(Exception):
    """Somebody asked the run to stop: it has no result."""


def result_of(run: Run, folder: Path) -> dict[str, Any] | None:
    """What a run has left, if it was of these settings."""
    try:
        found: dict[str, Any] = json.loads((folder / run.name / RESULT).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if found.get("digest") == digest_of(settings_of(run)) else None


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Train it from its beginning, whatever lies in its folder; what it leaves. Raises StoppedError."""
    if biases := BIASES.get(run.setting):
        initial.write(initial_folder(run, folder), run.size, run.seed, biases)
    plan, own = plan_of(run, folder), folder / run.name
    own.mkdir(parents=True, exist_ok=True)
    (own / RESULT).unlink(missing_ok=True)
    data.prepare(plan.data, data.BYTES, lambda event: None)
    text = data.open_corpus(plan.data, data.BYTES).digest
    record, begun = Record(), time.monotonic()
    job = RankJob(plan, own, text, loop.StepCosts())
    found = run_ranks(measured, job, world=1, on_event=record, device=plan.run.device)[0]
    if found.asked_to_stop:
        raise StoppedError
    settings = settings_of(run)
    result = {
        "digest": digest_of(settings),
        "settings": settings,
        "text": text,
        "device": _device(plan.run.device),
        "seconds": round(time.monotonic() - begun, 1),
        "held_out": found.held_out,
        "ended": found.ended,
        "skipped": [one.step for one in record.skips],
        "largest_logits": found.largest,
        "losses": [[one.step, _short(one.loss)] for one in record.steps],
        "gradient_norms": [[one.step, _short(one.gradient_norm)] for one in record.steps],
    }
    part = own / f"{RESULT}.{os.getpid()}"
    part.write_text(json.dumps(result))
    part.rename(own / RESULT)
    return result


def _short(x: float) -> float:
    return float(f"{x:.6g}")


def _device(choice: str) -> str:
    if choice == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return str(torch.get_device_module().get_device_name())


def measured(rank: Rank, job: RankJob) -> Found:
    """The task of the rank."""
    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # two runs side by side are faster than one of two threads
    begun = begin(rank, job)
    corpus, model = begun.corpus, begun.model
    plan, world = model.plan, model.world
    every = max(1, plan.run.steps // LOOKS)
    largest: list[tuple[int, float]] = []

    def look() -> None:
        step = begun.state.progress.step
        if step % every == 0 or step == plan.run.steps:
            largest.append((step, largest_logit(begun)))

    hooks = loop.Hooks(rank.emit, rank.stop.requested, look, job.folder)
    checkpointer = Checkpointer(job.folder / "checkpoint", plan, world)  # the plan saves nothing
    ended, held_out, stopped = None, None, False
    try:
        trained = loop.train_steps(model, begun.state, corpus, checkpointer, hooks)
        stopped = trained.stopped is not None
        held_out = None if stopped else held_out_loss(model, corpus)
    except FloatingPointError as error:
        ended = str(error)
    checkpointer.close()
    return Found(held_out, tuple(largest), ended, stopped)


@torch.no_grad()
def largest_logit(begun: Begun) -> float:
    """Of the scores that held-out tokens give to what they see, times the scale, in float32; not casts'."""
    model = begun.model
    batch = next(iter(held_out_batches(begun.corpus, model.plan.data, index=0, size=1, device=model.world.device)))
    few = Batch(*(None if x is None else x[:SAMPLES] for x in (batch.inputs_BS, batch.labels_BS, batch.positions_BS)))  # pyright: ignore[reportArgumentType]
    model.module.eval()
    with resharded(model.module), watched(model.module) as found:
        logits_of(model, few)
    model.module.train()
    return math.nan if any(map(math.isnan, found)) else max(found)


@contextmanager
def watched(model: nn.Module) -> Generator[list[float]]:
    """While it lasts, each attention of a model notes its largest logit and goes on as it would."""
    config, found = cast(Any, model).config, list[float]()
    before: str = config._attn_implementation
    AttentionInterface.register("watched", partial(watching, ALL_ATTENTION_FUNCTIONS[before], found))
    config._attn_implementation = "watched"
    try:
        yield found
    finally:
        config._attn_implementation = before


def watching(
    inner: Callable[..., Any], found: list[float],
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float,
    **others: Any,
) -> Any:  # fmt: skip
    """What `inner` gives; the largest logit of each head goes to `found`."""
    numbers_BSN = attention_mask[:, 0]  # as attention by tokens is told
    visible_BSS = by_numbers(numbers_BSN, numbers_BSN).visible()
    for head in range(query.shape[1]):  # one at a time: all of them take much memory where sequences are long
        shared = key[:, head * key.shape[1] // query.shape[1]]
        scores_BSS = query[:, head].float() @ shared.float().mT * scaling
        found.append(float(scores_BSS.masked_fill(~visible_BSS, -torch.inf).max()))
    return inner(module, query, key, value, attention_mask, scaling=scaling, **others)
