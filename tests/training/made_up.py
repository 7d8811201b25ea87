"""Runs that never ran: records as real ones look, for tests of what is made of them."""

import math
import random
from pathlib import Path
from typing import Any

from tangram.schema.plan import Plan
from tangram.training.observe.events import CheckpointSaved, Evaluated, Record, StepDone
from tangram.training.observe.summary import Summary, summarise
from tests.training.small import small_plan

TOKENS = 1000
ENTROPY = 3.2


def record_of(
    steps: int,
    *,
    first: int = 1,
    evaluate_every: int = 0,
    save_every: int = 0,
    flops: float = 0.0,
    peak_flops: float = 0.0,
    rss_mb: float = 600.0,
) -> Record:
    """Steps of about 0.1 s with a falling, noisy loss; an evaluation takes 2 s, a save stops training for 0.05 s."""
    chance = random.Random(7)
    record, clock = Record(), 0.5  # the first step of a run is slower
    for step in range(first, first + steps):
        clock += 0.1 * math.exp(chance.gauss(0, 0.08))
        loss = 1.9 + 3.6 * math.exp(-step / 45) + 0.35 * math.exp(-step / 400) + chance.gauss(0, 0.06)
        record(
            StepDone(
                step=step,
                steps=first + steps - 1,
                loss=loss,
                gradient_norm=0.5 + 2.5 * math.exp(-step / 20) + abs(chance.gauss(0, 0.12)),
                lr=2e-3 * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1, step / (first + steps)))),
                tokens=TOKENS,
                seconds=clock,
                first=first,
                flops=flops,
                peak_flops=peak_flops,
                rss_mb=rss_mb + 40 * (1 - math.exp(-(step - first) / 15)) + chance.gauss(0, 1.5) if rss_mb else 0.0,
            )
        )
        if save_every and step % save_every == 0:
            clock += 0.05
            record(CheckpointSaved(step, f"runs/small/checkpoint/step-{step}", 0.05, 0.4, asynchronous=True))
        if evaluate_every and step % evaluate_every == 0:
            clock += 2.0
            record(Evaluated(step, loss + 0.08, clock))
    return record


def summary_of(plan: Plan, record: Record, **changes: Any) -> Summary:
    """A run whose proofs hold."""
    known: dict[str, Any] = {
        "model": "qwen3-2m",
        "parameters": 1_837_248,
        "wall_s": 74.0,
        "eval_loss": 2.3145,
        "unigram_entropy": ENTROPY,
        "eval_loss_relayout": 2.3145002,
        "relayout_relative_difference": 8.6e-8,
        "relayout_logits_max_diff": 2.1e-6,
        "export_logits_max_diff": 1.4e-6,
        "peak_rss_mb": 655.0,
        "predicted": {"step_seconds": 0.088, "tokens_per_s": 11_363.0, "memory_mb": 702.0},
        "checkpoint": "runs/small/checkpoint/step-300",
        "export": "runs/small/export",
        "tensorboard": "runs/small/tensorboard",
    }
    return summarise(plan=plan, record=record, **{**known, **changes})


def plan_of(steps: int, **changes: Any) -> Plan:
    """A plan of so many steps."""
    fixed = {"optimiser": {"lr": 2e-3, "warmup_steps": min(20, steps - 1)}, "run": {"steps": steps, "device": "cpu"}}
    return small_plan(Path("/texts/code"), **{**fixed, **changes})
