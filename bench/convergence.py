"""Training with attention in low precision beside BF16: losses, gradients and logits of small runs, several seeds.

    plain      a Qwen3-like decoder (queries and keys are normed)
    outliers   a Qwen2-like one whose queries and keys begin with channels far from zero; `mild`: less far

`--folder`: where runs lie, each in a folder of its own (runs/convergence). A run that has its result, and of the same
settings, is not repeated; one that was broken off begins anew. The same command in a second terminal takes what the
first has not taken. `--seconds`: no run is begun that would end later, by the longest so far. `--repeats`: seeds (3).
`--only`: a setting, a recipe, a number of tokens of a step, or `page`: run nothing, and write the tables and pictures
of `docs/attention-convergence.md` from the results that are there. `--quick`: two tiny runs, to see that it works.

Where there is an accelerator models and texts are larger, and what the kernels cannot compute is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench._convergence import page, table
from bench._convergence.settings import LARGE, QUICK, RECIPES, SMALL, Run, Size, queue
from bench._convergence.waiting import work
from tangram.errors import UserError
from tangram.hardware.machine import accelerators
from tangram.hardware.measure import Row

DOCS = Path(__file__).parents[1] / "docs"
KINDS: tuple[Callable[[Run], str], ...] = (
    lambda run: run.setting, lambda run: run.recipe, lambda run: str(run.step_tokens),
)  # fmt: skip
"""What a word of `--only` may name of a run."""
FEW = ("bf16", "fp8")
"""Recipes of `--quick`."""


def rows(
    quick: bool,
    only: tuple[str, ...] = (),
    repeats: int = 3,
    folder: Path = Path("runs/convergence"),
    seconds: float = float("inf"),
) -> Iterable[Row]:
    """The figures of all that has a result, after what time allows was run."""
    until = time.monotonic() + seconds
    size = QUICK if quick else LARGE if accelerators() else SMALL
    runs = [*queue(size, 1 if quick else repeats, kernels_only=size is LARGE)]
    refuse_unknown(only, size)
    wanted = chosen(runs, (*only, *FEW) if quick else only)
    if "page" not in only:
        work(wanted, folder.resolve(), until)
    results = table.read(wanted, folder.resolve())
    if "page" in only:
        page.write(DOCS, size, results)
    yield from table.rows(results)


def refuse_unknown(only: Sequence[str], size: Size) -> None:
    """Raise UserError for a word of `--only` that names nothing."""
    known = ["page", *RECIPES, *map(str, size.steps_of)]
    known += dict.fromkeys(recipe for recipes in RECIPES.values() for recipe in recipes)
    if unknown := [word for word in only if word not in known]:
        raise UserError(f"there is nothing called {unknown[0]!r} to run here; known are {', '.join(known)}")


def chosen(runs: Sequence[Run], words: Sequence[str]) -> list[Run]:
    """Runs of which each kind of word that is given names one: a setting, a recipe, tokens of a step."""
    found = list(runs)
    for of in KINDS:
        named = {of(run) for run in runs} & {*words}
        found = [run for run in found if not named or of(run) in named]
    return found
