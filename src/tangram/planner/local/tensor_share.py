"""What one TP rank computes of a model, as derived: the share of matmuls, and of all other operators.

For models that no configuration says narrower (heads without a size of their own, state spaces, experts): there the
costs of the whole model are scaled. Shares are of all layers, and of what lies outside of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tangram.layout import Layout, Mesh, region
from tangram.models.outlines.costs import Made, ModelCosts, Part, Work
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.problem.rates import effort


@dataclass(frozen=True)
class TensorShare:
    """Of 1, what is done on a rank."""

    blocks: float = 1.0
    """Of matmuls inside of layers."""
    outside: float = 1.0
    """Of those outside, as the logits."""
    others: float = 1.0
    """Of the bytes that all other operators read and write."""


def tensor_share(found: Derived, axes: Collection[str]) -> TensorShare:
    """The share of a rank of some axes of a derivation."""
    folded, whole, own = found.folded, defaultdict[str, float](float), defaultdict[str, float](float)
    paths = tuple(f"{block.path}." for block in folded.graph.blocks)
    for step in folded.steps:
        does = effort(folded, step)
        kind = ("blocks" if f"{step.node.module}.".startswith(paths) else "outside") if does.product else "others"
        amount = float(does.flops if does.product else does.touched * bool(does.flops)) * step.times
        whole[kind] += amount
        own[kind] += amount * math.prod(
            over.communication[step.number].share for over in found.axes if over.axis in axes
        )
    return TensorShare(**{kind: own[kind] / whole[kind] for kind in whole if whole[kind]})


def scaled(costs: ModelCosts, share: TensorShare, *, logits: float = 1.0) -> ModelCosts:
    """The costs of a rank that has such a share, and so much of the logits."""
    forward, backward = (_work(work, costs, share) for work in (costs.forward, costs.backward))
    return replace(
        costs,
        parts=tuple(_part(part, share) for part in costs.parts),
        forward=forward,
        backward=backward,
        logits_bytes=costs.logits_bytes * logits,
    )


def _part(part: Part, share: TensorShare) -> Part:
    products = share.blocks if part.name else share.outside
    return replace(
        part,
        forward_flops=part.forward_flops * products,
        backward_flops=part.backward_flops * products,
        kept_bytes=part.kept_bytes * share.others,
        made={kind: Made(one.nbytes * products, one.flops * products) for kind, one in part.made.items()},
    )


def _work(work: Work, costs: ModelCosts, share: TensorShare) -> Work:
    flops = {inside: sum(p.forward_flops for p in costs.parts if bool(p.name) == inside) for inside in (True, False)}
    total = sum(flops.values()) or 1.0
    products = (flops[True] * share.blocks + flops[False] * share.outside) / total
    return Work(_times(work.products, products), _times(work.memory_traffic, share.others))


def _times(sizes: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple(size * share for size in sizes)


def local_shapes(
    shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, str], axis: tuple[str, int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the first rank's parts over an axis (name and size), by each parameter's layout (as in `_/tp _`).

    No rank has more, as parts are made here: in chunks, of single places or of whole heads.
    """
    mesh, found = Mesh((((axis[0], axis[1]),),)), dict(shapes)
    for parameter, text in dims.items():
        layout = Layout.parse(text).bind(shapes[parameter])
        own = replace(layout, dims=tuple(dim.over(mesh.axes) for dim in layout.dims))
        found[parameter] = region(own, mesh, 0).local_shape or ()
    return found
