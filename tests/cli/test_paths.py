"""Home folders and variables in paths: in every word of the command line, and in every key of a plan that is a path."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from tangram.cli import expanded
from tangram.cli.errors import reported
from tangram.errors import UserError
from tangram.schema.files import absolute, load
from tangram.schema.job import DataPlan, ModelPlan, SourcePlan
from tangram.schema.parallelism import PipelinePlan
from tangram.schema.plan import Plan
from tests.training.small import small_plan, small_tables


def test_words_are_as_a_shell_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    words = ["train", "~/job.toml", "--model=~/x", "--out", "$SCRATCH/run", "--config", "~", "--html=${SCRATCH}/p.html"]
    assert expanded(words) == [
        "train", "/home/me/job.toml", "--model=/home/me/x", "--out", "/scratch/me/run", "--config", "/home/me",
        "--html=/scratch/me/p.html",
    ]  # fmt: skip
    left = ["--run", "python $SCRATCH/t.py", "--run=~/t", "--set", "a=$SCRATCH", "$NOWHERE/x", "a~/b", "-n", "2"]
    assert expanded(left) == left


def path_keys(table: type[BaseModel]) -> set[str]:
    """The keys of a table that are text of at least one letter, which only paths are."""
    return {
        name
        for name, field in table.model_fields.items()
        if "min_length=1" in str(field) and "str" in str(field.annotation) and "tuple" not in str(field.annotation)
    }


def test_every_path_of_a_plan_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    tables = (ModelPlan, SourcePlan, DataPlan, PipelinePlan)
    assert [path_keys(table) for table in tables] == [
        {"path", "code", "rules"},
        {"path"},
        {"tokenizer", "cache"},
        {"table"},
    ]
    plan = small_plan(tmp_path)
    data = plan.data.model_copy(
        update={
            "tokenizer": "~/t",
            "cache": "$SCRATCH/c",
            "sources": (plan.data.sources[0].model_copy(update={"path": "~/s"}),),
        }
    )
    table = PipelinePlan.model_construct(schedule="table", table="${SCRATCH}/t.csv", stages=(("a",),))
    found: Any = absolute(
        plan.model_copy(update={"data": data, "model": ModelPlan(path="$SCRATCH/m"), "pipeline": table}), tmp_path
    )
    assert isinstance(found, Plan)
    assert (found.data.tokenizer, found.data.cache, found.data.sources[0].path, found.model.path) == (
        "/home/me/t", "/scratch/me/c", "/home/me/s", "/scratch/me/m",
    )  # fmt: skip
    assert found.pipeline is not None
    assert found.pipeline.table == "/scratch/me/t.csv"


def test_a_variable_that_is_not_set_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(small_tables(tmp_path)))
    with pytest.raises(UserError, match=r"no path: the environment variable \$NOWHERE is not set"):
        load(tmp_path / "plan.toml", {"data.cache": "$NOWHERE/tokens"})


def test_the_end_of_a_file_is_no_interrupt() -> None:
    """Typer takes an EOFError for Ctrl-D, so that a fault would end as if somebody had pressed it."""
    import typer

    def command() -> None:
        try:
            raise EOFError("a pipe has ended")
        except EOFError:
            raise typer.Abort from None

    with pytest.raises(EOFError, match="a pipe has ended"):
        reported(command)
