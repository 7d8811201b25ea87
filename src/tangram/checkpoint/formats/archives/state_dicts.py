"""What a state dict that `torch.save` wrote has: a model's tensors, and an optimiser's states by parameters' names.

An optimiser's own state dict numbers its parameters in an order that only the program knew. Its states are taken where
the file itself says the names (`param_names` of the groups, as an optimiser made of `named_parameters` has them; or
states by name, as FSDP gives them); they are left out with that reason otherwise, rather than matched by shapes.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.model_part import unwrapped
from tangram.checkpoint.formats.common.opened import SETTINGS
from tangram.checkpoint.formats.common.optimiser_names import KNOWN, STEP
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec
from tangram.relayout.mapping.states import SAME

PARALLEL = "module."
"""What DDP puts before all of them."""
TENSORS = ("torch._utils._rebuild", "torch._tensor._rebuild", "torch.distributed._shard")
"""How the kinds of tensors begin that are more than elements in memory."""
DEEPEST = 50
SHARED_BY = 1000
"""Places of a tree that the same list or dict stands at: a small file of them has leaves without end."""
MOST = 4_000_000
"""Leaves of a tree that are looked at."""
_SCALAR = TensorSpec((), "float32")


@dataclass(frozen=True)
class Number:
    """The place of a scalar whose value has been read already."""

    value: float


def leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """What a tree of dicts and lists ends in, with names as `state.0.exp_avg`. Raises UserError for one without end."""
    stack: list[tuple[str, Any, int]] = [(where, tree, 0)]
    seen, again = 0, Counter[int]()
    while stack:
        name, value, depth = stack.pop()
        seen += 1
        if isinstance(value, Mapping):
            pairs: list[tuple[Any, Any]] = list(cast("Mapping[Any, Any]", value).items())
        elif isinstance(value, list | tuple):
            pairs = list(enumerate(cast("list[Any]", value)))
        else:
            yield name, value
            continue
        again[id(cast("object", value))] += 1
        if depth > DEEPEST or seen > MOST or (pairs and again[id(cast("object", value))] > SHARED_BY):
            raise UserError(f"{name[:200] or 'the tree'} is nested deeper, or has more in it, than a state dict does")
        stack += [(f"{name}.{key}" if name else str(key), one, depth + 1) for key, one in pairs][::-1]


@dataclass(frozen=True)
class StateDict:
    """Tensors by name, and what else stands there."""

    places: dict[str, TensorPlace] = field(default_factory=dict[str, TensorPlace])
    skipped: list[str] = field(default_factory=list[str])

    def add(self, tree: Any, file: str) -> None:
        """The tensors of one state dict. Raises UserError for a kind of tensor that is not read, and for a name twice.

        Names of nested dicts are joined with dots.
        """
        for name, value in leaves(tree):
            if isinstance(value, TensorPlace):
                if name in self.places:
                    raise UserError(f"{name} is there twice, in {self.places[name].file} and in {file}")
                self.places[name] = value
                continue
            kind = tensor_kind(value)
            if kind:
                raise UserError(f"{name} in {file} is a {kind}, which is not read: save it as a plain tensor")
            self.skipped.append(name)


def tensor_kind(value: Any) -> str | None:
    """What a tensor is that is not only elements in memory: quantised, sparse, a subclass. None of what is none."""
    if not isinstance(value, Opaque) or not value.kind.startswith(TENSORS):
        return None
    for one in value.args:  # a subclass stands among what it is rebuilt of
        inner = getattr(one, "kind", "")
        if isinstance(one, type) and inner and not inner.startswith(TENSORS):
            return str(inner)
    return value.kind.removeprefix("torch._utils._rebuild_").removeprefix("torch._tensor._rebuild_").replace("_", " ")


def listed(value: Any) -> list[Any]:
    """The elements of a list; none of what is none."""
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else []


def plain_names(names: Iterable[str], lead: str = "") -> dict[str, str]:
    """Names without what wrappers have put into them. Raises UserError where two become one.

    `lead`: what stands before all and is no part of the module's names.
    """
    given = list(names)
    parallel = bool(given) and all(name.startswith(PARALLEL) for name in given)
    return unwrapped(given, (PARALLEL if parallel else "", lead))


# ---------------------------------------------------------------- optimisers


@dataclass(frozen=True)
class OptimiserStates:
    """States of an optimiser by names as `w.exp_avg`, its groups with the names of their parameters."""

    places: dict[str, TensorPlace | Number] = field(default_factory=dict[str, "TensorPlace | Number"])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    skipped: list[str] = field(default_factory=list[str])

    def objects(self, step: Any = None) -> dict[str, Any]:
        """What is no tensor: the groups, the settings that all of them agree on, the number of steps of the run."""
        if not self.groups:
            return {}
        first = self.groups[0]
        same = [key for key in SETTINGS if key in first and all(g.get(key) == first[key] for g in self.groups)]
        count = {STEP: step} if isinstance(step, int) else {}
        return {"param_groups": self.groups, "settings": {key: first[key] for key in same}, **count}


def optimiser_of(tree: Any, key: str, maps: Maps, params: Mapping[str, TensorSpec], lead: str = "") -> OptimiserStates:
    """The states in an optimiser's own state dict, which lies under `key`; those of no parameter are skipped."""
    alone = listed(tree)  # Lightning has a list
    fields: Any = alone[0] if len(alone) == 1 else tree
    known = cast("Mapping[str, Any]", fields) if isinstance(fields, Mapping) else dict[str, Any]()
    state, groups = known.get("state"), known.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return OptimiserStates(skipped=[f"{key} (it is no state dict of one torch optimiser)"])
    tables = [cast("Mapping[str, Any]", group) for group in listed(groups) if isinstance(group, Mapping)]
    names = _names(cast("Mapping[Any, Any]", state), tables)
    if names is None:
        return OptimiserStates(skipped=[f"{key} (its states are by number, and nothing says the parameters' names)"])
    spare = plain_names(dict.fromkeys(names.values()), lead)
    found = OptimiserStates()
    for number, values in cast("Mapping[Any, Any]", state).items():
        name = spare[names[number]]
        if name not in params or not isinstance(values, Mapping):
            found.skipped.append(f"{key}.state.{number} ({name} is no parameter of the model)")
            continue
        for word, value in cast("Mapping[Any, Any]", values).items():
            place = _state(maps, str(word), value, params[name])
            if place is not None:
                found.places[f"{name}.{word}"] = place
                found.states[str(word)] = KNOWN[str(word)]
            elif value is not None:
                found.skipped.append(f"{key}.state.{number}.{word} (of {name})")
    for group in tables:
        own = [spare[names[one]] for one in group.get("params", ()) if one in names]
        found.groups.append(group_of(maps, group, own))
    return found


