"""`mark`, `relayout` and `layout_of`: what a model's own code says, and asks, of how its tensors lie.

    class Block(nn.Module):
        def forward(self, x):
            x = mark(x, "batch seq/tp hidden")
            h = relayout(self.up(x), "batch seq hidden/tp")
            print(layout_of(h))

What they do depends on who runs the code:

    nobody in particular     nothing: the module stays one that runs on one process
    `Session` (in_code)      each operator is derived as it runs; tensors move at once
    a capture                marks on these tensors of the graph, for `derive`; a derived model then moves them where
                             the calls stand

A mark binds the axes that it names; one that names none says that the tensor is whole, over every axis. Of modules and
parameters, `mark` is kept on the object: before anything runs, it is the same as a mark by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.layout import Layout
from tangram.models.capturing import called as noted
from tangram.models.capturing.called import caller, line_of
from tangram.sharding.derive.marking.marks import InCode, Mark, parsed
from tangram.sharding.derive.marking.meant import kind as _kind
from tangram.sharding.derive.marking.meant import meant, typed
from tangram.sharding.eager.sharded_tensor import ShardedTensor

Marked = TypeVar("Marked", Tensor, nn.Module)
_KEPT = "_tangram_mark"


class Session(Protocol):
    """Who derives operators as they run."""

    def mark(self, x: Tensor, written: WrittenMark) -> Tensor:
        """`x`, lying so from now on."""
        ...

    def relayout(self, x: Tensor, written: WrittenMark) -> Tensor:
        """The same elements, lying so."""
        ...

    def layout_of(self, x: Tensor) -> Layout:
        """How `x` lies."""
        ...


@dataclass(frozen=True)
class WrittenMark:
    """A mark as somebody wrote it."""

    layout: Layout
    name: str
    """How it is called in a message."""

    @staticmethod
    def in_code(what: str, layout: str, line: str) -> WrittenMark:
        """A call of `mark` or `relayout`. Raises UserError for a layout that cannot be read."""
        found = parsed(layout, line, what)
        return WrittenMark(found, f'{what}(…, "{found}") in {line}')

    def __str__(self) -> str:
        return self.name


current: ContextVar[Session | None] = ContextVar("session", default=None)


def mark(x: Marked, layout: str) -> Marked:
    """Say that `x` lies so. Gives `x`.

    A tensor in a forward is moved there if it has been made otherwise. Of a module: the first tensor that it gives. A
    module or a parameter is marked before the model is made parallel, as in `__init__`.

    Raises UserError for a layout that cannot be read and, where the model is parallel, for one that does not fit the
    tensor, the mesh, or another mark of the same tensor.
    """
    line = _line()
    _refuse(x, layout, "mark", line)
    if isinstance(x, nn.Module) or (isinstance(x, nn.Parameter) and current.get() is None):
        if current.get() is not None:
            raise UserError(f"{line}: mark a module before the model runs in parallel, as in its __init__")
        if not noted.is_listening():
            vars(x)[_KEPT] = parsed(layout, line, "mark"), line
        if isinstance(x, nn.Module):
            return x
    return cast(Marked, _on_tensor(x, layout, "mark", line))


def relayout(x: Tensor, layout: str) -> Tensor:
    """The same tensor, lying so; `x` may lie otherwise, and stays as it is.

    Raises UserError as `mark`, but for other marks of `x`.
    """
    line = _line()
    _refuse(x, layout, "relayout", line)
    if isinstance(x, nn.Module):
        raise UserError(f"{line}: relayout moves a tensor, and {type(x).__name__} is a module: mark it")
    return _on_tensor(x, layout, "relayout", line)


def layout_of(x: Tensor) -> Layout:
    """How a tensor lies, in the notation. Raises UserError where nothing says so."""
    session = current.get()
    if not isinstance(cast(Any, x), Tensor):
        raise UserError(f"{_line()}: layout_of is for tensors, and not for {_kind(x)}")
    if isinstance(x, ShardedTensor):
        return x.notation
    if session is None:
        raise UserError(
            f"{_line()}: no layout is known here: layout_of works while each operator is derived as it runs, in `with "
            "in_code(model, ...):`"
        )
    return session.layout_of(x)


def marks_in(model: nn.Module) -> list[Mark]:
    """The marks that are kept on a model's modules and parameters, as marks by name."""
    found: list[Mark] = []
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    for name, one in (*modules, *model.named_parameters()):
        own: tuple[Layout, str] | None = vars(one).get(_KEPT)
        if own is not None:
            found.append(InCode(name, *own))
    return found


def _on_tensor(x: Any, layout: str, what: str, line: str) -> Any:
    session = current.get()
    if session is not None:
        written = WrittenMark.in_code(what, layout, line)
        return session.mark(x, written) if what == "mark" else session.relayout(x, written)
    function = mark if what == "mark" else relayout
    if has_torch_function((x,)):  # a capture and a runtime look at the functions that code calls
        return cast(Any, handle_torch_function)(function, (x,), x, layout)
    if noted.is_listening():
        return (noted.mark if what == "mark" else noted.relayout)(x, layout)
    return x


def _refuse(x: object, layout: object, what: str, line: str) -> None:
    if not isinstance(x, Tensor | nn.Module):
        raise UserError(f"{line}: {what} is for tensors, and not for {_kind(x)}")
    other = typed(layout) if isinstance(layout, str) else layout
    if not isinstance(layout, str) or other is not None:
        ndim = x.ndim if isinstance(x, Tensor) else None
        axes = [*getattr(getattr(current.get(), "mesh", None), "axes", ())]
        raise UserError(f"{line}: {what} takes a layout as text, {meant(other, ndim, axes)}")


def _line() -> str:
    return line_of(caller(sys._getframe(2)))  # pyright: ignore[reportPrivateUsage]
