"""Moving tensors from any layout to any other, through a mapping between model structures.

bound = bind("q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h", specs, g=8)
source = shard("dp=2 tp=2", {"q": "(g/tp r d)/dp h", ...}, bound.source, g=8, d=128)
target = shard("tp=4 dp=2", {"qkv": "(g/tp (r + 1 + 1) d) h/dp"}, bound.target, g=8, d=128)
copies = plan(bound, source, target.pieces(rank))      # coverage proved, nothing moved
execute(copies, source_buffers, target_buffers)        # {(place, name): tensor or array}
"""

from tangram.relayout.bind import Bound, Tensors, bind
from tangram.relayout.codecs import CODECS, Codec
from tangram.relayout.errors import CoverageError, NotInvertibleError, RelayoutError
from tangram.relayout.execute import execute
from tangram.relayout.inverse import inverse, invert
from tangram.relayout.names import TensorSpec
from tangram.relayout.peers import Peers
from tangram.relayout.pieces import Holders, Piece, PieceIndex, Sharding, shard
from tangram.relayout.plan import Check, Copy, Plan, plan

__all__ = [
    "CODECS",
    "Bound",
    "Check",
    "Codec",
    "Copy",
    "CoverageError",
    "Holders",
    "NotInvertibleError",
    "Peers",
    "Piece",
    "PieceIndex",
    "Plan",
    "RelayoutError",
    "Sharding",
    "TensorSpec",
    "Tensors",
    "bind",
    "execute",
    "inverse",
    "invert",
    "plan",
    "shard",
]
