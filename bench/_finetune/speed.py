"""Steps of LoRA on conversations beside those of TRL's trainer with peft: the same rows in the same order."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench._finetune.job import planned, write_job
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, sample_ids, step_batches, step_length, tokens_of
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.step import loop
from tests.training.tuning_tasks import begin_as

PEER = "trl"
"""No dependency, of the benches neither: as in `make interop`, whoever wants it beside ours installs it."""
WARM = 2
"""Steps that are not counted."""


@dataclass(frozen=True)
class Found:
    """Of the one rank."""

    pairs: Pairs
    tokens: float
    """In the loss, of a step."""
    losses: tuple[float, float]
    """Of the first step, ours and theirs."""


def trl() -> Any:
    """TRL, or None where it is not installed."""
    try:
        return importlib.import_module(PEER)
    except ImportError:
        return None


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures: without TRL ours alone."""
    turns = 2 if quick else 8
    write_job(folder, large=not quick, count=4 * (WARM + turns), most=100)
    plan = planned(folder)
    found: Found = run_ranks(measure, (plan, turns), world=1, on_event=lambda _: None, device="cpu")[0]
    peers = {"TRL": found.tokens / found.pairs.peer} if trl() is not None else {}
    what = "LoRA of 114 million parameters, as a job has it" if not quick else "LoRA of a small model"
    said = f"{what}{'' if peers else ' (TRL is not installed: pip install trl)'}"
    yield Row(said, "tokens/s", found.tokens / found.pairs.ours, peers, better="higher")
    if peers:
        ours, theirs = found.losses
        yield Row("its first loss beside TRL's", "", abs(ours / theirs - 1), target=1e-5)
        yield found.pairs.row("a step beside TRL's", 1.0)


def measure(rank: Rank, work: tuple[Plan, int]) -> Found:
    """The task of the rank. The trainer has the loop, so ours takes its turn when a step of it has ended."""
    plan, turns = work
    corpus, seconds, losses, counted = open_corpus(plan.data, tokens_of(plan)), list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        begun = begin(rank, RankJob(plan, Path(folder), corpus.digest, loop.StepCosts()))
        model, optimiser = begun.model, begun.state.optimiser
        assert optimiser is not None
        model.module.train()

        def ours() -> None:
            nonlocal counted
            first, begun_at = len(seconds) * plan.data.global_batch, time.perf_counter()
            batches = step_batches(
                corpus, model.plan.data, seed=plan.seed, first_sample=first, index=0, size=1,
                micro_steps=plan.micro_steps, device=rank.device,
            ).cut(step_length(corpus, model.plan.data, plan.seed, first))  # fmt: skip
            losses.append(loop.train_step(model, optimiser, batches, lr=plan.optimiser.lr).loss)
            seconds.append(time.perf_counter() - begun_at)
            counted += batches.counted

        if trl() is None:
            for _ in range(WARM + turns):
                ours()
            theirs, their_losses = seconds, losses
        else:
            theirs, their_losses = beside(plan, WARM + turns, Path(folder), ours)
    pairs = paired(list(zip(seconds, theirs, strict=True))[WARM:])
    return Found(pairs, counted / len(seconds), (losses[0], their_losses[0]))


def beside(plan: Plan, steps: int, folder: Path, ours: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds and losses of TRL's steps; `ours` runs after each."""
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler

    seconds: list[float] = []

    class Turns(TrainerCallback):
        """Takes the time of steps, from the end of one (its batch is made then) to the next."""

        begun = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.begun)
            ours()
            self.begun = time.perf_counter()

    class InOrder(trl().SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    dataset: Any = importlib.import_module("datasets").Dataset
    lora, o, path = plan.lora, plan.optimiser, Path(str(plan.model.path))
    assert lora is not None
    lines = (Path(plan.data.sources[0].path) / "a.jsonl").read_text().splitlines()
    order = sample_ids(open_corpus(plan.data, tokens_of(plan)), plan.data, plan.seed, 0, steps * plan.data.global_batch)
    config = trl().SFTConfig(
        output_dir=str(folder / "theirs"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        per_device_train_batch_size=plan.data.global_batch, max_steps=steps, logging_steps=1, learning_rate=o.lr,
        lr_scheduler_type="constant", adam_beta1=o.betas[0], adam_beta2=o.betas[1], adam_epsilon=o.eps,
        weight_decay=0.0, max_grad_norm=o.clip_norm, save_strategy="no", max_length=plan.data.sequence,
        disable_tqdm=True, assistant_only_loss=True,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer: Any = InOrder(
        model=model, args=config, train_dataset=dataset.from_list([json.loads(lines[n]) for _, n in order]),
        processing_class=AutoTokenizer.from_pretrained(path), callbacks=[Turns()],
        peft_config=LoraConfig(
            r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    begin_as(trainer.model, plan)
    trainer.train()
    return seconds, [one["loss"] for one in trainer.state.log_history if "loss" in one]
