"""What four ranks do together: load every state into every other, and fail in every way that leaves them alive."""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from tangram.checkpoint.loading import between_nodes, block_source, exchange
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.loading.read import Want, read_wants
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import BLOCK
from tangram.errors import UserError
from tangram.hardware.host import shared
from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout.exchange.peers import Peers
from tests.checkpoint.saving import RANKS, STATES, Meshes, Net, meshes, whole_values
from tests.checkpoint.stored import elements, same, with_small_blocks

ALIKE = ("fsdp", "hsdp", "copies")
"""States that are of the same model."""
LARGE = (96, 1031)
NODES = ("aaaa", "aabb", "abab", "abbc", "abcd")
"""Where each rank is, as it says itself."""
LAYOUTS = {"rows": "a/dp b", "columns": "a b/dp", "copied": "a b", "flat": "a b //dp"}

Scene = Callable[[Path, Meshes], Any]


def scramble(state: dict[str, Any], peers: Peers) -> None:
    """Overwrite everything that a load should fill."""
    for entry in describe(state, peers).entries:
        entry.local.copy_(torch.full_like(entry.local, True if entry.local.dtype == torch.bool else 77))


def wrong(state: dict[str, Any], peers: Peers, whole: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors here that are not the parts of `whole`, and of those that are missing."""
    entries = describe(state, peers).entries
    return [e.name for e in entries if e.region and not same(e.local, elements(whole[e.name], e.region))] + [
        f"no {e.name}" for e in entries if e.name not in whole
    ]


def every_pair(folder: Path, found: Meshes) -> Any:
    """Each state saved by one layout is loaded into each layout of it."""
    peers = Peers(dist.group.WORLD)
    bad: dict[str, Any] = {}
    pairs = [(a, b) for a in ALIKE for b in ALIKE] + [(name, name) for name in STATES if name not in ALIKE]
    for there, here in pairs:
        if not (folder / there).exists():
            save(STATES[there](found), folder / there, group=dist.group.WORLD)
        state = STATES[here](found)
        scramble(state, peers)
        state.pop("progress", None)
        load(state, folder / there, group=dist.group.WORLD)
        if differing := wrong(state, peers, whole_values(there)):
            bad[f"{there} -> {here}"] = differing
    return bad


def without_states(folder: Path, found: Meshes) -> Any:
    """An optimiser that never stepped, over FSDP2."""
    torch.manual_seed(5)
    net = Net()
    fully_shard(net, mesh=found.flat)
    optimiser = AdamW([p for p in net.parameters() if p.requires_grad], lr=0.7)
    state = {"model": net, "optim": optimiser, "progress": {"step": 0}}
    load(state, folder / "fsdp", group=dist.group.WORLD)
    whole = whole_values("fsdp")
    names = sorted(e.name for e in describe(state, Peers(dist.group.WORLD)).entries)
    return {
        "wrong": wrong(state, Peers(dist.group.WORLD), whole),
        "same names": names == sorted(whole),
        "lr": optimiser.param_groups[0]["lr"],
        "progress": state["progress"],
    }


def other_cuts(folder: Path, found: Meshes) -> Any:
    """What was cut by hand, loaded as arrays that are whole."""
    state = {"parts": {name: whole * 0 for name, whole in _by_hand().items()}}
    load(state, folder / "by hand", group=dist.group.WORLD)
    return [name for name, whole in _by_hand().items() if not (state["parts"][name] == whole).all()]


def _by_hand() -> dict[str, Any]:
    return {name.removeprefix("parts."): t.numpy() for name, t in whole_values("by hand").items()}


def one_does_not_fit(folder: Path, found: Meshes) -> Any:
    """One rank has another shape, another an extra tensor."""
    said: list[str] = []
    for rank, table in (
        (2, {"weight": torch.zeros(3, 4)}),
        (1, {"weight": torch.zeros(4, 3), "more": torch.zeros(2)}),
    ):
        own = table if dist.get_rank() == rank else {"weight": torch.zeros(4, 3)}
        try:
            load({"model": own}, folder / "linear", group=dist.group.WORLD)
        except UserError as error:
            said.append(f"{type(error).__name__}: {error}")
        said.append(str(any(bool(t.any()) for t in own.values())))
    return said


def no_folder(folder: Path, found: Meshes) -> Any:
    """A checkpoint that is not there for one rank."""
    path = folder / ("linear" if dist.get_rank() else "nowhere")
    try:
        load({"model": {}}, path, group=dist.group.WORLD)
    except UserError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- reading together


def _wants(layout: str) -> Want:
    here = region(Layout.parse(layout).bind(LARGE), Mesh.parse(f"dp={RANKS}"), dist.get_rank())
    shape = here.local_shape if here.local_shape is not None else (here.size,)
    return Want("model.large", here, torch.zeros(shape, dtype=torch.int32))


def once(folder: Path, found: Meshes) -> Any:
    """Every block is read by one rank, however many want it, through windows with few slots and many."""
    results: dict[str, Any] = {}
    whole = large()
    places = [(nodes, 0) for nodes in NODES] + [(nodes, 64 * BLOCK) for nodes in NODES[:2]]
    for (nodes, memory), (name, layout) in itertools.product(places, LAYOUTS.items()):
        read: list[tuple[str, int]] = []
        want = _wants(layout)
        with pytest.MonkeyPatch.context() as patch:
            _small(patch, nodes)
            _spy(patch, read)
            manifest = commits.read_manifest(folder / "large")
            read_wants(folder / "large", manifest, [want], peers=Peers(dist.group.WORLD), memory=memory)
        results[f"{name} {memory} {nodes}"] = [read, same(want.into, elements(whole, want.region))]
    return results


def different_wants(folder: Path, found: Meshes) -> Any:
    """One rank wants all, one a few rows, one nothing, one a corner."""
    rank = dist.get_rank()
    regions = [Region.full(LARGE), Region.box((50, 0), (7, LARGE[1])), Region(), Region.box((90, 1000), (6, 31))]
    here = regions[rank]
    results: list[Any] = []
    for nodes in NODES:
        want = Want("model.large", here, torch.zeros(here.local_shape or (0,), dtype=torch.int32))
        read: list[tuple[str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            _small(patch, nodes)
            _spy(patch, read)
            manifest = commits.read_manifest(folder / "large")
            read_wants(folder / "large", manifest, [want], peers=Peers(dist.group.WORLD))
        results.append([read, same(want.into, elements(large(), here))])
    return results


def by_files(folder: Path, found: Meshes) -> Any:
    """Without memory that has no name, and without any in common."""
    results: list[bool] = []
    for ways in ((shared.in_a_file,), ()):
        with pytest.MonkeyPatch.context() as patch:
            _small(patch)
            patch.setattr(shared, "WAYS", ways)
            patch.setenv("TMPDIR", str(folder / "temporary"))
            patch.setattr("tempfile.tempdir", None)
            want = _wants("a b/dp")
            read_wants(folder / "large", commits.read_manifest(folder / "large"), [want], peers=Peers(dist.group.WORLD))
            results.append(same(want.into, elements(large(), want.region)))
    return [results, [path.name for path in (folder / "temporary").iterdir()]]


def damaged(folder: Path, found: Meshes) -> Any:
    """One block is not as it was written: all ranks say the same, soon."""
    said: list[str] = []
    for nodes, layout in itertools.product(NODES[::2], LAYOUTS.values()):
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            _small(patch, nodes)
            manifest = commits.read_manifest(folder / "rotten")
            try:
                read_wants(folder / "rotten", manifest, [_wants(layout)], peers=Peers(dist.group.WORLD))
            except UserError as error:
                said.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - started < 60
    return said


def one_cannot_read(folder: Path, found: Meshes) -> Any:
    """The disk of one rank fails, or another one has no memory, in the midst of it."""
    said: list[str] = []
    failures = ((1, OSError(5, "Input/output error")), (3, MemoryError("none left")))
    for nodes, (rank, error) in itertools.product(NODES, failures):
        with pytest.MonkeyPatch.context() as patch:
            _small(patch, nodes)
            if dist.get_rank() == rank:
                _failing(patch, error)
            manifest = commits.read_manifest(folder / "large")
            try:
                read_wants(folder / "large", manifest, [_wants("a b/dp")], peers=Peers(dist.group.WORLD), memory=0)
            except UserError as caught:
                said.append(str(caught))
    return said


def spoiled(folder: Path, found: Meshes) -> Any:
    """What one rank receives from another node is not what was sent."""
    real, left = between_nodes.Between.receive, iter(range(3))

    def receive(*arguments: Any) -> Any:
        data = real(*arguments)
        data[17] ^= next(left, None) is None
        return data

    with pytest.MonkeyPatch.context() as patch:
        _small(patch, "aabb")
        if dist.get_rank() == 2:
            patch.setattr(between_nodes.Between, "receive", receive)
        manifest = commits.read_manifest(folder / "large")
        try:
            read_wants(folder / "large", manifest, [_wants("a b")], peers=Peers(dist.group.WORLD))
        except UserError as error:
            return f"{type(error).__name__}: {error}"
    return None


def one_cannot_plan(folder: Path, found: Meshes) -> Any:
    """One rank wants what is not there."""
    name = "model.other" if dist.get_rank() == 3 else "model.large"
    want = Want(name, Region.full(LARGE), torch.zeros(LARGE, dtype=torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        _small(patch)
        manifest = commits.read_manifest(folder / "large")
        try:
            read_wants(folder / "large", manifest, [want], peers=Peers(dist.group.WORLD))
        except UserError as error:
            return str(error)
    return None


SCENES: tuple[Scene, ...] = (
    every_pair,
    without_states,
    other_cuts,
    one_does_not_fit,
    no_folder,
    once,
    different_wants,
    by_files,
    damaged,
    one_cannot_read,
    spoiled,
    one_cannot_plan,
)


def _small(patch: pytest.MonkeyPatch, nodes: str = NODES[0]) -> None:
    with_small_blocks(patch)
    patch.setattr(exchange, "SLOTS", 5)
    patch.setattr(shared, "node", lambda: nodes[dist.get_rank()])


def _spy(patch: pytest.MonkeyPatch, read: list[tuple[str, int]]) -> None:
    real = block_source.Sources.read

    def spied(self: block_source.Sources, file: str, block: int, out: Any) -> Any:
        read.append((file, block))
        return real(self, file, block, out)

    patch.setattr(block_source.Sources, "read", spied)


def _failing(patch: pytest.MonkeyPatch, error: Exception) -> None:
    real, left = os.preadv, iter(range(6))

    def fails(*arguments: Any) -> int:
        if next(left, None) is None:
            raise error
        return real(*arguments)

    patch.setattr(os, "preadv", fails)


def large() -> torch.Tensor:
    """A tensor over a hundred small blocks."""
    return torch.arange(LARGE[0] * LARGE[1], dtype=torch.int32).reshape(LARGE)


def play(rank: int, folder: str) -> None:
    """All scenes, one after the other; what came of each goes into a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = meshes()
    for scene in SCENES:
        result = scene(Path(folder), found)
        Path(f"{folder}/{scene.__name__}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()
