"""The part of one rank in `tangram train`: build, resume, train, save, measure."""

# ruff: noqa: N806  a tensor carries its dims in its name

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import tangram
from tangram.errors import UserError
from tangram.hardware.host.machine import peak_resident_mb, repeatable
from tangram.layout import Layout
from tangram.models.building.build import Source
from tangram.models.capturing.attention import TOKENS, by_tokens, mode_of
from tangram.models.outlines.costs import block_names
from tangram.planner.local.own_rules import code_digest
from tangram.planner.local.peak_memory import Memory
from tangram.planner.report import figures
from tangram.schema.files import dumps
from tangram.schema.job import Job, Packing
from tangram.schema.plan import Plan
from tangram.tracing.files.format import Phase
from tangram.tracing.settings import TraceSettings
from tangram.tracing.weights import WeightGroup
from tangram.training.data import Batch, Corpus, Stream, held_out_batches, open_corpus, padding, step_lengths, tokens_of
from tangram.training.mesh.groups import on_first
from tangram.training.mesh.local_parts import local
from tangram.training.mesh.mapped_tensors import free_at_once
from tangram.training.mesh.world import World, make_world
from tangram.training.objective.cached_teacher import open_cache
from tangram.training.objective.packing import SettledPacking, settle
from tangram.training.observe.events import Doing, Note, SaveFailed
from tangram.training.observe.profiling import profiled
from tangram.training.parallel.due_calls import due_calls, due_in_forwards
from tangram.training.parallel.fsdp import resharded
from tangram.training.parallel.model import ParallelModel, Reference
from tangram.training.run.launch import Rank
from tangram.training.run.out_of_memory import explained
from tangram.training.run.run_folder import CHECKPOINTS
from tangram.training.state.build_model import build, shallow, source_of
from tangram.training.state.checkpointer import Checkpointer, JobState, Pace, describe, load
from tangram.training.state.new_embedding_rows import untrained_rows
from tangram.training.state.reference_digest import begin_of_others
from tangram.training.state.state import make_missing_states
from tangram.training.state.teacher import build_teacher, classes_of, teacher_stamp
from tangram.training.step import loop
from tangram.training.step.evaluate import held_out_loss, logits_of, sum_over
from tangram.training.step.objectives import objective_of
from tangram.training.step.optimiser_step import make_optimiser

PROBE_TOKENS = 128  # of the fixed batch whose logits are compared


@dataclass(frozen=True)
class Snapshots:
    """Where checkpoints go in the stead of the job's folder, as into memory, and after how many steps each."""

    folder: Path
    every: int | None
    """None: as often as costs little (`Pace`)."""
    node: tuple[int, int, int, int] | None = None
    """Which of several machines this is, where what each has written stays there (`async_saver.Settings`)."""


@dataclass(frozen=True)
class RankJob:
    """What a rank is told."""

    plan: Plan
    folder: Path
    digest: str
    """Of the text that the parent has read; a rank that reads another one has to say so."""
    costs: loop.StepCosts
    resume: Path | None = None
    profile: bool = False
    memory: Memory | None = None
    """What the planner predicts of a rank."""
    snapshots: Snapshots | None = None
    """Whoever starts the ranks brings some of them to the folder of checkpoints."""
    spent: float = 0.0
    """Seconds that training has taken before, which count for `run.max_seconds`."""
    reached: int = 0
    """The steps that were told of by then."""
    trace: TraceSettings | None = None
    """None: nothing is traced."""


@dataclass(frozen=True)
class RankReport:
    """What a rank has measured; the same on every rank but for clock and memory."""

    trained: loop.Trained
    first: int
    """The steps that were done before, by the run that this one resumed."""
    step: int
    held_out_loss: float | None
    """None where nothing is held out, or somebody asked to stop, so that nothing was measured."""
    probe: npt.NDArray[np.float32] | None
    """The logits of the fixed batch, from rank 0."""
    peak_rss_mb: float
    """The most memory that any rank has had."""
    blocked_seconds: float
    packing: Packing
    """Which documents a sample held."""
    ranks: int
    """With how many it ended: fewer than its plan has where not all could be kept alive."""


