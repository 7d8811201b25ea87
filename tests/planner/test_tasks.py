"""Pairs of answers, references, teachers and updates in the backward: what a step needs and takes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tangram.cli import main
from tangram.hardware.catalogue.cluster import builtin
from tangram.models.lora.outline import adapted
from tangram.models.outlines.catalogue import in_catalogue
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost import memory as cost
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.cost.timeline import play
from tangram.planner.search.explain import StrategyRequest, explain
from tangram.planner.search.heterogeneous import over_parts, parts_of
from tangram.planner.search.query import plan
from tangram.planner.search.strategy import Ask, setting_of
from tangram.planner.space.framework_profiles import BESIDE_REFERENCE, LOSSES, framework
from tangram.planner.space.grid import grid
from tangram.planner.space.optimisers_and_offload import BASES
from tangram.planner.space.tasks import TASKS, beside
from tests.training.pairs import write_pairs

MODEL = decoder(Dims(16, 1024, 16, 32000, ffn=4096, kv_heads=4), "small")
LARGE = decoder(Dims(24, 2048, 16, 32000, ffn=8192, kv_heads=4), "large")
NODE = builtin("a100x8")


def asked(task: str, samples: int, **more: Any) -> Ask:
    rows, forwards = TASKS[task]
    return Ask(samples * rows * 1024, 1024, rows=rows, beside=beside(forwards, MODEL), **more)


def given(task: str, *, zero: int = 2, micro: int = 1, samples: int = 16, **more: Any) -> Any:
    found = explain(MODEL, NODE, asked(task, samples, **more), StrategyRequest("dp=8", micro=micro, zero=zero))
    assert found.choice is not None, found.refused
    return found.choice


def test_a_pair_is_two_rows_of_one_sample() -> None:
    """Without a reference it is the step of as many rows by themselves."""
    pair, rows = given("orpo", micro=1, samples=16), given("sft", micro=2, samples=32)
    assert (pair.step, pair.memory, pair.tokens_per_device) == (rows.step, rows.memory, rows.tokens_per_device)
    assert (pair.micro, pair.micros) == (1, 2)
    assert (rows.micro, rows.micros) == (2, 2)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_reference_is_one_more_model_and_one_more_forward(zero: int) -> None:
    """Of parameters counted by hand: as they are kept, divided where those of the policy are."""
    alone, beside_it = given("orpo", zero=zero), given("dpo", zero=zero)
    kept = framework("tangram").parameter_bytes * MODEL.numbers / (8 if zero == 3 else 1)
    assert beside_it.held["parameters"] - alone.held["parameters"] == pytest.approx(kept, rel=1e-4)
    others = {name: held for name, held in beside_it.held.items() if name not in ("parameters", "reserve")}
    assert others == {name: alone.held[name] for name in others}
    # Three passes of a step without recompute become four.
    for part in ("products", "attention"):
        ahead = beside_it.parts[part] - alone.parts[part]
        assert 0.2 < ahead / alone.parts[part] < 0.45, part


def test_the_policys_logits_are_there_while_a_reference_works_behind_it() -> None:
    """Of LLaMA-Factory: both models' in float32 with the logarithms of shares; of Tangram, whose reference is first,
    and of TRL, which takes row by row, no more than without one; nor of a loss that makes no logits at once."""
    g = grid(data=8, batch=32, micro=4, sequence=1024, zero=3, shard=8)
    logits = 4 * 1024 * 32000
    behind = (("llama-factory", "", 6.0), ("deepspeed", "", 6.0), ("torchtune", "eager", 6.0))
    for name, loss, more in (*behind, ("trl", "", 0.0), ("tangram", "", 0.0), ("llama-factory", "chunked", 0.0)):
        one = setting_of(NODE, asked("orpo", 32, framework=name, loss=loss))
        two = replace(one, beside=beside(1, MODEL))
        passing = [float(memory(MODEL, g, setting).last.passing[0]) for setting in (one, two)]
        assert passing[1] - passing[0] == more * logits, name


def _shares(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logarithms of the labels' shares by log_softmax, as LLaMA-Factory and torchtune have them."""
    return rows[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None]).sum((1, 2))


