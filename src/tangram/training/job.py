"""The whole of `tangram train`: train on many ranks, then prove in one process that the state survived.

    read the text -> train on the mesh -> checkpoint -> load it in one process through relayout -> same held-out loss?
    -> export -> does transformers load it with the same logits?

The last two questions are answered by measuring, and a wrong answer fails the job.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.build import build_on_meta, initial_tensors, make_config
from tangram.training import data, loop, state
from tangram.training.export import export, logits_difference
from tangram.training.launch import Rank, RankError, computing_as_a_rank, pick_device, refuse_too_many, run_ranks
from tangram.training.parallelise import materialise, parallelise, shard_dims
from tangram.training.plan import AXIS, Plan
from tangram.training.progress import Note

SAME_LOSS = 1e-6  # relative; the sums are the same but for their order
SUMMARY_FILE = "summary.json"  # the report, as `--json` prints it; written last, so it says that all proofs held
FAILURE_FILE = "failure.txt"  # the stack trace of the rank that ended a job
SAME_LOGITS = 1e-5  # absolute; the same operations on the same numbers


class ProofError(Exception):
    """The job ran, but what it left behind is not what it trained."""


JOB_FAILURES = (RankError, ProofError)


@dataclass(frozen=True)
class RankJob:
    """What a rank is told: the plan, where to leave the checkpoint, and what the text is."""

    plan: Plan
    checkpoint: Path
    digests: tuple[str, str]
    """Of the text that the parent has read; a rank that reads another one has to say so."""


@dataclass(frozen=True)
class RankReport:
    """What a rank has measured; the same on every rank but for the clock."""

    trained: loop.Trained
    held_out_loss: float


@dataclass(frozen=True)
class TrainReport:
    """The result of a job, as shown and as `--json` writes it."""

    parameters: int
    ranks: int
    steps: int
    tokens: int
    seconds: float
    first_loss: float
    final_loss: float
    """The mean of the last ten steps."""
    unigram_entropy: float
    held_out_loss: float
    held_out_loss_reloaded: float
    relative_difference: float
    logits_difference: float
    checkpoint: str
    export: str


def run_job(plan: Plan, out: Path, on_event: Callable[[object], None]) -> TrainReport:
    """Train as planned; leave `checkpoint/`, `export/` and `summary.json` in `out`, the folder from `run_folder`."""
    refuse_too_many(plan.ranks)
    config = model_config(plan)
    cut = shard_dims(build_on_meta(config), plan.layout_of, Mesh.parse(plan.mesh))  # refused here, not on every rank
    parameters = sum(parameter.numel() for parameter in cut)
    split, held_out = data.read_corpus(plan.data)
    entropy = data.unigram_entropy(held_out, data.held_out_samples(held_out, plan.data))
    on_event(Note(f"model      {plan.model.preset}, {parameters:,} parameters, mesh {plan.mesh}"))
    on_event(
        Note(f"text       {len(split.tokens_N):,} tokens to train on, {len(held_out.tokens_N):,} held out by file")
    )

    checkpoint, folder = out / "checkpoint" / "last", out / "export"
    trained, before = _run_ranks(RankJob(plan, checkpoint, (split.digest(), held_out.digest())), out, on_event)
    on_event(Note(f"trained    {len(trained.losses)} steps, {trained.tokens:,} tokens in {trained.seconds:.0f} s"))
    on_event(Note(f"held out   loss {before:.6f} on {plan.ranks} rank(s); unigram entropy {entropy:.4f}"))

    with computing_as_a_rank(plan.ranks):
        model = load_in_one_process(plan, config, checkpoint, pick_device(plan.run.device, 0, plan.ranks))
        after, relative = prove_same_loss(model, plan, held_out, before)
    on_event(
        Note(f"reloaded   loss {after:.6f} in one process; relative difference {relative:.1e}, at most {SAME_LOSS}")
    )
    with computing_as_a_rank(plan.ranks):
        export(model, folder)
        difference = prove_same_logits(model, plan, held_out, folder)
    on_event(
        Note(f"exported   {folder}; loaded by transformers, logits differ by {difference:.1e}, at most {SAME_LOGITS}")
    )
    report = TrainReport(
        parameters=parameters,
        ranks=plan.ranks,
        steps=len(trained.losses),
        tokens=trained.tokens,
        seconds=trained.seconds,
        first_loss=trained.losses[0],
        final_loss=statistics.fmean(trained.losses[-10:]),
        unigram_entropy=entropy,
        held_out_loss=before,
        held_out_loss_reloaded=after,
        relative_difference=relative,
        logits_difference=difference,
        checkpoint=str(checkpoint),
        export=str(folder),
    )
    (out / SUMMARY_FILE).write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def _run_ranks(job: RankJob, out: Path, on_event: Callable[[object], None]) -> tuple[loop.Trained, float]:
    """Run the ranks; what rank 0 measured. The stack trace of a rank that fails goes to a file."""
    plan = job.plan
    try:
        first, *_ = run_ranks(train_rank, job, world=plan.ranks, on_event=on_event, device=plan.run.device)
    except RankError as failure:
        (out / FAILURE_FILE).write_text(f"{failure}\n\n{failure.details}", encoding="utf-8")
        raise
    return first.trained, first.held_out_loss


def prove_same_loss(model: PreTrainedModel, plan: Plan, held_out: data.Split, before: float) -> tuple[float, float]:
    """The held-out loss of the reloaded model and how far it is from the one before; ProofError when too far."""
    batches = data.held_out_batches(held_out, plan.data, rank=0, world=1, device=model.device)
    after = loop.evaluate(model, batches, model.device, group=None)
    relative = abs(after - before) / abs(before)
    if not relative <= SAME_LOSS:
        raise ProofError(f"the reloaded checkpoint has a held-out loss of {after}, not the {before} that was measured")
    return after, relative


def prove_same_logits(model: PreTrainedModel, plan: Plan, held_out: data.Split, folder: Path) -> float:
    """How far the logits of the exported model are from ours on held-out text; ProofError when too far."""
    samples = data.held_out_samples(held_out, plan.data)[: plan.data.micro_batch]
    probe = data.collate(held_out, samples, plan.data.sequence, model.device)
    difference = logits_difference(model, folder, probe.inputs_BS)
    if not difference <= SAME_LOGITS:
        raise ProofError(f"transformers loads {folder} as another model: the logits differ by {difference}")
    return difference


def model_config(plan: Plan) -> PreTrainedConfig:
    """The model's configuration, fitted to the tokens of `tangram.training.data`."""
    tokens = {"vocab_size": data.VOCABULARY, "bos_token_id": data.END, "eos_token_id": data.END}
    fields = tokens | dict(plan.model.change)
    size = fields["vocab_size"]
    if isinstance(size, int) and size < data.VOCABULARY:  # before transformers warns of what follows from it
        raise UserError(f"model.change.vocab_size is {size}, but the tokens need {data.VOCABULARY}")
    config = make_config(plan.model.preset, fields)
    if config.max_position_embeddings < plan.data.sequence:
        raise UserError(
            f"data.sequence is {plan.data.sequence}, but the model has {config.max_position_embeddings} positions: "
            "set model.change.max_position_embeddings"
        )
    return config


