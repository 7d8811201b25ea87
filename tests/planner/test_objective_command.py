"""`tangram plan MODEL --cluster C --objective NAME`, `--pareto` and `--mtbf` as a person uses them."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tangram.cli import main
from tests.planner.commands import refused

pytestmark = pytest.mark.usefixtures("one_search_each")

SAID = ("llama-3-8b", "--cluster", "h100-8x8", "--gpus", "16", "--tokens-per-batch", "1M", "--top", "4")
FAILURES = ("--mtbf", "20000", "--checkpoint-s", "60", "--restart-s", "600")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["plan", *SAID, *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_first_is_the_best_by_its_objective(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--objective", "cost", "--price", "3", *FAILURES)
    aimed = found["objective"]
    assert aimed["name"] == "cost"
    assert aimed["values"] == sorted(aimed["values"])
    measured = {"failures": 1 / 20_000, "checkpoint": 60.0, "restart": 600.0, "snapshots": None, "known": ""}
    assert aimed["goodput"] == measured
    for value, devices, share, one in zip(
        aimed["values"], aimed["devices"], aimed["shares"], found["choices"], strict=True
    ):
        assert value == pytest.approx(3 * devices * one["step"] / share / 3600 / 2**20 * 1e6)
        assert 0.9 < share < 1
    assert set(aimed["devices"]) <= {16, 8, 4, 2, 1}
    assert main(["plan", *SAID, "--objective", "cost", "--price", "3", *FAILURES]) == 0
    out = capsys.readouterr().out
    assert "cost of 1M tokens, with failures" in out
    assert "a checkpoint every" in out


def test_a_deadline_takes_the_fewest_devices_or_says_that_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--objective", "devices", "--train-tokens", "2B")
    found = asked(capsys, *long, "--hours", "12")
    assert set(found["objective"]["devices"]) == {8}
    assert all(-(-2 * 10**9 // 2**20) * one["step"] / 3600 <= 12 for one in found["choices"])
    late = asked(capsys, *long, "--hours", "0.01", code=1)
    assert late["choices"] == []
    assert late["missed"].startswith("no part of h100-8x8 trains 2,000,000,000 tokens in 0.01 hours: the quickest plan")
    assert main(["plan", *SAID, *long, "--hours", "0.01"]) == 1
    assert "The deadline is not kept" in capsys.readouterr().out


def test_failures_lengthen_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    without, failing = (asked(capsys, "--train-tokens", "2B", *more)["sizes"][0]["hours"] for more in ((), FAILURES))
    assert without < failing < 1.1 * without


def test_the_fronts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--pareto", "--price", "2")
    front = found["pareto"]["memory"]
    assert front[0]["step"] == found["choices"][0]["step"]
    assert all(a["step"] < b["step"] and a["memory"] > b["memory"] for a, b in pairwise(front))
    assert [one["devices"] for one in found["pareto"]["sizes"]][:2] == [16, 8]
    assert main(["plan", *SAID, "--pareto"]) == 0
    out = capsys.readouterr().out
    assert "Front of time and memory: none is as quick and needs less, up to 2 times the shortest step" in out
    assert "Front of sizes: none is quicker and has no more devices" in out
    assert "cost of 1M" not in out


def test_no_front_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--pareto", "--memory", "4", code=1)
    assert found["pareto"] == {"reach": 2.0, "memory": [], "sizes": []}
    assert main(["plan", *SAID, "--pareto", "--memory", "4"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    assert "Front" not in out


def test_what_would_be_otherwise_says_by_what(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys)
    assert list(found["otherwise"]) == [
        "with 5 GB more memory", "with 5 GB less memory", "with half of the network",
        "at twice the sequence, the same tokens",
    ]  # fmt: skip
    assert {name: one["step"] for name, one in found["otherwise"].items()} == found["instead"]
    one = found["otherwise"]["at twice the sequence, the same tokens"]
    assert one["at"]["sequence"] == 2 * found["ask"]["sequence"]
    assert one["at"]["sequence"] * one["at"]["batch"] == found["ask"]["tokens"]
    odd = asked(capsys, "--tokens-per-batch", str(8192 * 9), "--gpus", "3")
    assert "at twice the sequence, the same tokens" not in odd["otherwise"]


def test_power_is_a_part_of_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    """1.2 kW at 0.25 and 2 an hour without it are 2.3 an hour."""
    long = ("--train-tokens", "2B")
    powered = asked(capsys, *long, "--watts", "1200", "--kwh", "0.25", "--price", "2")["sizes"][0]
    priced = asked(capsys, *long, "--price", "2.3")["sizes"][0]
    assert powered["cost"] == pytest.approx(priced["cost"])
    assert powered["kwh"] == pytest.approx(1.2 * powered["device_hours"])
    assert priced["kwh"] is None
    energy = asked(capsys, "--objective", "cost", "--watts", "1200", "--kwh", "0.25")
    price = asked(capsys, "--objective", "cost", "--price", "0.3")
    assert energy["choices"] == price["choices"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--objective", "cost"), "the objective cost needs --price"),
        (("--objective", "cost", "--price", "0"), "the objective cost needs a --price above 0"),
        (("--objective", "cheap"), 'there is no objective "cheap": give one of time, per-device, cost, devices'),
        (("--objective", "devices", "--hours", "3"), "the objective devices needs --train-tokens"),
        (("--objective", "per-device", "--explain", "dp=16"), "--objective ranks strategies, and explain looks at"),
        (("--price", "-1"), "--price one from 0"),
        (("--kwh", "0.2"), "--kwh is a price from 0 of what --watts take: give both"),
        (("--watts", "nan", "--kwh", "0.2"), "is a number above 0"),
        (("--watts", "700", "--kwh", "-1"), "--kwh is a price from 0"),
        (("--mtbf", "3"), "failures need all of --mtbf, --checkpoint-s and --restart-s"),
        ((*FAILURES[:4], "--restart-s", "-1"), "--restart-s is a number of seconds from 0"),
        (("--mtbf", "0", *FAILURES[2:]), "--mtbf is a number of hours above 0"),
        (("--mtbf", "nan", *FAILURES[2:]), "--mtbf is a number of hours above 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *SAID, *arguments)


def test_objectives_are_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one with --cluster" in refused(capsys, "examples/quickstart/job.toml", "--pareto")
