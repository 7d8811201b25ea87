"""What work is worth in bytes that a rank receives: the one place where a derivation asks a cluster for its rates.

Without a cluster the numbers are those of an axis of 8 in a node of `h100-8x8`. With one, each axis has its own: over
ranks that follow each other in a node a byte costs less work than over a network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tangram.hardware.catalogue.cluster import Cluster
from tangram.hardware.catalogue.cluster import rates as rates_of
from tangram.layout import Mesh
from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.propagation import op_cost


@dataclass(frozen=True)
class WorkRates:
    """What work is worth in bytes that a rank receives."""

    flops_per_byte: float = 2200.0
    """Of products."""
    moved_per_byte: float = 7.4
    """Bytes that other operators read and write."""
    summed: float = 1 / 8
    """What a byte of a parameter's gradient counts that is summed over ranks: that is done once a step, however many
    micro-batches there are, and beside the backward."""
    follow: float = 10.0
    """What it costs beside, in bytes for each of its bytes, to undo the cut of a tensor that goes into a product with a
    parameter without a mark; an all-to-all counts as the gather that it saves. So these parameters follow the cuts that
    they meet, as in the published plans. 0: bytes count as they are; then a tensor may be cut otherwise before it meets
    a parameter, which can move less, and keeps the parameter whole."""
    cluster: Cluster | None = None
    """Whose rates count, in place of the first two numbers."""

    def along(self, mesh: Mesh, axis: str) -> WorkRates:
        """Those of an axis, by its size and its stride. Raises UserError for a mesh that is larger than the cluster."""
        if self.cluster is None:
            return self
        flops, moved = rates_of(self.cluster, *mesh.axes[axis])
        return replace(self, flops_per_byte=flops, moved_per_byte=moved)


class Effort(NamedTuple):
    """What an operator does, whole, in a forward."""

    flops: int
    """0: a view, or what is filled with nothing."""
    touched: int
    """Bytes that it reads and writes."""
    product: bool
    """Whether operations count, and not bytes."""

    def worth(self, rates: WorkRates) -> float:
        """In bytes that are received."""
        if not self.flops:
            return 0.0
        return self.flops / rates.flops_per_byte if self.product else self.touched / rates.moved_per_byte


def effort(folded: Folded, step: FoldedStep) -> Effort:
    """What an operator does, once; remembered with its call."""
    known = vars(step.call)
    if "_effort" not in known:
        whole = op_cost.results(step.call)
        flops = op_cost.flops(step.call, step.bound, {}, Mesh.parse("x=1"), whole) if step.bound.cuttable else 1
        touched = sum(folded.value(v).nbytes for v in (*step.inputs, *step.outputs) if v is not None)
        sizes = [t.numel() for t in step.call.tensors if t is not None]
        largest = max([*sizes, *(math.prod(folded.value(v).shape) for v in step.outputs)], default=0)  # or a look-up
        known["_effort"] = Effort(flops, touched, flops > 2 * largest)
    return known["_effort"]
