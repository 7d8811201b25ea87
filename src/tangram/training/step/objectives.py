"""What a task trains on, made of the logits of a batch: one row of a table for each task.

A loss is a sum of terms, each summed over something and divided by how much of that the global batch has, which every
rank knows: so it is the same for any micro-batches and ranks.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.kernels.divergence import FORMULAS as DIVERGENCES
from tangram.schema.job import Job
from tangram.schema.tuning import TaskName
from tangram.training.data import IGNORE, Batch, RankBatches
from tangram.training.objective.cached_teacher import TopLogits
from tangram.training.objective.loss import (
    Logits,
    leaving,
    logits_placement,
    row_losses,
    token_divergence,
    token_loss,
)
from tangram.training.objective.packing import model_inputs
from tangram.training.objective.preferences import (
    FIGURES,
    FORMULAS,
    LABELLED_FIGURES,
    Labelled,
    Scores,
    figures_of,
    labelled_figures,
    labelled_scores,
)
from tangram.training.parallel.model import ParallelModel, evaluating
from tangram.training.parallel.pipeline import ModelPart

Over = Literal["labels", "samples", "first tokens"]
"""What a term is a mean over: counted labels, samples, or all tokens but the begin of the first rows of samples."""
R = TypeVar("R")
LossSum = Callable[[nn.Module, Batch], Tensor]
"""The loss of a module on a batch, summed over its counted tokens."""


class Sums(NamedTuple):
    """Of a batch."""

    terms: tuple[Tensor, ...]
    figures: Tensor | None = None
    """Summed over samples (float64); None where the objective names none."""


@dataclass(frozen=True)
class Objective:
    """What is trained on, and what is told beside the loss."""

    sums: Callable[[Logits, Batch, Any], Sums]
    """Of the logits of a batch; with what `rows` gives of it under the reference (B), or a teacher's `Logits`."""
    over: tuple[Over, ...] = ("labels",)
    """What each term is divided by."""
    figures: tuple[str, ...] = ()
    """Names of means."""
    rows: Callable[[Logits, Batch], Tensor] | None = None
    """What is compared with a reference, for each row of a batch (B); None: there is no reference."""
    rows_per_sample: int = 1
    taught: bool = False
    """Whether it is compared with what a teacher says."""
    figures_over: Over = "samples"
    """What the figures are means over."""
    labelled: bool = False
    """Whether samples are answers that are good or bad: what they are compared with is `Labelled`, stacked."""
    own: LossSum | None = None
    """In the place of `sums`; of a model without stages."""

    def of_part(self, part: ModelPart, batch: Batch, compared: Any) -> Sums:
        """The sums of a whole model on a batch."""
        if self.own is not None:
            return Sums((self.own(part.module, batch),))
        return self.sums(_logits(part, batch), batch, compared)

    def refuse_own(self) -> None:
        """Raise UserError for a loss of one's own, of a model with stages."""
        if self.own is not None:
            raise UserError("stages of a pipeline train on the plan's task: this version takes no loss of one's own")

    def no_sums(self, device: torch.device) -> Sums:
        """Of a stage without logits."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return Sums((zero,) * len(self.over), zero.expand(len(self.figures)))

    def references(self, model: ParallelModel, batches: Sequence[Batch]) -> Sequence[Any]:
        """What it says of each batch, on ranks that have logits. Raises UserError for a model without one.

        A teacher's logits are made when they are asked for, each once.
        """
        rows = self.rows
        if self.taught:
            if (cached := model.cached_teacher) is not None:
                return _OnDemand(lambda number: cached(batches[number]), len(batches))
            if model.teacher is None:
                raise UserError("this loss compares with a teacher: give the ParallelModel one before it is trained")
            return _OnDemand(_teacher_logits(model.teacher, batches), len(batches))
        if rows is None:
            return [None for _ in batches]
        if model.reference is None:
            raise UserError("this loss compares with a reference: give the ParallelModel one before it is trained")
        others = [batch.others for batch in batches if batch.others is not None]
        with model.reference.used():
            found = _each(model, batches, rows)
            of_others = _each(model, others, rows)
        if not self.labelled:
            return found
        with evaluating(model.module):
            ahead = [(own, was) for own, was in zip(_each(model, others, rows), of_others, strict=True)]
        return _labelled_with(model, batches, found, ahead)

    def loss(self, sums: Sums, batches: RankBatches) -> Tensor:
        """This batch's part of the loss of the global batch."""
        parts = [term / count_of(batches, over) for term, over in zip(sums.terms, self.over, strict=True)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def counts(self, batch: Batch) -> Tensor:
        """What a batch has of everything that terms are divided by, and at last what figures are (float64)."""
        counted_BS = batch.labels_BS != IGNORE
        first_BS = counted_BS[:: self.rows_per_sample]
        counts: Mapping[Over, Tensor] = {
            "labels": counted_BS.sum(),
            "samples": first_BS.any(1).sum(),
            "first tokens": (every_label(batch)[:: self.rows_per_sample] != IGNORE).sum(),
        }
        return torch.stack([counts[over] for over in (*self.over, self.figures_over)]).double()


def count_of(batches: RankBatches, over: Over) -> int:
    """What the global batch has of it; at least 1."""
    counts = {"labels": batches.counted, "samples": batches.samples, "first tokens": batches.first_tokens}
    return max(1, counts[over])


@dataclass(frozen=True)
class _OnDemand(Sequence[Any]):
    """What a teacher says of each batch, made or read when it is asked for: all ranks ask a model alike."""

    make: Callable[[int], Any]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Any) -> Any:
        return self.make(at)


