"""Cells of the matrix on ranks: each is the run of one process, and mistakes that are planted in them are found.

`make matrix` takes a sample, other cells with every commit, of those that the page in docs/ has results of: a cell is
measured first (`tangram bench matrix`), and then it has to stay as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench._matrix.cells import Name, Planned, every_name, planned
from bench._matrix.measure import oracle_of, train
from bench._matrix.ranks import PATIENCE, WORLD, Found, Plant, Run
from bench._matrix.results import State, read, wrong_of
from tests.matrix.mistakes import FAILS, FAILURES, MISTAKES
from tests.training.oracle.compare import Bounds
from tests.training.small import write_text

pytestmark = pytest.mark.matrix
STEPS = 4
CLEAR = 50
"""Times the bound, by which a mistake is found."""
PAGE = read(Path(__file__).parents[2] / "docs" / "matrix.json")
STATES = {name: one.state for name, one in PAGE.results.items()} if PAGE else dict[Name, State]()
RANKS = {name: one.ranks for name, one in PAGE.results.items()} if PAGE else dict[Name, int]()
NAMES = [name for name in every_name() if STATES.get(name) in ("same", "slower", "broken")]


def as_on_the_page(name: Name) -> Any:
    """A cell to run; one that the page has in red is expected to fail, until it is mended and measured anew."""
    marks = [pytest.mark.xfail(reason="red on the page")] if STATES.get(name) == "broken" else []
    marks += [pytest.mark.heavy] if RANKS[name] == WORLD else []
    return pytest.param(name, id=": ".join(name), marks=marks)


@dataclass(frozen=True)
class Trained:
    """What the ranks found."""

    planned: Planned
    cells: Mapping[Name, Sequence[Found]]
    wrong: Mapping[str, Sequence[Found]]
    """By planted mistake."""
    failed: Mapping[str, Sequence[Found]]
    """By planted failure."""


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All that was chosen of this file, on one start of eight ranks."""
    names: list[Name] = []
    planted: dict[str, tuple[Name, Plant]] = {}
    failing: dict[str, tuple[Name, Plant]] = {}
    for item in request.session.items:
        told = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == Path(__file__) and "cell" in told:
            names.append(told["cell"])
        if item.path == Path(__file__) and "mistake" in told:
            planted[told["mistake"]] = MISTAKES[told["mistake"]]
        if item.path == Path(__file__) and "failure" in told:
            failing[told["failure"]] = FAILURES[told["failure"]]
    folder = tmp_path_factory.mktemp("matrix")
    every = dict.fromkeys([*names, *(name for name, _ in (*planted.values(), *failing.values()))])
    found = planned(folder, write_text(folder / "text"), every, STEPS)

    def run(name: Name, until: int, plant: Plant | None = None) -> Run:
        cell = found.cells[name]
        assert cell.plan is not None, f"{name} is refused: {cell.why_not}"
        return Run(name, cell.plan, oracle_of(cell), until, plant)

    failed = [run(name, 1, plant) for name, plant in failing.values()]  # first: the others go on with the same ranks
    runs = [run(name, STEPS) for name in names if found.cells[name].plan is not None]
    wrong = [run(name, 1, plant) for name, plant in planted.values()]
    done = iter(train(found, [*failed, *runs, *wrong], print))
    ended = {failure: next(done) for failure in failing}
    return Trained(found, {one.name: next(done) for one in runs}, {mistake: next(done) for mistake in planted}, ended)


@pytest.mark.parametrize("cell", [as_on_the_page(name) for name in NAMES])
def test_it_is_the_run_of_one_process(cell: Name, trained: Trained) -> None:
    one = trained.planned.cells[cell]
    if one.plan is None:
        assert cell not in STATES, f"the page has it as {STATES[cell]}, but it is refused: {one.why_not}"
        pytest.skip(one.why_not)
    ranks = trained.cells[cell]
    assert len(ranks) == one.strategy.ranks
    assert wrong_of(ranks, trained.planned.trained(one)) == []
    assert {len(rank.losses) for rank in ranks} == {STEPS}
    assert len({rank.losses for rank in ranks}) == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, trained: Trained) -> None:
    ranks = trained.wrong[mistake]
    assert not any(rank.failed for rank in ranks)
    assert any(rank.wrong for rank in ranks)
    assert max(rank.apart for rank in ranks) >= CLEAR * Bounds().gradients


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_ends_its_cell(failure: str, trained: Trained) -> None:
    ranks = trained.failed[failure]
    assert all(rank.failed for rank in ranks)
    assert FAILS in wrong_of(ranks, [])[0]
    assert max(rank.ended for rank in ranks) - min(rank.ended for rank in ranks) < PATIENCE.total_seconds() / 3
