"""Functions take what fits a call and fit a screen: those that may not are named here, each kind with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.walls import Module, modules

ROOT = Path(__file__).parents[2]
PARAMETERS, LINES = 8, 60
COMMAND = "a command's options are the parameters of its function"
AUTOGRAD = "the signature is that of an operator of torch, or of what autograd calls with its arguments"
OPTIONS = "what may not be left out is few values; all others are options by keyword, each with a default"
ROW = "one row is put together from several tables, which have no owner in common"
REASONS = {
    "tangram.checkpoint.conversion.find_mapping.choose": OPTIONS,
    "tangram.planner.search.strategy._choice": ROW,
    "tangram.relayout.exchange.redistribute.move": OPTIONS,
    "tangram.sharding.choose.choose.choose": OPTIONS,
    "tangram.cli.bench.bench": COMMAND,
    "tangram.cli.launch.launch": COMMAND,
    "tangram.cli.plan.commands.cluster": COMMAND,
    "tangram.cli.plan.commands.export": COMMAND,
    "tangram.cli.plan.commands.local": COMMAND,
    "tangram.cli.shard.check": COMMAND,
    "tangram.cli.shard.model": COMMAND,
    "tangram.cli.train.train": COMMAND,
    "tangram.kernels.attention.attend_backward": AUTOGRAD,
    "tangram.kernels.flash.operator.flash": AUTOGRAD,
    "tangram.kernels.flash.operator.flash_backward": AUTOGRAD,
    "tangram.models.capturing.attention._attention": AUTOGRAD,
    "tangram.relayout.collectives.ring_attention._Ring.forward": AUTOGRAD,
    "tangram.sharding.compositions.classes.linear_cross_entropy": AUTOGRAD,
    "tangram.sharding.compositions.classes.linear_cross_entropies": AUTOGRAD,
}
"""Why a function is longer or takes more. A kernel of Triton, which takes no objects, needs none (`triton.jit`)."""


def too_much(house: list[Module]) -> Iterator[tuple[str, str]]:
    """The full name of each function that takes more or is longer than it may, and what it has."""
    for module in house:
        for name, function in _functions(module.tree, module.name):
            if any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list):
                continue
            arguments = function.args
            names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len([one for one in names if one not in ("self", "cls")])
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if count > PARAMETERS:
                yield (
                    name,
                    f"takes {count} parameters, and may {PARAMETERS}: a frozen dataclass has what belongs together",
                )
            if lines > LINES:
                yield name, f"has {lines} lines, and may have {LINES}"


def _functions(node: ast.AST, within: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = (
            f"{within}.{child.name}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else within
        )
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from _functions(child, name)


def test_functions_take_few_parameters_and_fit_a_screen() -> None:
    found = dict(too_much(modules(ROOT / "src/tangram")))
    assert {name: what for name, what in found.items() if name not in REASONS} == {}
    assert [name for name in REASONS if name not in found] == [], "these need no reason any more"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(a, b, c, d, /, e, f, *, g, h, i): ...", "takes 9 parameters"),
        ("class C:\n  async def f(self, a, b, c, d, e, f, g, h, i): ...", "takes 9 parameters"),
        ("def f():\n" + "  x = 1\n" * 60, "has 61 lines"),
        ("def f():\n  def g():\n" + "    x = 1\n" * 59, "has 61 lines"),
    ],
)
def test_one_that_takes_more_or_is_longer_is_found(text: str, what: str) -> None:
    ((_, found),) = too_much([Module("tangram.a", ast.parse(text), 1)])
    assert found.startswith(what)


def test_as_many_as_may_be_and_kernels_are_no_breach() -> None:
    text = "class C:\n  def f(self, a, b, c, d, e, f, g, h): ...\n@triton.jit\ndef k(a, b, c, d, e, f, g, h, i): ...\n"
    assert list(too_much([Module("tangram.a", ast.parse(text), 1)])) == []
