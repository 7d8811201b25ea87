"""One accelerator: the quickstart as it is, then models of the sizes of 1B and 8B: memory, tokens/s and MFU.

    quickstart  `tangram train examples/quickstart/job.toml` on one process, to its end
    1B, 8B      steps of a Llama of that size in bfloat16, blocks compiled and recomputed, on text of the standard
                library. 1B keeps float32 masters and moments; 8B keeps them in bfloat16, so that it fits into 80 GB.

Beside each figure stands what the planner had predicted. Every figure runs in a process of its own, and a size that
would begin after `LIMIT` seconds is left out: all of it is meant to end within eight minutes. Where torch sees no
accelerator there is nothing to measure; `--quick` runs the same with tiny models, on the CPU too, to see that it works.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench._training.job import tables
from tangram.errors import UserError
from tangram.hardware.host.machine import accelerators, resident_mb
from tangram.hardware.measuring.measure import Row
from tangram.hardware.measuring.rates import Rates, rates
from tangram.models.building.build import build_on_meta
from tangram.models.outlines.costs import costs
from tangram.planner.local.rank import predict
from tangram.schema.plan import Plan
from tangram.training import data
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import build, source_of
from tangram.training.step.loop import train_step
from tangram.training.step.optimiser_step import make_adamw

LIMIT = 330.0
"""Seconds after which no further size is begun: the largest one takes up to two minutes."""
WARM, STEPS = 3, 10
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "job.toml"
BFLOAT16 = {"compute": "bfloat16"}
ALL_BFLOAT16 = {"compute": "bfloat16", "parameters": "bfloat16", "masters": "bfloat16"}


@dataclass(frozen=True)
class Size:
    """A Llama, its batch and its numbers."""

    name: str
    change: Mapping[str, Any]
    sequence: int
    global_batch: int
    micro_batch: int
    precision: Mapping[str, str]


SIZES = (
    Size(
        "1B",
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "tie_word_embeddings": True},
        4096, 8, 2, BFLOAT16,
    ),
    Size("8B", {"vocab_size": 128256}, 4096, 4, 1, ALL_BFLOAT16),
)  # fmt: skip
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
TINY_SIZES = (Size("1B", TINY, 128, 4, 2, BFLOAT16), Size("8B", TINY, 128, 4, 1, ALL_BFLOAT16))


@dataclass(frozen=True)
class Found:
    """What a size came to."""

    step_s: float
    peak: float
    """Bytes that tensors took at the highest moment; of a CPU, the process's memory at the end."""
    loss: float
    """Of the last step."""


def rows(quick: bool) -> Iterable[Row]:
    """The figures."""
    if not accelerators() and not quick:
        raise UserError(
            "this bench measures an accelerator, and torch sees none here: --quick runs it with tiny models on the CPU"
        )
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        yield from _quickstart(Path(folder), ("--set", "run.steps=24") if quick else ())
        device = accelerators()[0].kind if accelerators() else "cpu"
        measured = rates(device, 1)
        for size in TINY_SIZES if quick else SIZES:
            if time.monotonic() - begun > LIMIT and not quick:
                print(f"{size.name} is left out: {LIMIT:g} s have passed, it might not end in time", file=sys.stderr)
                return
            plan = plan_of(size, Path(folder))
            data.prepare(plan.data, data.BYTES, lambda event: None)
            found = run_ranks(measure, plan, world=1, on_event=lambda event: None, device="auto")[0]
            yield from _rows(size, plan, found, measured)


def _quickstart(folder: Path, more: tuple[str, ...]) -> Iterator[Row]:
    out = folder / "run"
    command = [sys.executable, "-m", "tangram", "train", str(QUICKSTART), "--processes", "1", "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the quickstart ended with {done.returncode}: {done.stderr[-1000:]}")
    said = json.loads((out / "summary.json").read_text())
    if said["relayout_relative_difference"] > 1e-6:
        raise RuntimeError(f"loaded anew, its loss is another one: {said['relayout_relative_difference']}")
    yield Row("quickstart", "tokens/s", said["tokens_per_s"], {"predicted": said["predicted"]["tokens_per_s"]})
    yield Row("quickstart, held-out loss", "nats", said["eval_loss"], {"unigram entropy": said["unigram_entropy"]})


def plan_of(size: Size, folder: Path) -> Plan:
    """On one device, every block compiled and recomputed."""
    found = tables(folder, model={"preset": "llama-3-8b", "change": dict(size.change)})
    found["data"] |= {"sequence": size.sequence, "global_batch": size.global_batch, "micro_batch": size.micro_batch}
    found["run"] = {"steps": STEPS, "compile": True, "recompute": ["model.layers.*"]}
    strategy = {"mesh": "dp=1", "axes": {"data": ["dp"]}, "layouts": {"parameters": {"*": "_/dp ..."}}}
    return Plan.model_validate({**found, "precision": dict(size.precision), **strategy})


def measure(rank: Rank, plan: Plan) -> Found:
    """The task of the one rank: some steps, of which the first compile and are not counted."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = build(plan, source_of(plan, data.BYTES), world, values=True)
    optimiser = make_adamw(model.module, plan.optimiser)
    stream = data.Stream(corpus, plan.data, device=world.device)
    model.module.train()
    losses: list[float] = []
    times: list[float] = []
    for _ in range(WARM + STEPS):  # each ends with a number that the host waits for
        begun = time.perf_counter()
        losses.append(train_step(model, optimiser, next(stream), lr=1e-4, stop_requests=(False, False)).loss)
        times.append(time.perf_counter() - begun)
    return Found(statistics.median(times[WARM:]), _peak_bytes(world.device), losses[-1])


def _peak_bytes(device: torch.device) -> float:
    return 1e6 * resident_mb() if device.type == "cpu" else float(torch.accelerator.max_memory_allocated(device))


def _rows(size: Size, plan: Plan, found: Found, measured: Rates) -> Iterator[Row]:
    """What was measured, beside what the planner had predicted."""
    config = source_of(plan, data.BYTES).config
    expected, counted = predict(plan, measured, config), costs(build_on_meta(config), size.sequence, size.micro_batch)
    tokens, flops = size.sequence * size.global_batch, counted.flops_per_sample * size.global_batch
    peak = measured.peak_flops(plan.precision.compute)

    def mfu(seconds: float) -> float:
        """Of the work that the model needs: what is recomputed counts nothing."""
        return 100 * flops / seconds / peak

    if not math.isfinite(found.loss):
        raise RuntimeError(f"{size.name}: the loss is {found.loss}")
    yield Row(size.name, "tokens/s", tokens / found.step_s, {"predicted": expected.tokens_per_second})
    yield Row(f"{size.name}, MFU", "%", mfu(found.step_s), {"predicted": mfu(expected.seconds.total)})
    yield Row(f"{size.name}, memory", "GB", found.peak / 1e9, {"predicted": expected.memory.total / 1e9})