def _teacher_logits(teacher: ParallelModel, batches: Sequence[Batch]) -> Callable[[int], Logits | None]:
    """Of a batch by its number. In a pipeline the stages before the last have run for all of them then."""
    pipeline = teacher.pipeline
    makers: dict[int, Callable[[], Logits]] = {}
    for some in [] if pipeline is None else _at_once(teacher, batches):
        assert pipeline is not None
        with evaluating(teacher.module):
            make = pipeline.before_last([batch for _, batch in some])
        makers |= {number: partial(make, place) for place, (number, _) in enumerate(some)}

    def logits(number: int) -> Logits | None:
        if pipeline is not None and not pipeline.is_last:
            return None
        with evaluating(teacher.module):
            return _logits(teacher.parts[0], batches[number]) if pipeline is None else makers.pop(number)()

    return logits


def _each(model: ParallelModel, batches: Sequence[Batch], rows: Callable[[Logits, Batch], R]) -> list[R | None]:
    """Of each batch, on ranks that have logits; in a pipeline as many go through at once as train, of one size."""
    if model.pipeline is None:
        return [rows(_logits(model.parts[0], batch), batch) for batch in batches]
    found: dict[int, R] = {}
    for some in _at_once(model, batches):

        def keep(logits: Logits, micro: int, some: Sequence[tuple[int, Batch]] = some) -> Tensor:
            number, batch = some[micro]
            found[number] = rows(logits, batch)
            return logits.values_BSV.sum()

        model.pipeline.losses([batch for _, batch in some], keep)
    return [found.get(number) for number in range(len(batches))]


