"""The documentation's own blocks: commands have the options that they show, Python its names, tables their keys.

What a console block shows of a command that anybody can run is printed by it: `make slow` runs those.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from tangram.cli import COMMANDS, _app, _load
from tangram.schema.plan import Job, Plan
from tests.house.doc_blocks import ROOT, Block, Command, all_blocks, blocks_of, commands_of

BLOCKS = all_blocks()
COMMANDS_SHOWN = [command for block in BLOCKS for command in commands_of(block)]
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z][A-Z_]{2,}\b|path/to|own[:.]|my\.|mine")
"""A command with one of these is not run: it names what the reader has."""
OUTPUTS = frozenset({"--html", "--out", "--report", "--save"})
TIMES = re.compile(r"\d[\d.,]* (?:s|ms|us|min)\b|\b\d[\d.,]* (?:[KMG]?B/s)")


# ------------------------------------------------------------ commands


@cache
def command_line(name: str) -> Any:
    """The command of that name, or the group of commands, as typer builds it."""
    group: Any = typer.main.get_command(_app([name]))
    return group.commands[name]


def mistakes(command: Command) -> list[str]:
    """What of a command no option or command of the command line is; its files need not be there."""
    words = [word for word in command.arguments if word != "COMMAND"]
    if not words or words[0].startswith("-"):
        return [] if words in (["--help"], ["--version"]) else [f"tangram {' '.join(words)}"]
    if words[0] not in COMMANDS:
        return [f"there is no command {words[0]}"]
    now = command_line(words.pop(0))
    while words and (inner := getattr(now, "commands", {})):
        now = inner[words.pop(0)] if words[0] in inner else inner["model"]  # `tangram shard MODEL`
    options = {name for parameter in now.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return [
        f"{word} in {' '.join(command.arguments)}" for word in words if _is_option(word) and _name(word) not in options
    ]


def _is_option(word: str) -> bool:
    return bool(re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word))


def _name(word: str) -> str:
    return word.partition("=")[0]


@pytest.mark.parametrize(
    "command", COMMANDS_SHOWN, ids=lambda command: f"{command.where} {' '.join(command.arguments)[:40]}"
)
def test_commands_have_the_options_that_pages_show(command: Command) -> None:
    assert mistakes(command) == []


def test_an_option_that_there_is_not_is_noticed() -> None:
    block = Block(
        "page.md", 1, "", "tangram train job.toml --procesess 2\ntangram pln x\n$ tangram shard llama --mesh tp=2\n"
    )
    slip, other, right = commands_of(block)
    assert mistakes(slip) == ["--procesess in train job.toml --procesess 2"]
    assert mistakes(other) == ["there is no command pln"]
    assert mistakes(right) == []
    assert (right.prompted, other.prompted) == (True, False)


# ------------------------------------------------------------ what commands print


def expected(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows; `...` stands for any number of lines, times are not compared."""
    wanted, lines = _lines(shown), _lines(printed)
    parts, part = [], []
    for line in wanted:
        if line == "...":
            parts, part = [*parts, part], []
        else:
            part = [*part, line]
    parts = [*parts, part]
    at = 0
    for number, part in enumerate(parts):
        starts = [i for i in range(at, len(lines) - len(part) + 1) if lines[i : i + len(part)] == part]
        if not starts or (number == 0 and part and starts[0] != 0):
            return False
        at = starts[0] + len(part)
    return not parts[-1] or lines[len(lines) - len(parts[-1]) :] == parts[-1]


def _lines(text: str) -> list[str]:
    found = [" ".join(TIMES.sub("TIME", line).split()) for line in text.strip().splitlines()]
    return [line for line in found if line]


