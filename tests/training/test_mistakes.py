"""Mistakes of a user, through the command line: exit code 2 and one sentence that says what to do."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tangram.cli import main
from tests.training.small import SMALL_MODEL, small_tables, write_text

Tables = dict[str, Any]
Mistake = Callable[[Path, Tables], list[str] | None]
"""Spoils something in a folder or in a plan's tables; options to add."""


def unknown_model_type(folder: Path, tables: Tables) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen33"}')
    tables["model"] = {"path": str(folder / "config.json")}
    tables["data"]["tokenizer"] = "bytes"


def no_model_there(folder: Path, tables: Tables) -> list[str]:
    return ["--model", str(folder / "nowhere")]


def missing_tokenizer(folder: Path, tables: Tables) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL_MODEL}))
    tables["model"] = {"path": str(folder)}


def small_vocabulary(folder: Path, tables: Tables) -> list[str]:
    return ["--set", "model.change.vocab_size=200"]


def empty_data(folder: Path, tables: Tables) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").write_text("")
    tables["data"]["sources"] = [{"path": str(folder / "empty")}]


def no_data_there(folder: Path, tables: Tables) -> list[str]:
    return ["--set", f"data.sources.0.path={folder / 'nowhere'}"]


def another_mesh_size(folder: Path, tables: Tables) -> list[str]:
    return ["--processes", "3"]


def no_processes(folder: Path, tables: Tables) -> list[str]:
    as_a_job(tables)
    return ["--processes", "0"]


def a_folder_in_use(folder: Path, tables: Tables) -> list[str]:
    as_a_job(tables)  # nothing is measured and planned before it is told of
    return ["--out", str(folder / "text")]


def as_a_job(tables: Tables) -> None:
    for key in ("mesh", "axes", "layouts"):
        del tables[key]


def unknown_key(folder: Path, tables: Tables) -> None:
    tables["optimiser"]["weight_decai"] = 0.1


def unknown_key_on_the_command_line(folder: Path, tables: Tables) -> list[str]:
    return ["--set", "run.stepps=3"]


def unknown_field_of_the_model(folder: Path, tables: Tables) -> None:
    tables["model"]["change"] = {**SMALL_MODEL, "hiden_size": 3}


def layout_that_does_not_fit(folder: Path, tables: Tables) -> None:
    tables["layouts"] = {"parameters": {"*": "a/dp b c d"}}


def parameter_without_layout(folder: Path, tables: Tables) -> None:
    tables["layouts"] = {"parameters": {"*.weight_norm": "..."}}


def tensor_axis_that_cuts_nothing(folder: Path, tables: Tables) -> None:
    tables["mesh"], tables["axes"] = "tp=2", {"tensor": ["tp"]}
    tables["layouts"] = {"parameters": {"*": "..."}}


def unwritable_output(folder: Path, tables: Tables) -> list[str]:
    (folder / "file").write_text("")
    return ["--out", str(folder / "file" / "run")]


def output_that_is_taken(folder: Path, tables: Tables) -> list[str]:
    (folder / "taken").mkdir()
    (folder / "taken" / "summary.json").write_text("{}")
    return ["--out", str(folder / "taken")]


def nothing_to_resume(folder: Path, tables: Tables) -> list[str]:
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("of something else")
    return ["--resume", "--out", str(folder / "other")]


def too_many_ranks(folder: Path, tables: Tables) -> None:
    tables["mesh"] = "dp=100000"


def nothing_frozen(folder: Path, tables: Tables) -> list[str]:
    return ["--set", 'model.freeze=["*.embed"]']


def everything_frozen(folder: Path, tables: Tables) -> list[str]:
    return ["--set", 'model.freeze=["*"]']


def more_positions_than_the_model_has(folder: Path, tables: Tables) -> list[str]:
    return ["--set", "model.change.max_position_embeddings=8"]


def heads_that_do_not_divide(folder: Path, tables: Tables) -> list[str]:
    return ["--set", "model.change.num_key_value_heads=3"]


def routers_of_a_model_that_has_none(folder: Path, tables: Tables) -> list[str]:
    return ["--set", "run.router_loss=0.01"]


MISTAKES: dict[Mistake, str] = {
    routers_of_a_model_that_has_none: r"run\.router_loss is of routers, and Qwen3ForCausalLM has none",
    unknown_model_type: 'model_type "qwen33".*did you mean "qwen3"',
    no_model_there: "nowhere.*does not exist",
    missing_tokenizer: r"tokenizer.*data\.tokenizer",
    small_vocabulary: "vocabulary of 200.*257",
    empty_data: "empty",
    no_data_there: "nowhere",
    no_processes: "--processes 0: plans are made for 1 to 64",
    a_folder_in_use: 'the folder ".*text" holds files already',
    another_mesh_size: '--processes 3 .*"dp=2"',
    unknown_key: 'plan.toml, line [0-9]+: unknown key "optimiser.weight_decai"; did you mean "weight_decay"',
    unknown_key_on_the_command_line: r'run\.stepps.*"steps"|stepps.*steps',
    unknown_field_of_the_model: 'no field "hiden_size".*did you mean "hidden_size"',
    layout_that_does_not_fit: r'the layout "a/dp b c d".*embed_tokens',
    parameter_without_layout: r"no rule in \[layouts.parameters\] matches",
    tensor_axis_that_cuts_nothing: 'no mark and no layout of a parameter names "tp"',
    unwritable_output: "the folder of the run cannot be made",
    output_that_is_taken: "holds files already",
    nothing_to_resume: "no run to resume",
    too_many_ranks: "ranks",
    nothing_frozen: r'model\.freeze names "\*\.embed"',
    everything_frozen: "leaves no parameter to train",
    more_positions_than_the_model_has: "8 positions",
    heads_that_do_not_divide: "num_key_value_heads|heads|cannot be built",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_sentence(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    tables = small_tables(write_text(tmp_path / "text"))
    options = mistake(tmp_path, tables) or []
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(tables))
    assert said(capsys, "train", "plan.toml", *options).matches(MISTAKES[mistake])
    assert not list(tmp_path.glob("runs/*/*"))  # nothing is left of a run that was refused


@pytest.mark.parametrize("text", ["", "version = 3", "version = 4\nmesh = 'dp=2'", "mesh = [", "\0"])
def test_a_corrupt_plan_is_one_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text(text)
    assert said(capsys, "train", str(tmp_path / "plan.toml")).matches(r"plan\.toml")


class said:  # noqa: N801  reads as a sentence
    """What a command says of a mistake: exit code 2, one line on stderr, nothing on stdout."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        *before, self.sentence = err.splitlines()
        assert (code, before) == (2, []), (code, out, err)
        assert self.sentence.startswith("error: ")

    def matches(self, words: str) -> bool:
        assert re.search(words, self.sentence), self.sentence
        return True
