"""What the ranks have measured, and what the oracle says to it."""

from collections.abc import Callable

import pytest

from tests.training.oracle.cases import Case, cases
from tests.training.oracle.trace import Trace
from tests.training.oracle.warm import Measured, Planted, measure, measure_mistakes, once

Oracle = Callable[[Case], Trace]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return once(tmp_path_factory, "oracle", measure)


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return once(tmp_path_factory, "mistakes", measure_mistakes)


@pytest.fixture(scope="session")
def everything(measured: Measured) -> dict[str, Case]:
    return cases(measured.folder / "text")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The same run in one process; what differs in its strategy only is run once."""
    from tests.training.oracle.plain import plain_run

    runs: dict[str, Trace] = {}

    def find(case: Case) -> Trace:
        job = case.plan.model_copy(update={"mesh": "", "axes": None, "layouts": None, "checkpoint": None})
        run = case.plan.run
        ranks = (
            case.plan.data_ranks if run.router_loss or run.expert_capacity else 0
        )  # which rows a global micro-batch has
        key = f"{job!r} {case.until} {bool(case.own)} {ranks}"
        if key not in runs:
            runs[key] = plain_run(case)
        return runs[key]

    return find