def train_rank(rank: Rank, job: RankJob) -> RankReport:
    """The part of one rank: build, train, measure, save."""
    plan, group = job.plan, dist.group.WORLD
    assert group is not None  # the launcher has made it
    model = build_parallel(plan, rank)
    optimiser = loop.make_adamw(model, plan.optimiser)
    split, held_out = data.read_corpus(plan.data)
    if (split.digest(), held_out.digest()) != job.digests:
        raise UserError("the files of data.root have changed since the job began: let them rest, or train on a copy")
    trained = loop.train_steps(model, optimiser, split, plan, rank, group)
    loss = loop.held_out_loss(model, held_out, plan, rank, group)
    state.save(model, optimiser, job.checkpoint, group)
    return RankReport(trained, loss)


def build_parallel(plan: Plan, rank: Rank) -> PreTrainedModel:
    """This rank's part of the model, with its initial weights."""
    config = model_config(plan)
    model = build_on_meta(config)
    devices = init_device_mesh(rank.device.type, (rank.world,), mesh_dim_names=(AXIS,))
    parallelise(model, plan.layout_of, Mesh.parse(plan.mesh), devices)
    materialise(model, rank.device, initial_tensors(config, plan.seed))
    return model


def load_in_one_process(
    plan: Plan, config: PreTrainedConfig, checkpoint: Path, device: torch.device
) -> PreTrainedModel:
    """The trained model, whole, from a checkpoint of any number of ranks."""
    model = build_on_meta(config)
    materialise(model, device, initial_tensors(config, plan.seed))
    optimiser = loop.make_adamw(model, plan.optimiser)
    state.empty_adamw_states(optimiser)
    state.load_whole(checkpoint, model, optimiser)
    return model
