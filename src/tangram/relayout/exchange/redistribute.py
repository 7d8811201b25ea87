"""DTensors into DTensors of any other meshes and placements, on the ranks of one group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tangram.layout import region
from tangram.relayout.copies.dtensor import layout_of, mesh_of
from tangram.relayout.copies.pieces import Piece
from tangram.relayout.exchange.between_ranks import MEMORY, move
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.rounds import ExchangeReport
from tangram.relayout.exchange.shared_lanes import agreed, tried
from tangram.relayout.mapping.bind import bind
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorSpec

DTensors = Mapping[str, DTensor]


def redistribute(
    have: DTensors, want: DTensors, peers: Peers, *, mapping: str = "{name*} -> {name*}", memory: int = MEMORY
) -> ExchangeReport:
    """Fill the DTensors of one state from those of another. Collective over `peers`, which has all ranks of all meshes.

    Names, shapes and dtypes may change as the mapping says; meshes and placements as they like, and from tensor to
    tensor. All ranks name the same tensors. Raises the same on all ranks, before any target is written.
    """
    group = peers.group
    if group is None:
        raise RelayoutError("DTensors are moved by the ranks of a group: give it to the peers")
    local = [{name: list(t.to_local().shape) for name, t in side.items()} for side in (have, want)]
    shapes = agreed(peers, None, local)
    made, fault = tried(
        lambda: (
            bind(mapping, _specs(have), _specs(want)),
            _pieces(have, [of[0] for of in shapes], group),
            _pieces(want, [of[1] for of in shapes], group),
        )
    )
    agreed(peers, fault)
    if made is None:
        raise AssertionError("what has no fault was made")
    bound, held, wanted = made
    me = peers.index
    sources, targets = ({(me, name): t.to_local() for name, t in side.items()} for side in (have, want))
    return move(bound, held, [p for p in wanted if p.place == me], sources, targets, peers, memory=memory)


def _specs(side: DTensors) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(t.shape), str(t.dtype)) for name, t in side.items()}


def _pieces(side: DTensors, shapes: list[Any], group: dist.ProcessGroup) -> list[Piece]:
    """What each rank of the group holds. `shapes`: by rank, the local shape of each tensor."""
    found: list[Piece] = []
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
    for name, t in side.items():
        mesh, ranks = mesh_of(t.device_mesh)
        outside = next((rank for rank in ranks if rank not in places), None)
        if outside is not None:
            raise RelayoutError(f"{name}: rank {outside} of its mesh is not in the group")
        here = [places[rank] for rank in ranks]
        lacking = next((place for place in here if name not in shapes[place]), None)
        if lacking is not None:
            raise RelayoutError(f"rank {lacking} has no {name}: all ranks name the same tensors")
        _, layout = layout_of(t, {i: tuple(shapes[place][name]) for i, place in enumerate(here)})
        if layout.pending:
            raise RelayoutError(f"{name} waits for a reduction over {layout.pending[0][1]}: do that first")
        regions = [region(layout, mesh, i) for i in range(len(here))]
        found += [Piece(place, name, held) for place, held in zip(here, regions, strict=True) if held]
    return found
