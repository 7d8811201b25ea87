"""What modules keep beside their parameters: functions that refer to them, and tensors that are the same memory.

A copy of a model needs functions of its own: deepcopy leaves them as they are, and with them the modules that they
refer to. And a parameter that is cut over ranks is another tensor afterwards: what kept the old one, in a list or in a
function, would go on with its old values.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from tangram.errors import UserError

DEPTH = 5
"""So far into what a module keeps: objects in lists in functions."""


@dataclass(frozen=True)
class Shared:
    """A hook in a copy of a model, which is not copied with that: it may hold whatever a user has."""

    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def rebound(value: Any, copies: MutableMapping[int, Any], depth: int = DEPTH) -> Any:
    """The value, or one like it whose functions refer to `copies` of what they referred to, also in containers.

    `copies`: by the identity of the original, as deepcopy's memo has them.
    """
    if id(value) in copies:
        return copies[id(value)]
    if depth == 0:
        return value
    depth -= 1
    if isinstance(value, Shared):
        hook = rebound(value.hook, copies, depth)
        return value if hook is value.hook else Shared(hook)
    if isinstance(value, weakref.ref):
        own = copies.get(id(value()))
        return value if own is None else weakref.ref(own)
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, copies, depth)
    if isinstance(value, types.MethodType):
        own = copies.get(id(value.__self__), value.__self__)
        function = rebound(value.__func__, copies, depth)
        return value if own is value.__self__ and function is value.__func__ else types.MethodType(function, own)
    if type(value) is partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        function, *given = [rebound(x, copies, depth) for x in parts]
        if all(x is y for x, y in zip(parts, (function, *given), strict=True)):
            return value
        n = len(value.args)
        return partial(function, *given[:n], **dict(zip(value.keywords, given[n:], strict=True)))
    return _rebound_container(value, copies, depth)


def _rebound_container(value: Any, copies: MutableMapping[int, Any], depth: int) -> Any:
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        new = {key: rebound(x, copies, depth) for key, x in entries.items()}
        if any(new[key] is not x for key, x in entries.items()):
            changed = copy.copy(entries)
            changed.update(new)
            return changed
    elif type(value) in (list, tuple):
        items = cast("list[Any]", value)
        made = [rebound(x, copies, depth) for x in items]
        if any(x is not y for x, y in zip(items, made, strict=True)):
            return type(items)(made)
    return value


def _rebound_function(function: types.FunctionType, copies: MutableMapping[int, Any], depth: int) -> types.FunctionType:
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    if not cells and not defaults:
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(types.CellType() for _ in cells)
    )
    copies[id(function)] = made  # before its cells, one of which may have itself
    same = True
    for old, new in zip(cells, made.__closure__ or (), strict=True):
        try:
            kept = old.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
        new.cell_contents = rebound(kept, copies, depth)
        same &= new.cell_contents is kept
    made.__defaults__ = tuple(rebound(x, copies, depth) for x in defaults) or None
    same &= all(x is y for x, y in zip(defaults, made.__defaults__ or (), strict=True))
    if same:
        del copies[id(function)]
        return function
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, {**vars(function)}
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    return made


def refuse_aliases(model: nn.Module) -> None:
    """Raise UserError where a module keeps a parameter, or a view of its memory, beside the parameter's own name.

    Once parameters are cut, these would keep the values of before. Left alone are buffers, and what is renewed by
    whoever keeps it: the list of weights of torch's recurrent layers, and a weight that a hook makes of `weight_orig`.
    """
    own: dict[int, list[tuple[range, str, Tensor]]] = {}
    for name, p in model.named_parameters():
        for before, other, tensor in own.setdefault(_storage(p), []):
            if _common(before, _bytes(p)) and tensor is not p:
                raise UserError(
                    f"{other} and {name} are two parameters in the same memory, and ranks would train them apart: "
                    "tie them as one, as in `a.weight = b.weight`"
                )
        own[_storage(p)].append((_bytes(p), name, p))
    buffers = {id(b) for b in model.buffers()}
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, nn.RNNBase):
            continue
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or hasattr(module, f"{name}_orig"):
                continue
            for where, tensor in _tensors(value, f"{path}{path and '.'}{name}", {}, DEPTH):
                for space, of, _ in own.get(_storage(tensor), ()) if id(tensor) not in buffers else ():
                    if _common(space, _bytes(tensor)):
                        raise UserError(
                            f"{where} is the memory of {of} beside its name, and would keep the values of before once "
                            "the parameter is cut over ranks: use the parameter itself in forward, by its module"
                        )


def _tensors(value: Any, where: str, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors in a value, and where: in containers, functions and plain objects, but not in modules."""
    if isinstance(value, Tensor):
        yield where, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, type, types.ModuleType, str, int, float)):
        return
    seen[id(value)] = value
    for name, part in _parts(value):
        yield from _tensors(part, where + name, seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", x) for key, x in cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", x) for i, x in enumerate(cast("Iterable[Any]", value)))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f" ({name})", cell.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
        yield from (("", x) for x in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), (".__self__", value.__self__))
    elif isinstance(value, partial):
        yield from (("", x) for x in (value.func, *value.args, *value.keywords.values()))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", x) for name, x in vars(value).items())


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # of a subclass that has none
        return id(tensor)


def _bytes(tensor: Tensor) -> range:
    """Of its storage, from its first to its last."""
    if not tensor.numel():
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return range(first * size, (first + last + 1) * size)


def _common(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)
