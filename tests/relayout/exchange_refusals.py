"""What four ranks refuse together, and what they make of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec, bind, shard
from tangram.relayout.exchange.redistribute import move, redistribute
from tangram.relayout.mapping.codecs import Codec
from tests.relayout.exchange_jobs import JOBS, rows, spec
from tests.relayout.exchanging import HOW, RANKS, World, blank, moved, names, raised, raw


def one_is_wrong(world: World) -> Any:
    """What is wrong on one rank, in each way that shows before a byte moves: what all say, if nothing is written."""
    said: dict[str, Any] = {}
    if world.out(4):
        return said
    peers = world.groups[4]
    me = peers.index
    for name, spoil in WRONG.items():
        bound, source, target, have = JOBS["tied" if "tied" in name else "of several lengths"]()
        mine = {key: t for key, t in have.items() if key[0] == me}
        out = {(me, n): blank(p, n, bound) for p in target.pieces(me) for n in names(p, bound)}
        given = {"bound": bound, "source": source, "target": target, "have": mine, "out": out}
        before = {key: t.clone() for key, t in out.items()}
        if me == WRONG_RANK.get(name, 2):
            given.update(spoil(given, me) or {})
        sentence = raised(lambda given=given: move(**given, peers=peers))
        said[name] = [sentence, all(torch.equal(raw(t), raw(before[key])) for key, t in out.items())]
    return said


WRONG_RANK = {"tied copies differ": 1}
"""The rank on which it is wrong, where that is not 2."""
WRONG: dict[str, Callable[[dict[str, Any], int], dict[str, Any] | None]] = {
    "no source buffer": lambda given, me: {"have": {k: t for k, t in given["have"].items() if k[1] != "c"}},
    "no target buffer": lambda given, me: {"out": {k: t for k, t in given["out"].items() if k[1] != "c"}},
    "source of another shape": lambda given, me: {"have": {**given["have"], (me, "c"): torch.zeros(3, 2).short()}},
    "target of another dtype": lambda given, me: {"out": {**given["out"], (me, "b"): torch.zeros(7)}},
    "target is the source": lambda given, me: {"out": {**given["out"], (me, "c"): given["have"][me, "c"].view(1, 3)}},
    "a hole": lambda given, me: {"source": [Piece(2, "a", Region.parse("[0:2]"))]},
    "a source that is no rank": lambda given, me: {
        "source": [Piece("file", n, Region.full(s.shape)) for n, s in given["bound"].source.specs.items()]
    },
    "wanted for another": lambda given, me: {"target": given["target"].pieces(1)},
    "another source": lambda given, me: {
        "source": [Piece(1, n, Region.full(s.shape)) for n, s in given["bound"].source.specs.items()]
    },
    "another mapping": lambda given, me: {
        "bound": bind("{x*} -> {x*}", {**given["bound"].source.specs, "e": spec("1")})
    },
    "no memory": lambda given, me: {"memory": 0},
    "another memory": lambda given, me: {"memory": 100},
    "no such way": lambda given, me: {"way": "pigeons"},
    "a buffer that fails": lambda given, me: {"have": _unreadable},
    "tied copies differ": lambda given, me: given["have"][me, "head"].view(torch.int32)[5, 0].bitwise_xor_(1) and None,
}


def _unreadable(place: Any, name: str) -> Any:
    raise OSError("the device is lost")


def all_want_what_does_not_fit(world: World) -> Any:
    """Ways that all ask for, and that do not fit; meshes that are larger than the group."""
    if world.out(4):
        return []
    bound, source, target, have = rows()["pairs"]
    peers = world.groups[4]
    own = [p for p in target if p.place == peers.index]
    larger = shard("x=6", {"w": "a/x b", "b": "a/x"}, bound.source)
    return [
        raised(lambda: moved(bound, source, own, have, peers, way="all-gather")),
        raised(lambda: moved(bound, source, own, have, peers, way="pigeons")),
        raised(lambda: move(bound, larger, own, {}, {}, peers)),
        raised(lambda: move(bound, source, larger, {}, {}, peers)),
    ]


def one_fails_in_the_midst(world: World) -> Any:
    """A codec that fails on one rank when bytes move already: all hear of it, by each way, and all go on."""
    said: list[str] = []
    if world.out(4):
        return said
    peers = world.groups[4]

    def fails(x: torch.Tensor, value: Any) -> torch.Tensor:
        if peers.index == 3:
            raise ArithmeticError("too much")
        return x

    codecs = {"odd": Codec(fails, lambda dtype, value: dtype, lambda value: value, lambda value: True)}
    bound = bind("w -> w; odd", {"w": TensorSpec((8, 8))}, codecs=codecs)
    source, target = (shard("x=4", {"w": text}, bound.source) for text in ("a/x b", "a b/x"))
    have = {(peers.index, "w"): torch.ones(2, 8)}
    for how in HOW:
        piece = target.piece("w", peers.index)
        out = {(peers.index, "w"): torch.zeros(piece.region.local_shape or ())}
        said.append(raised(lambda how=how, out=out: move(bound, source, target, have, out, peers, **how)))
    return said


def dtensors(world: World) -> Any:
    """DTensors into others over other meshes, some over a part of the ranks; names and dtypes change."""
    if world.out(4):
        return None
    peers = world.groups[4]
    ranks = list(range(RANKS - 4, RANKS))
    made = torch.Generator().manual_seed(3)
    wholes = {"w": torch.randn(7, 6, generator=made), "b": torch.randn(9, generator=made)}
    grid = DeviceMesh("cpu", torch.tensor(ranks).view(2, 2), mesh_dim_names=("dp", "tp"))
    line, pair = DeviceMesh("cpu", ranks[::-1]), DeviceMesh("cpu", ranks[1:3])
    before = {"w": (grid, [Shard(1), Shard(0)]), "b": (pair, [Shard(0)])}
    after = {"model.w": (line, [Shard(1)]), "model.b": (grid, [Shard(0), Replicate()])}
    have = {name: distribute_tensor(wholes[name], *how, src_data_rank=None) for name, how in before.items()}
    narrow = {f"model.{name}": t.bfloat16() for name, t in wholes.items()}
    want = {name: distribute_tensor(-narrow[name], *how, src_data_rank=None) for name, how in after.items()}
    mapping = "{x*} -> model.{x*}; cast=float32:bfloat16"
    redistribute(have, want, peers, mapping=mapping)
    right = {name: distribute_tensor(narrow[name], *how, src_data_rank=None) for name, how in after.items()}
    good = [bool((t.to_local() == right[name].to_local()).all()) for name, t in want.items()]
    if peers.index == 1:
        del have["b"]
    partial = {"w": DTensor.from_local(wholes["w"], grid, [Partial(), Replicate()], run_check=False)}
    return [
        good,
        raised(lambda: redistribute(have, want, peers, mapping=mapping)),
        raised(lambda: redistribute(partial, {"w": have["w"]}, peers)),
        raised(lambda: redistribute({"w": want["model.w"]}, {"w": want["model.w"]}, world.groups[3]))
        if not world.out(3)
        else "",
    ]
