"""What stands between a model's code and its operators: the runs of its modules, and the functions of torch they call.

Capture writes both down, so that what is to happen to a tensor can be said at the border of a module, or around a
function that its code calls, where a runtime can do it while the code itself stays as it is.

Marks that stand in a model's code, as operators of a graph: they give what they take, and say how it lies.

    tangram::mark(x, "batch seq/tp hidden")          x itself lies so, and what is given
    tangram::relayout(x, "batch seq hidden/tp")      what is given lies so; x may lie otherwise

Only while a capture listens are they run at all. So a graph carries the text of each and, as of every operator, the
line that it is from, and a model that is not captured pays nothing.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.library import custom_op  # pyright: ignore[reportUnknownVariableType]
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_structure  # pyright: ignore[reportUnknownVariableType]
from torch.utils.hooks import BackwardHook

from tangram.errors import UserError
from tangram.models.capturing.graph import Answer, Called, Leaves, Read, Run

_TORCH = str(Path(torch.__file__).parent)
_TANGRAM = str(Path(__file__).parents[2])
_STAGES = str(Path(__file__).with_name("stages.py"))
"""Whose forwards stand in a model's place."""
_CHECKPOINT = str(Path(_TORCH) / "utils" / "checkpoint.py")
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_HOOKED = BackwardHook._apply_on_tensors.__code__  # pyright: ignore[reportPrivateUsage]
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})
_MADE = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes of a tensor that are another tensor, which an operator makes."""


def name_of(func: Any) -> str:
    """The name of a function of torch that code calls; of an attribute `.T`, and "" of one that runs no operators."""
    name = getattr(func, "__name__", str(func))
    if name not in _ATTRIBUTES:
        return name
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return f".{attribute}" if name == "__get__" and attribute in _MADE else ""


def caller(frame: FrameType | None, until: CodeType | None = None) -> FrameType | None:
    """The innermost frame that is neither torch's nor Tangram's, which both wrap a model's forwards.

    A forward of Tangram's own, as a stage's, is code as any other: whoever calls the model may do so from many lines.
    None where `until` is met first.
    """
    while frame is not None and _wraps(frame.f_code):
        frame = frame.f_back if frame.f_code is not until else None
    return frame


def _wraps(code: CodeType) -> bool:
    return code.co_filename.startswith((_TORCH, _TANGRAM)) and (code.co_filename, code.co_name) != (_STAGES, "forward")


def unseen() -> AbstractContextManager[None]:
    """What runs within is no function that a model's code calls, on whatever line of it: hooks of ours, and what makes
    its weights. A derived model counts the calls of a line, and would take one for another."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


def computed_again(frame: FrameType | None) -> bool:
    """Whether what calls is, without a module around it, a function that `torch.utils.checkpoint` will call again."""
    while frame is not None and frame.f_code.co_name != "_call_impl":
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def runs_again(frame: FrameType | None) -> bool:
    """Whether what calls is in `torch.utils.checkpoint` of the reentrant kind: it has gradients when it runs again."""
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame is not None


def of_hooks() -> bool:
    """Whether what runs now is torch's, for hooks of a module's backward: of what that takes and gives it makes views.

    They are no operators of the model's. A capture sees the first of them within the module and a run outside of it.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not _HOOKED:
        frame = frame.f_back if frame.f_code.co_filename.startswith((_TORCH, _TANGRAM)) else None
    return frame is not None


def line_of(frame: FrameType | None) -> str:
    """`file:line`, the file from its package on: `transformers/models/llama/modeling_llama.py:120`."""
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


@cache
def short(file: str) -> str:
    """A path from its package on."""
    return re.sub(r"^.*/(site|dist)-packages/", "", file.replace(f"{_TANGRAM}/", "tangram/"))


def named_results(output: Any) -> dict[str, Tensor]:
    """The tensors of what a model returns: by their names where it is a mapping, else `output0`, `output1`.

    Those of a mapping or a list within a mapping are called `text_model_output.last_hidden_state`, `hidden_states.0`;
    where two have one name, as of `{1: x, "1": y}`, the second has a number. Raises UserError for what hides tensors.
    """
    found: dict[str, Tensor] = {}
    for name, x in _results(output, ""):
        key, turn = name, 2
        while found.get(key, x) is not x:
            key, turn = f"{name}#{turn}", turn + 1
        found[key] = x
    return found


def _results(output: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if path and isinstance(output, Tensor):
        yield path, output
        return
    if isinstance(output, Mapping) or (path and isinstance(output, list | tuple)):
        held = cast(Any, output)
        for key, own in held.items() if isinstance(output, Mapping) else enumerate(held):
            yield from _results(own, f"{path}.{key}" if path else str(key))
        return
    leaves: list[Any] = tree_leaves(output)
    for x in leaves:
        _refuse_hidden(x)
    if not path or not _of_transformers(output):  # whose caches may be among its results
        start = f"{path}." if path else "output"
        yield from ((f"{start}{i}", x) for i, x in enumerate(x for x in leaves if isinstance(x, Tensor)))


def _of_transformers(x: Any) -> bool:
    return type(x).__module__.startswith("transformers.")


def _refuse_hidden(x: Any) -> None:
    """Raise UserError for a result that has tensors where torch does not see them: as attributes, in a set."""
    if isinstance(x, Tensor) or _of_transformers(x):
        return
    own: list[Any] = tree_leaves([*getattr(x, "__dict__", {}).values()])
    if isinstance(x, set | frozenset):
        own += cast("Iterable[Any]", x)
    if any(isinstance(one, Tensor) for one in own) or isinstance(x, Iterator):
        raise UserError(
            f"the model gives a {type(cast(Any, x)).__name__}, whose tensors are not seen: give them in a tuple or a "
            "dict, or have torch see them (torch.utils._pytree.register_dataclass)"
        )


class _Holds:
    """What a check of values comes to where there are none."""

    def item(self) -> bool:
        return True


class ChecksHold(TorchFunctionMode):
    """Within, `torch._check_tensor_all` raises nothing: it changes no result, and the model's own code checks again.

    transformers asks so whether there are as many places for images as there are features.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _Holds() if func is _ALL_TRUE else func(*args, **(kwargs or {}))


