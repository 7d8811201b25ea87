"""How often devices fail, by what runs have seen: the mean and its ends beside draws, the file that a launcher leaves,
and the command that reads it."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.cost.goodput import FILE, PRIOR, SeenFailures, seen_failures

COMMAND = ("plan", "cluster", "llama-3-8b", "--cluster", "h100-8x2", "--checkpoint-s", "60")


def left(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(what: str, hours: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "device_hours": hours, **more}


def test_of_rates_drawn_beforehand_those_that_made_what_was_seen_lie_between_the_ends() -> None:
    """Bayes's rule by drawing: rates of the prior, failures of each, and the rates of those that come to three."""
    draw, prior, hours = random.Random(5), 100.0, 250.0

    def failures(rate: float) -> int:
        left, count = hours, -1
        while left > 0:
            left, count = left - draw.expovariate(rate), count + 1
        return count

    rates = sorted(rate for rate in (draw.expovariate(prior) for _ in range(60_000)) if failures(rate) == 3)
    mean, low, high = SeenFailures(hours, 3, ()).hours(prior)
    assert mean == pytest.approx(len(rates) / sum(rates), rel=0.03)
    assert low == pytest.approx(1 / rates[int(0.95 * len(rates))], rel=0.05)
    assert high == pytest.approx(1 / rates[int(0.05 * len(rates))], rel=0.05)


def test_nothing_seen_is_what_is_known_beforehand_and_much_is_what_was_seen() -> None:
    mean, low, high = SeenFailures(0.0, 0, ()).hours(PRIOR)
    assert mean == PRIOR
    assert (low, high) == pytest.approx((PRIOR / -math.log(0.05), PRIOR / -math.log(0.95)))
    assert SeenFailures(2e6, 419, ()).hours(PRIOR)[0] == pytest.approx(2e6 / 419, rel=0.03)


def test_of_a_run_that_was_started_again_all_hours_count(tmp_path: Path) -> None:
    first = left(
        tmp_path / "a",
        row("start", 0, devices=4),
        row("failure", 3, cause="killed", step=5),
        row("recovered", 3.1, seconds=40, **{"from": "memory", "again": 0}),
        *(row("failure", 4, cause=cause, step=7) for cause in ("raised", "memory", "hang")),  # no device failed
        row("start", 0, devices=4),  # its launcher was killed: no word of an end
        row("end", 10),
    )
    second = left(tmp_path / "b", row("start", 0), row("end", 5))
    assert seen_failures([first, second]) == SeenFailures(19, 1, (40,))


@pytest.mark.parametrize("text", ["{", '{"what": "failure"}\n', '{"what": "start", "device_hours": "x"}\n'])
def test_what_no_launcher_has_left_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"there is no failures\.jsonl"):
        seen_failures([tmp_path])
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="is not what tangram launch leaves"):
        seen_failures([tmp_path])


def test_the_command_corrects_what_was_known_beforehand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = left(
        tmp_path / "run",
        row("start", 0, devices=16),
        *(row("failure", 1000 * n, cause="killed", step=n) for n in range(1, 10)),
        row("recovered", 9000, seconds=90.0, **{"from": "memory", "again": 0}),
        row("end", 10_000),
    )
    assert main([*COMMAND, "--mtbf", "10000", "--failures", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2,000 hours (90 % interval 1,273 to 3,686): 9 failures in 10,000.0 device-hours" in shown, shown
    assert "between two failures 125.0 hours" in shown
    assert main([*COMMAND, "--failures", str(run), "--json"]) == 0
    goodput = json.loads(capsys.readouterr().out)["objective"]["goodput"]
    assert goodput["failures"] == pytest.approx(10 / 60_000)
    assert goodput["restart"] == 90.0, "as the run has measured it"
