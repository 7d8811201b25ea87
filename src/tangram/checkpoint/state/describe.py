"""The state of a job described: every tensor in it as an entry, and the rest as objects.

    {"model": model, "optim": optimiser, "rng": {"cpu": tensor}, "progress": {"step": 100}}

A section is a module, an optimiser, a table of tensors and values, or what has `state_dict` and `load_state_dict`, as a
scheduler has. Tensors are DTensors, as FSDP2 makes them, plain ones, which are whole on every rank, numpy arrays, or
`LocalPart`: a part with its layout. The states of an optimiser go by the names of its parameters, so its module must be
in the same state.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tangram.checkpoint.state import values
from tangram.checkpoint.state.entries import Described, LocalPart, State, StateEntry, replicas, uneven_share
from tangram.checkpoint.state.replicated import with_replicas
from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout import TensorSpec
from tangram.relayout.copies.dtensor import layout_of, mesh_of
from tangram.relayout.exchange.peers import Peers

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod."
"""In the names of what is inside a compiled module."""


def describe(state: State, peers: Peers | None = None, *, compare: bool = True) -> Described:
    """Every tensor of a state as it lies on this rank. Collective over `peers`.

    Ranks may hold different tensors, as pipeline stages do; who holds the same finds out here, and whether it is the
    same, unless `compare` is False: what is to be filled may differ. Raises UserError for what a checkpoint cannot
    hold.
    """
    peers = peers or Peers()
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for section, content in state.items():
        if not section or "." in section or section.startswith("__"):
            raise UserError(f"the section {section!r} of the state needs a name without dots")
        for name, value in _leaves(section, content, state):
            if values.is_tensor(value):
                values.add(tensors, name, value)
            else:
                values.add(objects, name, values.to_json(name, value, tensors))
    places = _Places(peers, tensors)
    still = {f"{section}.{n}" for section, one in state.items() if isinstance(one, nn.Module) for n in frozen(one)}
    entries = [places.entry(name, value) for name, value in tensors.items()]
    entries = [replace(entry, frozen=True) if entry.name in still else entry for entry in entries]
    in_values = {name: tensors[name] for value in objects.values() for name in values.tensors_in(value)}
    parameters = {
        f"{section}.{n}" for section, one in state.items() if isinstance(one, nn.Module) for n in _parameters(one)
    }
    optimisers = {section for section, one in state.items() if isinstance(one, Optimizer)}
    alike = {name: value for name, value in objects.items() if name.removesuffix(".param_groups") not in optimisers}
    agreeing = parameters | {name for name in tensors if name.partition(".")[0] in optimisers}
    return Described(tuple(with_replicas(entries, alike, peers, agreeing, compare=compare)), objects, in_values)


# ---------------------------------------------------------------- what is in a section


def _leaves(section: str, content: Any, state: State) -> Iterator[tuple[str, Any]]:
    if isinstance(content, nn.Module):
        yield from _of_module(section, content)
    elif isinstance(content, Optimizer):
        yield from _of_optimiser(section, content, parameter_names(state))
    elif isinstance(content, Mapping):
        yield from _of_table(section, cast("Mapping[str, Any]", content))
    else:
        yield section, content


def _of_table(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and any(_has_tensor(v) for v in cast("Mapping[str, Any]", value).values()):
            yield from _of_table(f"{prefix}.{key}", cast("Mapping[str, Any]", value))
        else:
            yield f"{prefix}.{key}", value


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(v) for v in cast("Mapping[str, Any]", value).values())
    return values.is_tensor(value)


def _of_module(section: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and persistent buffers; what is tied comes once, by its first name."""
    for name, tensor in named_tensors(module).items():
        yield f"{section}.{name}", tensor


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a module by the names of its `state_dict`, without those of wrappers.

    So a model has the same names whether it is compiled, in DDP, or has layers wrapped for recompute. Raises UserError
    for what `state_dict` gives beside them: nothing could be put back there.
    """
    while isinstance(module, _WRAPPERS):
        module = cast(nn.Module, module.module)
    kept = module.state_dict(keep_vars=True)
    by_tensor = {id(value): key for key, value in reversed(kept.items())}
    found: dict[int, tuple[str, Tensor]] = {}
    alike: set[str] = set()
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        key = name if name in kept else by_tensor.get(id(tensor))
        if key is not None:
            alike.add(key)
            found.setdefault(id(tensor), (key.replace(_COMPILED, ""), tensor))
    more = next((key for key, value in kept.items() if key not in alike and value is not None), None)
    if more is not None:
        raise UserError(
            f"the state_dict of {type(module).__name__} has {more!r}, which is no parameter or buffer of it, so it "
            "could not be loaded again: give the module's own parts, or what it keeps there as a table beside it"
        )
    return dict(found.values())


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in named_tensors(module).items() if isinstance(one, nn.Parameter)}


def frozen(module: nn.Module) -> set[str]:
    """The parameters that training leaves as they are; none where that is all of them, or none is."""
    parameters = _parameters(module)
    still = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return still if len(still) < len(parameters) else set()


def parameter_names(state: State) -> dict[int, str]:
    """The names of all parameters of the modules in a state, by identity; also where `state_dict` leaves them out."""
    modules = [content for content in state.values() if isinstance(content, nn.Module)]
    left_out = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    return left_out | {id(tensor): name for module in modules for name, tensor in named_tensors(module).items()}


def _of_optimiser(section: str, optimiser: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    groups: list[dict[str, Any]] = []
    for group in optimiser.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        members: list[str] = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UserError(f"the optimiser {section!r} has a parameter of no module in the state: save both")
            name = names[id(parameter)]
            members.append(name)
            states: Mapping[str, Any] = optimiser.state.get(parameter, {})
            for key, value in states.items():
                yield f"{section}.{name}.{key}", value
        groups.append({k: _setting(v) for k, v in settings.items()} | {"params": members})
    yield f"{section}.param_groups", groups


def _setting(value: Any) -> Any:
    """As other programs read it: a tensor of one number as a number, a tuple as a list."""
    if isinstance(value, tuple):
        return [_setting(one) for one in cast("tuple[Any, ...]", value)]
    return value.item() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------- where each lies


class _Places:
    """Works out where tensors lie."""

    def __init__(self, peers: Peers, tensors: Mapping[str, Any]) -> None:
        self._peers = peers
        self._ranks = _group_ranks(peers)
        strided = {n: t for n, t in tensors.items() if isinstance(t, DTensor) and _is_strided(t)}
        own = {name: list(tensor.to_local().shape) for name, tensor in strided.items()}
        some = any(peers.all_words(bool(own))) if any(isinstance(t, DTensor) for t in tensors.values()) else False
        self._shapes: list[dict[str, list[int]]] = peers.all_words(own) if some else []

    def entry(self, name: str, value: Any) -> StateEntry:
        if isinstance(value, LocalPart):
            return self._of_local_part(name, value)
        if isinstance(value, DTensor):
            return self._dtensor(name, value)
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            raise UserError(f"{name} is an array of {value.dtype}: a checkpoint has arrays of numbers")
        local = _as_tensor(value)
        if local.layout != torch.strided or local.is_meta:
            raise UserError(f"{name} is a {local.layout} tensor on {local.device}: a checkpoint holds dense values")
        return StateEntry(name, _spec(local, tuple(local.shape)), Region.full(local.shape), local)

    def _dtensor(self, name: str, tensor: DTensor) -> StateEntry:
        mesh, ranks = mesh_of(tensor.device_mesh)
        me = self._ranks[self._peers.index]
        if me not in ranks:
            raise UserError(f"{name} lies on a device mesh that this rank is not in: leave it out here")
        position = ranks.index(me)
        local = tensor.to_local().detach()
        shapes = {position: tuple(local.shape)}
        by_rank = {rank: shapes.get(name) for rank, shapes in zip(self._ranks, self._shapes, strict=False)}
        if _is_strided(tensor):
            shapes = {i: tuple(found) for i, rank in enumerate(ranks) if (found := by_rank.get(rank)) is not None}
        _, layout = layout_of(tensor, shapes)
        places = [self._ranks.index(rank) if rank in self._ranks else -1 for rank in ranks]
        return self._cut(name, local, tuple(tensor.shape), layout, mesh, position, places)

    def _of_local_part(self, name: str, held: LocalPart) -> StateEntry:
        mesh, layout = Mesh.parse(held.mesh), Layout.parse(held.layout).bind(held.shape)
        local = _as_tensor(held.local)
        if self._peers.size not in (1, mesh.size):
            raise UserError(f"{name} lies over the {mesh.size} ranks of {held.mesh}, but {self._peers.size} save")
        places = list(range(mesh.size))
        return self._cut(name, local, held.shape, layout, mesh, held.rank, places)

    def _cut(
        self, name: str, local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: int, places: list[int]
    ) -> StateEntry:
        if layout.pending:
            raise UserError(f"{name} has a pending reduction ({layout}): reduce it before it is saved")
        here, text = _place(layout, mesh, at)
        wanted = here.local_shape if here.local_shape is not None else (here.size,)
        if local.numel() != here.size:
            raise UserError(f"{name} has a part of shape {list(local.shape)} here, but by its layout {layout}, {here}")
        if here and tuple(local.shape) != wanted:
            local = local.reshape(wanted)
        alike: tuple[int, ...] = ()  # over a part of the group others have the same, who knows where
        share: Region | None = None
        if len(places) == self._peers.size:
            alike = tuple(sorted(places[i] for i in replicas(mesh, layout.axes, at, layout.at)))
            share = uneven_share(layout, mesh, at)
        return StateEntry(name, _spec(local, shape), here, local, alike, text, share)


@lru_cache(1 << 12)
def _place(layout: Layout, mesh: Mesh, rank: int) -> tuple[Region, str]:
    """What a rank holds, and the layout as text: once for each shape of a model, which has few."""
    return region(layout, mesh, rank), str(layout)


def _spec(local: Tensor, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(tuple(shape), str(local.dtype).removeprefix("torch."))


def _as_tensor(value: Any) -> Tensor:
    """A tensor or an array as a tensor that shares its memory."""
    return torch.from_numpy(cast(Any, value)) if isinstance(value, np.ndarray) else value.detach()


def _is_strided(tensor: DTensor) -> bool:
    return any(hasattr(placement, "split_factor") for placement in tensor.placements)


def _group_ranks(peers: Peers) -> list[int]:
    """The global rank at each place of the group; of a process alone its own, where it has one."""
    if peers.group is not None:
        return dist.get_process_group_ranks(peers.group)
    return [dist.get_rank() if dist.is_initialized() else 0]