@dataclass(frozen=True)
class Begun:
    """A rank that is ready for its first step."""

    model: ParallelModel
    """Its plan has what was settled."""
    corpus: Corpus
    state: JobState
    settled: SettledPacking


def begin(rank: Rank, job: RankJob) -> Begun:
    """Build the model and the optimiser, with what the checkpoint says if one is gone on from."""
    plan, group = job.plan, dist.group.WORLD
    assert group is not None  # the launcher has made it
    if plan.run.deterministic:
        repeatable()
    if plan.run.stream_layers:
        free_at_once()
    tell = rank.emit if rank.index == 0 else _nowhere
    tell(Doing("making the groups of the mesh, opening the text"))
    world = make_world(plan, rank.index, rank.device, group)
    tokens = tokens_of(plan)
    corpus = open_corpus(plan.data, tokens)
    if corpus.digest != job.digest:
        raise UserError("this rank reads another text than the others: let the files rest, or train on a copy")
    source = source_of(plan, tokens)
    tell(Doing("building the model, cutting it, giving it values"))
    with explained(None, None, job.memory):
        compares = plan.has_reference  # with the values of the begin, whatever a checkpoint has
        model = build(plan, source, world, values=job.resume is None or compares)
        model = replace(model, reference=Reference(model.module) if compares else None)
        model = replace(model, teacher=build_teacher(plan, tokens, world))
    stamp = teacher_stamp(plan) if plan.distill is not None and plan.distill.cache is not None else None
    cached = open_cache(plan, corpus.digest, classes_of(source.config), stamp)
    model = replace(model, cached_teacher=None if cached is None else cached.top_logits)
    begun = begin_of_others(model, job.resume, None if cached is None else cached.digest)
    tell(Doing("making the optimiser" if job.resume is None else "loading the checkpoint"))
    optimiser = make_optimiser(model)
    if plan.run.stream_layers:
        make_missing_states(optimiser, in_files=True)
    state = JobState(model.module, optimiser, plain=model.plain)
    if job.resume is not None:
        state.progress = load(job.resume, state, plan, world)
    tell(Doing("asking whether the model tells documents apart"))
    settled = settled_packing(model, job.resume, source)
    plan = with_packing(plan, settled.packing)
    state.about = about(plan, corpus) | begun
    return Begun(replace(model, plan=plan), corpus, state, settled)


