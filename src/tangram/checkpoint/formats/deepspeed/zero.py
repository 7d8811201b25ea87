"""A checkpoint of DeepSpeed's ZeRO, stage 1, 2 or 3, as pieces of its ranks' flat partitions: nothing is put together.

    latest                                            the name of the folder
    global_step7/mp_rank_00_model_states.pt           stages 0 to 2: the module
    global_step7/zero_pp_rank_R_mp_rank_00_model_states.pt    stage 3: buffers, frozen parameters in parts
    global_step7/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    flat float32 partitions, and the optimiser's states

Stages 1 and 2 lay the parameters of a group one behind the other and cut that into one partition a rank; stage 3 cuts
every parameter into one part a rank, and a rank's parts lie behind each other (`deepspeed_parts`). A parameter is so a
few runs of elements in files that are mapped; the files' pickles are read without running anything of them.

The model's tensors are the module's own where it is saved whole (stages 1 and 2), and `w.master` is the float32 copy.
Stage 3 has the weights in float32 alone, so those are the model's, and there is no `master`.

Trade-off: Megatron's tensor parallelism, pipelines and experts in files of their own are refused: what they cut is said
by the program that made the model, not by the checkpoint.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tangram.checkpoint.formats.archives.archive import TensorPlace
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import (
    KNOWN,
    STEP,
    Number,
    OptimiserStates,
    StateDict,
    group_of,
    optimiser_of,
    plain_names,
    unsharded,
    view,
)
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.side_files import small_files
from tangram.checkpoint.formats.deepspeed.rank_files import (
    Key,
    Shape,
    Stretch,
    Zero,
    flat_state,
    in_rows,
    in_shares,
    list_of,
    members,
    paddings_of,
    pieces_of,
    read_model,
    read_zero,
    shapes_of,
    share_of,
    step_of,
    table_of,
)
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

LATEST = "latest"
MASTER = "master"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_STATES = re.compile(r".*_(?:optim|model)_states\.pt")


@dataclass(frozen=True)
class _Files:
    folder: Path
    optim: Mapping[int, str]
    """By rank."""
    parts: Mapping[int, str]
    """The files of the model in stage 3, by rank."""
    module: str | None


@dataclass
class _Made:
    """What is found so far: names are plain ones."""

    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    pieces: list[Piece] = field(default_factory=list[Piece])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    skipped: list[str] = field(default_factory=list[str])

    def add(self, name: str, place: TensorPlace | Number) -> None:
        """A tensor that lies in one place."""
        spec, piece = unsharded(name, place)
        self.add_pieces(name, spec, [piece])

    def add_pieces(self, name: str, spec: TensorSpec, pieces: list[Piece]) -> None:
        """A tensor in parts."""
        if name in self.specs:
            raise UserError(f"the checkpoint has {name} twice")
        self.specs[name] = spec
        self.pieces += pieces


def is_deepspeed(path: Path) -> bool:
    """Whether a folder has what `save_checkpoint` writes, or is one of its folders of a step."""
    return path.is_dir() and ((path / LATEST).is_file() or any(_STATES.fullmatch(file.name) for file in path.iterdir()))


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """A checkpoint. Raises UserError for one that is not whole, or that is cut in a way that is not read."""
    files = _files(_folder(path))
    maps = maps.below(files.folder)
    made = _Made()
    objects = _of_zero(files, maps, made) if files.optim else _without_zero(files, maps, made)

    def read(place: Hashable, name: str) -> Tensor:
        return view(maps, place)

    return OpenCheckpoint(
        "deepspeed", files.folder, made.specs, tuple(made.pieces), read, maps.release, tuple(made.skipped),
        small_files(path), made.states, objects,
    )  # fmt: skip


def _folder(path: Path) -> Path:
    """The folder of the step that `latest` names, or the path itself."""
    if any(_STATES.fullmatch(file.name) for file in path.iterdir()):
        return path
    tag = (path / LATEST).read_bytes()[:1000].decode(errors="replace").strip()
    if Path(tag).name != tag or not (path / tag).is_dir():
        raise UserError(f'"{path / LATEST}" names {tag!r}, which is no folder beside it')
    return path / tag


def _files(folder: Path) -> _Files:
    optim: dict[int, str] = {}
    parts: dict[int, str] = {}
    module = None
    for file in sorted(folder.iterdir()):
        found, model = _OPTIM.fullmatch(file.name), _MODEL.fullmatch(file.name)
        match = found or model
        if match is None and _STATES.fullmatch(file.name):
            raise UserError(f'"{folder}" has {file.name}: pipelines, and experts in files of their own, are not read')
        if match and int(match[2]):
            raise UserError(f'"{folder}" has {file.name}: checkpoints of several tensor-parallel ranks are not read')
        if model and model[1] is None:
            module = file.name
        elif match:
            table = optim if found else parts
            if int(match[1]) in table:
                raise UserError(f'"{folder}" has {table[int(match[1])]} and {file.name}: files of two runs')
            table[int(match[1])] = file.name
    if not (optim or module):
        raise UserError(
            f'"{folder}" has no file that ends in _optim_states.pt or _model_states.pt, as DeepSpeed writes'
        )
    return _Files(folder, optim, parts, module)


def _without_zero(files: _Files, maps: Maps, made: _Made) -> dict[str, Any]:
    """Stage 0: a module, and the optimiser's own state dict."""
    assert files.module is not None
    model = read_model(maps, files.module)
    if model.get("param_shapes") is not None:
        raise UserError(f'"{files.folder}" is not whole: it has no files of ranks that end in _optim_states.pt')
    found = StateDict()
    found.add(table_of(model, "module", files.module), files.module)
    names = plain_names(found.places)
    for raw, place in found.places.items():
        made.add(names[raw], place)
    made.skipped += found.skipped
    trained = OptimiserStates()
    if model.get("optimizer"):
        trained = optimiser_of(model["optimizer"], "optimizer", maps, dict(made.specs))
    for name, place in trained.places.items():
        made.add(name, place)
    made.states.update(trained.states)
    made.skipped += trained.skipped
    return trained.objects(model.get("global_steps"))


