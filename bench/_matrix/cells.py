"""The cells of the matrix: a model under a strategy, as a plan, or with the reason why there is none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench._matrix.models import MODELS, job_of
from bench._matrix.strategies import STRATEGIES
from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.plan import Plan
from tangram.training.data import BYTES
from tangram.training.state.build_model import source_of

LEAST_LAYERS = 2
Name = tuple[str, str]
"""Model and strategy."""


@dataclass(frozen=True)
class Cell:
    """One model under one strategy."""

    model: str
    strategy: Strategy
    plan: Plan | None
    why_not: str = ""

    @property
    def name(self) -> Name:
        """Its place in the matrix."""
        return self.model, self.strategy.name

    @property
    def layers(self) -> int:
        """Of its model: a stage has one at least."""
        return layers_of(self.strategy)


def layers_of(strategy: Strategy) -> int:
    """How many layers a model needs for it."""
    return max(LEAST_LAYERS, strategy.stages)


def every_name() -> list[Name]:
    """All cells there are."""
    return [(model, strategy) for model in MODELS for strategy in STRATEGIES]


def rotated(names: Iterable[Name], count: int, turn: str) -> list[Name]:
    """So many of some cells, other ones for another text (of a commit, say); as many of each model as can be.

    Within a model they are sorted by a hash of the text and the cell, so that in time each comes to its turn.
    """
    rows: dict[str, list[Name]] = {}
    for name in sorted(names, key=lambda name: hashlib.sha256(f"{turn}:{name}".encode()).digest()):
        rows.setdefault(name[0], []).append(name)
    dealt = [
        row[place]
        for place in range(max(map(len, rows.values()), default=0))
        for row in rows.values()
        if place < len(row)
    ]
    return dealt[:count]


@dataclass(frozen=True)
class Planned:
    """Cells with their plans, and the models that they are of."""

    folder: Path
    """Of configurations and tokens."""
    cells: Mapping[Name, Cell]
    models: Mapping[tuple[str, int], Counted]
    """By name and layers."""

    def counted(self, cell: Cell) -> Counted:
        """The model of a cell."""
        return self.models[cell.model, cell.layers]

    def trained(self, cell: Cell) -> list[str]:
        """The parameters that have a gradient."""
        return [name for name, p in self.counted(cell).model.named_parameters() if p.requires_grad]


def planned(
    folder: Path, text: Path, names: Iterable[Name], steps: int, tell: Callable[[str], None] = lambda text: None
) -> Planned:
    """The cells with their plans, on a text; each model is counted once."""
    known: dict[tuple[str, int], Counted] = {}
    found: dict[Name, Cell] = {}
    for model, line in names:
        strategy = STRATEGIES[line]
        key = model, layers_of(strategy)
        if key not in known:
            tell(f"{model} of {key[1]} layers")
            job = job_of(folder, text, model, key[1], steps)
            known[key] = Counted(job, source_of(job, BYTES).config)
        counted = known[key]
        try:
            plan = plan_of(strategy, counted.job, counted, micro_batch_of(strategy, counted.job.data.global_batch))
            found[model, line] = Cell(model, strategy, plan)
        except UserError as error:
            found[model, line] = Cell(model, strategy, None, " ".join(str(error).split()))
    return Planned(folder, found, known)


def micro_batch_of(strategy: Strategy, batch: int) -> int:
    """Two micro-batches in a step, or two for each rank of a pipeline, if there are as many samples."""
    sizes: Mapping[str, tuple[int, int]] = Mesh.parse(strategy.mesh).axes
    share = batch
    for axis in strategy.data:
        share = -(-share // sizes[axis][0])
    return max(1, share // (2 * (sizes["pp"][0] if strategy.stages > 1 else 1)))
