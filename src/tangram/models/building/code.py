"""Python files of a user: run once in a process, as one that defines operators does not mean to define them twice."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tangram.errors import UserError


def run_code(path: str, said: str) -> Mapping[str, Any]:
    """What a file defines; run again only once it has changed. `said` is how a message names it.

    Raises UserError where there is no such file, or it does not run.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{said}: there is no file {path}")
    try:
        return _run(str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size)
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{said}: {path} does not run: {type(error).__name__}: {why}") from error


def function_of(path: str, name: str, said: str) -> Callable[..., Any]:
    """A function of a file. Raises UserError as `run_code`, and where the file has none of that name."""
    function = run_code(path, said).get(name)
    if not callable(function):
        raise UserError(f"{said}: {path} has no function {name}")
    return function


@lru_cache(64)
def _run(path: str, changed: int, size: int) -> Mapping[str, Any]:
    return runpy.run_path(path)