def _at_once(model: ParallelModel, batches: Sequence[Batch]) -> list[list[tuple[int, Batch]]]:
    """Batches that go through a pipeline together, with their numbers."""
    most = model.plan.micro_steps
    groups = groupby(enumerate(batches), lambda one: (one[0] // most, one[1].inputs_BS.shape))
    return [list(group) for _, group in groups]


def _labelled_with(
    model: ParallelModel,
    batches: Sequence[Batch],
    references: Sequence[Tensor | None],
    others: Sequence[tuple[Tensor | None, Tensor | None]],
) -> list[Tensor | None]:
    """`Labelled` of each batch, stacked. `others`: of the others' answers, under the policy and the reference."""
    sums = torch.zeros(4, dtype=torch.float64, device=model.world.device)
    for batch, (now, before) in zip(batches, others, strict=True):
        if now is None or before is None or batch.bad_B is None:  # a stage without logits
            continue
        counts_B = (batch.labels_BS != IGNORE).any(1)
        sums += torch.stack(
            [
                (now - before).where(counts_B, 0.0).sum(),
                counts_B.sum(),
                *((counts_B & side_B).sum() for side_B in (~batch.bad_B, batch.bad_B)),
            ]
        )
    dist.all_reduce(sums, group=model.world.group)  # of model axes' ranks all are multiples
    ahead, count, good, bad = sums
    shares = (ahead / count).clamp(min=0), *(torch.where(side > 0, count / side, 0.0) for side in (good, bad))
    return [None if x is None else torch.stack([x, *(share.expand_as(x) for share in shares)]) for x in references]


def objective_of(plan: Job, loss_sum: LossSum | None = None) -> Objective:
    """What a plan trains on; `loss_sum`: a loss of one's own in its place."""
    if loss_sum is not None:
        return replace(NEXT_TOKEN, own=loss_sum)
    return OBJECTIVES[plan.task](plan)


def next_token_loss(part: ModelPart, batch: Batch) -> Tensor:
    """The cross-entropy in nats of the next token, summed over the tokens that count.

    Of a derived model the logits stay in parts (`training.objective.loss`).
    """
    return _next_token(_logits(part, batch))


def _logits(part: ModelPart, batch: Batch) -> Logits:
    inputs = model_inputs(part.tokens, batch)
    with leaving(part.derived):
        values_BSV: Tensor = part.module(input_ids=inputs.batch.inputs_BS, use_cache=False, **inputs.keywords).logits
    return Logits(values_BSV, inputs, logits_placement(part.derived))


def _next_token(logits: Logits) -> Tensor:
    return token_loss(logits.values_BSV, logits.inputs.batch.labels_BS, logits.placement)


NEXT_TOKEN = Objective(lambda logits, batch, _: Sums((_next_token(logits),)))


def _preferences(plan: Job) -> Objective:
    preference = plan.preference
    assert preference is not None  # the job's tables say so
    formula, each = FORMULAS[preference.loss_type], plan.rows_per_sample

    def sums(logits: Logits, batch: Batch, reference_B: Tensor | None) -> Sums:
        logps_B, whole_B = answer_log_probs(logits, batch, prompts=formula.cross_entropy)
        scores, counts_P = _scores(logps_B, reference_B, batch)
        losses_P = formula.loss(scores, preference).where(counts_P, 0.0)
        figures = figures_of(scores, (logps_B[::each], logps_B[1::each]), counts_P, preference)
        return Sums((losses_P.sum(), *(() if whole_B is None else (whole_B[::each].sum(),))), figures)

    over: tuple[Over, ...] = ("samples", "first tokens") if formula.cross_entropy else ("samples",)
    return Objective(sums, over, FIGURES, _answers if plan.has_reference else None, each)


def _distilled(plan: Job) -> Objective:
    distill = plan.distill
    assert distill is not None  # the job's tables say so
    formula, alpha, temperature = DIVERGENCES[distill.loss_type], distill.alpha, distill.temperature

    def sums(logits: Logits, batch: Batch, teacher: Logits | TopLogits) -> Sums:
        far = token_divergence(logits, teacher, formula, distill.beta, temperature)
        loss, told = (1 - alpha) * temperature**2 * far, [far]
        if alpha:
            told.append(_next_token(logits))
            loss = loss + alpha * told[1]
        return Sums((loss,), torch.stack(told).detach().double())

    names = ("divergence", "cross_entropy")[: 1 + bool(alpha)]
    return Objective(sums, figures=names, taught=True, figures_over="labels")


def _labelled(plan: Job) -> Objective:
    preference = plan.preference
    assert preference is not None  # the job's tables say so
    formula = FORMULAS[preference.loss_type]

    def sums(logits: Logits, batch: Batch, compared_KB: Tensor | None) -> Sums:
        assert compared_KB is not None  # the job has a reference
        assert batch.bad_B is not None  # its rows have labels
        logps_B, compared = _answers(logits, batch), Labelled(*compared_KB)
        counts_B = (batch.labels_BS != IGNORE).any(1)
        losses_B = formula.loss(labelled_scores(logps_B, compared, batch.bad_B, counts_B), preference)
        return Sums((losses_B.sum(),), labelled_figures(logps_B, compared, batch.bad_B, counts_B, preference.beta))

    return Objective(sums, ("samples",), LABELLED_FIGURES, _answers, labelled=True)


def _answers(logits: Logits, batch: Batch) -> Tensor:
    return answer_log_probs(logits, batch)[0]


def _scores(logps_B: Tensor, reference_B: Tensor | None, batch: Batch) -> tuple[Scores, Tensor]:
    """Of pairs whose answers are rows that follow one another; and which of them are no empty ones."""
    tokens_B = (batch.labels_BS != IGNORE).sum(1)
    ratios_B = logps_B if reference_B is None else logps_B - reference_B
    counts_P = tokens_B[::2] > 0
    chosen, rejected = (ratios_B[side::2].where(counts_P, -1.0) for side in (0, 1))  # a formula's gradient is finite
    return Scores(chosen, rejected, *(tokens_B[side::2].clamp(min=1) for side in (0, 1))), counts_P


def answer_log_probs(logits: Logits, batch: Batch, *, prompts: bool = False) -> tuple[Tensor, Tensor | None]:
    """The log-probability of the labels of each row (B, float64), and with `prompts` the cross-entropy of every token
    but its first."""
    every_BS = every_label(batch) if prompts else batch.labels_BS
    masks = [batch.labels_BS != IGNORE, *([every_BS != IGNORE] if prompts else [])]
    ordered = logits.inputs.input_order_of
    answers_B, *whole = row_losses(
        logits.values_BSV, ordered(every_BS), [ordered(mask_BS) for mask_BS in masks], logits.placement
    )
    return -answers_B, whole[0] if whole else None


def every_label(batch: Batch) -> Tensor:
    """The labels of a batch of single documents that end with a counted one, with those of what answers answer."""
    places_S = torch.arange(batch.labels_BS.shape[1], device=batch.labels_BS.device)
    last_B = torch.where(batch.labels_BS != IGNORE, places_S, -1).amax(1)
    next_BS = torch.where(places_S < last_B[:, None], batch.inputs_BS.roll(-1, 1), batch.labels_BS)
    return torch.where(places_S <= last_B[:, None], next_BS, IGNORE)


OBJECTIVES: Mapping[TaskName, Callable[[Job], Objective]] = MappingProxyType(
    {
        "pretrain": lambda plan: NEXT_TOKEN,
        "sft": lambda plan: NEXT_TOKEN,
        "dpo": _preferences,
        "kto": _labelled,
        "distill": _distilled,
    }
)
