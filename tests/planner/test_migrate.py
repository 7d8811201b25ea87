"""A file of every older version becomes one of today."""

from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.schema.files import STEPS, dumps, load, migrate
from tangram.schema.job import VERSION
from tangram.schema.plan import Plan

OLD = Path(__file__).with_name("version_1.toml")


def test_a_file_of_version_1() -> None:
    plan = load(OLD)
    assert isinstance(plan, Plan)
    assert plan.version == VERSION
    assert (plan.mesh, plan.axes.data, plan.data_ranks, plan.micro_steps) == ("dp=2", ("dp",), 2, 1)
    assert plan.layouts.parameters == {"*": "_/dp ..."}
    assert [(source.path, source.pattern) for source in plan.data.sources] == [("stdlib", "**/*.py")]
    assert (plan.data.micro_batch, plan.data.held_out_samples, plan.run.max_seconds) == (4, 128, 60.0)


def test_what_is_wrong_in_an_old_file_is_said_in_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    text = OLD.read_text()
    for old, new, line in (("lr = 2e-3", "lr = -1", True), ("[layouts]", "[layoutz]", False)):
        path.write_text(text.replace(old, new))
        at = f", line {text[: text.index(old)].count(chr(10)) + 1}: "
        with pytest.raises(UserError, match=at if line else "layoutz"):
            load(path)


def test_tables_that_are_none_are_left_to_the_check(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("version = 1\ndata = 4\nlayouts = 3\n")
    with pytest.raises(UserError, match="line 2: data = 4: input should be a table"):
        load(tmp_path / "plan.toml")


def test_rules_of_activations_follow_from_the_layouts_of_parameters() -> None:
    parameters = {"*.up_proj.weight": "f/tp h", "*": "..."}
    rules = {"parameters": parameters, "activations": {"*.up_proj": "b s h -> b s f/tp"}}
    tables = {"version": 2, "mesh": "tp=2", "axes": {"tensor": ["tp"]}, "layouts": rules}
    assert migrate(tables) == {**tables, "version": 3, "layouts": {"parameters": parameters}}
    assert tables["layouts"] is rules


def test_every_version_below_todays_has_a_step() -> None:
    assert sorted(STEPS) == list(range(1, VERSION))
    for version in STEPS:
        assert migrate({"version": version})["version"] == VERSION


def test_a_migrated_file_is_written_as_todays(tmp_path: Path) -> None:
    (tmp_path / "new.toml").write_text(dumps(load(OLD)))
    assert f"version = {VERSION}" in (tmp_path / "new.toml").read_text()
    assert load(tmp_path / "new.toml") == load(OLD)
