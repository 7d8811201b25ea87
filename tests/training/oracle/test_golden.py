"""Today's losses are those of the files in `tests/training/golden`; the check says which file differs, and can fail."""

import json
from copy import deepcopy
from typing import Any

import pytest

from tests.training.golden.make import FOLDER, GOLDEN, difference, file_of
from tests.training.oracle.cases import Case
from tests.training.oracle.warm import Measured


def golden(case: str) -> dict[str, Any]:
    return json.loads(file_of(case).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN)
def test_losses_are_those_of_the_file(case: str, measured: Measured, everything: dict[str, Case]) -> None:
    losses = measured.traces(case)[0].losses
    differs = difference(golden(case), everything[case], losses)
    assert not differs, f"{file_of(case)}: {differs}"
    assert len(losses) >= 24


def test_every_file_is_compared() -> None:
    assert sorted(FOLDER.glob("*.json")) == sorted(map(file_of, GOLDEN))


def test_another_loss_or_setting_is_found(measured: Measured, everything: dict[str, Case]) -> None:
    case, losses = everything["hsdp"], measured.traces("hsdp")[0].losses
    page = golden("hsdp")
    other = deepcopy(page)
    other["losses"][7] *= 1 + 2e-4
    assert difference(other, case, losses).startswith("the loss of step 8 is")
    assert difference(page, case, losses[:-1]) == f"it has {len(losses)} losses, today's run has {len(losses) - 1}"
    other = deepcopy(page)
    other["plan"]["optimiser"]["lr"] = 1e-3
    assert "other settings" in difference(other, case, losses)
