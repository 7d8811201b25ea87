"""What the files of DeepSpeed's ranks say, seen to be of one save: trees of `torch.save`, of which nothing is run.

Where a parameter's elements lie in the flat partitions of ZeRO: arithmetic, with no files.

    stages 1 and 2    of each group the parameters, one behind the other, padded: | rank 0 | rank 1 | rank 2 |
    stage 3           of each parameter the share of a rank, padded to the same size for all; a rank has its shares one
                      behind the other, over all its partitions

Either way a parameter is a few stretches of elements that lie together both in it and in a partition, and what holds
for a partition of the parameters holds for those of their states.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import STEP, Number, listed, number_of
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

Key = tuple[int, int]
"""A partition: its rank, and its number there."""
Shape = dict[str, tuple[int, ...]]
ALIGNED = 2
"""Elements times ranks that the partitions of a group are a multiple of, where they are padded."""


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of a parameter, which lie from the element `at` of a partition on."""

    part: Key
    at: int
    start: int
    stop: int


def in_rows(
    shapes: Sequence[Shape], paddings: Sequence[Sequence[int]], lengths: Mapping[Key, int], ranks: int
) -> dict[str, list[Stretch]]:
    """Stages 1 and 2. Raises UserError where the partitions are not those of the parameters.

    `paddings`: elements behind each parameter.
    """
    groups = sum(rank == 0 for rank, _ in lengths)
    if groups != len(shapes):
        raise UserError(f"there are {groups} partitions a rank, but {len(shapes)} groups of parameters")
    found: dict[str, list[Stretch]] = {}
    for group, (some, gaps) in enumerate(zip(shapes, paddings, strict=True)):
        keys = [(rank, group) for rank in range(ranks)]
        sizes = [lengths[key] for key in keys]
        end = sum(map(math.prod, some.values())) + sum(gaps)
        full, unit = sizes[0], ALIGNED * ranks
        equal = all(n in (full, min(full, max(0, end - rank * full))) for rank, n in enumerate(sizes))
        if not equal or sum(sizes) < end or -(-end // unit) != -(-sum(sizes) // unit):
            raise UserError(f"the partitions of group {group} have {sizes} elements, its parameters {end:,}")
        first = 0
        for (name, shape), gap in zip(some.items(), gaps, strict=True):
            if name in found:
                raise UserError(f"{name} is in two groups of parameters")
            found[name] = list(_run(keys, sizes, first, 0, math.prod(shape)))
            first += math.prod(shape) + gap
    return found


def share_of(shape: tuple[int, ...], ranks: int) -> tuple[int, list[Stretch]]:
    """Stage 3: the size of a rank's share of a parameter, and which of its elements these are."""
    n = math.prod(shape)
    part = -(-n // ranks)
    return part, [Stretch((r, 0), 0, r * part, min(n, (r + 1) * part)) for r in range(ranks) if r * part < n]


def in_shares(shapes: Sequence[Shape], lengths: Mapping[Key, int], ranks: int) -> dict[str, list[Stretch]]:
    """Stage 3. Raises UserError where the partitions are not those of the parameters."""
    parts = sum(rank == 0 for rank, _ in lengths)
    keys = [[(rank, part) for part in range(parts)] for rank in range(ranks)]
    sizes = [[lengths[key] for key in some] for some in keys]
    end = sum(share_of(shape, ranks)[0] for some in shapes for shape in some.values())
    for rank, some in enumerate(sizes):
        if sum(some) != end:
            raise UserError(f"the partitions of rank {rank} have {sum(some):,} elements, its parameters {end:,}")
    found: dict[str, list[Stretch]] = {}
    first = 0
    for some in shapes:
        for name, shape in some.items():
            if name in found:
                raise UserError(f"{name} is in two groups of parameters")
            part, shares = share_of(shape, ranks)
            runs = ((one.part[0], one) for one in shares)
            found[name] = [s for r, one in runs for s in _run(keys[r], sizes[r], first, one.start, one.stop)]
            first += part
    return found


def _run(keys: Sequence[Key], sizes: Sequence[int], first: int, start: int, stop: int) -> Iterator[Stretch]:
    """Elements of a parameter that lie from a place on in partitions one behind the other, which have that many."""
    ends = list(accumulate(sizes))
    at = bisect_right(ends, first)
    while start < stop:
        n = min(stop - start, ends[at] - first)
        if n:
            yield Stretch(keys[at], first - ends[at] + sizes[at], start, start + n)
        first, start, at = first + n, start + n, at + 1


def pieces_of(
    name: str, shape: tuple[int, ...], stretches: Sequence[Stretch], places: Mapping[Key, TensorPlace]
) -> tuple[TensorSpec, list[Piece]]:
    """A tensor of a parameter's shape as pieces of partitions."""
    found: list[Piece] = []
    dtypes = {places[one.part].dtype for one in stretches} or {place.dtype for place in places.values()}
    if len(dtypes) != 1:
        raise UserError(f"{name} has parts of several types: {', '.join(sorted(dtypes))}")
    for one in stretches:
        flat, region = places[one.part], Region.flat(shape, one.start, one.stop)
        local = region.local_shape if region.local_shape is not None else (region.size,)
        strides = tuple(math.prod(local[dim + 1 :]) for dim in range(len(local)))
        offset = flat.offset + one.at * DTYPES[flat.dtype]
        found.append(Piece(TensorPlace(flat.file, offset, flat.dtype, local, strides), name, region))
    return TensorSpec(shape, dtypes.pop()), found


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