def train_rank(rank: Rank, job: RankJob) -> RankReport:
    """The task of a rank."""
    begun = begin(rank, job)
    model, corpus, state = replace(begun.model, trace=rank.trace), begun.corpus, begun.state
    plan, world = model.plan, model.world
    rank.trace.label(part.module for part in model.parts)
    figures = len(objective_of(plan).figures)
    rank.trace.expect(due_calls(model, figures=figures), due_in_forwards(model))
    early = plan.optimiser.in_backward
    rank.trace.weights(weight_groups(model), layers_of_trained(model), in_backward=early)
    tell = rank.emit if rank.index == 0 else _nowhere
    to = job.snapshots or Snapshots(job.folder / CHECKPOINTS, plan.checkpoint.every_steps)
    pace = Pace() if to.every is None and rank.index == 0 else None  # whose writer does the most
    memory = job.snapshots is not None
    checkpointer = Checkpointer(to.folder, plan, world, snapshots=memory, node=to.node, spare=rank.spare, pace=pace)
    tell(Doing("making ready to save"))
    if to.every != 0:  # else there is only the last one, which is waited for
        checkpointer.prepare(state)
    if rank.index == 0:
        rank.emit(Note(_packing_words(begun.settled, corpus, plan)))
        if words := untrained_rows(model.module, plan, tokens_of(plan).vocabulary):
            rank.emit(Note(words))

    tell(Doing("the first step"))
    first, before = state.progress.step, state.progress
    with profiled(job.folder / "profile" if job.profile else None, rank.index, rank.device) as after_step:
        often = plan.checkpoint.every_steps if to.every is None else to.every  # beside the pace, what the plan wants
        hooks = loop.Hooks(rank.emit, rank.stop.requested, after_step, job.folder, often, job.spent, job.reached)
        with explained(model.module, state.optimiser, job.memory):
            trained = loop.train_steps(model, state, corpus, checkpointer, hooks, job.costs)
    rank.trace.phase(Phase.CHECKPOINT)
    on_disk = job.resume is not None and job.resume.parent == job.folder / CHECKPOINTS
    last = checkpointer
    if not (on_disk and state.progress == before):  # else it would be written a second time
        checkpointer.save(state, wait=True)
        if memory and to.node is None and not checkpointer.has(state):  # it takes no more: the disk may
            last = Checkpointer(job.folder / CHECKPOINTS, plan, world)
            last.save(state, wait=True)
    rank.trace.phase(Phase.EVALUATION)
    for event in (*checkpointer.close(), *(last.close() if last is not checkpointer else ())):
        rank.emit(event)
        if isinstance(event, SaveFailed) and event.step == state.progress.step and not last.has(state):
            raise UserError(f"the last checkpoint could not be written: {event.reason}")
    stopped = trained.stopped == "signal"
    return RankReport(
        trained=trained,
        first=first,
        step=state.progress.step,
        held_out_loss=held_out_loss(model, corpus) if plan.data.measured and not stopped else None,
        probe=None if stopped else probe_logits(model, corpus),
        peak_rss_mb=highest(peak_resident_mb(), world),
        blocked_seconds=checkpointer.blocked_seconds,
        packing=begun.settled.packing,
        ranks=plan.ranks,
    )


def _nowhere(event: object) -> None:
    """Only rank 0 tells what it is doing."""


def highest(mine: float, world: World) -> float:
    """The highest of the ranks' numbers, on all."""
    number = torch.tensor(mine, dtype=torch.float64, device=world.device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=world.group)
    return float(number.item())


