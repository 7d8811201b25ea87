"""Which checkpoints stay, and that nothing else is ever removed."""

import datetime
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.checkpoint.inspect.verify import verify
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store.commits import MANIFEST, MARKER
from tangram.checkpoint.store.retention import Candidate, KeepBest, Policy, kept, parse
from tangram.errors import UserError
from tests.checkpoint.making import flip, make

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LOSSES = st.one_of(st.none(), st.floats(), st.integers(-5, 5), st.just("text"), st.booleans())


def candidate(serial: int, step: int = 0, loss: object = None, age: float = 0.0) -> Candidate:
    objects = {} if loss is None else {"eval.loss": loss}
    return Candidate(Path(f"c{serial}"), serial, step, NOW - datetime.timedelta(seconds=age), objects)


@st.composite
def folders(draw: st.DrawFn) -> list[Candidate]:
    serials = draw(st.lists(st.integers(1, 50), min_size=1, max_size=12, unique=True))
    steps, ages = st.integers(0, 20), st.floats(0, 1000)
    return [candidate(serial, draw(steps), draw(LOSSES), draw(ages)) for serial in serials]


BEST = st.builds(KeepBest, st.just("eval.loss"), st.integers(1, 4), st.booleans())
AGES = st.none() | st.integers(0, 1000).map(lambda s: datetime.timedelta(seconds=s))
POLICIES = st.builds(Policy, st.integers(0, 5), st.integers(0, 7), st.lists(BEST, max_size=2).map(tuple), AGES)


@given(folders(), POLICIES)
def test_the_newest_stays_whatever_the_policy(some: list[Candidate], policy: Policy) -> None:
    reasons = kept(some, policy, NOW)
    newest = max(some, key=lambda one: one.serial)
    assert "the newest" in reasons[newest.path]
    assert set(reasons) <= {one.path for one in some}
    assert all(reasons.values())


@given(folders(), POLICIES, st.randoms())
def test_each_rule_keeps_what_it_says_and_nothing_else_is_kept(
    some: list[Candidate], policy: Policy, shuffled: object
) -> None:
    reasons = kept(some, policy, NOW)
    by_serial = sorted(some, key=lambda one: -one.serial)
    expected = {by_serial[0].path}
    expected |= {one.path for one in by_serial[: policy.last]}
    expected |= {one.path for one in some if policy.every and one.step % policy.every == 0}
    if policy.younger is not None:
        expected |= {one.path for one in some if NOW - one.created < policy.younger}
    for rule in policy.best:
        numbers = {one.serial: retention.metric(one.objects, "eval.loss") for one in some}
        ranked = [one for one in by_serial if numbers[one.serial] is not None]
        for one in ranked:
            mine = numbers[one.serial]
            ahead = sum(
                (other > mine if rule.largest else other < mine) or (other == mine and rival.serial > one.serial)  # type: ignore[operator]
                for rival in ranked
                if (other := numbers[rival.serial]) is not None
            )
            if ahead < rule.count:
                expected.add(one.path)
    assert set(reasons) == expected


@given(folders(), POLICIES, POLICIES)
def test_more_rules_never_keep_less(some: list[Candidate], one: Policy, other: Policy) -> None:
    both = Policy(max(one.last, other.last), one.every, (*one.best, *other.best), one.younger)
    assert set(kept(some, one, NOW)) <= set(kept(some, both, NOW))


def test_what_is_no_number_is_never_best() -> None:
    some = [candidate(1, loss=float("nan")), candidate(2, loss="1"), candidate(3, loss=True), candidate(4)]
    assert set(kept(some, Policy(best=(KeepBest("eval.loss", 3),)), NOW)) == {Path("c4")}


@pytest.mark.parametrize(
    ("objects", "number"),
    [
        ({"eval.loss": 1}, 1.0),
        ({"eval": {"loss": 2.5}}, 2.5),
        ({"eval": {"a.loss": 1}, "eval.loss": 3}, 3.0),
        ({"eval": 4}, None),
        ({}, None),
    ],
)
def test_a_metric_is_found_by_its_name(objects: dict[str, object], number: float | None) -> None:
    assert retention.metric(objects, "eval.loss") == number


