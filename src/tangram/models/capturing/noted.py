"""Marks that stand in a model's code, as operators of a graph: they give what they take, and say how it lies.

    tangram::mark(x, "batch seq/tp hidden")          x itself lies so, and what is given
    tangram::relayout(x, "batch seq hidden/tp")      what is given lies so; x may lie otherwise

Only while a capture listens are they run at all. So a graph carries the text of each and, as of every operator, the
line that it is from, and a model that is not captured pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op  # pyright: ignore[reportUnknownVariableType]

MARK, RELAYOUT = "tangram::mark", "tangram::relayout"
_listening: ContextVar[bool] = ContextVar("listening", default=False)
Given = Callable[[Tensor, str], Tensor]


def _copy(x: Tensor, layout: str) -> Tensor:
    """As operators that a library adds have to: never what they take."""
    return x.clone()


def _empty(x: Tensor, layout: str) -> Tensor:
    return torch.empty_like(x)


def _back(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


def _made(name: str) -> Given:
    made: Any = custom_op(name, mutates_args=())(_copy)
    made.register_fake(_empty)
    made.register_autograd(_back)
    return cast(Given, made)


mark, relayout = _made(MARK), _made(RELAYOUT)


@contextmanager
def listening() -> Generator[None]:
    """Marks in code that runs in here become operators."""
    token = _listening.set(True)
    try:
        yield
    finally:
        _listening.reset(token)


def is_listening() -> bool:
    """Whether a capture is under way."""
    return _listening.get()
