"""`tangram plan export` and `tangram plan explain MODEL FILE`: what they read and write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.hardware.host.workers import command
from tangram.models.outlines.outline import Outline
from tangram.planner.exports.numbers import Written, numbers_of, strategy_request
from tangram.planner.exports.targets import picked, target
from tangram.planner.imports.words import ReadStrategy
from tangram.planner.legality.enumerate import Able
from tangram.planner.local.ranking_table import Titled
from tangram.planner.platforms.jobs import RUN, job_of, words
from tangram.planner.platforms.targets import platform
from tangram.planner.report.answer_tables import ZERO
from tangram.planner.search.strategy import Ask, Choice
from tangram.text import refuse_unwritable, write_file

Typed = tuple[str | None, int | None, str | None, str | None, str, float, int]
"""Tokens of a step, of a sample, precision, framework, devices, memory in GB, how many strategies; None: as usual."""


@dataclass(frozen=True)
class ExportRequest:
    """A file that is to be written of the strategy that is taken."""

    export: str
    """For which project; "" for a job file."""
    emit: str
    """For which platform; "" for a project."""
    out: Path | None
    pick: int
    run: str = RUN
    image: str = ""
    submit: bool = False

    @property
    def framework(self) -> str:
        """Whose figures hold where none is given; "" for the usual."""
        return target(self.export).framework if self.export else ""

    @property
    def loss(self) -> str:
        """How it is made of the logits where nothing else is said; "": as the framework does."""
        return target(self.export).loss if self.export else ""

    def able(self, outline: Outline) -> Able:
        """What is searched."""
        return target(self.export).able(outline) if self.export else Able()


def checked(wanted: ExportRequest) -> None:
    """Raise UserError for what can be seen before anything is searched."""
    if wanted.export and wanted.emit:
        raise UserError("--to and --job-file write one file each: call the command for each of them")
    out = wanted.out
    if wanted.export:
        target(wanted.export)
        if wanted.submit:
            raise UserError("--submit is of --job-file: it submits a job file")
    else:
        client = platform(wanted.emit).client[0]
        if wanted.submit and out is None:
            raise UserError("--submit needs a file: give one with --out")
        if wanted.submit and not which(client):
            raise UserError(f"{client} is not installed here: write the file without --submit, and submit it elsewhere")
    if out is not None:
        refuse_unwritable(out, "the file")


def read_strategy(explain: str, outline: Outline, devices: int, cluster: Cluster) -> ReadStrategy | None:
    """The strategy in a file; None where `explain` is a mesh. Raises UserError."""
    if not explain.strip():
        raise UserError('no strategy is given: write its mesh, as "dp=8 tp=2", or the name of its file')
    path = Path(explain)
    if path.exists():
        from tangram.planner.imports.files import strategy_of  # loads torch

        return strategy_of(path, outline, devices, cluster.ranks)
    if "=" not in explain and (path.suffix or "/" in explain):
        raise UserError(f'there is no file "{explain}", and it is no mesh either')
    return None


def typed_or_read(
    typed: Typed, found: ReadStrategy | None, wanted: ExportRequest | None
) -> tuple[str, int, str, str, str, float, int]:
    """What was typed, then what a file says, then what is usual. Raises UserError."""
    tokens, sequence, precision, framework, devices, memory, most = typed
    if wanted is not None:
        framework = framework or wanted.framework or None
    if found is None:
        tokens, sequence = "4M" if tokens is None else tokens, 8192 if sequence is None else sequence
        return tokens, sequence, precision or "bf16", framework or "tangram", devices, memory, most
    one = found.numbers
    sequence = one.sequence if sequence is None else sequence
    if not sequence:
        raise UserError("the file does not say how many tokens a sample has: give them with --seq")
    return (
        tokens or str(one.batch * sequence), sequence, precision or one.precision, framework or found.framework,
        str(one.ranks), memory, most,
    )  # fmt: skip


def read_table(path: str, found: ReadStrategy) -> Titled:
    """What was read of a file, for people."""
    given = strategy_request(found.numbers)
    rows = [
        ("mesh", given.mesh),
        ("micro-batch", f"{given.micro} of {found.numbers.batch} samples"),
        ("schedule", f"{given.schedule} x {given.chunks}" if given.chunks > 1 else given.schedule),
        ("fewer layers of the first and the last virtual stage", given.uneven),
        ("experts", given.experts),
        ("ZeRO", f"{ZERO[given.zero]}, over {given.shard} ranks"),
        ("recompute", given.again),
        *(("otherwise", one) for one in found.notes),
    ]
    if found.ignored:
        rows.append(("not looked at", ", ".join(found.ignored)))
    return f"Read from {path}", ("", "what"), rows


def strategy_json(found: ReadStrategy) -> dict[str, object]:
    """The same for programs."""
    return {"numbers": asdict(found.numbers), "otherwise": list(found.notes), "not_looked_at": list(found.ignored)}


def write(wanted: ExportRequest, choices: Sequence[Choice], outline: Outline, ask: Ask, cluster: Cluster) -> None:
    """The file, or its text on stdout; what is to be known of it on stderr. Raises UserError."""
    if wanted.export:
        written = picked(wanted.export, choices, wanted.pick, outline, ask, cluster)
    else:
        written = _job_file(wanted, choices, outline, ask, cluster)
    for one in written.notes:
        print(f"note: {one}", file=sys.stderr)
    if wanted.out is None:
        print(written.text, end="")
        return
    write_file(wanted.out, written.text, "the file")
    if wanted.submit:
        client = platform(wanted.emit).client
        if status := command([*client, str(wanted.out)]):
            raise UserError(f"{' '.join(client)} {wanted.out} ended with {status}: it said why")


def _job_file(
    wanted: ExportRequest, choices: Sequence[Choice], outline: Outline, ask: Ask, cluster: Cluster
) -> Written:
    if not 1 <= wanted.pick <= len(choices):
        raise UserError(f"--pick {wanted.pick}: the rows of the ranking are 1 to {len(choices)}")
    ranks = numbers_of(choices[wanted.pick - 1], ask).ranks
    job = job_of(cluster, outline.name, ranks, wanted.run, wanted.image)
    notes: tuple[str, ...] = ()
    if wanted.run == RUN:
        notes = (f"it starts torchrun {RUN}: put that plan beside it, or say what else with --run",)
    elif "tangram" in (run := words(job)) and "train" in run and "--resume" not in run:
        notes = ("where the platform starts it again it begins anew: add --resume, or let it start tangram launch",)
    return Written(platform(wanted.emit).write(job), notes)