# ---------------------------------------------------------------- ZeRO


def _of_zero(files: _Files, maps: Maps, made: _Made) -> dict[str, Any]:
    zero = read_zero(files.folder, files.optim, maps)
    ranks = range(len(zero.ranks))
    if zero.stage < 3:
        models = [read_model(maps, files.module or "mp_rank_00_model_states.pt")]
    else:
        gone = next((rank for rank in ranks if rank not in files.parts), None)
        if gone is not None:
            raise UserError(f'"{files.folder}" is not whole: it has no model_states.pt of rank {gone}')
        models = [read_model(maps, files.parts[rank]) for rank in ranks]
    model, file = models[0], (files.module or "") if zero.stage < 3 else files.parts[0]
    shapes = [shapes_of(one, file) for one in list_of(model, "param_shapes", file)]
    lengths = {key: place.shape[0] for key, place in zero.masters.items()}
    if zero.stage < 3:
        homes = in_rows(shapes, paddings_of(zero, shapes), lengths, len(ranks))
    else:
        homes = in_shares(shapes, lengths, len(ranks))
    module = StateDict()
    module.add(model.get("module") or {}, file)
    trained: Shape = {name: shape for one in shapes for name, shape in one.items()}
    frozen = shapes_of(model.get("frozen_param_shapes") or {}, file)
    shared = {str(k): str(v) for k, v in table_of(model, "shared_params", file).items()}
    names = plain_names(dict.fromkeys([*module.places, *trained, *frozen, *shared]))
    buffers = set(list_of(model, "buffer_names", file))
    _keep(module, zero.stage, buffers, {*trained, *frozen, *shared}, names, made)
    for name, shape in trained.items():
        spec = made.specs.get(names[name])
        if spec is not None and spec.shape != shape:
            raise UserError(f"{name} is {list(spec.shape)} in {file}, which says that it is {list(shape)}")
    _freeze(models, frozen, names, made, zero.stage)
    _train(maps, zero, homes, trained, names, made)
    for alias, own in shared.items():
        name, source = names[alias], names.get(own, own)
        if name not in made.specs and source in made.specs:
            same = [Piece(piece.place, name, piece.region) for piece in made.pieces if piece.tensor == source]
            made.add_pieces(name, made.specs[source], same)
    groups = [group_of(maps, group, members(zero, group, shapes, names)) for group in zero.groups]
    return OptimiserStates(groups=groups).objects(model.get("global_steps"))


