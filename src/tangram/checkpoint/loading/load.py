"""Load a state from a checkpoint of any layout and any number of ranks, in place.

    load({"model": model, "optim": optimiser, "progress": progress}, "runs/step-100")

Everything that can be known beforehand is checked, on all ranks, before the first byte of the state changes: names,
shapes, dtypes, groups of parameters. Sections that the state does not have are not loaded, so weights alone are
`{"model": model}`. If a file turns out damaged on the way, all ranks hear of it; what was filled by then stays filled.
"""

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tangram.checkpoint.loading import optimiser_load
from tangram.checkpoint.loading.read import MEMORY, DamagedError, Want, read_wants
from tangram.checkpoint.state import values
from tangram.checkpoint.state.describe import describe, parameter_names
from tangram.checkpoint.state.entries import Described, LocalPart, State, StateEntry
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import Manifest
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout.exchange.peers import Peers

IMPORTED = "imported"
"""The object that a checkpoint of another format has, once it is converted."""

T = TypeVar("T")


class LoadError(UserError):
    """A state and a checkpoint that do not fit each other, or a load that failed on another rank."""


@dataclass(frozen=True)
class Loaded(Manifest):
    """The manifest of what was loaded, and what was not."""

    missing: tuple[str, ...] = ()
    """What the state has and the checkpoint has not: it is as it was. Only where the load is not strict."""
    unused: tuple[str, ...] = ()
    """What the checkpoint has, in sections of the state, and no rank's state has."""


def load(
    state: State,
    path: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    only: Sequence[str] = (),
    cast: bool = False,
    memory: int = MEMORY,
    no_dist: bool = False,
) -> Loaded:
    """Fill the state of all ranks of `group` (None: all that there are) from the checkpoint `path`, and wait.

    The state is as for `save`, on any mesh; a collective call. An optimiser without states gets them first, and its
    settings are put back group by group; what is no tensor is put back into tables, and is in the `objects` of what is
    returned. `only`: patterns of names, such as `model.layers.0.*`; what none fits stays as it is. `strict`: names must
    be the same on both sides. `cast`: convert stored tensors of other dtypes. `memory`: bytes to read through.
    `no_dist`: this process alone.

    Raises LoadError or another UserError on all ranks, before anything changed, where state and checkpoint do not fit;
    DamagedError, which names tensor and file, where stored bytes are not those that were written.
    """
    path, peers = Path(path), Peers.of_call(group, no_dist)
    manifest = _together(peers, lambda: commits.read_manifest(path))
    if len(set(peers.all_words(manifest.id))) > 1:
        raise LoadError(f'the ranks do not read the same checkpoint: the folder of "{path}" is not shared by all')
    made = optimiser_load.MadeStates()
    try:
        _together(peers, lambda: _prepared(state, manifest, only, made))
        described = _together(peers, lambda: _fitting(state, peers, manifest, only))
        loaded = load_described(described, manifest, path, peers, strict=strict, only=only, cast=cast, memory=memory)
        read = _together(peers, lambda: replace(loaded, objects=_values(state, described, manifest)))
    except BaseException:
        made.undo()
        raise
    _put_back(state, read, only)
    return read


