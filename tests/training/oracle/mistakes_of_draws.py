"""Mistakes that one could make in what a step draws at random, planted one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, cast

from tangram.sharding.local_ops.random_numbers import Samples
from tangram.training.mesh import drawing
from tangram.training.parallel import apply, pipeline
from tests.training.oracle.ranks import Setting, swapped

Planted = Generator[None]


def _seeded(change: Callable[[Setting, int, int], tuple[int, int]], setting: Setting) -> Any:
    """Generators are seeded for another seed or step."""
    real = drawing.seed_for

    def seed_for(device: Any, seed: int, step: int, skip: int = 0) -> None:
        real(device, *change(setting, seed, step), skip)

    return swapped(drawing, "seed_for", seed_for)


@contextlib.contextmanager
def masks_of_the_rank(setting: Setting) -> Planted:
    """The key has the rank in it."""
    with _seeded(lambda setting, seed, step: (seed + setting.world.index, step), setting):
        yield


@contextlib.contextmanager
def masks_of_the_first_step(setting: Setting) -> Planted:
    """The key has no step."""
    with _seeded(lambda setting, seed, step: (seed, 0), setting):
        yield


@contextlib.contextmanager
def masks_of_the_first_samples(setting: Setting) -> Planted:
    """Every micro-batch has the masks of the step's first samples."""

    def first_ones(first: int, rows: int, total: int) -> Samples:
        return Samples(0, rows, total)

    with swapped(drawing, "Samples", first_ones):
        yield


@contextlib.contextmanager
def masks_by_the_micro_batch(setting: Setting) -> Planted:
    """It is not known which elements are a sample's, so masks are those of one way to cut the batch."""

    def nowhere(*given: object) -> dict[Any, int]:
        return {}

    with swapped(drawing, "places_of", nowhere):
        yield


@contextlib.contextmanager
def other_masks_when_computed_again(setting: Setting) -> Planted:
    """What runs again in the backward finds the generator as the forward has left it."""
    with swapped(apply, "checkpoint", partial(cast(Any, apply).checkpoint, preserve_rng_state=False)):
        yield


@contextlib.contextmanager
def stages_that_count_anew(setting: Setting) -> Planted:
    """Each stage draws as if it were the first."""
    real = pipeline.PipelineRun.__init__

    def made(self: pipeline.PipelineRun, model: Any, parts: Any, plan: Any, world: Any, drawn: Any) -> None:
        real(self, model, parts, plan, world, [0] * len(drawn))

    with swapped(pipeline.PipelineRun, "__init__", made):
        yield


DRAWN_MISTAKES: Mapping[str, tuple[Callable[[Setting], contextlib.AbstractContextManager[None]], ...]] = {
    "by default, one by one: gpt2 over fsdp": (
        masks_of_the_rank,
        masks_of_the_first_samples,
        masks_by_the_micro_batch,
    ),
    "by default: gpt2 over tensor, sequence": (masks_of_the_first_step,),
    "by default, whole in a step: gpt2 over fsdp": (other_masks_when_computed_again,),
    "by default: gpt2 over 1F1B of fsdp": (stages_that_count_anew,),
}
