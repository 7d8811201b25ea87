"""Mistakes that one could make over context and expert axes, planted one by one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.kernels import attention
from tangram.models.capturing import attention as attend
from tangram.relayout.collectives import ring_attention
from tangram.training.mesh import tensor_parallel
from tangram.training.objective import expert_capacity, packing, router_loss
from tangram.training.parallel import pipeline, schedule_runtime
from tangram.training.step import loop, objectives
from tests.training.oracle.planting import other_values
from tests.training.oracle.ranks import Setting, swapped

Planted = Iterator[None]
Wrong = Callable[[Tensor, Any, int], Tensor | None]
"""Of a tensor, a step from one state to another and the number of ranks: what comes of it; None: what should."""


def _brought(wrong: Wrong) -> Any:
    real: Any = tensor_parallel.DerivedModel._bring  # pyright: ignore[reportPrivateUsage]

    def bring(self: Any, x: Tensor, change: Any) -> Tensor:
        for step in change:
            made = wrong(x, step, dist.get_world_size(self._groups[step[0]]))
            x = real(self, x, (step,)) if made is None else made
        return x

    return swapped(tensor_parallel.DerivedModel, "_bring", bring)


@contextlib.contextmanager
def positions_of_the_first_part(setting: Setting) -> Planted:
    """Every rank takes its tokens for the first ones: positions and rows of masks are not offset."""

    def wrong(x: Tensor, step: Any, ranks: int) -> Tensor | None:
        _, source, target = step
        if x.requires_grad or target.kind != "cut" or source.kind not in ("same", "several"):
            return None
        return x.narrow(target.dim, 0, x.shape[target.dim] // ranks)

    with _brought(wrong):
        yield


@contextlib.contextmanager
def keys_of_one_rank_only(setting: Setting) -> Planted:
    """In the place of other ranks' keys and values stand a rank's own."""

    def wrong(x: Tensor, step: Any, ranks: int) -> Tensor | None:
        _, source, target = step
        gathers = source.kind == "cut" and target.kind in ("same", "several")
        return torch.cat([x] * ranks, source.dim) if gathers and x.ndim == 4 else None

    with _brought(wrong):
        yield


@contextlib.contextmanager
def not_summed(part: str) -> Planted:
    """Gradients of the parameters whose names have this part stay those of a rank's tokens; nobody compares."""
    real = tensor_parallel.DerivedModel.sum_gradients

    def some(self: Any) -> None:
        everything = self.sums.over
        self.sums.over = {name: axes for name, axes in (everything or {}).items() if part not in name}
        real(self)
        self.sums.over = everything

    with (
        swapped(tensor_parallel.DerivedModel, "sum_gradients", some),
        swapped(loop, "refuse_unlike_gradients", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def norms_not_summed_over_context(setting: Setting) -> Planted:
    """Each rank has the gradient of a norm's weight of its own tokens."""
    with not_summed("input_layernorm"):
        yield


@contextlib.contextmanager
def routers_not_summed_over_experts(setting: Setting) -> Planted:
    """Each rank has the gradient of the router of its own part."""
    with not_summed("mlp.gate"):
        yield


@contextlib.contextmanager
def experts_of_the_wrong_rank(setting: Setting) -> Planted:
    """Each rank of the expert axis has the experts of the other one."""

    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, whole in tensors.items():
            if ".experts." in name:
                whole.copy_(whole.roll(whole.shape[0] // 2, 0))
        return tensors

    with other_values(swap):
        yield


@contextlib.contextmanager
def keys_that_stay(setting: Setting) -> Planted:
    """Each rank attends to its own keys, time after time, and takes them for those of others."""

    def own(self: Any) -> list[Tensor]:
        for one in self._work:
            one.wait()
        return self._sent

    with swapped(ring_attention.Passing, "arrived", own):
        yield


@contextlib.contextmanager
def gradients_of_keys_not_brought_home(setting: Setting) -> Planted:
    """What is owed to keys stays with the rank that saw them last."""
    real = ring_attention.Passing.arrived

    def arrived(self: Any) -> list[Tensor]:
        found = real(self)
        return self._sent if self._first else found

    with swapped(ring_attention.Passing, "arrived", arrived):
        yield


@contextlib.contextmanager
def parts_of_keys_averaged(setting: Setting) -> Planted:
    """What parts of the keys come to counts by their number, not by their sums."""
    real = attention.Partial.plus

    def plus(self: Any, other: Any) -> Any:
        first = bool((self.sums == -torch.inf).all())
        return real(self, other) if first else attention.Partial((self.out + other.out) / 2, real(self, other).sums)

    with swapped(attention.Partial, "plus", plus):
        yield


@contextlib.contextmanager
def labels_left_in_order(setting: Setting) -> Planted:
    """Tokens are balanced, and their labels are not."""
    real = packing.model_inputs

    def inputs(tokens: Any, batch: Any) -> Any:
        found = real(tokens, batch)
        return found._replace(batch=replace(found.batch, labels_BS=batch.labels_BS))

    with swapped(objectives, "model_inputs", inputs):
        yield


@contextlib.contextmanager
def places_left_in_order(setting: Setting) -> Planted:
    """Tokens are balanced, and attention is told of them as if they were not."""

    def numbers(positions: Tensor) -> Tensor:
        found = attend.numbers_of(positions)
        return found[:, packing.balanced(positions.shape[1], 2).argsort()]

    with swapped(packing, "numbers_of", numbers):
        yield


@contextlib.contextmanager
def routers_balanced_by_rank(setting: Setting) -> Planted:
    """Each rank asks its routers for a balance of its own tokens."""
    with swapped(router_loss, "summed", lambda x, group: x):
        yield


@contextlib.contextmanager
def routers_of_empty_rows(setting: Setting) -> Planted:
    """Routers are asked for a balance of tokens that do not count, too."""
    with swapped(router_loss, "IGNORE", -1):
        yield


@contextlib.contextmanager
def routers_seen_by_every_rank(setting: Setting) -> Planted:
    """Ranks that have a part of the tokens each are taken for ranks that have the same."""
    real = router_loss.Routers._part  # pyright: ignore[reportPrivateUsage]

    def alike(self: Any, *given: Any) -> Any:
        return replace(real(self, *given), shared=setting.world.model_size)

    with swapped(router_loss.Routers, "_part", alike):
        yield


@contextlib.contextmanager
def room_by_rank(setting: Setting) -> Planted:
    """Each of four ranks drops what its own tokens have too much of, for a quarter of the room."""
    real = expert_capacity.largest

    def own(key: Tensor, index: Tensor, counted: Tensor, limit: Tensor, *rest: Any) -> Any:
        with swapped(expert_capacity, "summed", lambda x, group: x):
            return real(key, index, counted, -(-limit // 4), *rest)

    with swapped(expert_capacity, "largest", own):
        yield


@contextlib.contextmanager
def the_least_wanted_kept(setting: Setting) -> Planted:
    """Experts keep the choices of the smallest weights."""
    real: Any = expert_capacity._in_order  # pyright: ignore[reportPrivateUsage]
    with swapped(expert_capacity, "_in_order", lambda x: (1 << 32) - 1 - real(x)):
        yield


@contextlib.contextmanager
def room_for_empty_rows(setting: Setting) -> Planted:
    """Rows that fill up a micro-batch take room, and make more of it."""
    with swapped(expert_capacity, "IGNORE", -1):
        yield


@contextlib.contextmanager
def every_rank_first(setting: Setting) -> Planted:
    """Each DP rank takes its rows for the first ones of the micro-batch."""
    real = expert_capacity.Capacity.before

    def first(self: Any, seen: Any) -> None:
        world, self._world = self._world, replace(self._world, data_index=0)
        real(self, seen)
        self._world = world

    with swapped(expert_capacity.Capacity, "before", first):
        yield


@contextlib.contextmanager
def choices_of_the_own_stage_only(setting: Setting) -> Planted:
    """Stages pass on what their routers' probabilities add up to, and not how often experts were chosen."""
    real: Any = schedule_runtime.StageRun.forward_maybe_with_nosync

    def forget(self: Any, *given: Any, **told: Any) -> Any:
        x, *came = given
        if came:
            (sums,) = came
            counts = sums.shape[0] // 3 + 1  # of 3 E + 1 numbers the last E + 1
            came = [torch.cat([sums[:-counts], torch.zeros_like(sums[-counts:])])]
        return real(self, x, *came, **told)

    with swapped(schedule_runtime.StageRun, "forward_maybe_with_nosync", forget):
        yield


@contextlib.contextmanager
def sums_without_gradients_to_earlier_stages(setting: Setting) -> Planted:
    """What pulls the probabilities stays with the last stage."""
    real: Any = schedule_runtime.StageRun.backward_one_chunk

    def keep(self: Any, micro: int, *given: Any, **told: Any) -> None:
        for info in self.grad_recv_info.get(micro, ())[1:]:
            info.buffer.zero_()
        real(self, micro, *given, **told)

    with swapped(schedule_runtime.StageRun, "backward_one_chunk", keep):
        yield


@contextlib.contextmanager
def labels_of_the_first_micro_batch(setting: Setting) -> Planted:
    """Every stage counts the tokens of the first micro-batch for those of all; some of the last rows are empty."""
    real: Any = pipeline.PipelineRun._sums  # pyright: ignore[reportPrivateUsage]
    with swapped(pipeline.PipelineRun, "_sums", lambda self, micro, stage: real(self, 0, stage)):
        yield


@contextlib.contextmanager
def recomputed_as_the_latest(setting: Setting) -> Planted:
    """What a backward recomputes drops choices as of the micro-batch whose forward was the last."""
    real: Any = pipeline.PipelineRun._stage  # pyright: ignore[reportPrivateUsage]

    def stage(self: Any, *given: Any) -> Any:
        made = real(self, *given)
        made.before_backward = lambda micro, stage: None
        return made

    with swapped(pipeline.PipelineRun, "_stage", stage):
        yield


@contextlib.contextmanager
def room_over_all_stages(setting: Setting) -> Planted:
    """The tokens of a micro-batch are added up over the ranks of all stages."""
    real = expert_capacity.Capacity.before

    def before(self: Any, *seen: Any) -> None:
        real(self, *seen)
        self._batches = [(*rest, tokens * setting.world.stages) for *rest, tokens in self._batches]

    with swapped(expert_capacity.Capacity, "before", before):
        yield


AXES_MISTAKES = {
    "routers: ZBVZeroBubble of fsdp": (sums_without_gradients_to_earlier_stages,),
    "routers: stages of derived": (choices_of_the_own_stage_only, labels_of_the_first_micro_batch),
    "capacity by position, recomputed: stages of fsdp": (recomputed_as_the_latest, room_over_all_stages),
    "in a ring, balanced: context and fsdp": (
        keys_that_stay,
        gradients_of_keys_not_brought_home,
        parts_of_keys_averaged,
        labels_left_in_order,
        places_left_in_order,
    ),
    "context and fsdp": (positions_of_the_first_part, keys_of_one_rank_only, norms_not_summed_over_context),
    "routers: experts and fsdp": (routers_balanced_by_rank, routers_of_empty_rows, routers_seen_by_every_rank),
    "capacity: experts and fsdp": (room_by_rank, the_least_wanted_kept, room_for_empty_rows),
    "capacity by position: derived inside fsdp": (every_rank_first,),
    "qwen3_moe: experts and fsdp": (routers_not_summed_over_experts, experts_of_the_wrong_rank),
}
"""By the case in which they show."""