def about(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it."""
    return {
        "plan": dumps(plan),
        "stream": stream_of(plan, corpus),
        "code": code_digest(plan),
        "tangram": tangram.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def stream_of(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """What gives a position in the stream of samples its meaning: a run goes on with the same only."""
    return {
        "text": corpus.digest,
        "seed": plan.seed,
        "sequence": plan.data.sequence,
        "weights": [source.weight for source in plan.data.sources],
        "packing": plan.data.packing,
    }


def packing_of(checkpoint: Path) -> Packing:
    """How the run that wrote a checkpoint packed its text; before there was a choice, documents shared windows."""
    return describe(checkpoint).about.get("stream", {}).get("packing", "packed")


def settled_packing(model: ParallelModel, resume: Path | None, source: Source) -> SettledPacking:
    """What `data.packing` comes to, the same on all ranks; a run that goes on keeps what it had.

    Where no rank has the whole model, a shallow one is asked, of one block of each kind: what tells documents apart is
    the code and not the number of blocks. Nor is it the casts of a mode of attention, whose scales are of many tokens:
    later ones and other documents reach a token by a rounding. So with one a shallow model without them is asked.
    """

    plan, world = model.plan, model.world

    def on_all(mine: bool) -> bool:
        return sum_over(world.group, torch.tensor([float(mine)], device=world.device)) == [float(world.size)]

    before = None if resume is None else packing_of(resume)
    if mode_of(source.config) not in (None, TOKENS):
        source = replace(source, config=by_tokens(source.config))
        plan = plan.model_copy(update={"run": plan.run.model_copy(update={"attention": TOKENS})})
        return on_first(
            [world.group], lambda: settle(shallow(plan, source), plan.data.packing, before, lambda mine: mine)
        )
    if plan.pipeline is not None or plan.run.stream_layers:
        return on_first(
            [world.group], lambda: settle(shallow(plan, source), plan.data.packing, before, lambda mine: mine)
        )
    with resharded(model.module):
        device, tokens = next(model.module.parameters()).device, model.parts[0].tokens
        return settle(model.module, plan.data.packing, before, on_all, device=device, tokens=tokens)


def with_packing(plan: Plan, packing: Packing) -> Plan:
    """The plan in which it is settled."""
    return plan.model_copy(update={"data": plan.data.model_copy(update={"packing": packing})})


def empty_places(plan: Job, corpus: Corpus) -> float:
    """The share of the places of rows, as long as steps have them in the mean, that hold no token of a document."""
    data, length = plan.data, plan.data.sequence
    if not plan.run.compile:  # where each length would be compiled rows keep the plan's
        length, _ = step_lengths(corpus, data, plan.seed, plan.run.steps)
    return max(0.0, 1 - (1 - padding(corpus, data)) * data.sequence / length)


def _packing_words(settled: SettledPacking, corpus: Corpus, plan: Plan) -> str:
    what = "documents share samples"
    if settled.packing == "best-fit":
        what = f"whole documents share samples, {figures.percent(empty_places(plan, corpus))} of the places hold none"
    if settled.packing == "single":
        what = f"one document to a sample, {figures.percent(empty_places(plan, corpus))} of the places hold none"
    return f"packing    {settled.packing}: {what}; {settled.why}"


def probe_batch(corpus: Corpus, plan: Plan, device: torch.device) -> Batch:
    """The fixed batch: the begin of the first held-out sample (else training sample), the same for any ranks."""
    if plan.data.measured:
        batch = next(iter(held_out_batches(corpus, plan.data, index=0, size=1, device=device)))
    else:
        stream = Stream(corpus, plan.data, seed=plan.seed, device=device)
        batch = next(stream).micro[0]
    positions_BS = batch.positions_BS
    return Batch(
        batch.inputs_BS[:1, :PROBE_TOKENS],
        batch.labels_BS[:1, :PROBE_TOKENS],
        None if positions_BS is None else positions_BS[:1, :PROBE_TOKENS],
    )


@torch.no_grad()
def probe_logits(model: ParallelModel, corpus: Corpus) -> npt.NDArray[np.float32]:
    """The logits of the fixed batch, computed by all ranks of the model together."""
    model.module.eval()
    with resharded(model.module):
        batch = probe_batch(corpus, model.plan, model.world.device)
        return logits_of(model, batch).float().cpu().numpy()


def layers_of_trained(model: ParallelModel) -> list[str]:
    """Of each trained parameter, in order, the layer, or the module outside of all layers."""
    layers = block_names(model.module)
    return [_layer(name, layers) for name, parameter in model.module.named_parameters() if parameter.requires_grad]


def _layer(name: str, layers: Sequence[str]) -> str:
    return next((one for one in layers if name.startswith(f"{one}.")), name.rpartition(".")[0])


def weight_groups(model: ParallelModel) -> list[WeightGroup]:
    """The weights of the layers of a model, and of what lies outside of them.

    Ranks of model axes count as unlike: what they all hold whole they update by gradients that each has summed for
    itself, in an order of its own. Those of data axes update by the same bits.
    """
    layers = block_names(model.module)
    found: dict[str, list[nn.Parameter]] = {}
    axes: dict[str, set[str]] = {}
    for name, parameter in model.module.named_parameters():
        layer = _layer(name, layers)
        found.setdefault(layer, []).append(parameter)
        sharded = Layout.parse(model.plan.layout_of(name)).axes
        axes.setdefault(layer, {*model.world.axes.model}).update(sharded)
    return [WeightGroup(layer, tuple(sorted(axes[layer])), partial(_parts, some)) for layer, some in found.items()]


def _parts(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [local(one) for one in parameters]
