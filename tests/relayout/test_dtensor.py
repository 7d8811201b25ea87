"""Live DTensors on real gloo ranks: what FSDP2 and tensor parallelism make is read as the layout that it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tangram.layout import Layout, LayoutError, Mesh, region
from tangram.layout.placements import from_placements
from tangram.relayout.copies.dtensor import layout_of, local_shapes, mesh_of, placements_of
from tests.ranks import start

CASES = {  # name: (global shape, placements over tp, whether FSDP2 cuts it over dp as well)
    "rows": ((7, 3), Shard(0), True),
    "columns": ((8, 6), Shard(1), True),
    "whole": ((7, 2), Replicate(), True),
    "tp only": ((5, 4), Shard(0), False),
}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 6)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=6)
    device_mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, (shape, placement, fsdp) in CASES.items():
        whole = torch.arange(float(np.prod(shape))).reshape(shape)
        module = nn.Module()
        module.w = nn.Parameter(distribute_tensor(whole, device_mesh["tp"], [placement]))
        if fsdp:
            fully_shard(module, mesh=device_mesh["dp"])
        tensor = module.w.detach()
        assert isinstance(tensor, DTensor)
        group = dist.group.WORLD if fsdp else device_mesh["tp"].get_group()
        assert group is not None
        mesh, layout = layout_of(tensor, local_shapes(tensor, group))
        found[name] = (str(mesh), str(layout), mesh_of(tensor.device_mesh)[1], tensor.to_local().flatten().tolist())
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str, list[int], list[float]]]]:
    """What each of six ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    start(_rank, str(folder), ranks=6)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(6)]


@pytest.mark.parametrize("name", CASES)
def test_the_layout_names_just_the_elements_that_each_rank_has(ranks: list, name: str) -> None:
    for rank, found in enumerate(ranks):
        mesh_text, layout_text, members, values = found[name]
        mesh, layout = Mesh.parse(mesh_text), Layout.parse(layout_text)
        mine = region(layout, mesh, members.index(rank))
        assert [i for a, b in mine.runs(CASES[name][0]) for i in range(a, b)] == values


def test_uneven_rows_are_fsdp_inside_tp_whatever_torch_declares(ranks: list) -> None:
    assert ranks[0]["rows"][1] == "_=7/tp/dp _=3"


@pytest.mark.parametrize("text", ["o/tp i/dp", "o/dp/tp i", "o i sum:tp", "(2 f/tp) i/dp", "o i"])
def test_placements_there_and_back(text: str) -> None:
    mesh = Mesh.parse("dp=2 tp=2")
    layout = Layout.parse(text).bind((8, 4))
    made = placements_of(layout, mesh)

    back = from_placements(made, mesh, (8, 4))
    assert all(region(back, mesh, r) == region(layout, mesh, r) for r in range(4))
    assert back.pending == layout.pending


def test_what_no_placement_says_is_refused() -> None:
    with pytest.raises(LayoutError, match="no DTensor placements"):
        placements_of(Layout.parse("o/tp/dp").bind((9,)), Mesh.parse("dp=4 tp=2"))
