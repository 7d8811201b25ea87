"""`tangram shard MODEL --choose`: the cheapest plan for a cluster, beside that of the model's marks."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.text import refuse_unwritable, write_file

if TYPE_CHECKING:
    from tangram.hardware.catalogue.cluster import Cluster
    from tangram.layout import Mesh
    from tangram.models.capturing.graph import Graph
    from tangram.schema.job import Job
    from tangram.sharding.choose.choose import ChosenMarks, Price
    from tangram.sharding.choose.costs import Training
    from tangram.sharding.choose.export_marks import Marked
    from tangram.sharding.derive.derive import Derived
    from tangram.sharding.derive.marking.marks import Mark

UNITS = {"": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


@dataclass(frozen=True)
class Choosing:
    """What a user typed beside the model and its mesh."""

    memory: str | None = None
    """Of a rank, as `80GB`; None: what the cluster's device has."""
    seconds: float = 10.0
    """Of the clock, for the search."""
    optimiser: float = 12.0
    """Bytes of the optimiser's states for each parameter."""
    micro_batches: int = 1
    write: Path | None = None
    """Where to write it: as marks, or as a plan of a job."""
    job: Path | None = None

    @property
    def training(self) -> "Training":
        """How the model is trained, as far as it counts."""
        from tangram.sharding.choose.costs import Training

        return Training(optimiser=self.optimiser, micro_batches=self.micro_batches)


def cluster_of(name: str | None, mesh: "Mesh") -> "Cluster":
    """The cluster, which a choice needs. Raises UserError where there is none, or one that is too small."""
    from tangram.hardware.catalogue.cluster import load, names
    from tangram.sharding.choose.choose import refuse_larger

    if name is None:
        raise UserError(f"--choose needs a cluster: give --cluster, a file or one of {', '.join(names())}")
    cluster = load(name)
    refuse_larger(mesh, cluster)
    return cluster