def _keep(
    module: StateDict, stage: int, buffers: set[str], parted: set[str], names: Mapping[str, str], made: _Made
) -> None:
    """The module's own tensors: in stage 3 those that are not parted, which stand there empty."""
    for name, place in module.places.items():
        if stage < 3 or name in buffers or (name not in parted and 0 not in place.shape):
            made.add(names[name], place)
    made.skipped += module.skipped


def _train(
    maps: Maps, zero: Zero, homes: Mapping[str, list[Stretch]], shapes: Shape, names: Mapping[str, str], made: _Made
) -> None:
    """Float32 partitions and states of what is trained."""
    words = dict.fromkeys(
        str(word) for state in zero.states.values() for word, v in state.items() if isinstance(v, TensorPlace)
    )
    flat = {word: flat_state(zero, word) for word in words if word != STEP and KNOWN.get(word) == KNOWN[MASTER]}
    made.skipped += [f"optimizer.{word}" for word in words if word != STEP and word not in flat]
    steps = {group: step_of(maps, zero, group) for rank, group in zero.masters if rank == 0}
    for raw, stretches in homes.items():
        name = names[raw]
        spec, pieces = pieces_of(name, shapes[raw], stretches, zero.masters)
        if name not in made.specs:
            made.add_pieces(name, spec, pieces)
        elif made.specs[name].dtype != spec.dtype:
            copy = f"{name}.{MASTER}"
            made.add_pieces(copy, spec, pieces_of(copy, shapes[raw], stretches, zero.masters)[1])
            made.states[MASTER] = KNOWN[MASTER]
        for word, places in flat.items():
            if all(one.part in places for one in stretches):
                made.add_pieces(f"{name}.{word}", *pieces_of(f"{name}.{word}", shapes[raw], stretches, places))
                made.states[word] = KNOWN[word]
        step = steps[stretches[0].part[1]] if stretches else None
        if step is not None:
            made.add(f"{name}.{STEP}", step)
            made.states[STEP] = KNOWN[STEP]


def _freeze(models: list[Mapping[str, Any]], shapes: Shape, names: Mapping[str, str], made: _Made, stage: int) -> None:
    """Parameters that are not trained: stage 3 has a part of each in every rank's file."""
    for raw, shape in shapes.items():
        if names[raw] in made.specs:
            continue
        places: dict[Key, TensorPlace] = {}
        for rank, model in enumerate(models):
            table: Any = model.get("frozen_param_fragments")
            place = cast("Mapping[str, Any]", table).get(raw) if isinstance(table, Mapping) else None
            if not isinstance(place, TensorPlace):
                raise UserError(f"the frozen parameter {raw} is not in the file of rank {rank}")
            places[rank, 0] = place
        if stage < 3:
            made.add(names[raw], places[0, 0])
            continue
        spec = TensorSpec(shape, places[0, 0].dtype)
        if 0 in shape:
            made.add_pieces(names[raw], spec, [Piece(places[0, 0], names[raw], Region.full(shape))])
            continue
        part, shares = share_of(shape, len(models))
        if any(place.shape != (part,) or place.stride != (1,) for place in places.values()):
            raise UserError(f"the parts of the frozen parameter {raw} do not add up to {list(shape)}")
        made.add_pieces(names[raw], *pieces_of(names[raw], shape, shares, places))
