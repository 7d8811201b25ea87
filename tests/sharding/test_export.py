"""With the rules registered, DTensor gives what plain torch gives: the cases that show where it does not, and
operators placed in every way, forward and backward; on two ranks, and on a mesh of two axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.hardware.host import workers
from tangram.sharding.compare import CASES, FOUND_WITH, CompareCase, PairOutcome, run

NO_OPERATORS = {
    "register-sharding-dims": "the key of calls of operators that users register themselves is torch's",
    "local-map-uneven": "it is no operator",
    "set-data": "the attribute is the wrapper's",
}
"""Cases that no rule reaches."""
REFUSED = {"view-in-place": "would write to a copy"}
"""Cases that are told of, and with what."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, PairOutcome]:
    return {outcome.name: outcome for outcome in run(fixed=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_right_with_the_rules(case: CompareCase, outcomes: dict[str, PairOutcome]) -> None:
    verdict = outcomes[case.name].verdict
    if case.name in REFUSED:
        assert verdict == "raises"
        assert REFUSED[case.name] in outcomes[case.name].got
    else:
        assert (verdict == "right") == (case.name not in NO_OPERATORS), outcomes[case.name]


@pytest.mark.skipif(torch.__version__.partition("+")[0] != FOUND_WITH, reason="the page is of one torch")
def test_the_page_has_the_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sharding-dtensor.md").read_text()
    before, after = sum(case.expected == "right" for case in CASES), len(CASES) - len(NO_OPERATORS) - len(REFUSED)
    assert f"{before} of the {len(CASES)} cases are right without, {after} with" in text


def ranks(shape: list[int], folder: Path, names: list[str]) -> list[dict[str, Any]]:
    n = int(torch.Size(shape).numel())
    jobs = [
        workers.Job(
            "tests.sharding.exporting:work", {"rank": rank, "folder": str(folder), "shape": [*shape], "names": [*names]}
        )
        for rank in range(n)
    ]
    found = workers.run(jobs, 400)
    assert [one.error for one in found] == [None] * n, found[0].log
    return [one.value for one in found]  # pyright: ignore[reportReturnType]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks([2], tmp_path_factory.mktemp("pair"), [])


def test_operators_are_right_however_their_tensors_are_placed(pair: list[dict[str, Any]]) -> None:
    assert [rank["wrong"] for rank in pair] == [[], []]


def test_undo_brings_torchs_own_rule_back(pair: list[dict[str, Any]]) -> None:
    wrong_by_itself = torch.__version__.partition("+")[0] == FOUND_WITH
    for rank in pair:
        assert rank["with"]
        assert rank["before"] == rank["after"]
        assert not (wrong_by_itself and rank["after"])


def test_an_operator_of_anybodys_is_exported(pair: list[dict[str, Any]]) -> None:
    assert all(rank["own"] for rank in pair)


def test_what_can_stay_cut_stays_so(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["moved"] == {
        "tril": "S(0)", "std": "S(0)", "pad": "S(0)", "attention": "S(1)", "conv1d": "S(0)", "mm": "P(sum)",
        "sum": "P(sum)", "amax": "P(max)", "rms_norm": "S(0)", "cumsum": "S(0)",
    }  # fmt: skip


def test_what_is_written_to_a_view_is_there_or_refused(pair: list[dict[str, Any]]) -> None:
    assert [rank["written"] for rank in pair] == [["refused"] * 3 + ["right"] * 4] * 2


def test_a_rank_that_is_not_of_a_mesh_holds_nothing(pair: list[dict[str, Any]]) -> None:
    assert [rank["half"] for rank in pair] == [[[4, 6], [6], [4, 6], [4, 6]], [[0]] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[4], [2, 2]], ids=str)
def test_operators_are_right_on_four_ranks(shape: list[int], tmp_path: Path) -> None:
    assert [rank["wrong"] for rank in ranks(shape, tmp_path, [])] == [[]] * 4
