"""Losses and gradients that jump are named by step, rank, samples and layer; what only moves is left in peace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from bench._training.job import fsdp, job
from tangram.schema.plan import Plan
from tangram.tracing.blame import findings
from tangram.tracing.files.format import Phase
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.finding import Finding
from tangram.tracing.reading import read
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings
from tangram.tracing.show.report import top
from tangram.tracing.spikes import StepNumbers
from tangram.training import data
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import layers_of_trained, weight_groups
from tangram.training.state.build_model import build, source_of
from tangram.training.step.layer_peaks import looking
from tangram.training.step.loop import train_step
from tangram.training.step.optimiser_step import make_adamw

LAYERS = ("embed", "layers.0", "layers.0", "layers.1", "layers.1")
Losses = Callable[[int], Sequence[float]]
"""Of a step, from 1, the part of each rank."""
Norms = Callable[[int], Sequence[float]]


def ran(folder: Path, losses: Losses, norms: Norms, steps: int, first: int = 1) -> list[Finding]:
    """What is found in a run with these losses and norms."""
    ranks = len(losses(first))
    for rank in range(ranks):
        recorder = Recorder(TraceFiles(folder, b"r" * 16, rank, ranks), {"mesh": f"dp={ranks}", "stages": []})
        recorder.weights([], LAYERS)
        for step in range(first, first + steps):
            recorder.step(step)
            recorder.phase(Phase.OPTIMISER)
            parts = losses(step)
            said = f"the samples {step * ranks + rank} to {step * ranks + rank} of the job"
            recorder.numbers(StepNumbers(sum(parts), parts[rank], norms(step), lambda said=said: said))
        recorder.step(first + steps)
    return [one for one in findings(read(folder)) if one.kind.endswith("spike")]


def routed(folder: Path, loads: Callable[[int], Mapping[str, Sequence[int]]], counts: int) -> list[Finding]:
    """What is found in a run on two ranks, each of which counts its experts every fifth step."""
    for rank in range(2):
        recorder = Recorder(TraceFiles(folder, b"r" * 16, rank, 2), {"mesh": "dp=2", "stages": []})
        for count in range(1, counts + 1):
            recorder.step(5 * count)
            recorder.experts(loads(count))
        recorder.step(5 * counts + 1)
    return [one for one in findings(read(folder)) if one.kind == "expert load"]


def loads_of(seed: int, noise: float) -> Callable[[int], dict[str, list[int]]]:
    """Of two layers with eight experts, each of which gets about as many tokens."""
    drawn = np.random.default_rng(seed).normal(0, noise, (400, 2, 8))
    return lambda count: {f"layers.{at}": (1000 * np.exp(drawn[count, at])).astype(int).tolist() for at in range(2)}


def test_an_expert_that_is_given_ever_more_is_named_with_its_layer(tmp_path: Path) -> None:
    even = loads_of(1, 0.2)

    def loads(count: int) -> Mapping[str, Sequence[int]]:
        own = even(count)
        return own if count < 30 else own | {"layers.1": [*own["layers.1"][:5], 6000, *own["layers.1"][6:]]}

    (one,) = routed(tmp_path, loads, 40)
    assert (one.kind, one.ranks, one.step, one.layer) == ("expert load", (0, 1), 150, "layers.1")
    assert one.text.startswith("expert 5 of layers.1 is given 3.")
    assert "times as much as the mean in step 150, where before the most was 1." in one.text
    assert top(tmp_path).lines == (one.text,)


def test_a_layer_with_next_to_no_gradient_that_has_some_once_is_no_spike(tmp_path: Path) -> None:
    """As the embedding of a mixture whose experts have collapsed: the whole gradient is what it was."""
    norms = norms_of(4)

    def small(step: int) -> Sequence[float]:
        return [norms(step)[0] * (0.2 if step == 35 else 0.01), *norms(step)[1:]]

    assert not ran(tmp_path, noisy(4), small, 60)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_experts_that_are_chosen_as_ever_are_left_in_peace(noise: float, tmp_path: Path) -> None:
    assert not routed(tmp_path, loads_of(2, noise), 120)


def peaked(folder: Path, peaks: Callable[[int], Mapping[str, tuple[float, float]]], looks: int) -> list[Finding]:
    """What is found in a run on one rank, whose layers are looked at now and then."""
    recorder = Recorder(TraceFiles(folder, b"r" * 16, 0, 1), {"mesh": "dp=1", "stages": []})
    for look in range(1, looks + 1):
        recorder.step(5 * look)
        recorder.peaks(peaks(look))
        recorder.step(5 * look + 1)
        recorder.peaks({})
    return [one for one in findings(read(folder)) if one.kind in ("activation outlier", "attention logits")]


@pytest.mark.parametrize("growth", [0.0, 0.05, 0.15])
def test_layers_that_grow_are_left_in_peace_until_softmax_saturates(growth: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(0, 0.15, (200, 2))

    def peaks(look: int) -> Mapping[str, tuple[float, float]]:
        large = np.exp(growth * look + noise[look])
        return {"layers.0": (float(large[0]), 0.0), "layers.1": (1.0, min(99.0, float(large[1])) + (look > 60) * 99)}

    (one,) = peaked(tmp_path, peaks, 80)
    assert (one.kind, one.layer, one.step) == ("attention logits", "layers.1", 305)
    assert ("above 100 in step 305" in one.text) == (growth > 0.1), one.text


def test_a_jump_is_put_down_to_the_first_layer(tmp_path: Path) -> None:
    def peaks(look: int) -> Mapping[str, tuple[float, float]]:
        return {f"layers.{at}": ((50.0 if look == 40 and at > 0 else 2.0) + look % 3 / 10, 4.0) for at in range(4)}

    (one,) = peaked(tmp_path, peaks, 60)
    assert (one.kind, one.layer, one.step) == ("activation outlier", "layers.1", 200)
    assert one.text.endswith("times what it was, and that of 2 more layers, too"), one.text


def test_a_layer_without_tokens_says_nothing(tmp_path: Path) -> None:
    assert not routed(tmp_path, lambda count: {"layers.0": [0, 0] if count % 7 == 0 else [5, 5]}, 60)


def noisy(seed: int, falls: float = 0.0, noise: float = 0.02) -> Losses:
    drawn = np.random.default_rng(seed).normal(0, noise, (400, 4))
    return lambda step: ((2.0 + falls * np.exp(-step / 15)) / 4 * np.exp(drawn[step])).tolist()


def norms_of(seed: int, noise: float = 0.3) -> Norms:
    drawn = np.random.default_rng(seed).normal(0, noise, (400, len(LAYERS)))
    return lambda step: np.exp(drawn[step] - step / 100).tolist()


def test_garbage_on_one_rank_is_put_down_to_it_with_its_samples(tmp_path: Path) -> None:
    clean = noisy(1)

    def losses(step: int) -> Sequence[float]:
        return [part * (4 if step == 31 and rank == 2 else 1) for rank, part in enumerate(clean(step))]

    (one,) = ran(tmp_path, losses, norms_of(1), 60)
    assert (one.kind, one.ranks, one.step) == ("loss spike", (2,), 31)
    assert one.text.startswith("the loss of step 31 is 1.7 times that of the steps before, by the part of rank 2")
    assert one.details == ("rank 2 was trained on the samples 126 to 126 of the job",)


def test_garbage_on_all_ranks_is_a_spike_of_all(tmp_path: Path) -> None:
    clean = noisy(2)
    (one,) = ran(tmp_path, lambda s: [x * (2 if s == 40 else 1) for x in clean(s)], norms_of(2), 60, first=1)
    assert (one.kind, one.ranks, one.step) == ("loss spike", (0, 1, 2, 3), 40)
    assert "by the part" not in one.text


def test_a_layer_whose_gradient_is_a_hundredfold_is_named(tmp_path: Path) -> None:
    clean = norms_of(3)

    def norms(step: int) -> Sequence[float]:
        return [x * (100 if step == 33 and LAYERS[i] == "layers.1" else 1) for i, x in enumerate(clean(step))]

    (one,) = ran(tmp_path, noisy(3), norms, 60)
    assert (one.kind, one.layer, one.step) == ("gradient spike", "layers.1", 33)
    assert "the gradient of layers.1 in step 33 is" in one.text
    assert "other" not in one.text


def test_a_gradient_that_jumps_with_the_loss_needs_no_word_of_its_own(tmp_path: Path) -> None:
    clean, calm = noisy(4), norms_of(4)
    found = ran(
        tmp_path,
        lambda s: [x * (3 if s == 30 else 1) for x in clean(s)],
        lambda s: [x * (200 if s == 30 else 1) for x in calm(s)],
        60,
    )
    assert [one.kind for one in found] == ["loss spike"]


def clean(kind: str, seed: int) -> Losses:
    """Losses without a fault, of which some are far from even."""
    calm, drawn = noisy(seed), np.random.default_rng(seed)
    heavy, signed = drawn.exponential(0.2, (400, 4)), drawn.normal(0, 0.2, (400, 4))
    kinds: Mapping[str, Losses] = {
        "falls": noisy(seed, falls=8.0),
        "small batches": noisy(seed, noise=0.6),
        "a drop": lambda step: [x * (0.2 if step > 60 else 1) for x in calm(step)],
        "a slow rise": lambda step: [x * (1 + step / 40) for x in calm(step)],
        "heavy tails": lambda step: heavy[step].tolist(),
        "of both signs": lambda step: signed[step].tolist(),
        "often nothing": lambda step: [0.3 * (step % 3 == 0)] * 4,
    }
    return kinds[kind]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind", ["falls", "small batches", "a drop", "a slow rise", "heavy tails", "of both signs", "often nothing"]
)
def test_clean_losses_raise_no_alarm(kind: str, seed: int, tmp_path: Path) -> None:
    assert ran(tmp_path, clean(kind, seed), norms_of(seed, noise=0.5), 200) == []


def test_nothing_is_said_before_steps_are_known_as_after_a_resume(tmp_path: Path) -> None:
    def losses(step: int) -> Sequence[float]:
        return [9.0 if step in (103, 110) else 1.0]

    assert ran(tmp_path, losses, norms_of(5), 20, first=101) == []


def test_a_loss_that_stays_high_is_told_once(tmp_path: Path) -> None:
    calm = noisy(6)
    found = ran(tmp_path, lambda s: [x * (3 if s >= 50 else 1) for x in calm(s)], norms_of(6), 120)
    assert [one.step for one in found] == [50]


def hundredfold(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 100


def trains(rank: Rank, task: tuple[Plan, str]) -> int:
    """The task of a rank: 34 steps, of which the 30th has garbage on rank 1, or one layer's gradient a hundredfold.

    Or from there on a layer has other weights, by which what it computes is larger.
    """
    plan, fault = task
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = replace(build(plan, source_of(plan, data.BYTES), world, values=True), trace=rank.trace)
    model.module.train()
    rank.trace.weights(weight_groups(model), layers_of_trained(model))
    optimiser = make_adamw(model.module, plan.optimiser)
    stream = data.Stream(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    for step in range(1, 35):
        rank.trace.step(step)
        batches = next(stream)
        if fault == "garbage" and step == 30 and rank.index == 1:
            drawn = [torch.randint(0, 250, one.labels_BS.shape) for one in batches.micro]
            micro = tuple(replace(one, labels_BS=y) for one, y in zip(batches.micro, drawn, strict=True))
            batches = replace(batches, micro=micro)
        hooks = [
            cast("RemovableHandle", one.register_post_accumulate_grad_hook(hundredfold))  # FSDP2 calls no other ones
            for name, one in model.module.named_parameters()
            if fault == "gradient" and step == 30 and ".layers.1." in f".{name}"
        ]
        for name, one in model.module.named_parameters():
            if step == 30 and name.endswith(f"layers.1.{fault}"):
                one.data *= 40
        with looking(model, step, every=1):
            train_step(model, optimiser, batches, lr=1e-3)
        for hook in hooks:
            hook.remove()
        rank.trace.phase(Phase.OTHER)
    return 0


@pytest.mark.parametrize(
    ("fault", "world", "found"),
    [
        ("garbage", 2, ("loss spike", (1,), 30, "")),
        ("gradient", 2, ("gradient spike", (0, 1), 30, "model.layers.1")),
        ("self_attn.q_norm.weight", 2, ("attention logits", (0, 1), 30, "model.layers.1")),
        ("mlp.down_proj.weight", 2, ("activation outlier", (0, 1), 30, "model.layers.1")),
    ],
)
def test_what_is_planted_in_steps_of_real_ranks_is_named(
    fault: str, world: int, found: tuple[object, ...], tmp_path: Path
) -> None:
    data.prepare(job(tmp_path).data, data.BYTES, lambda event: None)
    settings, task = TraceSettings(tmp_path / "trace", mesh=f"dp={world}"), (fsdp(tmp_path, world), fault)
    run_ranks(trains, task, world=world, on_event=lambda event: None, device="cpu", trace=settings)
    told = [(one.kind, one.ranks, one.step, one.layer) for one in findings(read(tmp_path)) if one.kind != "slow"]
    if "." not in fault:
        assert told == [found]
    else:  # of these weights the loss and gradients jump, too
        assert found in told, told
        assert {one[2] for one in told} == {30}, told
