"""One QKV weight from Hugging Face at TP 2 to Megatron at TP 4 and back, bit for bit.

    python examples/qkv.py

Every "rank" here is an entry of a dict; the plans are the ones that real ranks would make, each for itself.
"""

import torch

from tangram.layout import Mesh
from tangram.relayout import Sharding, TensorSpec, bind, execute, invert, plan, shard

GROUPS, QUERIES, HEAD, HIDDEN = 8, 4, 16, 96
MAPPING = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
SIZES = {"g": GROUPS, "d": HEAD}

Buffers = dict[tuple[int, str], torch.Tensor]


def local_parts(whole: dict[str, torch.Tensor], side: Sharding) -> Buffers:
    """What each rank holds, cut out of the whole tensors by plain indexing."""
    return {
        (rank, piece.tensor): whole[piece.tensor][tuple(slice(*hull) for hull in piece.region.hull)].clone()
        for rank in range(side.mesh.size)
        for piece in side.pieces(rank)
    }


def empty_parts(side: Sharding) -> Buffers:
    """Buffers for what each rank will hold."""
    pieces = [(rank, piece) for rank in range(side.mesh.size) for piece in side.pieces(rank)]
    return {(rank, piece.tensor): torch.full(piece.region.local_shape or (), torch.nan) for rank, piece in pieces}


def main() -> None:
    torch.manual_seed(0)
    rows = {"q": GROUPS * QUERIES * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    whole = {name: torch.randn(n, HIDDEN) for name, n in rows.items()}
    there = bind(MAPPING, {name: TensorSpec((n, HIDDEN)) for name, n in rows.items()}, sizes=SIZES)
    back = invert(there)

    face = {"q": "(g/tp r d)/dp h", "k": "(g/tp d)/dp h", "v": "(g/tp d)/dp h"}
    hugging_face = shard(Mesh.parse("dp=2 tp=2"), face, there.source, **SIZES)
    megatron = shard(Mesh.parse("tp=4 dp=2"), {"qkv": "(g/tp (r + 1 + 1) d) h/dp"}, there.target, **SIZES)
    begin, fused, end = local_parts(whole, hugging_face), empty_parts(megatron), empty_parts(hugging_face)

    for rank in range(megatron.mesh.size):
        copies = plan(there, hugging_face, megatron.pieces(rank))
        execute(copies, begin, fused)
        read = sorted({(str(c.source.tensor), c.source.place) for c in copies.copies if c.source})
        print(f"Megatron rank {rank}: {copies.size:,} elements from", *(f"{name}@{place}" for name, place in read))
    for rank in range(hugging_face.mesh.size):
        execute(plan(back, megatron, hugging_face.pieces(rank)), fused, end)

    q, k, v = (whole[name].view(GROUPS, -1, HIDDEN) for name in "qkv")
    expected = torch.cat([q, k, v], 1).view(-1, HIDDEN)
    parts = local_parts({"qkv": expected}, megatron)
    print("fused as torch.cat would:", all(torch.equal(fused[key], parts[key]) for key in parts))
    print("back bit for bit:", all(torch.equal(begin[key], end[key]) for key in begin))


if __name__ == "__main__":
    main()