_ALL_TRUE = torch.Tensor._is_all_true  # pyright: ignore  # of which nothing but these checks makes use

_LONGEST = 100_000
"""Operators of a forward. A loop over the tokens of a long sequence, in each layer, has a million."""


class Log(TorchFunctionMode):
    """Writes down runs and calls while a capture records nodes.

    `value_of`: the number of a tensor, None for one that is not known; `now`: how many nodes there are.
    """

    def __init__(self, value_of: Callable[[Tensor], int | None], now: Callable[[], int]) -> None:
        super().__init__()
        self._value_of, self._now = value_of, now
        self.runs: list[Run] = []
        self.calls: list[Called] = []
        self.answers: list[Answer] = []
        self.reads: list[Read] = []
        self._open: list[int] = []
        self._turns: Counter[Any] = Counter()

    @property
    def module(self) -> str:
        """The innermost module that runs."""
        return self.runs[self._open[-1]].module if self._open else ""

    def bounded(self, model: nn.Module, source: str) -> None:
        """Raises UserError where a loop of the innermost module would make the capture take minutes."""
        run = self.runs[self._open[-1]] if self._open else None
        kind = None if run is None else type(model.get_submodule(run.module))
        alike = 1 if run is None else sum(type(one) is kind for one in model.modules())
        if (self._now() - (0 if run is None else run.first)) * alike > _LONGEST:
            raise UserError(
                f"{source} is in a loop, of which a capture takes each turn by itself, and over {_LONGEST:,} operators "
                "of a forward take minutes: give a shorter sequence (`tangram shard --sequence 32`)"
            )

    def enter(self, module: str, args: Any, kwargs: Any) -> None:
        """A module begins to run."""
        # Of modules that a model calls more than once each turn is a run of its own.
        parent = self._open[-1] if self._open else None
        turn = self._turns[module]
        self._turns[module] += 1
        self._open.append(len(self.runs))
        line = line_of(caller(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]
        self.runs.append(Run(module, turn, parent, self._leaves((args, kwargs)), (), self._now(), self._now(), line))

    def leave(self, output: Any) -> None:
        """The innermost module has run."""
        at = self._open.pop()
        self.runs[at] = replace(self.runs[at], gives=self._leaves(output), stop=self._now())

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        name = name_of(func)
        if not name or not self._open or (name == "view_as" and of_hooks()):
            return func(*args, **given)
        first, run = self._now(), self._open[-1]
        takes, read = self._leaves((args, given)), len(self.reads)
        found = func(*args, **given)
        # Numbers in the model's code are known as soon as an operator has taken them.
        takes = tuple(
            own if own is not None else new for own, new in zip(takes, self._leaves((args, given)), strict=True)
        )
        key = run, line_of(caller(sys._getframe(1))), name  # pyright: ignore[reportPrivateUsage]
        if self._now() > first:
            gives, form = self._leaves(found), tree_structure(found)
            again = computed_again(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
            nothing = tuple(i for i, x in enumerate(tree_leaves(found)) if x is None)
            self.calls.append(Called(*key, self._turns[key], takes, gives, form, first, self._now(), again, nothing))
        if len(self.reads) > read and isinstance(found, bool | int | float):
            self.answers.append(Answer(*key, self._turns[key], found))
        self._turns[key] += 1
        return found

    def _leaves(self, tree: Any) -> Leaves:
        leaves: list[Any] = tree_leaves(tree)
        return tuple(self._value_of(x) if isinstance(x, Tensor) else None for x in leaves)


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
