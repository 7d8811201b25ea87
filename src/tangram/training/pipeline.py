"""Micro-batches through the stages of a model, by the schedules of torch.distributed.pipelining.

A rank has one stage (`models.stages`), and torch's `PipelineStage` moves what flows between stages: hidden states
forward, their gradients back, each tensor whole on every rank of a stage. Within a stage all is as without a pipeline:
FSDP2, derived tensor parallelism, recomputing, compiled blocks. Gradients of all micro-batches are added before FSDP
reduces them, once a step.

A schedule is made for each size of the micro-batches and number of them, and kept.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tangram.planner.plan import Plan
from tangram.training.data import Batch
from tangram.training.world import World

_HELD = "_tangram_pipeline"
TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""The loss of logits (B, S, V) and labels (B, S), summed over the labels that count."""


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline whose stage a model is; None for a whole one."""
    return cast("Pipeline | None", model.__dict__.get(_HELD))


class Pipeline:
    """This rank's stage, and what it does for the micro-batches of a step. All ranks of the pipeline call alike."""

    def __init__(self, model: nn.Module, plan: Plan, world: World) -> None:
        assert plan.pipeline is not None
        self._model, self._world, self._name = model, world, plan.pipeline.schedule
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[plan.precision.compute]
        self._hidden = int(cast(Any, model).config.get_text_config().hidden_size)
        self._vocabulary = int(cast(Any, model).config.get_text_config().vocab_size)
        self._made: dict[tuple[Any, ...], PipelineScheduleSingle] = {}
        self._loss: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: logits.sum()
        self._before: list[Callable[[], None]] = []
        model.register_forward_pre_hook(self._begin)
        model.__dict__[_HELD] = self

    @property
    def stage(self) -> int:
        """Its number."""
        return self._world.stage

    @property
    def is_last(self) -> bool:
        """Whether this rank has the logits, and the loss."""
        return self._world.stage == self._world.stages - 1

    def backward(self, micro: Sequence[Batch], loss: TokenLoss, before: Sequence[Callable[[], None]]) -> list[Tensor]:
        """Add the gradients of micro-batches of one size; their losses on the last stage, else none.

        `before` is called before the forward of each micro-batch, on every stage.
        """
        return self._run(micro, loss, before, train=True)

    def losses(self, micro: Sequence[Batch], loss: TokenLoss) -> list[Tensor]:
        """The losses of micro-batches of one size on the last stage, else none; without gradients."""
        with torch.no_grad():
            return self._run(micro, loss, (), train=False)

    def logits(self, batch: Batch) -> Tensor:
        """The logits (B, S, V) of a batch, which the last stage gives to all; without gradients."""
        kept: list[Tensor] = []

        def keep(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
            kept.append(logits_BSV.detach())
            return logits_BSV.sum()

        self.losses([batch], keep)
        group = self._world.devices.get_group("pipeline")
        rows, length = batch.inputs_BS.shape
        device = self._world.device
        logits_BSV = kept[0] if kept else torch.empty(rows, length, self._vocabulary, dtype=self._dtype, device=device)
        dist.broadcast(logits_BSV, group_src=self._world.stages - 1, group=group)
        return logits_BSV

    def _run(
        self, micro: Sequence[Batch], loss: TokenLoss, before: Sequence[Callable[[], None]], *, train: bool
    ) -> list[Tensor]:
        schedule = self._schedule(micro[0], len(micro), train)
        self._loss, self._before = loss, list(before)
        given = [torch.cat([batch.inputs_BS for batch in micro])] if self._world.stage == 0 else []
        told: dict[str, Tensor] = {}
        if micro[0].positions_BS is not None:
            told["position_ids"] = torch.cat([cast(Tensor, batch.positions_BS) for batch in micro])
        labels = torch.cat([batch.labels_BS for batch in micro]) if self.is_last else None
        losses: list[Tensor] = []
        run = cast("Callable[..., Any]", schedule.step if train else schedule.eval)
        try:
            run(*given, target=labels, losses=losses if self.is_last else None, **told)
        except RuntimeError as error:  # torch tells of shapes; what went wrong is its cause
            if (cause := error.__cause__) is None:
                raise
            raise cause from cause.__cause__
        self._before = []
        return [one.detach() for one in losses]

    def _schedule(self, batch: Batch, count: int, train: bool) -> PipelineScheduleSingle:
        rows, length = batch.inputs_BS.shape
        key = (rows, length, count, train)
        if key not in self._made:
            name = self._name if train else "GPipe"
            make = cast("Callable[..., PipelineScheduleSingle]", get_schedule_class(name))
            stage = self._stage(rows, length)
            self._made[key] = make(stage, n_microbatches=count, loss_fn=self._loss_of, scale_grads=False)
        return self._made[key]

    def _stage(self, rows: int, length: int) -> PipelineStage:
        """Told what comes and goes, so that nothing is run to find out."""
        world = self._world
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        flow = torch.empty(rows, length, self._hidden, dtype=self._dtype, device="meta", requires_grad=True)
        logits = torch.empty(rows, length, self._vocabulary, dtype=self._dtype, device="meta", requires_grad=True)
        return PipelineStage(
            self._model,
            world.stage,
            world.stages,
            world.device,
            input_args=(ids if world.stage == 0 else flow,),
            output_args=(logits if self.is_last else flow,),
            group=world.devices.get_group("pipeline"),
        )

    def _loss_of(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        return self._loss(logits_BSV, labels_BS)

    def _begin(self, *_: Any) -> None:
        if self._before:
            self._before.pop(0)()