def _names(state: Mapping[Any, Any], groups: list[Mapping[str, Any]]) -> dict[Any, str] | None:
    """What each key of the states stands for, where that is known."""
    found: dict[Any, str] = {}
    for group in groups:
        numbers, words = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list):
            return None
        if isinstance(words, list) and len(cast("list[Any]", words)) == len(cast("list[Any]", numbers)):
            found.update(zip(cast("list[Any]", numbers), map(str, cast("list[Any]", words)), strict=True))
        else:
            found.update({one: one for one in cast("list[Any]", numbers) if isinstance(one, str)})
    found.update({key: key for key in state if isinstance(key, str)})
    return found if all(key in found for key in state) else None


def _state(maps: Maps, word: str, value: Any, param: TensorSpec) -> TensorPlace | Number | None:
    """Where a state is; None for what is not known to be one."""
    if word == STEP:
        return number_of(maps, value)
    if word not in KNOWN or not isinstance(value, TensorPlace):
        return None
    return value if KNOWN[word] != SAME or value.shape == param.shape else None


def number_of(maps: Maps, value: Any) -> Number | None:
    """A number, or a tensor of one element; None of what is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Number(float(value))
    if isinstance(value, TensorPlace) and value.shape in ((), (1,)) and not value.dtype.startswith("complex"):
        return Number(float(maps.view(value.file, value.offset, value.dtype, value.shape, value.stride)))
    return None


def group_of(maps: Maps, group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The plain values of a group of parameters, with their names in the place of numbers."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        number = number_of(maps, value) if isinstance(value, TensorPlace) else None
        if number is not None:
            found[str(key)] = number.value
        elif _is_plain(value) and key not in ("params", "param_names"):
            found[str(key)] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    return {**found, "params": names}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, str | int | float | None) for one in cast("list[Any]", value))
    return isinstance(value, str | int | float | None)


# ---------------------------------------------------------------- as pieces


def unsharded(name: str, place: TensorPlace | Number) -> tuple[TensorSpec, Piece]:
    """A tensor that lies at one place."""
    spec = _SCALAR if isinstance(place, Number) else TensorSpec(place.shape, place.dtype)
    return spec, Piece(place, name, Region.full(spec.shape))


def view(maps: Maps, place: Hashable) -> Tensor:
    """The elements at a place: a view of the mapped file."""
    if isinstance(place, Number):
        return torch.tensor(place.value, dtype=torch.float32)
    assert isinstance(place, TensorPlace)
    return maps.view(place.file, place.offset, place.dtype, place.shape, place.stride)
