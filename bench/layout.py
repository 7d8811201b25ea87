"""Regions and overlaps: what one rank of many thousands holds, and who holds the rest.

The peer is torch's `compute_local_shape_and_global_offset`: it answers the first question only, for DTensor placements,
and is called here without a device mesh, by its private helper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tangram.hardware.measuring.measure import Row, interleaved
from tangram.layout import Layout, Mesh, Owner, Region, owners, region

SHAPE = (64 * 10 * 128, 8192)
QKV = Layout.parse("(g/tp (r + 1 + 1) d)/fsdp h/cp").bind(SHAPE, g=64, d=128)
MESH = Mesh.parse("pp=8 fsdp=64 cp=4 tp=8")  # 16,384 ranks
RANK = 12345

OTHERS: tuple[tuple[str, str, str, dict[str, int]], ...] = (
    ("rows over tp, then dp", "o/tp/dp h", "dp=2048 tp=8", {}),
    ("rows over dp, columns over tp", "o/dp h/tp", "dp=2048 tp=8", {}),
    ("heads over tp, the rest over dp", "(a/tp b)/dp h", "dp=2048 tp=8", {"b": 128}),
    ("columns over all ranks", "o h/dp/tp", "dp=2048 tp=8", {}),
    ("gate/up halves over tp", "(2 f/tp)/dp h", "dp=2048 tp=8", {}),
    ("zigzag over cp", "s/cp:zigzag h", "dp=16 cp=1024", {}),
    ("flat over dp", "o/tp h //dp", "dp=2048 tp=8", {}),
)


def rows(quick: bool) -> Iterable[Row]:
    """The figures; `quick` takes fewer repeats."""
    repeats = 5 if quick else 21
    assert MESH.size == 16384
    yield from _regions(repeats)
    mine = region(QKV, MESH, RANK)
    for what, text, mesh_text, sizes in OTHERS:
        other, mesh = Layout.parse(text).bind(SHAPE, **sizes), Mesh.parse(mesh_text)
        seconds = interleaved({"ours": _find(other, mesh, mine)}, repeats)["ours"]
        found = len(owners(other, mesh, mine))
        yield Row(f"each of {found} overlaps with 16,384 ranks: {what}", "us", seconds / found * 1e6, target=10)
    yield from _growth(mine, repeats)


def _regions(repeats: int) -> Iterable[Row]:
    plain = Layout.parse("o/fsdp h/tp").bind(SHAPE)
    mesh = Mesh.parse("fsdp=2048 tp=8")
    coords_free = {"ours": lambda: region(QKV, MESH, RANK)}
    yield Row(
        "region of one rank of 16,384: fused QKV", "us", interleaved(coords_free, repeats)["ours"] * 1e6, target=100
    )
    times = interleaved({"ours": lambda: region(plain, mesh, RANK), "torch": _torch_offsets(mesh)}, repeats)
    yield Row(
        "region of one rank of 16,384: FSDP x TP",
        "us",
        times["ours"] * 1e6,
        {"torch": times["torch"] * 1e6},
        target=100,
    )


def _torch_offsets(mesh: Mesh) -> Callable[[], object]:
    """torch's own answer for the same rank: shapes and offsets by its private helper, coordinates given."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
    )

    sizes = tuple(n for _, n in mesh.views[0])
    coords = list(mesh.coords(RANK).values())
    placements = (Shard(0), Shard(1))
    return lambda: _compute_local_shape_and_global_offset(SHAPE, sizes, coords, placements)


def _find(layout: Layout, mesh: Mesh, wanted: Region) -> Callable[[], list[Owner]]:
    return lambda: owners(layout, mesh, wanted)


def _growth(mine: Region, repeats: int) -> Iterable[Row]:
    """The same 32 overlaps on ever larger meshes: replicas multiply, the time must not."""
    meshes = {n: Mesh.parse(f"rep={n // 1024} dp=128 tp=8") for n in (1024, 16384, 1048576)}
    layout = Layout.parse("o/tp/dp h").bind(SHAPE)
    times = interleaved({str(n): _find(layout, mesh, mine) for n, mesh in meshes.items()}, repeats)
    found = len(owners(layout, meshes[1024], mine))
    for n in meshes:
        yield Row(
            f"all {found} overlaps on a mesh of {n:,} ranks", "us", times[str(n)] * 1e6, limit=times["1024"] * 1e6
        )
