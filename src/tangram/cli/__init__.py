"""The command line: one thin module per command, `tangram.cli.NAME` with a function NAME, and no logic.

A command that has commands of its own is a `typer.Typer` by that name.

Only the module of the command that was asked for is imported, so that `tangram --help` is quick and no command pays for
the libraries of another. A user's mistake ends with one sentence on stderr and exit code 2; anything else that goes
wrong is a fault of ours and keeps its stack trace.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import typer

from tangram import __version__
from tangram.cli.errors import reported
from tangram.training.run.environment import end_process, started_by_torchrun

__all__ = ["COMMANDS", "expanded", "main"]

# What `tangram --help` says of each command; the module is imported only when the command runs.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "Train a model as a plan says, or as the planner says of a job.",
        "launch": "Train on this machine, and go on when a rank is lost.",
        "plan": "Rank the strategies for a job on this machine or a model on a cluster; explain or export one.",
        "shard": "Derive the layouts of a model from a few marks; prove op rules by numbers.",
        "data": "Show what a job trains on, token by token.",
        "checkpoint": "Look into checkpoints, verify, compare, export and prune them.",
        "trace": "Say what the ranks of a run did, and which is to blame for what went wrong.",
        "top": "Show what the ranks of a run do now, the slowest first.",
        "runs": "Put runs side by side: results, keys that differ, losses.",
        "experts": "Say how evenly tokens went to experts, and place these anew.",
        "evaluate": "Score a model, a checkpoint or adapters by lm-evaluation-harness.",
        "doctor": "Say what this machine has and what will work on it.",
        "bench": "Measure Tangram beside its peers, from a checkout.",
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = expanded(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    code = reported(lambda: _app(given)(given, standalone_mode=False, prog_name="tangram"))
    code = _flushed(code)
    if started_by_torchrun():
        end_process(code)
    return code


_AS_IT_IS = ("--run", "--set")
"""Options whose value is for a shell of later, or for the keys of a plan, which know what is a path."""


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with `~/` and `$VAR` as a shell has them, which leaves `--model=~/x` and quoted words alone.

    So every option that takes a path does. What is not set, or no home, stays as it is.
    """
    found: list[str] = []
    for before, word in zip(("", *arguments), arguments, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if before not in _AS_IT_IS and option not in _AS_IT_IS:
            value = os.path.expandvars(value)
            value = os.path.expanduser(value) if value == "~" or value.startswith("~/") else value  # noqa: PTH111
        found.append(f"{option}{equals}{value}")
    return found


def _app(arguments: Sequence[str]) -> typer.Typer:
    """The command line, with only the command that `arguments` ask for loaded."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        loaded = _load(name) if name == asked else _unloaded
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, short_help=summary)
        else:
            app.command(name, short_help=summary)(loaded)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tangram {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)


def _options(version: Annotated[bool, _VERSION] = False) -> None:
    """Train large models on PyTorch; their state takes any layout."""


_BESIDE = {"top": "trace", "experts": "runs", "evaluate": "runs"}
"""Commands that stand in the module of another."""


def _load(name: str) -> Callable[..., object] | typer.Typer:
    module = importlib.import_module(f"tangram.cli.{_BESIDE.get(name, name)}")
    command: Callable[..., object] | typer.Typer = getattr(module, name)
    return command


def _unloaded() -> None:
    """Stands for a command that was not asked for; only its name and summary are shown."""


def _flushed(code: int) -> int:
    """Write out what is left; a reader that has gone (`tangram ... | head`) is told by the exit code alone.

    Typer does the same for what is written while a command runs.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
