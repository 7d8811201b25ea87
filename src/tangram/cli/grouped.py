"""Commands that take groups of options as objects: `with_options(Common)` gives typer the fields of the dataclass as
parameters, before the command's own, and the command an object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def with_options(*kinds: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command that takes objects of these dataclasses first, as typer takes it: each field a parameter."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        def run(**typed: Any) -> int:
            made = [kind(**{one.name: typed.pop(one.name) for one in fields(kind)}) for kind in kinds]
            return command(*made, **typed)

        own = list(inspect.signature(command).parameters)[len(kinds) :]
        hints = get_type_hints(command, include_extras=True)
        found = {name: (hints[name], inspect.signature(command).parameters[name].default) for name in own}
        shared = {
            one.name: (get_type_hints(kind, include_extras=True)[one.name], one.default)
            for kind in kinds
            for one in fields(kind)
        }
        both = {**shared, **found}
        empty = (MISSING, inspect.Parameter.empty)
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {name: hint for name, (hint, _) in both.items()} | {"return": int}
        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hint,
                default=inspect.Parameter.empty if default in empty else default,
            )
            for name, (hint, default) in both.items()
        ]  # fmt: skip
        setattr(run, "__signature__", inspect.Signature(parameters, return_annotation=int))  # noqa: B010
        return run

    return decorate