def _by_rows(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As TRL has them since 2025."""
    rows = rows[:, :-1]
    chosen = rows.gather(2, labels[:, 1:, None]).squeeze(2)  # before the sums: the backward goes the other way
    return (chosen - torch.stack([one.logsumexp(-1) for one in rows])).sum(1)


@pytest.mark.parametrize(
    ("shares", "reference", "most"),
    [(_shares, True, BESIDE_REFERENCE["eager"]), (_shares, False, LOSSES["eager"]), (_by_rows, True, LOSSES["eager"])],
)
def test_bytes_of_a_pairs_logits_are_those_that_torch_allocates(
    shares: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], reference: bool, most: float
) -> None:
    """The policy first, then what it began as, then the backward; the most that is there at once, by the profiler."""
    vocab, tokens = 8192, 256
    head, flow = (torch.randn(size, 8, dtype=torch.bfloat16, requires_grad=True) for size in (vocab, 2 * tokens))
    labels = torch.randint(vocab, (2, tokens))

    def logits() -> torch.Tensor:
        return (flow @ head.T).float().view(2, tokens, vocab)

    def losses() -> torch.Tensor:
        rows = logits()
        margin = shares(rows, labels)
        if reference:
            with torch.no_grad():
                before = shares(logits(), labels)
            margin = margin - before
        return (margin[1] - margin[0]).sigmoid()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        losses().backward()
    counted: Any = profile.profiler
    changes = [int(one.nbytes()) for one in counted.kineto_results.events() if one.name() == "[memory]"]
    peak = max(accumulate(changes)) / (2 * tokens * vocab)
    assert most - 2.5 < peak <= most + 0.1, peak


def test_of_adapters_the_reference_is_the_base_that_is_there() -> None:
    """DPO of adapters holds no second model: but a copy of what is trained."""
    small, g = adapted(MODEL, 8), grid(data=8, batch=32, micro=2, sequence=1024, zero=2, shard=8)
    one = setting_of(NODE, asked("orpo", 16))
    two = replace(one, beside=beside(1, MODEL))
    more = memory(small, g, two).worst.parameters - memory(small, g, one).worst.parameters
    assert 0 < float(more[0]) < 0.02 * float(memory(small, g, one).worst.parameters[0])


def test_a_teacher_of_any_size_is_held_in_16_bits_and_asked_once() -> None:
    g = grid(data=8, batch=32, micro=2, sequence=1024, zero=3, shard=8)
    one = setting_of(NODE, asked("sft", 32))
    two = replace(one, beside=beside(0, MODEL, LARGE))
    less, more = memory(MODEL, g, one).worst, memory(MODEL, g, two).worst
    assert float((more.parameters - less.parameters)[0]) == pytest.approx(2 * LARGE.numbers / 8, rel=1e-4)
    logits = 2 * 2 * 1024 * 32000
    assert float((more.passing - less.passing)[0]) == pytest.approx(logits)
    staged = grid(data=2, pipeline=4, batch=32, micro=2, sequence=1024, zero=1, shard=2)
    waiting = 8 * 2 * (2 * 1024) * 2048  # hidden states of eight micro-batches, as wide as the teacher's
    of_last = cost.logits(MODEL, staged, two) - cost.logits(MODEL, staged, one)
    assert float(of_last[0]) == pytest.approx(2 * 2 * 1024 * 32000 + waiting)
    forward = LARGE.flops(1024) / (3 * MODEL.flops(1024))  # as much more computation, all else alike
    extra = float((seconds(MODEL, g, two).products / seconds(MODEL, g, one).products)[0]) - 1
    assert extra == pytest.approx(forward, rel=0.25)


def test_rows_of_a_pair_are_never_apart() -> None:
    """Of five pairs no rank of eight has a half, and of a search's plans each micro-batch has whole pairs."""
    found = plan(MODEL, NODE, asked("dpo", 16), what_if=False)
    assert found.choices
    assert all(one.at["micro"] % 2 == 0 and one.at["micro"] == 2 * one.micro for one in found.choices)
    refused = explain(MODEL, NODE, Ask(16 * 1024, 1024, rows=2), StrategyRequest("dp=8", micro=2)).refused
    assert any("16 samples" in one for one in refused)


def test_updates_in_the_backward_hold_one_blocks_gradients_and_take_one_micro_batch() -> None:
    plain, early = given("sft", micro=2), given("sft", micro=2, in_backward=True)
    assert early.step == plain.step
    ends = 32000 * 1024
    block = (MODEL.numbers - 2 * ends) / 16
    each = framework("tangram").gradient_bytes
    assert early.held["gradients"] <= each * max(ends, 1.01 * block) / 8
    assert early.held["gradients"] < 0.4 * plain.held["gradients"]
    why = explain(MODEL, NODE, asked("sft", 16, in_backward=True), StrategyRequest("dp=8", micro=1)).refused
    assert any("one micro-batch" in one for one in why)
    assert all(one.micros == 1 for one in plan(MODEL, NODE, asked("sft", 16, in_backward=True)).choices)


def test_a_mixed_cluster_and_a_played_step_know_how_full_rows_are() -> None:
    """Rows half as long in the mean: of a cluster of one part, of several, and action by action."""
    parts = [builtin("a100x8"), builtin("h100x8")]
    full, half = asked("sft", 64), replace(asked("sft", 64), filled=0.5)
    whole, some = (over_parts(LARGE, parts_of(parts, one), one, 25e9)[0] for one in (full, half))
    assert some.step < 0.75 * whole.step
    assert some.tokens_per_device == pytest.approx(half.tokens_met / some.step / 16)
    one = grid(data=8, batch=32, micro=2, sequence=1024, zero=2, shard=8)
    long, short = (setting_of(NODE, ask) for ask in (full, half))
    closed = float(seconds(MODEL, one, short).step[0] / seconds(MODEL, one, long).step[0])
    assert closed < 0.75
    assert play(MODEL, one, short).step / play(MODEL, one, long).step == pytest.approx(closed, rel=0.03)


def test_frozen_ends_stay_in_16_bits_beside_a_base_in_4() -> None:
    """bitsandbytes and GPTQ bring layers to 4 bits, never embedding and head; peft brings these to float32.

    meta-pytorch/torchtune README: Llama 3.1 8B in 7.4 GiB, of which 0.55 GiB more would be missing were they in 4 bits.
    """
    small, g = adapted(MODEL, 8), grid(data=1, batch=1, micro=1, sequence=1024)
    blocks, ends = MODEL.numbers - 2 * 32000 * 1024, 2 * 32000 * 1024
    for name, nbytes in (("torchtune", 2), ("transformers", 4)):
        setting = replace(setting_of(NODE, asked("sft", 1, framework=name)), base=BASES[2])
        held = float(memory(small, g, setting).worst.parameters[0])
        trained = sum(count * block.trained.tensor for block, count in small.runs) * framework(name).parameter_bytes
        assert held == pytest.approx(blocks * BASES[2].nbytes + ends * nbytes + trained, rel=0.01), name


def test_a_job_of_pairs_is_planned_with_its_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of so many pairs has twice as many rows; before, a pair was one row and the reference was forgotten."""
    write_pairs(tmp_path)
    found: dict[str, Any] = {}
    for name in ("dpo", "kto"):
        job = tmp_path / f"{name}.toml"
        assert main(["plan", "explain", str(job), "dp=2", "--cluster", "a100x2", "--zero", "2", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)["given"]
        assert main(["plan", "cluster", str(job), "--cluster", "a100x2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["choices"]
    assert found["dpo"]["at"]["batch"] == 2 * found["kto"]["at"]["batch"]
    assert found["dpo"]["micro"] == 1
    assert found["dpo"]["at"]["micro"] == 2


def test_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """hiyouga/LlamaFactory issue 1383: DPO of all of Qwen-7B by ZeRO-2 on eight A100 of 80 GB ran out of memory, where
    the same fine-tuning does not."""
    said = ("plan", "explain", "Qwen/Qwen-7B", "dp=8", "--cluster", "a100x8", "--framework", "deepspeed", "--zero", "2",
            "--seq", "1024", "--tokens-per-batch", "16384", "--recompute", "full", "--json")  # fmt: skip
    needs: dict[str, float] = {}
    for task in ("sft", "orpo", "dpo"):
        main([*said, "--task", task])
        needs[task] = json.loads(capsys.readouterr().out)["given"]["memory"]
    known = in_catalogue("Qwen/Qwen-7B")
    assert known is not None
    assert needs["dpo"] - needs["orpo"] == pytest.approx(2 * known.numbers * 1.04, rel=0.01)
    assert needs["orpo"] >= needs["sft"]
    assert main([*said, "--task", "pdo"]) == 2
    assert 'no task "pdo" (did you mean' in capsys.readouterr().err
    assert main([*said, "--teacher", "Qwen/Qwen-77B"]) == 2
    assert "no model" in capsys.readouterr().err
    assert np.isfinite(list(needs.values())).all()
