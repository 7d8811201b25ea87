"""Micro-batches through the stages of a model, as a schedule's table says (`schema.schedules`).

A rank has one stage or several (`models.capturing.stages`), and torch's `PipelineStage` moves what flows between them:
hidden states forward, their gradients back, each tensor whole on every rank of a stage, and with them the sums that a
loss of routers is made of (`training.objective.router_loss`). Within a stage all is as without a pipeline: FSDP2,
derived tensor parallelism, recomputing, compiled blocks. Gradients of all micro-batches are added before FSDP reduces
them, once a step.

A parameter that the first stage has together with the last (`pipeline.tied`) lies on the ranks of both, which add up
their gradients of a step after everybody else has, and so update it alike.

A table is made for each size of the micro-batches and number of them, and kept.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.models.capturing.capture import quiet
from tangram.models.outlines.outlined import FIELDS, int_field
from tangram.schema.plan import Plan
from tangram.schema.schedule_table import Schedule
from tangram.schema.schedules import forward_only
from tangram.training.data import Batch
from tangram.training.mesh.drawing import Draws, DrawSource
from tangram.training.mesh.local_parts import local
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World
from tangram.training.objective.expert_capacity import Capacity
from tangram.training.objective.loss import Logits, leaving, logits_placement
from tangram.training.objective.packing import ModelInputs, TokenOrder, model_inputs
from tangram.training.objective.router_loss import Routers
from tangram.training.parallel.data_parallel import Replicas
from tangram.training.parallel.fsdp import StepShards
from tangram.training.parallel.schedule_runtime import ScheduleRun, StageRun


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A module, and what runs beside it; a plain module in one process has none of it."""

    module: nn.Module
    tokens: TokenOrder | None = None
    """None: the model does not attend by tokens."""
    derived: DerivedModel | None = None
    """The programs of tensor, context and expert parallelism."""
    draws: DrawSource | None = None
    """What numbers the elements that it draws for; None where it is not trained."""
    data_parallel: Replicas | StepShards | None = None
    """DDP's sums of gradients, or what FSDP2 has to hear of each micro-batch."""
    routers: Routers | None = None
    capacity: Capacity | None = None


StageLoss = Callable[[Logits, int], Tensor]
"""The loss of the logits of a micro-batch and its number."""
Ahead = Callable[[int], None]
"""Called with the number of a micro-batch before the last stage's forward of it."""
RouterLoss = Callable[[Routers, Tensor], Tensor]
"""What the last stage's routers make of the sums over all layers."""


