"""What the bench finds: errors of every recipe on every law, and what every criterion makes of every mutant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench._numerics.attention import emulated
from bench._numerics.cases import Case, Mask
from bench._numerics.criterion import Limits, judged, limits
from bench._numerics.inputs import Shape, drawn
from bench._numerics.metrics import Measured, measured
from bench._numerics.mutant import mutated
from bench._numerics.mutants import MUTANTS
from bench._numerics.rivals import RIVALS
from tangram.kernels.lab.recipes import RECIPES, Accumulator, Freedom, Recipe

OURS = "ours"
CRITERIA = (OURS, *RIVALS)
ERROR_SHAPE = Shape(tokens=192, heads=2, groups=1, width=64)
HELD_OUT: dict[str, tuple[str, Shape]] = {
    "outliers": ("outliers", Shape(tokens=160, width=32)),
    "channels, window": ("channels", Shape(tokens=112, width=64, heads=2, groups=2, mask=Mask(window=40))),
    "sink": ("sink", Shape(tokens=136, width=32)),
    "normed, cross": ("normed", Shape(tokens=120, keys=184, width=32, mask=Mask(causal=False))),
    "gaussian, packed, sinks": ("gaussian", Shape(tokens=176, width=32, mask=Mask(documents=(70, 5, 101)), sinks=True)),
    "channels, packed, window, sinks": (
        "channels", Shape(tokens=104, width=32, mask=Mask(window=17, documents=(40, 64)), sinks=True)),
}  # fmt: skip
"""Inputs that the criterion was not chosen on: other laws, lengths and masks. A trained model's are added."""
RIGHT_KERNELS = (
    Freedom(tile=96, descending=True, seed=11, reciprocal=True),
    Freedom(tile=64, accumulate=Accumulator(64, 23), seed=12, jitter=2.0**-19),
    Freedom(tile=32, descending=True, accumulate=Accumulator(4, 23), seed=13, jitter=2.0**-20),
    Freedom(tile=160, seed=14, reciprocal=True, jitter=2.0**-19),
)
"""Right kernels that made no limits."""


@dataclass(frozen=True)
class Survivor:
    """A mutant that our criterion accepts."""

    recipe: str
    input: str
    mutant: str
    worst: float


@dataclass
class Score:
    """What the criteria said of right kernels and of mutants."""

    right: int = 0
    wrong: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CRITERIA, 0))
    """Right kernels."""
    passed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CRITERIA, 0))
    """Mutants."""
    kinds: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Mutants passed, by their kind and criterion; the kind's number under the empty name."""
    survivors: list[Survivor] = field(default_factory=list[Survivor])
    killed: dict[tuple[str, str], bool] = field(default_factory=dict[tuple[str, str], bool])
    """Whether any input made our criterion refuse the mutant of a recipe."""
    nearest: float = 0.0
    """The largest distance of a right kernel over its limit."""


def errors(laws: dict[str, Case], names: Sequence[str]) -> Iterable[tuple[str, Measured]]:
    """Each recipe on each law."""
    for law, case in laws.items():
        for name in names:
            yield law, measured(RECIPES[name], case)


def put_to_the_test(inputs: dict[str, Case], names: Sequence[str], each: int, done: Callable[[str], None]) -> Score:
    """`each` inputs for a recipe, in turn."""
    score, known = Score(), list(inputs)
    for i, name in enumerate(names):
        for j in range(each):
            law = known[(i + j) % len(known)]
            _judge(score, RECIPES[name], law, inputs[law])
        done(name)
    return score


def _judge(score: Score, recipe: Recipe, law: str, case: Case) -> None:
    own = limits(recipe, case)
    for freedom in RIGHT_KERNELS:
        found = emulated(recipe, case, freedom)
        verdict = judged(found, own)
        score.right += 1
        score.nearest = max(score.nearest, verdict.worst)
        accepted = {OURS: verdict.accepted} | {
            rival: accepts(found, own.true, own.emulation, recipe.hadamard) for rival, accepts in RIVALS.items()
        }
        for criterion, one in accepted.items():
            score.refused[criterion] += not one
    for mutant in MUTANTS:
        if mutant.applies(recipe, case):
            _judge_mutant(score, recipe, law, case, own, mutant.name)


_BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def _judge_mutant(score: Score, recipe: Recipe, law: str, case: Case, own: Limits, name: str) -> None:
    mutant = _BY_NAME[name]
    found = mutated(mutant, recipe, case, own.emulation)
    verdict = judged(found, own)
    kind = score.kinds.setdefault(mutant.kind, dict.fromkeys(("", *CRITERIA), 0))
    score.wrong += 1
    kind[""] += 1
    accepted = {OURS: verdict.accepted} | {
        rival: accepts(found, own.true, own.emulation, recipe.hadamard) for rival, accepts in RIVALS.items()
    }
    for criterion, one in accepted.items():
        score.passed[criterion] += one
        kind[criterion] += one
    pair = (recipe.name, name)
    score.killed[pair] = score.killed.get(pair, False) or not verdict.accepted
    if verdict.accepted:
        score.survivors.append(Survivor(recipe.name, law, name, verdict.worst))


def laws_of(model: Case, seed: int = 0) -> dict[str, Case]:
    """The inputs of the errors."""
    return {law: drawn(law, ERROR_SHAPE, seed) for law in ("gaussian", "outliers", "channels", "sink", "normed")} | {
        "model": model
    }


def held_out(model: Case, seed: int = 77) -> dict[str, Case]:
    """The inputs of the mutants."""
    return {name: drawn(law, shape, seed) for name, (law, shape) in HELD_OUT.items()} | {"model": model}