def runnable(command: Command) -> bool:
    """Whether a page shows what a command prints that anybody can run as it stands."""
    words = [
        word for option, word in zip(("", *command.arguments), command.arguments, strict=False) if option not in OUTPUTS
    ]
    files = [word for word in words if "/" in word or word.endswith((".toml", ".marks", ".py"))]
    return (
        command.prompted
        and bool(command.shown.strip())
        and not PLACEHOLDER.search(" ".join(command.arguments))
        and all(word in command.files or (ROOT / word).exists() or "=" in word or ":" in word for word in files)
        and not command.where.startswith("docs/checkpoint")  # tests/cli/test_checkpoint_page.py: it makes files
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS_SHOWN if runnable(c)], ids=lambda c: f"{c.where} {' '.join(c.arguments)[:40]}"
)
def test_commands_print_what_pages_show(command: Command, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in command.files.items():
        (tmp_path / name).write_text(text)
    call = [sys.executable, "-m", "tangram", *command.arguments]
    answer = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    printed = answer.stdout + (answer.stderr if answer.returncode else "")
    assert expected(command.shown, printed), printed


def test_another_figure_on_a_page_is_noticed() -> None:
    printed = "rank 0\n\na rank receives 266 GB; took 3.1 s\nlast\n"
    assert expected("rank 0\na rank receives  266 GB; took 9 s\nlast", printed)
    assert expected("...\na rank receives 266 GB; took 9 s\n...", printed)
    assert expected("rank 0\n...", printed)
    assert not expected("...\na rank receives 558 GB; took 9 s\n...", printed)
    assert not expected("rank 0\nlast", printed)
    assert not expected("rank 0\n...\na rank receives 266 GB; took 9 s", printed)


# ------------------------------------------------------------ Python and TOML


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("python", "py") and ">>> " not in b.text], ids=str
)
def test_python_blocks_name_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text.replace("{...,", "{"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tangram"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not _has(module, alias.name)]
            assert missing == [], f"{node.module} has no {missing}"


def _has(module: Any, name: str) -> bool:
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None


NEEDS: Mapping[str, str] = {
    "docs/attention-numerics.md": "minutes of measuring",
    "docs/data.md": "a corpus of the reader's",
    "docs/fine-tuning.md:26": "a model of the reader's",
    "docs/tutorial/3-convert.md:12": "the page's folders; the pages before make them",
    "docs/sharding-run.md:31": "ranks that torchrun started; tests/sharding/derive runs the same",
    "docs/sharding-dtensor.md:26": "ranks that torchrun started; tests/sharding/runtime runs the same",
}
"""Blocks that are whole and are not run here, and what they need."""


def stands_alone(text: str) -> bool:
    """Whether Python binds every name that it uses."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return False
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {(one.asname or one.name).split(".")[0] for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)
              for one in n.names}  # fmt: skip
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
    last = any(isinstance(node, ast.Yield | ast.Constant) and getattr(node, "value", 0) is ... for node in nodes)
    return not last and loaded <= bound | vars(builtins).keys()


ALONE = [
    block
    for block in BLOCKS
    if block.language in ("python", "py")
    and ">>> " not in block.text
    and stands_alone(block.text)
    and not {block.page, str(block)} & NEEDS.keys()
]


@pytest.mark.slow
@pytest.mark.parametrize("block", ALONE, ids=str)
def test_python_blocks_that_stand_alone_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__page__"})  # noqa: S102  a page of this repository


def test_blocks_that_stand_alone_are_told_apart() -> None:
    assert stands_alone("import torch\nx = torch.ones(3)\ndef f(y): return y + x.sum()\n")
    assert not stands_alone("x = torch.ones(3)\n")
    assert not stands_alone("def f(): ...\n")
    assert not stands_alone("x = [1,\n")
    assert len(ALONE) >= 5
    known = {str(block) for block in BLOCKS} | {block.page for block in BLOCKS}
    assert NEEDS.keys() <= known


def unknown_keys(tables: dict[str, Any]) -> list[str]:
    """Keys of a part of a job or a plan that neither has."""
    known = {name: field for model in (Job, Plan) for name, field in model.model_fields.items()}
    found = [name for name in tables if name not in known]
    for name, table in tables.items():
        kind = getattr(known.get(name), "annotation", None)
        inner = [k for k in (kind, *getattr(kind, "__args__", ())) if isinstance(k, type) and issubclass(k, BaseModel)]
        if inner and isinstance(table, dict):
            keys = {key for k in inner for key in k.model_fields}
            found += [f"{name}.{key}" for key in table if key not in keys]
    return found


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_toml_blocks_parse_and_have_known_keys(block: Block) -> None:
    tables = tomllib.loads(block.text)
    if block.page.startswith(("docs/training", "docs/attention-kernels.md", "docs/data.md", "README.md")):
        assert unknown_keys(tables) == []


def test_a_key_that_there_is_not_is_noticed() -> None:
    assert unknown_keys({"run": {"stepz": 3, "steps": 3}, "dta": {}}) == ["dta", "run.stepz"]


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```python\nx = 1\n```\n\n```\ntangram plan a \\\n   --cluster b   # why\n```\n")
    python, plain = blocks_of(page)
    assert (python.language, python.text, python.line, plain.line) == ("python", "x = 1\n", 2, 6)
    assert [c.arguments for c in commands_of(plain)] == [("plan", "a", "--cluster", "b")]
    assert _load("plan") is not None
