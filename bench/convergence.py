"""Training with attention in low precision beside BF16: losses, gradients and logits of small runs, several seeds.

    plain      a Qwen3-like decoder (queries and keys are normed)
    outliers   a Qwen2-like one whose queries and keys begin with channels far from zero; `mild`: less far

`--folder`: where runs lie, each in a folder of its own (runs/convergence). A run that has its result, and of the same
settings, is not repeated; one that was broken off begins anew. The same command in a second terminal takes what the
first has not taken. `--seconds`: no run is begun that would end later, by the longest so far. `--repeats`: seeds (3).
`--only`: a size (small: 0.36 million parameters, all settings; million: so many, and tokens, plain alone), a setting, a
recipe, a number of tokens of a step, or `page`: run nothing, and write the tables and pictures of
`docs/attention-convergence.md` from the results that are there. `--quick`: two tiny runs, to see that it works.

Where there is an accelerator models and texts are larger, and what the kernels cannot compute is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench._convergence import page, table
from bench._convergence.settings import LARGE, MILLION, QUICK, RECIPES, SMALL, Run, Size, queue
from bench._convergence.waiting import work
from tangram.errors import UserError
from tangram.hardware.host.machine import accelerators
from tangram.hardware.measuring.measure import Row

DOCS = Path(__file__).parents[1] / "docs"
KINDS: tuple[Callable[[Run], str], ...] = (
    lambda run: run.size.name, lambda run: run.setting, lambda run: run.recipe, lambda run: str(run.step_tokens),
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
    sizes = (QUICK,) if quick else (LARGE,) if accelerators() else (SMALL, MILLION)
    runs = [run for size in sizes for run in queue(size, 1 if quick else repeats, kernels_only=size is LARGE)]
    refuse_unknown(only, sizes)
    wanted = chosen(runs, (*only, *FEW) if quick else only)
    if "page" not in only:
        work(wanted, folder.resolve(), until)
    found = {size: table.read([run for run in wanted if run.size is size], folder.resolve()) for size in sizes}
    if "page" in only:
        refuse_nothing(found)
    for size, results in found.items():
        if "page" in only and results:
            page.write(DOCS, size, results)
        yield from table.rows(size, results)


def refuse_nothing(found: Mapping[Size, table.Results]) -> None:
    """Raise UserError where there is nothing to write."""
    if not any(found.values()):
        raise UserError("no run has a result, so there is nothing to write: leave --only page out first")


def refuse_unknown(only: Sequence[str], sizes: Sequence[Size]) -> None:
    """Raise UserError for a word of `--only` that names nothing."""
    known = ["page", *(size.name for size in sizes), *RECIPES]
    known += dict.fromkeys(str(tokens) for size in sizes for tokens in size.steps_of)
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
