"""Tables of actions, run by torch's own runtime of pipelines: one path for every schedule.

torch lowers a table: sends and receives come after what makes and before what takes, FSDP2's gathers before the first
use of a stage, its reduction after the last backward. What is here is what torch would find out by asking the other
ranks, or keep for longer than it is needed:

    told       stages know what comes and goes, so ranks do not vote on it, and no value is read on the way
    losses     by micro-batch, in whatever order the last stage takes them
    logits     of a micro-batch are the loss's alone once it is there
    received   what comes has memory from when it may come until it is used, not for all micro-batches of a step
    weights'   gradients of a backward's second part are added in the type in which FSDP2 reduces, as of whole ones
    sums       over all layers: each stage adds its own to those that came with the hidden states, and sends them on;
               the last one makes a loss of them, whose gradient goes back with the others
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    UNSHARD,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from tangram.schema.schedule_table import Row, Schedule
from tangram.training.mesh.written_parameters import fsdp_groups
from tangram.training.parallel.data_parallel import Replicas

Before = Callable[[int, int], None]
"""Called with a micro-batch and a stage before the stage's forward of it."""
Loss = Callable[[Tensor, int], Tensor]
"""Of what the last stage gives for a micro-batch, whose number is told."""
Sums = Callable[[int, int], Tensor]
"""What a stage adds to a micro-batch's sums, with gradients: called with both after the stage's forward of it."""


def as_torchs(row: Row) -> list[_Action | None]:
    return [_Action.from_str(str(action)) for action in row]


def times_gathered(row: Row, stage: int) -> int:
    """How often a rank's row has a stage's parameters gathered: anew each time that they made room for others'."""
    return sum(
        one.computation_type == UNSHARD and one.stage_index == stage for one in _add_unshard_reshard(as_torchs(row))
    )


class StageRun(PipelineStage):
    """One stage of a rank."""

    before: Before
    before_backward: Before
    after_backward: Before
    """Likewise, but not around the second part of a backward, in which no module runs again."""
    sums: Sums | None = None
    """None: nothing goes along."""
    replicas: Replicas | None = None
    """What sums gradients at the end of a step, where FSDP2 does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._micro = 0
        self.summed: dict[int, Tensor] = {}
        """On the last stage the sums over all of them, by micro-batch."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, which knows nothing of what goes along."""
        if self.sums is None:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        x, *came = args
        output = super().forward_maybe_with_nosync(x, **kwargs)
        own = self.sums(self._micro, self.stage_index)
        # Those of no stages, too, have a gradient, for what a stage that has no sums of its own sends on.
        sums = (came[0] if came else torch.zeros_like(own, requires_grad=torch.is_grad_enabled())) + own
        if not self.is_last:
            return output, sums
        self.summed[self._micro] = sums
        return output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro = fwd_chunk_id
        self.before(fwd_chunk_id, self.stage_index)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # its backward begins at the loss
            _, inputs = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = ((), inputs)
        _let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Whole, or its first part."""
        self.before_backward(bwd_chunk_id, self.stage_index)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.after_backward(bwd_chunk_id, self.stage_index)
        _let_go(self.grad_recv_info.get(bwd_chunk_id, ()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second part, of which FSDP2's own hooks know nothing."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for group in fsdp_groups(self.submod):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After all micro-batches: FSDP2's, or of whole copies."""
        super().perform_reduce_grad(grad_scale_factor)
        if self.replicas is not None:
            self.replicas.reduce()

    def _get_recv_ops(self, recv_infos: Any) -> Any:
        for info in recv_infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(num_microbatches)

    @contextlib.contextmanager
    def _without_memory(self) -> Generator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _let_go(received: Any) -> None:
    """Of what is used now; the shape stays, for what comes in its place in the next step."""
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta")


class ScheduleRun(_PipelineScheduleRuntime):
    """A schedule for the stages of this rank, and the loss of the last of all."""

    def __init__(
        self, stages: list[StageRun], schedule: Schedule, loss: Loss, loss_of_sums: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(cast(Any, stages), schedule.micros, loss_fn=loss, scale_grads=False)
        self._loss = loss
        self._loss_of: dict[int, Tensor] = {}
        """What the backward begins at, by micro-batch."""
        self._told_of: dict[int, Tensor] = {}
        """The loss without that of the sums."""
        self._loss_of_sums = loss_of_sums
        self.stage_index_to_group_rank = dict(enumerate(schedule.rank_of))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        # Not by `_prepare_schedule_with_comms`, which misses the backwards of an evaluation.
        whole = {rank: _add_unshard_reshard(as_torchs(row)) for rank, row in enumerate(schedule.rows)}
        reduced: Any = {rank: _add_reduce_grad([*row], schedule.micros) for rank, row in whole.items()}
        self.pipeline_order_with_comms = _add_send_recv(reduced, schedule.rank_of.__getitem__, schedule.stages)

    def forget(self) -> None:
        """What stages keep of a forward for a backward, where none comes."""
        for stage in self._stages:
            stage.clear_runtime_states()

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """All stages are told what comes and goes; else each would ask all others, and read what they say."""
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if not stage.is_last:
            return
        loss = self._loss(output, mb_index)
        self._told_of[mb_index] = loss.detach()
        sums = cast(StageRun, stage).summed.pop(mb_index, None)
        self._loss_of[mb_index] = loss if sums is None else loss + self._loss_of_sums(sums)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._loss_of[mb_index] if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        if losses is not None:
            losses[:] = [self._told_of[micro] for micro in sorted(self._told_of)]
        self._loss_of, self._told_of = {}, {}
