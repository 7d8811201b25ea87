"""Parameters that modules keep beside their own names: in lists, in functions, as views of their memory.

A parameter that is cut over ranks is another tensor afterwards, and what kept the old one would go on with its values.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.models.building.twin import storage_of

DEPTH = 5
"""So far into what a module keeps: objects in lists in functions."""


def refuse_aliases(model: nn.Module) -> None:
    """Raise UserError where a module keeps a parameter, or a view of its memory, beside the parameter's own name.

    Once parameters are cut, these would keep the values of before. Left alone are buffers, and what is renewed by
    whoever keeps it: the list of weights of torch's recurrent layers, and a weight that a hook makes of `weight_orig`.
    """
    own: dict[int, list[tuple[range, str, Tensor]]] = {}
    for name, p in ((name, p) for name, p in model.named_parameters() if p.layout is torch.strided):
        for before, other, tensor in own.setdefault(storage_of(p), []):
            if _common(before, _bytes(p)) and tensor is not p:
                raise UserError(
                    f"{other} and {name} are two parameters in the same memory, and ranks would train them apart: "
                    "tie them as one, as in `a.weight = b.weight`"
                )
        own[storage_of(p)].append((_bytes(p), name, p))
    buffers = {id(b) for b in model.buffers()}
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, nn.RNNBase):
            continue
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or hasattr(module, f"{name}_orig"):
                continue
            for where, tensor in _tensors(value, f"{path}{path and '.'}{name}", {}, DEPTH):
                for space, of, _ in own.get(storage_of(tensor), ()) if id(tensor) not in buffers else ():
                    if _common(space, _bytes(tensor)):
                        raise UserError(
                            f"{where} is the memory of {of} beside its name, and would keep the values of before once "
                            "the parameter is cut over ranks: use the parameter itself in forward, by its module"
                        )


def _tensors(value: Any, where: str, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors in a value, and where: in containers, functions and plain objects, but not in modules."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:  # others, as sparse ones, have no storage to share
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
        yield from ((f".{name}", x) for name, x in cast("dict[str, Any]", vars(value)).items())


def _bytes(tensor: Tensor) -> range:
    """Of its storage, from its first to its last."""
    if not tensor.numel():
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return range(first * size, (first + last + 1) * size)


def _common(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)
