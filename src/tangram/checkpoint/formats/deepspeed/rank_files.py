"""What the files of DeepSpeed's ranks say, seen to be of one save: trees of `torch.save`, of which nothing is run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import STEP, Number, listed, number_of
from tangram.checkpoint.formats.deepspeed.flat_partitions import Key, Shape
from tangram.errors import UserError

PARTITIONS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
"""Of stages 1 and 2, and of stage 3."""


@dataclass(frozen=True)
class Zero:
    """What the ranks' files say of the optimiser."""

    stage: int
    ranks: list[Mapping[str, Any]]
    masters: dict[Key, TensorPlace]
    states: dict[Key, Mapping[Any, Any]]
    groups: list[Mapping[str, Any]]
    """Of parameters, of rank 0; the numbers of their partitions under `params`."""
    order: list[Any]
    """By which number the state of each partition is kept."""


def read_zero(folder: Path, optim: Mapping[int, str], maps: Maps) -> Zero:
    """The ranks' files, seen to be of one save."""
    first = min(optim)
    trees = {rank: _optimiser(maps, file) for rank, file in optim.items()}
    stage, world = _stage(trees[first], optim[first]), _world(trees[first], optim[first])
    missing = next((rank for rank in range(world) if rank not in trees), None)
    if missing is not None or len(trees) != world:
        what = f"no file of rank {missing}" if missing is not None else f"files of {len(trees)} ranks"
        raise UserError(f'"{folder}" is not whole: it is of {world} ranks, and has {what}')
    masters: dict[Key, TensorPlace] = {}
    states: dict[Key, Mapping[Any, Any]] = {}
    groups, order = _numbers(trees[0], optim[0], stage)
    for rank, tree in trees.items():
        file = optim[rank]
        if (_stage(tree, file), _world(tree, file)) != (stage, world):
            raise UserError(f'"{folder}" is of several saves: {file} is of another stage or number of ranks')
        flat = list_of(tree, PARTITIONS[stage == 3], file)
        kept = _kept(tree, file, stage)
        for group, place in enumerate(flat):
            if not isinstance(place, TensorPlace) or len(place.shape) != 1 or place.stride != (1,):
                raise UserError(f'"{folder / file}": its partition {group} is no flat tensor')
            masters[rank, group] = place
            state = kept.get(order[group]) if group < len(order) else None
            states[rank, group] = cast("Mapping[Any, Any]", state) if isinstance(state, Mapping) else {}
        if len(flat) != sum(rank == 0 for rank, _ in masters):
            raise UserError(f'"{folder}": {file} has {len(flat)} partitions, and that of rank 0 another number')
    return Zero(stage, [trees[rank] for rank in range(world)], masters, states, groups, order)


def flat_state(zero: Zero, word: str) -> dict[Key, TensorPlace]:
    """The partitions of a state, as long as those of the parameters: without what pads them."""
    found: dict[Key, TensorPlace] = {}
    for (rank, group), master in zero.masters.items():
        place = zero.states[rank, group].get(word)
        if place is None:
            continue
        gaps = listed(zero.ranks[rank].get("group_paddings"))
        n, gap = master.shape[0], gaps[group] if group < len(gaps) else 0
        fits = (n, n + gap if isinstance(gap, int) else n)
        if not isinstance(place, TensorPlace) or place.stride != (1,) or place.shape[0] not in fits:
            raise UserError(f"{word} of rank {rank}, partition {group}, is not as long as the partition: {n:,}")
        found[rank, group] = TensorPlace(place.file, place.offset, place.dtype, (n,), (1,))
    return found


def step_of(maps: Maps, zero: Zero, group: int) -> Number | None:
    """How many steps a partition has had, by all ranks alike."""
    number = zero.order[group] if group < len(zero.order) else None
    own = next((g for g in zero.groups if number in g.get("params", ())), dict[str, Any]())
    base = zero.ranks[0].get("base_optimizer_state_step")
    found: list[Number | None] = []
    for rank in range(len(zero.ranks)):
        state = zero.states[rank, group]
        found.append(number_of(maps, state[STEP] if STEP in state else own.get(STEP, base)))
    if any(one != found[0] for one in found):
        raise UserError("the ranks' optimisers are at different steps: their files are of several saves")
    return found[0]


# ---------------------------------------------------------------- fields of the trees


def read_model(maps: Maps, file: str) -> Mapping[str, Any]:
    tree = read_archive(maps, file)
    if not isinstance(tree, Mapping) or "module" not in tree:
        raise UserError(f'"{maps.folder / file}" is no file of a model that DeepSpeed wrote')
    fields = cast("Mapping[str, Any]", tree)
    if (fields.get("mp_world_size") or 1) != 1:
        raise UserError(f'"{maps.folder / file}" is of several tensor-parallel ranks: such checkpoints are not read')
    if any("autoep_layers" in str(key) for key in fields):
        raise UserError(f'"{maps.folder / file}" has experts cut over ranks: such checkpoints are not read')
    return fields


