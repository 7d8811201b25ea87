"""A mutant: right code but for one thing.

Results that are spoiled afterwards, another mask or scale, another recipe, or one wrong step of `attention.Steps`.
`applies` says where it is a mistake at all: a sink cannot be missing where there is none. `mutants` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bench._numerics.attention import RIGHT, Steps, traced
from bench._numerics.cases import Case, Results
from tangram.kernels.lab.recipes import Freedom, Recipe

Applies = Callable[[Recipe, Case], bool]


@dataclass(frozen=True)
class Mutant:
    """A mistake."""

    name: str
    kind: str
    applies: Applies = lambda recipe, case: True
    results: Callable[[Results], Results] | None = None
    case: Callable[[Case], Case] | None = None
    """Of another input, mask or scale, forward and backward."""
    backward_mask: Callable[[Case], Tensor] | None = None
    recipe: Callable[[Recipe], Recipe] | None = None
    steps: Steps = RIGHT


def mutated(
    mutant: Mutant,
    recipe: Recipe,
    case: Case,
    right: Results,
    freedom: Freedom = Freedom(),  # noqa: B008
) -> Results:
    """What the mutant of a recipe gives. `right`: what the recipe gives, which is all that some mutants spoil."""
    if mutant.results:
        return mutant.results(right)
    own = mutant.case(case) if mutant.case else case
    mask = mutant.backward_mask(case) if mutant.backward_mask else None
    spoiled = mutant.recipe(recipe) if mutant.recipe else recipe
    return traced(spoiled, own, freedom, mutant.steps, mask).results
