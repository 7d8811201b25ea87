"""Strategies of a model on a cluster, from Python: what `tangram plan MODEL --cluster C` prints, as values.

    print(plan("llama-3-8b", "h100-8x8", Workload(tokens="4M", sequence=8192)))

Models by name need transformers, which is imported only when one is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.errors import UserError
from tangram.schema.plan import Job
from tangram.text import plain

if TYPE_CHECKING:
    from tangram.hardware.catalogue.cluster import Cluster
    from tangram.models.outlines.outline import Outline
    from tangram.planner.search.query import Answer
    from tangram.planner.search.strategy import Choice


PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""As a job writes them, and as the planner does."""


@dataclass(frozen=True)
class Workload:
    """What is to be trained in a step, and what may be used for it; the defaults of the command."""

    tokens: int | str = "4M"
    """Of a step, over all devices; "4M" is 4 x 1,024 x 1,024."""
    sequence: int = 8192
    """Tokens of a sample."""
    precision: str = "bf16"
    """What matmuls are computed in; several with commas between, as "bf16,fp8"."""
    framework: str = "tangram"
    """Whose overheads are predicted."""
    devices: str = ""
    """How many, or a range as "8-64"; "": all of the cluster."""
    memory_gb: float = 0.0
    """That a rank may use; 0: what its device has."""
    rows: int = 8
    """Strategies in the ranking."""


@dataclass(frozen=True)
class ClusterPlan:
    """Strategies by predicted step time within memory, the fastest first. `str` gives the command's tables."""

    answer: Answer
    """All of it: what was looked at, what would be otherwise, what would fit where nothing does."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Each with `mesh`, `step` (seconds), `memory` (bytes of a rank) and their intervals."""
        return self.answer.choices

    @property
    def best(self) -> Choice:
        """The first. Raises UserError where nothing fits."""
        if not self.choices:
            from tangram.planner.report.answer_tables import nothing_fits

            raise UserError(self.answer.missed or nothing_fits(self.answer))
        return self.choices[0]

    def as_json(self) -> dict[str, object]:
        """For programs: what `--json` prints of the ranking."""
        from tangram.planner.report.answer_tables import as_json

        return as_json(self.answer)

    def __str__(self) -> str:
        """The tables of the command."""
        from tangram.planner.report.answer_tables import tables

        return "\n\n".join("\n".join(plain(*table)) for table in tables(self.answer))


def plan(model: str | Path | Outline, cluster: str | Path | Cluster, job: Workload | Job | None = None) -> ClusterPlan:
    """The best strategies for a model on a cluster; nothing is run, and no device is needed.

    `model`: a preset, a Hugging Face directory or configuration, or an outline. `cluster`: a name as `h100-8x8`, or a
    file of one's own. `job`: the batch, sequence and precision; None: those of `Workload()`. Of a job that
    `tangram train` takes, its batch, sequence and precision are used. Raises UserError.
    """
    from tangram.hardware.catalogue import cluster as clusters
    from tangram.models.outlines.outline import Outline
    from tangram.planner.search.by_device_count import best
    from tangram.planner.search.objectives import Terms, aim_of
    from tangram.planner.search.query import ask_of

    where = clusters.load(cluster) if isinstance(cluster, str | Path) else cluster
    load = _workload(job)
    request = ask_of(
        str(load.tokens), load.sequence, load.precision, load.framework, load.devices, load.memory_gb, load.rows
    )
    if not isinstance(model, Outline):
        from tangram.models.outlines.outlined import outlined

        model = outlined(str(model))
    return ClusterPlan(best(model, where, request, aim_of("time", Terms(request.tokens))))


def _workload(job: Workload | Job | None) -> Workload:
    if job is None or isinstance(job, Workload):
        return job or Workload()
    tokens = job.data.global_batch * job.data.sequence
    return Workload(tokens, job.data.sequence, PRECISIONS[job.precision.compute])