def test_rules_are_read() -> None:
    rules = ["last=3", "every=1000", "best=eval.loss", "best=acc:max:2", "younger=2h"]
    best = (KeepBest("eval.loss"), KeepBest("acc", 2, largest=True))
    assert parse(rules) == Policy(3, 1000, best, datetime.timedelta(hours=2))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([], "say what stays"),
        (["last"], "give a number"),
        (["last=0"], "give a number"),
        (["last=-1"], "give a number"),
        (["last=\u0663"], "give a number"),
        (["last=1", "last=2"], "is there twice"),
        (["lsat=1"], "--keep lsat=1: give last=N"),
        (["best="], "give best=NAME"),
        (["best=loss:low"], "give best=NAME"),
        (["best=loss:min:0"], "give a number"),
        (["younger=3"], "give an age"),
        (["younger=1y"], "give an age"),
    ],
)
def test_what_is_no_rule_is_refused(rules: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(rules)


# ---------------------------------------------------------------- folders


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for step in range(1, 6):
        about = About(step=step)
        make(tmp_path / f"step-{step}", {"m.w": torch.ones(step)}, objects={"eval.loss": -step}, about=about)
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_pruned(runs: Path) -> None:
    pruning = retention.plan(runs, parse(["last=1", "every=2", "best=eval.loss:max"]))
    assert [path.name for path in pruning.kept] == ["step-1", "step-2", "step-4", "step-5"]
    assert [path.name for path in pruning.removed] == ["step-3"]
    assert pruning.removed[runs / "step-3"] > 4096
    assert len(names(runs)) == 5  # nothing has happened so far
    retention.prune(pruning)
    assert names(runs) == {"step-1", "step-2", "step-4", "step-5"}


def test_age_is_taken_from_the_checkpoint(runs: Path) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=2)
    assert len(retention.plan(runs, parse(["younger=3d"]), later).removed) == 0
    assert len(retention.plan(runs, parse(["younger=1d"]), later).removed) == 4


def test_what_is_not_ours_is_left_alone(runs: Path) -> None:
    (runs / "notes").mkdir()
    (runs / "notes" / "tangram.txt").write_text("x")
    (runs / "other").mkdir()
    (runs / "other" / MARKER).write_text('{"format": 1}')
    (runs / "latest").symlink_to("step-1")
    (runs / ".hidden").mkdir()
    pruning = retention.plan(runs, parse(["last=1"]))
    assert pruning.leftovers == ()
    retention.prune(pruning, partials=True)
    assert names(runs) == {"step-5", "notes", "other", "latest", ".hidden"}


def test_a_torn_newest_checkpoint_does_not_count_as_the_newest(runs: Path) -> None:
    next((runs / "step-5").glob("*.safetensors")).unlink()
    pruning = retention.plan(runs, parse(["last=1"]))
    assert [path.name for path in pruning.kept] == ["step-4"]
    (torn,) = pruning.leftovers
    assert torn.path.name == "step-5"
    assert "is not whole" in torn.why


def test_a_rotten_newest_checkpoint_is_seen_when_it_is_read(runs: Path) -> None:
    flip(next((runs / "step-5").glob("*.safetensors")), 4097)
    pruning = retention.plan(runs, parse(["last=1"]), sound=lambda path: verify(path).sound)
    assert [path.name for path in pruning.kept] == ["step-4"]
    assert [(one.path.name, one.dead) for one in pruning.leftovers] == [("step-5", False)]
    retention.prune(pruning, partials=True)
    assert names(runs) == {"step-4", "step-5"}
    flip(next((runs / "step-4").glob("*.safetensors")), 4097)
    with pytest.raises(UserError, match="holds no checkpoint that is sound"):
        retention.plan(runs, parse(["last=1"]), sound=lambda path: verify(path).sound)


def test_leftovers_are_removed_when_asked_for_and_quiet(runs: Path) -> None:
    dead, alive = commits.begin(runs / "step-6", "dead"), commits.begin(runs / "step-7", "alive")
    (dead / "data").write_bytes(b"x" * 100)
    (runs / "step-2" / MARKER).write_text("{")
    (runs / "step-3" / MANIFEST).unlink()
    old = time.time() - 2 * retention.QUIET
    for file in (dead, dead / "data", runs / "step-2", *(runs / "step-2").iterdir()):
        os.utime(file, (old, old))
    pruning = retention.plan(runs, parse(["last=9"]))
    assert {(one.path.name, one.dead) for one in pruning.leftovers} == {
        (dead.name, True),
        (alive.name, False),
        ("step-2", True),
        ("step-3", False),  # somebody may be copying it here
    }
    assert next(one.nbytes for one in pruning.leftovers if one.path == dead) == 100
    retention.prune(pruning)
    assert dead.exists()
    retention.prune(pruning, partials=True)
    assert names(runs) == {"step-1", "step-3", "step-4", "step-5", alive.name}


def test_a_folder_without_checkpoints_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is one checkpoint"):
        retention.plan(runs / "step-1", Policy(last=1))
    with pytest.raises(UserError, match="there is no folder"):
        retention.plan(tmp_path / "nowhere", Policy(last=1))
    for path in list(runs.iterdir()):
        shutil.rmtree(path)
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        retention.plan(runs, Policy(last=1))
