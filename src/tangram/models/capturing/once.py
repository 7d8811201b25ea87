"""A model of which each kind of block runs once: so that capturing a hundred layers costs as much as a few.

Two blocks are of one kind when their modules are: classes, plain attributes, shapes of parameters and which of them are
another block's, and what lists of the configuration with an entry for each block say of them. In the place of a block
that is like one before it stands what gives what it takes (`stages.Through`).

Trade-off: what a model's code makes of a block's number alone is not seen. Blocks that give more than hidden states
cannot be left out; then the capture fails, and the caller captures the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from tangram.models.capturing.stages import Through

_NUMBERED = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "block_idx"})
"""Attributes that say which block it is."""


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """For each block the number of the first that is like it."""
    owner: dict[int, str] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        owner.setdefault(id(one), name)
    said = _listed(getattr(model, "config", None), len(blocks))
    seen: dict[Any, int] = {}
    return [seen.setdefault(_signature(model, path, owner, said[at]), at) for at, path in enumerate(blocks)]


def run_once(model: nn.Module, blocks: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Leave only the first block of each kind in the model, which is changed; the names of those that are left."""
    for at, (path, kind) in enumerate(zip(blocks, kinds, strict=True)):
        if kind != at:
            model.set_submodule(path, Through(model.get_submodule(path)))
    return [path for at, (path, kind) in enumerate(zip(blocks, kinds, strict=True)) if kind == at]


def _listed(config: Any, count: int) -> list[tuple[Any, ...]]:
    """What the configuration's lists of so many entries say of each block."""
    own = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    lists = [
        [*cast("Iterable[Any]", fields[name])] for name in sorted(fields) if isinstance(fields[name], list | tuple)
    ]
    told = [one for one in lists if len(one) == count]
    return [tuple(repr(one[at]) for one in told) for at in range(count)]


def _signature(model: nn.Module, path: str, owner: Mapping[int, str], said: tuple[Any, ...]) -> Any:
    block = model.get_submodule(path)
    modules = tuple(
        (name, type(module).__qualname__, _plain(module))
        for name, module in cast("Iterable[tuple[str, nn.Module]]", block.named_modules())
    )
    parameters = tuple(
        (name, tuple(one.shape), one.requires_grad, "" if owner[id(one)].startswith(f"{path}.") else owner[id(one)])
        for name, one in block.named_parameters(remove_duplicate=False)
    )
    return modules, parameters, said


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Its attributes that are numbers and texts, but for its own number."""
    found = {name: value for name, value in vars(module).items() if name not in _NUMBERED}
    kinds = (bool, int, float, str, type(None))
    return tuple(sorted((name, repr(value)) for name, value in found.items() if isinstance(value, kinds)))