def bytes_of(text: str) -> float:
    """`80GB` or `74.5GiB` as bytes. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        units = ", ".join(unit for unit in UNITS if unit)
        raise UserError(f'"{text}" is no memory: write a number above 0 with one of {units}, as in 80GB')
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Answer:
    """What was chosen, and what it is beside."""

    chosen: "ChosenMarks"
    limit: float
    took: float
    """Seconds of the clock."""
    other: "Derived | None"
    """The plan of the marks that come with the model."""
    theirs: "Price | None"
    why_not: str
    """Why there is none."""


def answer(
    graph: "Graph", mesh: "Mesh", cluster: "Cluster", kind: str, given: "Sequence[Mark]", asked: Choosing
) -> Answer:
    """Choose, and price the plan of the marks that come with a type of model. Raises UserError."""
    from tangram.sharding.choose.choose import choose, priced

    limit = cluster.device.memory_bytes if asked.memory is None else bytes_of(asked.memory)
    training = asked.training
    with progress("choosing"):
        start = time.perf_counter()
        try:
            other, why_not = _of_marks(graph, mesh, cluster, kind), ""
        except UserError as error:
            other, why_not = None, str(error)
        known = [other] if other is not None and not given else []
        chosen = choose(
            graph, mesh, cluster, memory_limit=limit, marks=given, seconds=asked.seconds, training=training, known=known
        )
        took = time.perf_counter() - start
    theirs = None if other is None else priced(other, cluster, training)
    return Answer(chosen, limit, took, other, theirs, why_not)


def _of_marks(graph: "Graph", mesh: "Mesh", cluster: "Cluster", kind: str) -> "Derived":
    """The plan of the marks that come with a model; over axes that they do not name, the batch is cut."""
    from tangram.sharding.derive.derive import WorkRates, derive
    from tangram.sharding.derive.marking.marks import Mark, marks_of

    marks = marks_of(kind)
    if not marks:
        what = f"a {kind} model" if kind else "a model of one's own"
        raise UserError(f"no marks come with Tangram for {what}")
    # The marks that come with a model speak of tensor parallelism alone: over what is left the batch is cut, as in use.
    others = [axis for axis in mesh.axes if axis != "tp"]
    if others:
        marks.append(Mark.parse(f"input_ids: b/{'/'.join(others)} s"))
    return derive(graph, marks, mesh, rates=WorkRates(cluster=cluster))


def job_of(asked: Choosing, sequence: int) -> "Job | None":
    """The job that a plan is to be written for. Raises UserError for one that the choice cannot be for."""
    from tangram.schema.files import load
    from tangram.schema.plan import Plan

    if asked.write is not None:
        refuse_unwritable(asked.write, "the file")
    if asked.job is None:
        return None
    job = load(asked.job)
    if isinstance(job, Plan):
        raise UserError(f"{asked.job} is a plan already: give a job, without mesh, axes and layouts")
    if job.data.sequence != sequence:
        raise UserError(
            f"{asked.job} trains on {job.data.sequence} tokens a sample, and the choice is for {sequence}: give "
            f"--sequence {job.data.sequence}"
        )
    return job


@dataclass(frozen=True)
class Wrote:
    """What was written, for people and for programs."""

    summary: str
    marks: tuple[str, ...]


def write(
    asked: Choosing,
    found: Answer,
    cluster: "Cluster",
    samples: int,
    job: "Job | None",
    captured: "Callable[[int], Graph]",
) -> Wrote:
    """Write the chosen plan as marks or, for a job, as a plan. Raises UserError where that cannot be."""
    path = asked.write
    assert path is not None  # it was asked for
    with progress("writing it as marks"):
        if job is not None:
            text, marks = _plan_text(found, cluster, samples, job, captured, asked.training)
            said = f"wrote {path}: tangram train {path}"
        else:
            marked = _as_marks(found, cluster, asked.training)
            marks = tuple(map(str, marked.marks))
            if not marks:
                raise UserError("the chosen plan cuts nothing, so there is no mark to write: choose over a mesh of one")
            text = "\n".join([f"# Chosen over {found.chosen.plan.mesh}.", *marks, ""])
            said = f"wrote {path}: {len(marks)} marks, which take {marked.price.seconds:.3g} s by the same model"
    write_file(path, text, "the file")
    return Wrote(said, marks)


def _as_marks(found: Answer, cluster: "Cluster", training: "Training") -> "Marked":
    from tangram.sharding.choose.export_marks import as_marks

    return as_marks(found.chosen.plan, cluster, memory_limit=found.limit, training=training)


def _plan_text(
    found: Answer,
    cluster: "Cluster",
    samples: int,
    job: "Job",
    captured: "Callable[[int], Graph]",
    training: "Training",
) -> tuple[str, tuple[str, ...]]:
    from tangram.models.building.build import build_on_meta
    from tangram.planner.local.plan_from_sharding import plan_of_choice
    from tangram.schema.files import dumps
    from tangram.training.data import tokens_of
    from tangram.training.state.build_model import source_of

    model = build_on_meta(source_of(job, tokens_of(job)).config)
    plan = plan_of_choice(
        job, found.chosen.plan, samples, captured, cluster, model, memory_limit=found.limit, training=training
    )
    return dumps(plan), tuple(f"{pattern}: {layout}" for pattern, layout in plan.layouts.marks.items())


def show(found: Answer, asked_json: bool, seconds: Mapping[str, float], wrote: Wrote | None = None) -> None:
    """Print it."""
    from tangram.sharding.choose.choose import kept
    from tangram.sharding.derive.explain.show import amount, as_json, folded_name, short, tables

    if asked_json:
        print_json(
            {
                **as_json(found.chosen.plan), "chosen": _figures(found.chosen.price), "bound": found.chosen.bound,
                "gap": found.chosen.gap, "kept": {name: str(own) for name, own in kept(found.chosen.plan).items()},
                "memory": found.limit, "seconds": {**seconds, "choose": found.took},
                "written": None if wrote is None else wrote.marks,
                "marked": None if found.theirs is None else _figures(found.theirs),
            }
        )  # fmt: skip
        return
    for title, headers, rows in tables(found.chosen.plan):
        print_table(title, headers, rows)
    own = kept(found.chosen.plan)
    if own:
        plan = found.chosen.plan
        rows_kept = [(folded_name(plan, name), short(layout)) for name, layout in own.items()]
        title = "Parameters that are kept in parts, and gathered for the forward and the backward"
        print_table(title, ("", "kept as"), rows_kept)
    headers = ("plan", "seconds", "operators", "moving", "memory of a rank", "states", "saved")
    rows = [_row("chosen", found.chosen.price)]
    if found.theirs is not None:
        rows.append(_row("from the model's marks", found.theirs))
    print_table("A forward and a backward, as the cluster's file has it", headers, rows)
    if found.why_not:
        print(f"nothing to compare it with: {found.why_not}")
    gap = found.chosen.gap
    said = "the best there is" if gap < 1e-4 else f"at most {gap:.2%} longer than the best there is"
    print(f"{said} within {amount(found.limit)}, by this model; chosen in {found.took:.1f} s")
    if wrote is not None:
        print(wrote.summary)


def _row(name: str, price: "Price") -> tuple[str, ...]:
    from tangram.sharding.derive.explain.show import amount

    times = (f"{x:.3g} s" for x in (price.seconds, price.work, price.moving))
    return (name, *times, *map(amount, (price.nbytes, price.states, price.saved)))


def _figures(price: "Price") -> dict[str, Any]:
    return {**asdict(price), "seconds": price.seconds, "bytes": price.nbytes}
