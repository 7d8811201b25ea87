"""Operators and op rules of a job's own: its code is run, and its rules are proved, once in each process."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from tangram.errors import UserError
from tangram.models.building.code import function_of, run_code
from tangram.schema.job import Job
from tangram.sharding.discover.own_rules import Samples, own_rules


def define_operators(job: Job) -> Samples | None:
    """Run the file that a job names as its code, once in this process; the function that gives calls, if one is named.

    Raises UserError where the file does not run.
    """
    if job.model.code is None:
        return None
    path, function = split_code(job.model.code)
    run_code(path, "model.code")
    return function_of(path, function, "model.code") if function else None


def split_code(text: str) -> tuple[str, str]:
    """`FILE.py:function` as the file and the function, which is "" of a file alone."""
    file, colon, function = text.rpartition(".py:")
    return (f"{file}.py", function) if colon else (text, "")


def code_digest(job: Job) -> str:
    """A fixed text for what is in the file that a job names as its code; "" without one, or where it is gone."""
    file = Path(split_code(job.model.code or "")[0])
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else ""


def rules_of(job: Job) -> str:
    """The text of a job's own rules, proved; "" without any. Raises UserError."""
    samples = define_operators(job)
    if job.model.rules is None:
        return ""
    try:
        content = Path(job.model.rules).read_bytes()
    except OSError as error:
        raise UserError(f'model.rules: "{job.model.rules}" cannot be read: {error.strerror}') from None
    return _proved(job.model.rules, content, samples)


@lru_cache(16)
def _proved(file: str, content: bytes, samples: Samples | None) -> str:
    return own_rules(file, samples).text
