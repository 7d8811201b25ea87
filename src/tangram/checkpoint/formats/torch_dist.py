"""Megatron-core's distributed checkpoint, `torch_dist`: DCP with files of its own beside, and layers that are stacked.

    metadata.json    which back end wrote it
    common.pt        what is the same on all ranks: arguments, step; a pickle
    .metadata, *.distcp    DCP

Where all layers are alike, Megatron-core stores each kind of tensor of all layers as one, with the layer in front:
`decoder.layers.mlp.linear_fc2.weight` of [layers, out, in]. Here they are taken apart on the way in, so that a mapping
names `decoder.layers.{l}.mlp...` whether they were stacked or not, and stacked again on the way out.

Trade-off: a DCP of several ranks is written by one process, in chunks of a size of its own: readers of DCP take any
chunks, and no rank's layout is asked for.
"""

import itertools
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.formats import dcp
from tangram.checkpoint.formats.archives.archive import TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import SETTINGS, OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import MASTER, STEP, Naming, common_step, named, with_steps
from tangram.checkpoint.formats.common.outgoing import WriteTask, filled
from tangram.checkpoint.formats.common.side_files import small_files, write_side_files
from tangram.checkpoint.loading.page_memory import fetched
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

CONFIG = "metadata.json"
COMMON = "common.pt"
SOURCE = "source"
"""A folder for the configuration and tokenizer that the checkpoint was made with; Megatron-core does not look at it."""
OBJECTS = "__1_0.distcp"
NAMING = Naming("optimizer.state.{state}.{param}", {"param": MASTER, "fp32_param": MASTER}, lead=r"(?:chained_\d+\.)?")
"""The distributed optimiser calls its copies of parameters `param`, the other one `fp32_param`."""
EXPERTS = ".experts.experts."
MOMENT = "exp_avg"
_LINEAR = re.compile(r"(.+\.(?:linear_\w+|eh_proj))\.weight")
_STACK = re.compile(r"(.*\blayers)\.((?!\d+\.).+)")
_MEMBER = re.compile(r"(.*?\blayers)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class StackedRow:
    """A layer of a stacked chunk."""

    span: dcp.ByteSpan
    index: int


def is_torch_dist(path: Path) -> bool:
    """Whether a directory says that it is one."""
    try:
        fields: Any = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and cast("dict[str, Any]", fields).get("sharded_backend") == "torch_dist"


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """A directory, stacked layers taken apart. Raises UserError for one that is not whole."""
    whole = _apart(path, maps)
    step, settings = _of_optimiser(path, maps) if (path / COMMON).is_file() else (None, None)
    known = with_steps(named(whole, NAMING), step)
    return replace(known, objects={"settings": settings}) if settings else known


def _apart(path: Path, maps: Maps) -> OpenCheckpoint:
    index = dcp.read_index(path)
    whole = dcp.mapped_chunks(maps)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    stacks = {name: (m[1], m[2]) for name in index.specs if (m := _STACK.fullmatch(name))}
    for name, spec in index.specs.items():
        if name in stacks and spec.shape:
            before, after = stacks[name]
            one = TensorSpec(spec.shape[1:], spec.dtype)
            specs.update({f"{before}.{i}.{after}": one for i in range(spec.shape[0])})
        else:
            specs[name] = spec
    for piece in index.pieces:
        if piece.tensor in stacks and index.specs[piece.tensor].shape:
            assert isinstance(piece.place, dcp.ByteSpan)
            before, after = stacks[piece.tensor]
            for box in piece.region.boxes:
                ((first, last),) = box[0]
                rows = ((i, StackedRow(piece.place, i - first)) for i in range(first, last))
                pieces += [Piece(row, f"{before}.{i}.{after}", Region.of([box[1:]])) for i, row in rows]
        else:
            pieces.append(piece)

    def read(place: Hashable, name: str) -> Tensor:
        return whole(place.span, name)[place.index] if isinstance(place, StackedRow) else whole(place, name)

    small = small_files(path / SOURCE) if (path / SOURCE).is_dir() else {}
    return OpenCheckpoint("torch_dist", path, specs, tuple(pieces), read, maps.release, index.opaque, small)


def _of_optimiser(path: Path, maps: Maps) -> tuple[float | None, dict[str, Any] | None]:
    """The step that the groups of parameters are at, and their settings; None where there are none.

    Groups differ in weight decay, and experts may have an optimiser of their own; the step is one.
    """
    tree = read_archive(maps, COMMON)
    groups: list[Mapping[str, Any]] = []
    steps: list[float] = []

    def plain(value: Any) -> Any:
        """Numbers, also those that are tensors of one, and rows of numbers; None of anything else."""
        if isinstance(value, TensorPlace) and not value.shape:
            value = maps.view(value.file, value.offset, value.dtype, value.shape, value.stride).item()
        if isinstance(value, list | tuple):
            found = [plain(one) for one in cast("list[Any]", value)]
            return None if None in found else found
        return value if isinstance(value, int | float) else None

    def look(node: Any) -> None:
        table: Mapping[Any, Any] = cast("Mapping[Any, Any]", node) if isinstance(node, Mapping) else {}
        for key, value in table.items():
            if key == "common_step":
                steps.append(plain(value) or 0.0)
            elif key == "param_groups" and isinstance(value, list):
                for group in cast("list[Any]", value):
                    known = {name: plain(group[name]) for name in (*SETTINGS, STEP) if name in group}
                    groups.append({name: one for name, one in known.items() if one is not None})
            else:
                look(value)

    try:
        look(tree.get("optimizer") if isinstance(tree, Mapping) else None)
    except (TypeError, RecursionError):
        raise UserError(f'"{path / COMMON}" has settings of an optimiser that are none of Megatron-core\'s') from None
    steps += [group[STEP] for group in groups if STEP in group]
    if len(set(steps)) > 1:
        raise UserError(
            f'"{path}": its groups of parameters are at the steps {", ".join(f"{x:g}" for x in sorted(set(steps)))}'
        )
    first = max(groups, key=lambda group: group.get("weight_decay", 0.0), default=None)
    settings = {key: first[key] for key in SETTINGS if key in first} if first else None
    return (float(steps[0]) if steps else None), settings


# ---------------------------------------------------------------- writing


def write(task: WriteTask) -> list[str]:
    """Write a checkpoint of Megatron-core's; the names of its files.

    Raises UserError where parameters have taken different numbers of steps.
    """
    homes = _homes(task) if task.stack else {}
    whole: dict[str, TensorSpec] = {}
    sources: list[tuple[str, str]] = []
    for name, spec in task.specs.items():
        param, state = task.owners[name]
        place, _, count = homes.get(name, (param, 0, 0))
        if state == STEP:  # which all have in common
            continue
        own = [NAMING.write(place, state) if state else place]
        if not state and f"{name}.{MASTER}" not in task.specs and f"{name}.{MOMENT}" in task.specs:
            own.append(NAMING.write(place, MASTER))  # which its optimiser has of every parameter
        for one in own:
            sources.append((name, one))
            dtype = spec.dtype if one == place or state else "float32"
            whole[one] = TensorSpec((count, *spec.shape) if count else spec.shape, dtype)

    def chunks() -> Iterator[dcp.Chunk]:
        for name, own in sources:
            _, index, count = homes.get(name, ("", 0, 0))
            for offsets, values in filled(task, name):
                made = values.to(getattr(torch, whole[own].dtype))
                yield dcp.Chunk(own, (index, *offsets), made[None]) if count else dcp.Chunk(own, offsets, made)

    with fetched(chunks(), dcp.size_of) as made:
        written, files = dcp.stream_chunks(task, made)
    blank = dcp.write_object(task.folder / OBJECTS, [None])
    params = {name: spec for name, spec in whole.items() if not NAMING.read(name)}
    objects = dict.fromkeys(extra_states(params, {home[0] for home in homes.values()}), blank)
    dcp.write_index(task.folder, whole, written, objects)
    return [*files, OBJECTS, dcp.INDEX, *_beside(task)]


def _homes(task: WriteTask) -> dict[str, tuple[str, int, int]]:
    """Of each tensor of a layer its parameter's name in a stack, its number and how many there are."""
    found: dict[str, tuple[str, int, int]] = {}
    for state in ("", *task.states):
        own = {param: name for name, (param, kind) in task.owners.items() if kind == state}
        stacks = stacked(own, {param: task.specs[name] for param, name in own.items()})
        found.update({own[param]: home for param, home in stacks.items()})
    return found


def stacked(names: Iterable[str], specs: Mapping[str, TensorSpec]) -> dict[str, tuple[str, int, int]]:
    """Of each tensor of a layer its name in a stack, its number and how many there are, where all layers are alike.

    Layers are alike where each has the same tensors with the same shapes and types.
    """
    groups: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if match := _MEMBER.fullmatch(name):
            groups.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = name
    found: dict[str, tuple[str, int, int]] = {}
    for before, layers in groups.items():
        kinds = [{after: specs[name] for after, name in some.items()} for some in layers.values()]
        if sorted(layers) == list(range(len(layers))) and all(kind == kinds[0] for kind in kinds):
            found.update({n: (f"{before}.{a}", i, len(layers)) for i, some in layers.items() for a, n in some.items()})
    return found


def extra_states(specs: Mapping[str, TensorSpec], stacks: Collection[str]) -> Iterator[str]:
    """The names of the empty states that Megatron-core keeps beside linear layers and attention, and asks for.

    `stacks`: the tensors that have the layers in front. One is there for each layer and expert.
    """
    for name, spec in specs.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        dims = spec.shape[: (name in stacks) + (EXPERTS in name)]
        for index in itertools.product(*map(range, dims)) if dims else [(0,)]:
            place = f"_extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, dims or (1,)))}"
            yield f"{match[1]}.{place}"
            if match[1].endswith(".self_attention.linear_proj"):
                yield f"{match[1].removesuffix('linear_proj')}core_attention.{place}"


def _beside(task: WriteTask) -> list[str]:
    """The files that make a DCP one of Megatron-core, and those that it was made with."""
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    text = json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1})
    (task.folder / CONFIG).write_text(text, encoding="utf-8")
    torch.save(_common(task), task.folder / COMMON)
    return [CONFIG, COMMON, *(f"{SOURCE}/{name}" for name in write_side_files(task.folder / SOURCE, task.small))]


def _common(task: WriteTask) -> dict[str, Any]:
    """What all ranks have in common: of the optimiser its settings by group, and the step."""
    counts, settings = task.steps(), task.objects.get("settings", {})
    if not counts:
        return {}
    step = common_step(counts, "Megatron-core")

    def one() -> dict[str, Any]:  # anew each time: Megatron-core fills what it reads, and shared tables twice
        groups = [
            {
                "wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False,
                "step": int(step), **settings,
            }
            for wd, expert in itertools.product((1.0, 0.0), (False, True))
        ]  # fmt: skip
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    apart = task.experts_apart and any(EXPERTS in name for name in task.specs)
    return {"optimizer": {0: one(), 1: one()} if apart else one()}
