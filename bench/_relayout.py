"""Four ranks turn a matrix cut by rows into one cut by columns: the exchange, DTensor itself, and the bytes alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tangram.hardware.measuring.measure import interleaved
from tangram.relayout import TensorSpec, bind, shard
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.redistribute import move
from tangram.training.run.launch import Rank

RANKS = 4
OURS, DTENSOR, BYTES = "ours", "DTensor.redistribute", "all_to_all_single of as many bytes"


def seconds(rank: Rank, side: int) -> dict[str, float]:
    """Of a square matrix of so many rows of float32; runs in a rank. Raises RuntimeError where a result is wrong."""
    torch.set_num_threads(1)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("a rank has a group")
    part = side // RANKS
    rows = torch.arange(rank.index * part * side, (rank.index + 1) * part * side).float().reshape(part, side)
    columns, sent, received = torch.zeros(side, part), rows.reshape(-1), torch.empty(side * part)
    bound = bind("w -> w", {"w": TensorSpec((side, side))})
    source, target = shard("tp=4", {"w": "o/tp i"}, bound.source), shard("tp=4", {"w": "o i/tp"}, bound.target)
    have, out = {(rank.index, "w"): rows}, {(rank.index, "w"): columns}
    mesh = init_device_mesh("cpu", (RANKS,))
    cut = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    theirs = cut.redistribute(mesh, [Shard(1)]).to_local()
    move(bound, source, target, have, out, Peers(group))
    if not torch.equal(columns, theirs):
        raise RuntimeError("the exchange and DTensor do not agree")

    def alone() -> None:
        dist.all_to_all_single(received, sent)

    return interleaved(
        {
            OURS: lambda: move(bound, source, target, have, out, Peers(group)),
            DTENSOR: lambda: cut.redistribute(mesh, [Shard(1)]),
            BYTES: alone,
        },
        repeats=9,
        at_least=0,
    )
