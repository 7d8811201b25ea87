"""What a state has beside tensors, as JSON that gives back the same: tuples, sets, bytes, tables with any keys.

What JSON has itself stays as it is, so that other programs read it. The rest is a table with the key `__type__`. A
tensor in a list or in what `state_dict` returns is stored as any tensor, and the JSON refers to it by name. Nothing is
pickled: to read a checkpoint never runs code of it.
"""

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.checkpoint.state.entries import LocalPart
from tangram.errors import UserError

TYPE = "__type__"
"""The key of a table that stands for a value of another type."""

_ITEMS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
"""Types by name that are made of a list of their items."""
_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
"""Types by name that are made of a list of pairs."""


@runtime_checkable
class Stateful(Protocol):
    """What gives its state and takes it back: schedulers, scalers, loaders; torch's DCP calls it so, too."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | LocalPart)


def to_json(name: str, value: Any, tensors: MutableMapping[str, Any]) -> Any:
    """A value as JSON. The tensors in it are added to `tensors`, by names that begin with `name`.

    Raises UserError for what neither JSON nor the types above can say.
    """
    try:
        return _to_json(name, value, tensors)
    except RecursionError:
        raise UserError(f"{name} has tables or lists that are in each other without end") from None


def _to_json(name: str, value: Any, tensors: MutableMapping[str, Any]) -> Any:
    if isinstance(value, np.generic):
        return _to_json(name, value.item(), tensors)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_tensor(value):
        add(tensors, name, value)
        return {TYPE: "array" if isinstance(value, np.ndarray) else "tensor", "name": name}
    if isinstance(value, nn.Module | Optimizer):
        raise UserError(f"{name} is a {type(value).__name__}: give it a section of its own, beside the others")
    if isinstance(value, dict):
        return _table_to_json(name, cast("dict[Any, Any]", value), tensors)
    kind = cast("type[Any]", type(value))
    if kind is list or kind is deque or _ITEMS.get(kind.__name__) is kind:
        ordered: list[Any] = sorted(value, key=repr) if kind in (set, frozenset) else list(value)
        items = [_to_json(f"{name}.{i}", one, tensors) for i, one in enumerate(ordered)]
        more = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return items if kind is list else {TYPE: kind.__name__, "value": items, **more}
    if kind is bytes:
        return {TYPE: "bytes", "value": base64.b64encode(value).decode()}
    if kind is complex:
        return {TYPE: "complex", "value": [value.real, value.imag]}
    if kind in (torch.dtype, torch.device):
        return {TYPE: kind.__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, Stateful):
        return _to_json(name, value.state_dict(), tensors)
    raise UserError(
        f"{name} is a {kind.__name__}: a checkpoint holds tensors, numbers, texts, lists and tables of them, and what "
        "has state_dict and load_state_dict"
    )


def _table_to_json(name: str, table: dict[Any, Any], tensors: MutableMapping[str, Any]) -> Any:
    kind = type(table)
    values = {key: _to_json(f"{name}.{key}", value, tensors) for key, value in table.items()}
    if kind in (dict, defaultdict) and TYPE not in table and all(type(key) is str for key in table):
        return values
    named = kind.__name__ if _PAIRS.get(kind.__name__) is not None else "dict"
    return {TYPE: named, "value": [[_to_json(f"{name} (a key)", key, {}), values[key]] for key in values]}


def from_json(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """What `to_json` was given; `tensor_of`: the tensor by a name. Raises UserError for a type that is not known."""
    if isinstance(value, list):
        return [from_json(one, tensor_of) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    if TYPE not in table:
        return {key: from_json(one, tensor_of) for key, one in table.items()}
    kind, inner = table[TYPE], table.get("value")
    if kind in ("tensor", "array"):
        tensor = tensor_of(table["name"])
        return tensor.numpy() if kind == "array" and isinstance(tensor, Tensor) else tensor
    if kind in _ITEMS:
        return _ITEMS[kind](from_json(inner, tensor_of))
    if kind in _PAIRS:
        return _PAIRS[kind]([from_json(pair, tensor_of) for pair in cast("list[Any]", inner)])
    if kind == "deque":
        return deque(from_json(inner, tensor_of), table["maxlen"])
    if kind == "bytes":
        return base64.b64decode(cast(str, inner))
    if kind == "complex":
        return complex(*cast("list[float]", inner))
    if kind == "device":
        return torch.device(cast(str, inner))
    if kind == "dtype" and isinstance(found := getattr(torch, cast(str, inner), None), torch.dtype):
        return found
    raise UserError(f"the checkpoint has a value of the type {kind!r}, which this version does not know")


def tensors_in(value: Any) -> Iterator[str]:
    """The names of the tensors that a value as JSON refers to."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest.extend(reversed(cast("list[Any]", one)))
        elif isinstance(one, Mapping):
            table = cast("Mapping[str, Any]", one)
            if table.get(TYPE) in ("tensor", "array"):
                yield table["name"]
            else:
                rest.extend(reversed(list(table.values())))


def add(table: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Set what has a name, once. Raises UserError where two have the same, as `a.b` and `b` in `a` have."""
    if name in table:
        raise UserError(f"two parts of the state are called {name}: give one of them another name")
    table[name] = value
