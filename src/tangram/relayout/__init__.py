"""Moving tensors from any layout to any other, through a mapping between model structures.

bound = bind("q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h", specs, g=8)
source = shard("dp=2 tp=2", {"q": "(g/tp r d)/dp h", ...}, bound.source, g=8, d=128)
target = shard("tp=4 dp=2", {"qkv": "(g/tp (r + 1 + 1) d) h/dp"}, bound.target, g=8, d=128)
copies = plan(bound, source, target.pieces(rank))      # coverage proved, nothing moved
execute(copies, source_buffers, target_buffers)        # {(place, name): tensor or array}
"""

from tangram.relayout.copies.pieces import Holders, Piece, PieceIndex, Sharding, shard
from tangram.relayout.copies.plan import Copy, CopyPlan, TieCheck, execute, plan
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.mapping.bind import BoundMapping, bind
from tangram.relayout.mapping.codecs import CODECS, Codec
from tangram.relayout.mapping.errors import CoverageError, NotInvertibleError, RelayoutError
from tangram.relayout.mapping.inverse import inverse, invert
from tangram.relayout.mapping.names import Tensors, TensorSpec

__all__ = [
    "CODECS",
    "BoundMapping",
    "Codec",
    "Copy",
    "CopyPlan",
    "CoverageError",
    "Holders",
    "NotInvertibleError",
    "Peers",
    "Piece",
    "PieceIndex",
    "RelayoutError",
    "Sharding",
    "TensorSpec",
    "Tensors",
    "TieCheck",
    "bind",
    "execute",
    "inverse",
    "invert",
    "plan",
    "shard",
]
