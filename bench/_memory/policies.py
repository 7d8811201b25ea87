"""The policies, each with those before it, and what is measured of one: a model in one process, a few steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench._memory.counter import FlowCounter
from tangram.hardware.host.machine import peak_resident_mb
from tangram.hardware.measuring.rates import Rates
from tangram.planner.local.estimate import Estimate, estimate
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, prepare, step_batches, tokens_of
from tangram.training.mesh.local_parts import local
from tangram.training.parallel.apply import blocks_of
from tangram.training.run.launch import Rank
from tangram.training.run.rank import RankJob, begin
from tangram.training.state.build_model import source_of
from tangram.training.step import loop
from tangram.training.step.optimiser_step import lr_at

RECOMPUTE = {"run.recompute": '["model.layers.*"]'}
IN_BACKWARD = {"optimiser.in_backward": "true", "optimiser.clip_norm": "inf"}
STREAMED = {**RECOMPUTE, **IN_BACKWARD, "run.stream_layers": "true", "checkpoint.asynchronous": "false"}
LORA = {"lora.rank": "8"}
NF4 = {**LORA, "lora.base": '"nf4"'}
POLICIES: Mapping[str, Mapping[str, str]] = {
    "AdamW in float32": {},
    "AdamW, recompute": RECOMPUTE,
    "AdamW, in backward": IN_BACKWARD,
    "AdamW, recompute, in backward": {**RECOMPUTE, **IN_BACKWARD},
    "AdamW, layers streamed": STREAMED,
    "AdamW in 8 bits": {"optimiser.moments": '"8-bit"'},
    "AdamW in bfloat16, rounded stochastically": {
        **{f"precision.{key}": '"bfloat16"' for key in ("compute", "parameters", "masters")},
        "optimiser.rounding": '"stochastic"',
    },
    "LoRA": LORA,
    "LoRA, recompute": {**LORA, **RECOMPUTE},
    "LoRA on NF4": NF4,
    "LoRA on NF4, recompute": {**NF4, **RECOMPUTE},
}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "vocab_size": 4096}
"""42.7 million parameters."""


@dataclass(frozen=True)
class Measured:
    """Of one policy, in bytes where nothing else is said."""

    states: int
    """Parameters, buffers and the optimiser's states."""
    forward: int
    """Of what operators make, the most until the backward begins."""
    backward: int
    """The most from there until the optimiser has stepped: gradients, and what is left of activations."""
    tokens_per_second: float
    loss: float
    """Of the last step."""
    resident: float
    """The most that the process has had."""
    moved: int = 0
    """Of streamed layers, in a step."""
    needed: int = 0
    """The same, at least: layers twice, all else once."""


def write_job(folder: Path, *, quick: bool) -> None:
    """A model of random weights, a text and a job."""
    sizes = SMALL if quick else LARGE
    config = AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "weights")
    lines = [f"{n} times {n + 1} is {n * (n + 1)}" for n in range(4000)]
    (folder / "text.txt").write_text("\n".join(lines))
    batch, length = (2, 64) if quick else (4, 128)
    (folder / "job.toml").write_text(
        f'version = 3\nmodel.path = "weights"\ndata.sources = [{{ path = "text.txt" }}]\ndata.tokenizer = "bytes"\n'
        f'data.held_out = 0.0\ndata.packing = "packed"\ndata.sequence = {length}\ndata.global_batch = {batch}\n'
        f'data.micro_batch = {batch}\noptimiser.lr = 1e-3\noptimiser.schedule = "constant"\nrun.steps = 1000\n'
    )


def plan_for(folder: Path, policy: str, rates: Rates) -> tuple[Plan, Estimate]:
    """The plan of a policy for one process, and what the planner says of it."""
    job = load(folder / "job.toml", {"data.cache": str(folder / "cache"), **POLICIES[policy]})
    counted = Counted(job, source_of(job, tokens_of(job)).config)
    prepare(job.data, tokens_of(job), lambda event: None)
    plan = plan_of(Strategy("one process", "dp=1", ("dp",), shard="dp"), job, counted)
    costs = counted.costs(plan.data.micro_batch)
    return plan, estimate(plan, costs, costs, rates)


def measure(rank: Rank, work: tuple[Plan, int, Path]) -> Measured:
    """The task of the one rank: a step to begin with, one that is counted, and some that are timed."""
    plan, steps, folder = work
    corpus = open_corpus(plan.data, tokens_of(plan))
    begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts()))
    model, optimiser = begun.model, begun.state.optimiser
    assert optimiser is not None
    model.module.train()
    batches = step_batches(
        corpus, model.plan.data, seed=0, first_sample=0, index=0, size=1, micro_steps=plan.micro_steps,
        device=rank.device,
    )  # fmt: skip

    def step() -> float:
        return loop.train_step(model, optimiser, batches, lr=lr_at(0, 1000, plan.optimiser)).loss

    step()
    optimiser.zero_grad()
    states: list[Any] = [one for of_one in optimiser.state.values() for one in of_one.values()]
    there = [local(one) for one in (*model.module.parameters(), *model.module.buffers(), *states)]
    inputs = [one.inputs_BS for one in batches.micro]
    moved = 0 if model.stream is None else -model.stream.moved_bytes
    with FlowCounter([*there, *inputs]) as counter:
        step()
    peaks = counter.flow.peaks
    needed = 0
    if model.stream is not None:  # what it has lies in files
        moved += model.stream.moved_bytes
        of_layers = sum(p.nbytes for layer in blocks_of(model.module) for p in layer.parameters())
        needed = of_layers + sum(p.nbytes for p in model.module.parameters())
        there = [*model.module.buffers()]
    known = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in there}
    begun_at, loss = time.perf_counter(), 0.0
    for _ in range(steps):
        loss = step()
    took = (time.perf_counter() - begun_at) / steps
    tokens = plan.data.global_batch * plan.data.sequence
    backward = max(peaks["backward"], peaks["update"])
    return Measured(
        sum(known.values()), peaks["forward"], backward, tokens / took, loss, 1e6 * peak_resident_mb(), moved, needed
    )
