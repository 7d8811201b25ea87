"""What `torch.save` wrote, a file or a Hugging Face directory of `pytorch_model.bin`, as pieces.

The file is never unpickled: an archive is read as a tree in which tensors are places (`archive`), and these are views
of the mapped file, so that one from a stranger runs nothing and one of any size takes no memory. A name for each tensor
is all that is looked for: at the top, or under one of the keys that training programs use. Of two names with one
storage both come out.

Trade-off: an optimiser's states are taken where the file says the parameters' names (`state_dicts`), and a pickled
module is refused: its tensors are known only to its class.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tangram.checkpoint.formats import dcp
from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import (
    Number,
    OptimiserStates,
    StateDict,
    leaves,
    optimiser_of,
    plain_names,
    tensor_kind,
    unsharded,
    view,
)
from tangram.checkpoint.formats.common.model_part import DEEPEST, model_part
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.side_files import small_files
from tangram.checkpoint.formats.huggingface import PICKLED, chooses_index, weight_map
from tangram.checkpoint.formats.shards import refuse_missing
from tangram.errors import UserError
from tangram.relayout import Piece, TensorSpec

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SINGLE, INDEX = PICKLED
SHARDS = "pytorch_model-*-of-*.bin"
MODELS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs keep a model."""
OPTIMISERS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
STEPS = ("step", "global_step", "global_steps", "iteration")
LIGHTNING = "pytorch-lightning_version"
SAID = 8
"""Keys that a sentence names."""


@dataclass(frozen=True)
class _Parts:
    model: Any
    lead: str
    optimisers: Mapping[str, Any]
    step: Any
    skipped: tuple[str, ...]
    keyed: bool = True
    """Whether the model is under a key of its own."""
    several: tuple[str, ...] = ()
    """The keys, where there are several of them."""


def is_torch(path: Path) -> bool:
    """Whether it is a file by the name of one, or a directory of pickled weights."""
    there = path.is_file() and path.suffix in SUFFIXES
    return there or any((path / name).is_file() for name in PICKLED) or bool(_shards(path))


def _shards(path: Path) -> list[str]:
    """The files of a directory that are numbered, as they are written beside an index."""
    return sorted(file.name for file in path.glob(SHARDS))


def open_path(path: Path, maps: Maps) -> OpenCheckpoint:
    """A file, or a directory with its configuration. Raises UserError for what is not whole, or no state dict."""
    if path.is_dir():
        return _folder(path, maps)
    maps = Maps(path.parent)
    tree = read_archive(maps, path.name)
    parts = _parts(tree, path)
    found = StateDict()
    found.add(parts.model, path.name)
    names = plain_names(found.places, parts.lead)
    places: dict[str, TensorPlace | Number] = {names[raw]: place for raw, place in found.places.items()}
    params = {name: unsharded(name, place)[0] for name, place in places.items()}
    trained = OptimiserStates()
    skipped = [*found.skipped, *parts.skipped]
    for key, states in parts.optimisers.items():
        trained = optimiser_of(states, key, maps, params, parts.lead)
        skipped += trained.skipped
    for name, place in trained.places.items():
        if name in places:
            raise UserError(f'"{path}" has {name} as a tensor of the model and as a state of the optimiser')
        places[name] = place
    opened = _opened(path, maps, places, skipped)
    if parts.keyed:
        uncut = _uncut(path, maps, tree)
        return replace(opened, states=trained.states, objects=trained.objects(parts.step), uncut=uncut)
    return replace(model_part(opened, dcp.NAMING, skipped), several=parts.several)


def _uncut(path: Path, maps: Maps, tree: Any) -> OpenCheckpoint | None:
    """All tensors of a file by the keys that lead to them; None where something beside the model is not read."""
    try:
        places = {name: value for name, value in leaves(tree) if isinstance(value, TensorPlace)}
        return _opened(path, maps, places, [])
    except UserError:
        return None