def _optimiser(maps: Maps, file: str) -> Mapping[str, Any]:
    tree = read_archive(maps, file)
    inner: Any = cast("Mapping[str, Any]", tree).get("optimizer_state_dict") if isinstance(tree, Mapping) else None
    if not isinstance(inner, Mapping):
        raise UserError(f'"{maps.folder / file}" is no file of an optimiser that DeepSpeed wrote')
    return cast("Mapping[str, Any]", inner)


def _stage(tree: Mapping[str, Any], file: str) -> int:
    found = tree.get("zero_stage")
    if isinstance(found, Opaque):  # an enumeration of DeepSpeed's
        found = found.args[0] if found.args else None
    if found is None and PARTITIONS[0] in tree:
        return 1  # the optimiser for bfloat16 that keeps gradients in float32 does not say it
    if found not in (1, 2, 3):
        raise UserError(f"{file} is of ZeRO stage {found!r}: 1, 2 and 3 are read")
    return int(found)


def _world(tree: Mapping[str, Any], file: str) -> int:
    found = tree.get("partition_count")
    counts: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
    if not counts or not all(isinstance(one, int) and one > 0 for one in counts):
        raise UserError(f"{file} does not say how many partitions there are")
    if len(set(counts)) > 1:
        raise UserError(f"{file} has groups of parameters over different numbers of ranks: experts are not read")
    return counts[0]


def _numbers(tree: Mapping[str, Any], file: str, stage: int) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The groups of parameters, and the number of each partition among the states."""
    base = tree.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):  # an elastic checkpoint has the states alone
        return [], list(range(len(cast("list[Any]", base))))
    groups: Any = cast("Mapping[str, Any]", base).get("param_groups") if isinstance(base, Mapping) else None
    if not isinstance(groups, list):
        return [], []
    known = [cast("Mapping[str, Any]", one) for one in cast("list[Any]", groups) if isinstance(one, Mapping)]
    lists = [cast("list[Any]", one["params"]) for one in known if isinstance(one.get("params"), list)]
    order = [number for numbers in lists for number in numbers]
    if len(lists) < len(known) or not all(isinstance(number, int) for number in order):
        raise UserError(f"{file} has groups of parameters without the numbers of these")
    return known, order


def _kept(tree: Mapping[str, Any], file: str, stage: int) -> Mapping[Any, Any]:
    base = tree.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):
        return dict(enumerate(cast("list[Any]", base)))
    state: Any = cast("Mapping[str, Any]", base).get("state") if isinstance(base, Mapping) else None
    return cast("Mapping[Any, Any]", state) if isinstance(state, Mapping) else {}


def members(zero: Zero, group: Mapping[str, Any], shapes: list[Shape], names: Mapping[str, str]) -> list[str]:
    at = [zero.order.index(number) for number in group["params"]]
    return [names[name] for one in at if one < len(shapes) for name in shapes[one]]


def paddings_of(zero: Zero, shapes: list[Shape]) -> list[list[int]]:
    """What lies behind each parameter of each group, which old versions do not write."""
    found = zero.ranks[0].get("param_alignment_paddings")
    if found is None:
        return [[0] * len(one) for one in shapes]
    lists = [listed(one) for one in listed(found)]
    fits = [len(some) for some in lists] == [len(one) for one in shapes]
    if not fits or not all(isinstance(n, int) and n >= 0 for some in lists for n in some):
        raise UserError("the checkpoint's param_alignment_paddings are not those of its parameters")
    return lists


def shapes_of(table: Any, file: str) -> Shape:
    found: Shape = {}
    for name, shape in cast("Mapping[Any, Any]", table).items() if isinstance(table, Mapping) else [("", None)]:
        sizes = listed(shape)
        if not isinstance(shape, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in sizes):
            raise UserError(f"{file} does not say the shapes of its parameters: it has {shape!r} for {name!r}")
        found[str(name)] = tuple(sizes)
    return found


def list_of(fields: Mapping[str, Any], key: str, file: str) -> list[Any]:
    found = fields.get(key)
    if not isinstance(found, list | tuple):
        raise UserError(f"{file} has no list {key}")
    return listed(found)


def table_of(fields: Mapping[str, Any], key: str, file: str) -> Mapping[str, Any]:
    found = fields.get(key)
    if not isinstance(found, Mapping):
        raise UserError(f"{file} has no table {key}")
    return cast("Mapping[str, Any]", found)
