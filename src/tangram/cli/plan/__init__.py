"""`tangram plan`: strategies of a job on this machine, or of a model on a cluster; one explained, exported, shown."""

from typing import Any

import typer
from typer.core import TyperGroup

from tangram.cli.plan import commands
from tangram.cli.plan.guess import with_command
from tangram.errors import UserError

__all__ = ["plan"]


class _Guessing(TyperGroup):
    """A group whose first word need be no command (`tangram.cli.plan.guess`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_command(args))


plan = typer.Typer(cls=_Guessing)


@plan.callback(invoke_without_command=True)
def _none(context: typer.Context) -> None:
    """Plan a job for this machine, or a model for a cluster. `tangram plan FILE|MODEL` guesses the command."""
    if context.invoked_subcommand is None:
        raise UserError(
            "give a job, as in examples/quickstart/job.toml, or a model with --cluster; or one of local, cluster, "
            "explain, export, show and history: --help lists them"
        )


for _command in (commands.local, commands.cluster, commands.explain, commands.export, commands.show, commands.history):
    plan.command()(_command)