def _opened(path: Path, maps: Maps, places: Mapping[str, TensorPlace | Number], skipped: list[str]) -> OpenCheckpoint:
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for name, place in places.items():
        specs[name], piece = unsharded(name, place)
        pieces.append(piece)

    def read(place: Hashable, name: str) -> Tensor:
        return view(maps, place)

    return OpenCheckpoint("torch", path, specs, tuple(pieces), read, maps.release, tuple(skipped))


def _folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """One file, or several with an index that says which tensor is where."""
    index = weight_map(path / INDEX) if (path / INDEX).is_file() else {}
    if (path / SINGLE).is_file() and not chooses_index(path, SINGLE, set(index.values())):
        index = {}
    found = StateDict()
    files = sorted(set(index.values())) or ([SINGLE] if (path / SINGLE).is_file() else _shards(path))
    if not index:
        refuse_missing(path, files)
    for file in files:
        parts = _parts(read_archive(maps, file), path / file)
        found.add(parts.model, file)
        found.skipped.extend(parts.skipped)
    for name, file in index.items():
        if name not in found.places or found.places[name].file != file:
            raise UserError(f'the index "{path / INDEX}" says that {name} is in {file}, but it is not')
    names = plain_names(found.places)
    places: dict[str, TensorPlace | Number] = {names[raw]: place for raw, place in found.places.items()}
    opened = _opened(path, maps, places, found.skipped)
    return replace(opened, small=small_files(path))


def _parts(tree: Any, path: Path) -> _Parts:
    """Where in a file the model is, and where its optimiser. Raises UserError where there is no model."""
    if not isinstance(tree, Mapping):
        kind = "tensor" if isinstance(tree, TensorPlace) else type(tree).__name__
        what = f"a pickled {tree.kind}" if isinstance(tree, Opaque) else f"a {kind}"
        raise UserError(f'"{path}" is {what}, no state dict: save model.state_dict()')
    fields = _inside(cast("Mapping[Any, Any]", tree))
    keys = [key for key in MODELS if isinstance(fields.get(key), Mapping) and _has_tensors(fields[key])]
    if len(keys) > 1:
        return _Parts(fields, "", {}, None, (), keyed=False, several=tuple(keys))
    if not keys:
        module = next((fields[key] for key in MODELS if isinstance(fields.get(key), Opaque)), None)
        if module is not None and not tensor_kind(module):
            raise UserError(f'"{path}" has a pickled {module.kind}, no state dict: save model.state_dict()')
        if not _has_tensors(fields):
            some = ", ".join(map(str, list(fields)[:SAID])) or "nothing"
            raise UserError(f'"{path}" has no tensors by name, and none under {", ".join(MODELS)}; it has {some}')
        return _Parts(fields, "", {}, None, (), keyed=False)
    model = fields[keys[0]]
    optimisers = {key: fields[key] for key in OPTIMISERS if fields.get(key)}
    count = next((key for key in STEPS if isinstance(fields.get(key), int)), None)
    step = fields[count] if count else None
    rest = [str(key) for key in fields if key not in (keys[0], *optimisers, count)]
    lead = _attribute(model) if LIGHTNING in fields else ""
    if len(optimisers) > 1:
        rest += [f"{key} (there are several optimisers)" for key in optimisers]
        optimisers = {}
    return _Parts(model, lead, optimisers, step, tuple(rest))


def _inside(fields: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The table that has the model under a key of its own, as `{"app": {"model": ...}}` has it one further down."""

    def models(table: Any) -> bool:
        known = cast("Mapping[Any, Any]", table) if isinstance(table, Mapping) else dict[Any, Any]()
        return any(isinstance(known.get(key), Mapping) and _has_tensors(known[key]) for key in MODELS)

    for _ in range(DEEPEST):
        below = [value for value in fields.values() if models(value)]
        if models(fields) or len(below) != 1:
            break
        fields = cast("Mapping[Any, Any]", below[0])
    return fields


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(value, TensorPlace) or tensor_kind(value) for _, value in leaves(tree))


def _attribute(model: Mapping[Any, Any]) -> str:
    """The attribute of Lightning's module that the model is, where it is one: it stands before all names."""
    firsts = {str(name).partition(".")[0] for name in model}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in str(name) for name in model) else ""