def load_described(
    described: Described,
    manifest: Manifest,
    path: Path,
    peers: Peers,
    *,
    strict: bool = True,
    only: Sequence[str] = (),
    cast: bool = False,
    memory: int = MEMORY,
) -> Loaded:
    """The same for a state that is described already: fills the memory of its entries. Objects are not put back."""
    entries = [entry for entry in described.entries if _chosen(entry.name, only)]
    names = [entry.name for entry in entries] + [name for name in described.objects if _chosen(name, only)]
    everywhere = _union(peers, names)
    sections = {name.partition(".")[0] for name in everywhere}
    stored = [*manifest.tensors, *manifest.objects]
    there = [name for name in stored if name.partition(".")[0] in sections and _chosen(name, only)]
    missing = tuple(name for name in names if not (name in manifest.tensors or name in manifest.objects))
    if IMPORTED in manifest.objects:  # another framework's settings by group are not these groups'
        missing = tuple(name for name in missing if not name.endswith(".param_groups"))
    unused = tuple(name for name in there if name not in everywhere and name not in manifest.objects)
    error = _mismatch(entries, manifest, cast)
    if strict and not error:
        error = _differences(path, missing, unused)
    if only and not names and not there:
        error = f"nothing in the state or the checkpoint is named {' or '.join(only)}"
    _raise_first(peers.all_words(error))
    wants = [Want(e.name, e.region, e.local) for e in entries if e.name in manifest.tensors]
    try:
        read_wants(path, manifest, wants, peers=peers, memory=memory, cast=cast)
    except DamagedError as damaged:
        raise DamagedError(f"{damaged}{commits.older(path)}") from None
    known = {f.name: getattr(manifest, f.name) for f in fields(Manifest)}
    return Loaded(**known, missing=missing, unused=unused)


# ---------------------------------------------------------------- what fits


def _chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)


def _union(peers: Peers, names: Sequence[str]) -> set[str]:
    """The names that any rank has; where all have the same, only a digest passes between them."""
    digest = hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()
    if len(set(peers.all_words(digest))) == 1:
        return set(names)
    return {name for some in peers.all_words(sorted(names)) for name in some}


def _mismatch(entries: Iterable[StateEntry], manifest: Manifest, cast: bool) -> str:
    """What keeps stored tensors from going into those of the state, as a sentence."""
    found: list[str] = []
    for entry in entries:
        stored = manifest.tensors.get(entry.name)
        if stored is None:
            continue
        if stored.spec.shape != entry.spec.shape:
            found.append(f"{entry.name} has shape {list(stored.spec.shape)} there and {list(entry.spec.shape)} here")
        elif stored.spec.dtype != entry.spec.dtype and not cast:
            found.append(
                f"{entry.name} is {stored.spec.dtype} there and {entry.spec.dtype} here: say cast=True to convert"
            )
    return _listed("the checkpoint does not fit the state", found)


def _differences(path: Path, missing: Sequence[str], unused: Sequence[str]) -> str:
    found = [f"it lacks {name}" for name in missing] + [f"it has {name}, which the state lacks" for name in unused]
    return _listed(f'the checkpoint "{path}" is of another state', found)


