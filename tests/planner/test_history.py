"""What was measured is kept, whatever happens to the file; and what it teaches about plans that were not measured."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.cost import history
from tangram.planner.cost.history import (
    Entry,
    Here,
    History,
    PredictedPlan,
    add,
    family_of,
    hopeless,
    key_of,
    likely,
    read,
)
from tangram.planner.local.estimate import Estimate, Seconds
from tangram.planner.local.rerank import predicted_plan
from tangram.schema.tuning import LoraPlan
from tests.training.small import small_plan

HERE = Here("a processor", "a machine, 2 processes", 8e9, 2)
PARTS = {"products": 0.06, "moves": 0.02, "communication": 0.01, "optimiser": 0.01}
HELD = {"parameters": 1e8, "activations": 4e8, "logits": 5e7}


def entry(**changes: Any) -> Entry:
    usual = Entry(
        at=1.0, kind="trial", name="job", plan='mesh = "dp=2"\n[data]\nmicro_batch = 4\n', key="k", family="f",
        device=HERE.device, place=HERE.place, precision="float32", model=HERE.model, parts=PARTS, expected=0.1,
        low=0.05, high=0.2, held=HELD, room=8e9, outcome="measured", seconds=0.2, used=7e8,
    )  # fmt: skip
    return replace(usual, **changes)


def asked(**changes: Any) -> PredictedPlan:
    return replace(PredictedPlan("other", "f", "float32", PARTS, HELD), **changes)


def write(number: int, file: str) -> None:
    add(entry(at=float(number), name=f"job {number}"), Path(file))


# ---------------------------------------------------------------- the file


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "h.sqlite"
    assert read(file) == History()
    assert not file.exists()  # who only looks makes no file
    rows = (entry(), entry(at=2.0, outcome="out of memory", seconds=None, used=None, why="it ran out; 'quoted'"))
    for one in rows:
        add(one, file)
    assert read(file).entries == rows


def test_processes_that_write_together_lose_no_row(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(write, range(20), [str(file)] * 20))
    assert [one.name for one in read(file).entries] == [f"job {number}" for number in range(20)]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seconds", -1.0), ("seconds", "soon"), ("seconds", None), ("parts", "{}"), ("parts", "no json"),
        ("parts", '{"matmuls": -1}'), ("parts", '{"matmuls": NaN}'), ("parts", "[1]"), ("held", None),
        ("outcome", "splendid"), ("room", "much"), ("model", None), ("at", None), ("key", 3), ("why", None),
        ("expected", float("inf")),
    ],
)  # fmt: skip
def test_a_row_that_makes_no_sense_is_left_out_and_counted(tmp_path: Path, column: str, value: object) -> None:
    file = tmp_path / "h.sqlite"
    for number in range(3):
        add(entry(at=float(number)), file)
    with sqlite3.connect(file) as database:
        database.execute(f"UPDATE runs SET {column} = ? WHERE at = 1.0", (value,))
    found = read(file)
    assert (found.left_out, len(found.entries)) == (1, 2)


def test_files_that_are_no_history(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at by who reads a header" * 40)
    with pytest.raises(UserError, match="cannot be used"):
        read(text)
    with pytest.raises(UserError, match="cannot be used"):
        add(entry(), tmp_path)
    newer = tmp_path / "newer"
    add(entry(), newer)
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(UserError, match="newer version"):
        read(newer)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANGRAM_HISTORY", "")
    assert history.path() is None
    monkeypatch.setenv("TANGRAM_HISTORY", str(tmp_path / "h"))
    assert history.path() == tmp_path / "h"
    monkeypatch.delenv("TANGRAM_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert history.path() == tmp_path / "tangram" / "history.sqlite"


def test_the_key_is_of_what_decides_time_and_memory(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    same = small_plan(tmp_path / "other", seed=7, run={"steps": 99}, optimiser={"lr": 1.0})
    assert key_of(plan) == key_of(same)
    batch = small_plan(tmp_path, data={"micro_batch": 4})
    assert key_of(batch) != key_of(plan)
    assert family_of(batch) == family_of(plan)
    again = small_plan(tmp_path, run={"recompute": ["model.layers.*"]})
    assert key_of(again) != key_of(plan)
    assert family_of(again) == family_of(plan)
    assert family_of(small_plan(tmp_path, layouts={"parameters": {"*": "..."}})) != family_of(plan)


def test_what_is_trained_of_a_model_and_the_text_of_single_documents_are_in_the_key(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    tuned = plan.model_copy(update={"lora": LoraPlan(rank=4)})
    for other in (tuned, small_plan(tmp_path, optimiser={"moments": "8-bit"})):
        assert key_of(other) != key_of(plan), "adapters of a model were taken for the whole of it"
        assert family_of(other) != family_of(plan)
    sources = [{"path": str(tmp_path / "elsewhere")}]
    for packing, same in (("packed", True), ("single", False)):  # whose rows are as long as documents
        here, there = (small_plan(tmp_path, data={"packing": packing, **more}) for more in ({}, {"sources": sources}))
        assert (key_of(here) == key_of(there)) == same
    auto = small_plan(tmp_path, data={"packing": "auto"})  # whose rows are short where the model mixes documents
    nothing, tokens = Seconds(0.0, 0.0, 0.0, 0.0), auto.data.global_batch * auto.data.sequence
    full, short = (predicted_plan(auto, Estimate(cast("Any", nothing), nothing, n)).key for n in (tokens, tokens - 8))
    assert full == key_of(auto) != short


# ---------------------------------------------------------------- what it teaches


def test_nothing_known_leaves_the_estimate_and_a_wide_interval() -> None:
    found = likely((), HERE, [asked()])[0]
    assert found.step == pytest.approx(0.1)
    assert found.low < 0.07 < 0.14 < found.high
    assert found.measured == 0


def test_a_planted_factor_is_found_and_narrows() -> None:
    """Products take twice as long here: a plan that was not measured, with other shares, is corrected, too."""
    chance = np.random.default_rng(1)
    rows: list[Entry] = []
    for number in range(12):
        parts = dict(zip(PARTS, (0.1 * chance.dirichlet(np.ones(4))).tolist(), strict=True))
        seconds = (2 * parts["products"] + sum(parts.values()) - parts["products"]) * chance.lognormal(0, 0.02)
        rows.append(entry(parts=parts, seconds=float(seconds), key=f"k{number}"))
    wanted = asked(parts={"products": 0.08, "moves": 0.01, "communication": 0.005, "optimiser": 0.005})
    before, after = likely((), HERE, [wanted])[0], likely(rows, HERE, [wanted])[0]
    assert abs(after.step / 0.18 - 1) < 0.12 < abs(before.step / 0.18 - 1)
    assert after.high / after.low < before.high / before.low
    assert after.low < 0.18 < after.high
    one_bad = [*rows, entry(parts=PARTS, seconds=5.0, key="bad")]
    assert abs(likely(one_bad, HERE, [wanted])[0].step / 0.18 - 1) < 0.15


def test_the_very_plan_counts_before_all_others() -> None:
    rows = [entry(key="k1", seconds=seconds) for seconds in (0.30, 0.31, 0.90)]
    found = likely(rows, HERE, [asked(key="k1"), asked(key="k2")])
    assert (found[0].step, found[0].measured) == (0.31, 3)
    assert found[1].measured == 0
    elsewhere = [entry(key="k1", seconds=0.3, place="another machine")]
    assert likely(elsewhere, HERE, [asked(key="k1")])[0].measured == 0


def test_what_another_estimate_predicted_teaches_nothing() -> None:
    rows = [entry(model=HERE.model + 1, key=f"k{n}") for n in range(9)]
    assert likely(rows, HERE, [asked()])[0].step == pytest.approx(0.1)


sizes = st.dictionaries(st.sampled_from(sorted(HELD)), st.floats(0.5, 2.0), min_size=3, max_size=3)


@given(sizes, st.floats(0.5, 2.0), st.dictionaries(st.sampled_from(sorted(HELD)), st.floats(0.2, 5), min_size=3))
def test_a_plan_is_refused_only_if_the_one_that_ran_out_needs_no_more(
    factors: dict[str, float], room: float, truth: dict[str, float]
) -> None:
    """Whatever each part of a prediction is off by: what is refused would really have run out."""
    failed = entry(outcome="out of memory", seconds=None, used=None)
    wanted = asked(held={name: part * factors[name] for name, part in HELD.items()})
    here = replace(HERE, room=room * 8e9)
    if hopeless([failed], here, wanted):
        real = [sum(truth.get(name, 1.0) * part for name, part in one.held.items()) for one in (failed, wanted)]
        assert real[1] >= real[0] * (1 - 1e-9)
        assert here.room <= failed.room
    elif room <= 1:
        assert min(factors.values()) < 1


def test_what_ran_out_says_nothing_of_other_layouts_or_places() -> None:
    failed = entry(outcome="out of memory", seconds=None)
    more = asked(held={name: 9 * part for name, part in HELD.items()})
    assert "ran out of memory here before" in hopeless([failed], HERE, more)
    assert not hopeless([failed], HERE, replace(more, family="another"))
    assert not hopeless([failed], replace(HERE, place="elsewhere"), more)
    assert not hopeless([replace(failed, outcome="not done")], HERE, more)
    assert hopeless([failed], HERE, replace(more, key="k", family="any")).startswith("it ran out")


# ---------------------------------------------------------------- the command


def test_the_command_shows_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "h.sqlite"
    monkeypatch.setenv("TANGRAM_HISTORY", str(file))
    assert main(["plan", "--history"]) == 1
    assert "nothing was measured yet" in capsys.readouterr().err
    add(entry(), file)
    add(entry(plan="[[[", outcome="out of memory", seconds=None, used=None), file)
    assert main(["plan", "--history"]) == 0
    said = capsys.readouterr().out
    assert "dp=2" in said
    assert "200 ms" in said
    assert "-50 %" in said
    assert "out of memory" in said
    assert "the estimate alone" in said
    monkeypatch.setenv("TANGRAM_HISTORY", "")
    assert main(["plan", "--history"]) == 2
    assert "no history is kept" in capsys.readouterr().err


def test_plan_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "give a job" in capsys.readouterr().err
