"""Mistakes that one could make in pipelines, planted one by one."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tangram.training.data import Batch
from tangram.training.parallel import pipeline, schedule_runtime
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart
from tangram.training.step import loop
from tests.training.oracle.ranks import Setting, swapped

Planted = Iterator[None]


@contextlib.contextmanager
def gradients_averaged_over_micro_batches(setting: Setting) -> Planted:
    """torch's own default: a step's gradients are divided by the number of micro-batches."""
    real = pipeline.ScheduleRun.__init__

    def averaged(self: pipeline.ScheduleRun, *given: Any) -> None:
        real(self, *given)
        self.scale_grads = True

    with swapped(pipeline.ScheduleRun, "__init__", averaged):
        yield


def _other_micro(change: Callable[[pipeline.PipelineRun, Sequence[Batch]], Sequence[Batch]]) -> Any:
    real = pipeline.PipelineRun.backward

    def backward(self: pipeline.PipelineRun, micro: Sequence[Batch], *given: Any) -> list[Tensor]:
        return real(self, change(self, micro), *given)

    return swapped(pipeline.PipelineRun, "backward", backward)


@contextlib.contextmanager
def positions_told_to_the_first_stage_only(setting: Setting) -> Planted:
    """In the blocks of later stages documents see each other."""

    def without(own: pipeline.PipelineRun, micro: Sequence[Batch]) -> Sequence[Batch]:
        return [replace(batch, positions_BS=None) for batch in micro] if own.is_last else micro

    with _other_micro(without):
        yield


@contextlib.contextmanager
def labels_of_another_micro_batch(setting: Setting) -> Planted:
    """The last stage has the labels in another order than the first has the tokens."""

    def turned(own: pipeline.PipelineRun, micro: Sequence[Batch]) -> Sequence[Batch]:
        labels = [batch.labels_BS for batch in micro]
        pairs = zip(micro, [*labels[1:], labels[0]], strict=True)
        return [replace(batch, labels_BS=own_BS) for batch, own_BS in pairs] if own.is_last else micro

    with _other_micro(turned):
        yield


@contextlib.contextmanager
def last_micro_batch_passed_over(setting: Setting) -> Planted:
    """The schedule ends one micro-batch early."""
    with _other_micro(lambda own, micro: micro[:-1]):
        yield


@contextlib.contextmanager
def stages_counted_as_copies(setting: Setting) -> Planted:
    """The norm divides a parameter's part by all ranks, as if each stage had it."""
    real = loop.square_sum
    with swapped(loop, "square_sum", lambda norms, grads, ranks: real(norms, grads, ranks * setting.world.stages)):
        yield


@contextlib.contextmanager
def weights_of_a_micro_batch_passed_over(setting: Setting) -> Planted:
    """Of the first micro-batch nobody does the second part of the backward."""
    real = schedule_runtime.StageRun.backward_weight_one_chunk

    def but_the_first(self: schedule_runtime.StageRun, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id:
            real(self, bwd_chunk_id, last_backward=last_backward)

    with swapped(schedule_runtime.StageRun, "backward_weight_one_chunk", but_the_first):
        yield


@contextlib.contextmanager
def stages_of_a_rank_exchanged(setting: Setting) -> Planted:
    """A rank runs the blocks of its two stages in the place of each other."""
    real = pipeline.PipelineRun.__init__

    def exchanged(self: pipeline.PipelineRun, model: nn.Module, parts: Mapping[int, ModelPart], *given: Any) -> None:
        if 0 not in parts:  # the first stage and the last do not take alike
            parts = dict(zip(parts, reversed(parts.values()), strict=True))
        real(self, model, parts, *given)

    with swapped(pipeline.PipelineRun, "__init__", exchanged):
        yield


@contextlib.contextmanager
def tied_gradients_left_apart(setting: Setting) -> Planted:
    """Each stage updates its own copy of the embeddings by what it did with it."""
    with swapped(pipeline.PipelineRun, "sum_tied", lambda self: None):
        yield


@contextlib.contextmanager
def tied_gradients_counted_twice(setting: Setting) -> Planted:
    """The norm has them of both stages."""
    with swapped(ParallelModel, "counted_elsewhere", frozenset()):
        yield


STAGED_MISTAKES = {
    "tied: stages of fsdp": (tied_gradients_left_apart, tied_gradients_counted_twice),
    "ZBVZeroBubble of fsdp": (weights_of_a_micro_batch_passed_over, stages_of_a_rank_exchanged),
    "stages of fsdp": (
        gradients_averaged_over_micro_batches,
        positions_told_to_the_first_stage_only,
        labels_of_another_micro_batch,
        last_micro_batch_passed_over,
    ),
    "clipped: stages of fsdp": (stages_counted_as_copies,),
}