def own_results(part: nn.Module) -> None:
    """Have a stage give no views: a backward in two parts cuts off what it gives, which torch does not do to a view.

    What brings a result from the ranks of a tensor axis may be one.
    """
    forward = part.forward

    def run(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = forward(*args, **kwargs)
        return result.clone() if result._is_view() else result

    part.forward = run


def _size(config: Any, name: str) -> int:
    """A size that a configuration says. Raises UserError where it does not."""
    if (found := int_field(config.get_text_config(), FIELDS[name])) is None:
        raise UserError(
            f"a {config.model_type} model's configuration has no {FIELDS[name][0]}: it has no stages to run"
        )
    return found[1]


class _PassOn(nn.Module):
    """A last stage that is run later."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x


class PipelineRun:
    """This rank's stages, and what they do for the micro-batches of a step. All ranks of the pipeline call alike."""

    def __init__(
        self, model: nn.Module, parts: Mapping[int, ModelPart], plan: Plan, world: World, drawn: Sequence[int]
    ) -> None:
        """Of a rank's model and its stages, by number. `drawn`: how often the stages before each draw in a forward."""
        self.parts = parts
        self._model, self._world, self._plan, self._drawn = model, world, plan, drawn
        self._rank_of = plan.rank_of_stage
        self._dtype = getattr(torch, plan.precision.compute)
        self.hidden, self._vocabulary = (_size(cast(Any, model).config, name) for name in ("hidden", "vocab"))
        self.actions: Callable[[int], Schedule] = plan.actions
        """The table for so many micro-batches."""
        self._made: dict[tuple[Any, ...], ScheduleRun] = {}
        self._loss: Callable[[Tensor, int], Tensor] = _no_loss
        self._draws: Draws | None = None
        self._router_loss: RouterLoss = _no_router_loss
        self._ahead: Ahead | None = None
        self._tokens = next((part.tokens for part in parts.values()), None)
        self._seen: Sequence[ModelInputs] = ()

    @property
    def is_last(self) -> bool:
        """Whether this rank has the logits, and the loss."""
        return self._last is not None

    @property
    def _last(self) -> ModelPart | None:
        """The stage that has them."""
        return self.parts.get(len(self._rank_of) - 1)

    def backward(
        self, micro: Sequence[Batch], loss: StageLoss, draws: Draws, router_loss: RouterLoss, ahead: Ahead | None = None
    ) -> list[Tensor]:
        """Add the gradients of micro-batches of one size; their losses on the last stage, else none.

        `draws` is told which micro-batch runs through which stage, `router_loss` called where the stages' routers are
        watched; what is returned is without it.
        """
        self._router_loss, self._ahead = router_loss, ahead
        try:
            return self._run_in_parts(micro, loss, draws, train=True)
        finally:
            self._ahead = None

    def losses(self, micro: Sequence[Batch], loss: StageLoss) -> list[Tensor]:
        """The losses of micro-batches of one size on the last stage, else none; without gradients."""
        with torch.no_grad():
            return self._run_in_parts(micro, loss, None, train=False)

    @torch.no_grad()
    def before_last(self, micro: Sequence[Batch]) -> Callable[[int], Logits]:
        """Micro-batches of one size through all stages but the last; without gradients.

        What is returned gives a micro-batch's logits once, on ranks of the last stage, which ask alike: hidden states
        wait there for it, not logits.
        """
        came: dict[int, Tensor] = {}

        def keep(x: Tensor, number: int) -> Tensor:
            came[number] = x
            return x.new_zeros(())

        self._run(micro, keep, None, train=False, without_last=True)

        def logits(number: int) -> Logits:
            part = self._last
            assert part is not None  # of no other stage
            inputs = model_inputs(self._tokens, micro[number])
            with leaving(part.derived):
                values_BSV: Tensor = part.module(came.pop(number), **inputs.keywords)
            return Logits(values_BSV, inputs, logits_placement(part.derived, "output0"))

        return logits

    def tied(self) -> dict[int, dict[str, nn.Parameter]]:
        """The trained parameters that another place on the pipeline axis has, too, by that place and name."""
        found: dict[int, dict[str, nn.Parameter]] = {}
        if self._plan.pipeline is None or not self._plan.pipeline.tied:
            return found
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and self._plan.is_tied(name):
                other = next(place for place in self._plan.places_of(name) if place != self._world.stage)
                found.setdefault(other, {})[name] = parameter
        return found

    @torch.no_grad()
    def sum_tied(self) -> None:
        """Add up the gradients of tied parameters, once a step, when they are whole otherwise. Collective.

        Each of the two ranks adds the other's to its own, which rounds alike in either order.
        """
        group = self._world.devices.get_group("pipeline")
        for other, tied in self.tied().items():
            own = [local(p.grad) for p in tied.values() if p.grad is not None]  # of none the loop refuses the step
            came = [torch.empty_like(one) for one in own]
            send = [dist.P2POp(dist.isend, one, group=group, group_peer=other) for one in own]
            receive = [dist.P2POp(dist.irecv, one, group=group, group_peer=other) for one in came]
            for work in dist.batch_isend_irecv([*send, *receive]) if own else ():
                work.wait()
            for one, more in zip(own, came, strict=True):
                one.add_(more)

    def logits(self, batch: Batch) -> Tensor:
        """The logits (B, S, V) of a batch, which the last stage gives to all; without gradients."""
        kept: list[Tensor] = []

        def keep(logits_BSV: Tensor, micro: int) -> Tensor:
            kept.append(logits_BSV.detach())
            return logits_BSV.sum()

        with torch.no_grad():
            self._run([batch], keep, None, train=False)
        group = self._world.devices.get_group("pipeline")
        rows, length = batch.inputs_BS.shape
        device = self._world.device
        logits_BSV = kept[0] if kept else torch.empty(rows, length, self._vocabulary, dtype=self._dtype, device=device)
        dist.broadcast(logits_BSV, group_src=self._rank_of[-1], group=group)
        return model_inputs(self._tokens, batch).in_order(logits_BSV)

    def _run_in_parts(
        self, micro: Sequence[Batch], loss: StageLoss, draws: Draws | None, *, train: bool
    ) -> list[Tensor]:
        """As `_run`; the last stage leaves its logits as they lie, and the loss is told how."""
        last = self._last
        if last is None:
            return self._run(micro, _no_loss, draws, train=train)
        derived = last.derived
        with leaving(derived):
            return self._run(
                micro,
                lambda x, micro: loss(Logits(x, self._seen[micro], logits_placement(derived, "output0")), micro),
                draws,
                train=train,
            )

    def _run(
        self,
        micro: Sequence[Batch],
        loss: Callable[[Tensor, int], Tensor],
        draws: Draws | None,
        *,
        train: bool,
        without_last: bool = False,
    ) -> list[Tensor]:
        table = self._table(micro[0], len(micro), train, without_last)
        self._loss, self._draws = loss, draws
        for part in self.parts.values():
            if part.module.training != self._model.training:
                part.module.train(self._model.training)
        seen = self._seen = [model_inputs(self._tokens, batch) for batch in micro]
        for part in self.parts.values():
            if train and part.capacity is not None:
                part.capacity.before(*seen)
        inputs = [torch.cat([one.batch.inputs_BS for one in seen])] if 0 in self.parts else []
        keywords = {name: torch.cat([one.keywords[name] for one in seen]) for name in seen[0].keywords}
        losses: list[Tensor] = []
        run = cast("Callable[..., Any]", table.step if train else table.eval)
        try:
            with quiet("torch.distributed.pipelining.schedules"):  # it logs the whole table
                run(*inputs, losses=losses if self.is_last else None, return_outputs=False, **keywords)
        except RuntimeError as error:  # torch tells of shapes; what went wrong is its cause
            if (cause := error.__cause__) is None:
                raise
            raise cause from cause.__cause__
        finally:
            self._seen = ()
            if not train:
                table.forget()
        return [one.detach() for one in losses]

    def _table(self, batch: Batch, count: int, train: bool, without_last: bool) -> ScheduleRun:
        rows, length = batch.inputs_BS.shape
        key = (rows, length, count, train, without_last)
        if key not in self._made:
            actions = self.actions(count) if train else forward_only(self._rank_of, count)
            stages = [self._stage(number, rows, length, train, without_last) for number in self.parts]
            self._made[key] = ScheduleRun(stages, actions, self._loss_of, self._loss_of_sums)
        return self._made[key]

    def _stage(self, number: int, rows: int, length: int, train: bool, without_last: bool) -> StageRun:
        """Told what comes and goes, so that nothing is run to find out."""
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        flow = torch.empty(rows, length, self.hidden, dtype=self._dtype, device="meta", requires_grad=True)
        logits = torch.empty(rows, length, self._vocabulary, dtype=self._dtype, device="meta", requires_grad=True)
        first, last = number == 0, number + 1 == len(self._rank_of)
        part = self.parts[number]
        routers = part.routers if train else None
        beside: tuple[Tensor, ...] = ()
        if routers is not None:
            beside = (torch.empty(routers.width, dtype=torch.float64, device="meta", requires_grad=True),)
        stage = StageRun(
            _PassOn() if last and without_last else part.module,
            number,
            len(self._rank_of),
            self._world.device,
            input_args=(ids,) if first else (flow, *beside),
            output_args=(logits,) if last else (flow, *beside),
            group=self._world.devices.get_group("pipeline"),
        )
        stage.before, stage.before_backward, stage.after_backward = self._begin, self._turn, self._end
        stage.sums = self._sums if beside else None
        stage.replicas = part.data_parallel if isinstance(part.data_parallel, Replicas) else None
        return stage

    def _loss_of(self, logits_BSV: Tensor, micro: int) -> Tensor:
        return self._loss(logits_BSV, micro)

    def _loss_of_sums(self, sums: Tensor) -> Tensor:
        assert self._last is not None  # the sums are its routers'
        assert self._last.routers is not None
        return self._router_loss(self._last.routers, sums)

    def _sums(self, micro: int, stage: int) -> Tensor:
        routers = self.parts[stage].routers
        assert routers is not None
        return routers.sums(self._seen[micro].batch.labels_BS)

    def _begin(self, micro: int, stage: int) -> None:
        if self._ahead is not None and stage + 1 == len(self._rank_of):
            self._ahead(micro)
        source = self.parts[stage].draws
        if self._draws is not None and source is not None:
            self._draws.begin(micro, source, self._drawn[stage])
        self._turn(micro, stage)

    def _turn(self, micro: int, stage: int) -> None:
        """What runs next is of this micro-batch: a forward, or a backward that computes some of it again."""
        part = self.parts[stage]
        if self._draws is not None and part.draws is not None:
            self._draws.turn(micro, part.draws)
        if part.capacity is not None:
            part.capacity.turn(micro)

    def _end(self, micro: int, stage: int) -> None:
        if (routers := self.parts[stage].routers) is not None:
            routers.forget()


def _no_loss(logits_BSV: Tensor, micro: int) -> Tensor:
    """Of a rank that has no logits."""
    raise AssertionError("a stage that is not the last has no loss")


def _no_router_loss(routers: Routers, sums: Tensor) -> Tensor:
    raise AssertionError("what is not trained has no loss of routers")