def _listed(what: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{what}: {'; '.join(found[:3])}{more}"


def _prepared(state: State, manifest: Manifest, only: Sequence[str], made: optimiser_load.MadeStates) -> None:
    _refuse_read_only(state)
    optimiser_load.prepare(
        state, [name for name in (*manifest.tensors, *manifest.objects) if _chosen(name, only)], made
    )


def _fitting(state: State, peers: Peers, manifest: Manifest, only: Sequence[str]) -> Described:
    described = describe(state, peers, compare=False)
    _refuse_copies(state, described)
    optimiser_load.check(state, described, {n: v for n, v in manifest.objects.items() if _chosen(n, only)})
    own = [value for name, value in manifest.objects.items() if name.partition(".")[0] in state and _chosen(name, only)]
    return _with_stored_values(described, own, manifest)


def _with_stored_values(described: Described, objects: Iterable[Any], manifest: Manifest) -> Described:
    """With memory for the tensors in stored values, which are as many and as large as when they were saved."""
    stored = {name for value in objects for name in values.tensors_in(value)}
    have = dict(described.in_values)
    kept = [
        e for e in described.entries if e.name not in have or (e.name in stored and _fits(have[e.name], e, manifest))
    ]
    for name in sorted(stored - {entry.name for entry in kept}):
        spec, device = manifest.tensors[name].spec, getattr(have.get(name), "device", "cpu")
        have[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        kept.append(StateEntry(name, spec, Region.full(spec.shape), have[name]))
    return replace(described, entries=tuple(kept), in_values=have)


def _fits(value: Any, entry: StateEntry, manifest: Manifest) -> bool:
    """Whether a tensor in a value is filled where it lies: those with a layout always are, arrays never."""
    if isinstance(value, DTensor | LocalPart):
        return True
    known = manifest.tensors.get(entry.name)
    return isinstance(value, Tensor) and known is not None and known.spec == entry.spec


def _together(peers: Peers, act: Callable[[], T]) -> T:
    """What every rank does by itself; if one cannot, all raise."""
    error, found = "", list[T]()
    try:
        found.append(act())
    except UserError as caught:
        error = str(caught)
    _raise_first(peers.all_words(error))
    return found[0]


def _raise_first(errors: Sequence[str]) -> None:
    found = [error for error in errors if error]
    if found:
        raise LoadError(found[0])


def _refuse_read_only(state: State) -> None:
    for name, value in _by_hand(state):
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise LoadError(f"{name} is an array that is read-only: load into one that can be written")


def _refuse_copies(state: State, described: Described) -> None:
    """Refuse a part in strides that has no shape of its region without a copy: the copy would be loaded."""
    found = {entry.name: entry for entry in described.entries if entry.region}
    for name, value in _by_hand(state):
        local = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        entry = found.get(name)
        if entry is not None and entry.local.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
            raise LoadError(f"{name} lies in strides here: load into a part without gaps, {list(entry.local.shape)}")


def _by_hand(state: State) -> Iterator[tuple[str, Tensor | np.ndarray[Any, Any]]]:
    """The arrays, and the parts that are held by hand."""
    for section, content in state.items():
        yield from _arrays(section, content)


def _arrays(name: str, content: Any) -> Iterator[tuple[str, Tensor | np.ndarray[Any, Any]]]:
    if isinstance(content, LocalPart):
        yield name, content.local
    elif isinstance(content, np.ndarray):
        yield name, cast("np.ndarray[Any, Any]", content)
    elif isinstance(content, Mapping):
        for key, value in cast("Mapping[str, Any]", content).items():
            yield from _arrays(f"{name}.{key}", value)


# ---------------------------------------------------------------- what is no tensor


def _values(state: State, described: Described, manifest: Manifest) -> dict[str, Any]:
    """The stored objects: those of the state's sections as what they were, with their tensors, others as JSON."""
    have, read = described.in_values, dict(manifest.objects)
    for name, value in manifest.objects.items():
        if name.partition(".")[0] in state and all(one in have for one in values.tensors_in(value)):
            read[name] = values.from_json(value, have.__getitem__)
    return read


def _put_back(state: State, manifest: Manifest, only: Sequence[str]) -> None:
    objects = {name: value for name, value in manifest.objects.items() if _chosen(name, only)}
    for section, content in state.items():
        own = {name.removeprefix(f"{section}."): v for name, v in objects.items() if name.startswith(f"{section}.")}
        if isinstance(content, Optimizer):
            optimiser_load.put_back(content, own, parameter_names(state))
        elif isinstance(content, MutableMapping):
            for key, value in own.items():
                _put(cast("MutableMapping[str, Any]", content), key, value)
        elif isinstance(content, values.Stateful) and section in objects:
            content.load_state_dict(objects[section])
        elif section in objects and isinstance(state, MutableMapping):
            state[section] = objects[section]


def _put(table: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set what `key` names: keys may have dots in them, and tables may lie in tables."""
    own = next((name for name in table if str(name) == key), key)  # keys may be numbers, of which names are the text
    if own not in table:
        for name, inner in table.items():
            if key.startswith(f"{name}.") and isinstance(inner, MutableMapping):
                _put(cast("MutableMapping[str, Any]", inner), key.removeprefix(f"{name}."), value)
                return
    now = table.get(own)
    if isinstance(now, values.Stateful):
        now.load_state_dict(value)
    else:
        table[own] = value
