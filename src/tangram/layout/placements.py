"""Other systems' words for a layout: DTensor placements, JAX PartitionSpec text, Paddle dims mappings.

Reading them is exact. Writing DTensor placements is a guess that is then checked: the regions of the result must
equal the layout's on every rank, else it is refused, because `_StridedShard` cannot say everything. Live torch
objects are read by their public methods, so this module needs no torch; `tangram.relayout.copies.dtensor` makes them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from tangram.layout.errors import LayoutError
from tangram.layout.locate import region, validate
from tangram.layout.mesh import Mesh
from tangram.layout.notation import Layout
from tangram.layout.syntax import VOID, Cut, Dim

OPS = ("sum", "avg", "max", "min")
_SPECS = ("PartitionSpec", "P")


@dataclass(frozen=True)
class Placement:
    """What DTensor says of one mesh axis. `dim` and `split_factor` count for shards, `op` for partials."""

    kind: Literal["replicate", "shard", "strided", "partial"]
    dim: int = 0
    split_factor: int = 1
    op: str = "sum"

    @staticmethod
    def read(placement: Any, ndim: int) -> Placement:
        """Read a `torch.distributed.tensor` placement by its public attributes.

        Raises LayoutError for what is no layout: a masked partial, a reduction other than sum, avg, max, min, or a dim
        that a tensor of `ndim` dims does not have.
        """
        if isinstance(placement, Placement):
            shards = placement.kind in ("shard", "strided")
            return replace(placement, dim=_dim(placement.dim, ndim)) if shards else placement
        if placement.is_replicate():
            return Placement("replicate")
        if placement.is_partial():
            if hasattr(placement, "mask_buffer") or placement.reduce_op not in OPS:
                raise LayoutError(f"{placement!r} is no layout: reduce it first")
            return Placement("partial", op=str(placement.reduce_op))
        dim = _dim(int(placement.dim), ndim)
        if hasattr(placement, "split_factor"):
            return Placement("strided", dim, int(placement.split_factor))
        return Placement("shard", dim)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise LayoutError(f"a placement shards dim {dim} of a tensor of {ndim} dims")
    return dim % ndim


def from_placements(
    placements: Iterable[Any],
    mesh: Mesh,
    shape: Sequence[int],
    local_shapes: Mapping[int, Sequence[int]] | None = None,
) -> Layout:
    """The layout of a DTensor over the first view of `mesh`, one placement an axis, bound to the global `shape`.

    Pass the local shapes of all ranks where they are known. torch's own description is wrong for some uneven tensors
    that FSDP2 cut inside tensor parallelism (it declares `o/dp:strided[2]/tp` where the data lie as `o/tp/dp`); the
    shapes tell the two apart. Raises LayoutError for what fits neither, or both where they differ (on two mesh axes the
    shapes of all ranks always suffice; on three they may not).
    """
    words = [Placement.read(p, len(shape)) for p in placements]
    declared = _declared(words, mesh).bind(tuple(shape))
    validate(declared, mesh)
    if local_shapes is None:
        return declared
    fsdp = _fsdp_order(declared, mesh)
    fits = [x for x in dict.fromkeys((declared, fsdp)) if _fits(x, mesh, local_shapes)]
    if len(fits) == 2 and any(region(declared, mesh, r) != region(fsdp, mesh, r) for r in range(mesh.size)):
        raise LayoutError(
            f"the local shapes of {len(local_shapes)} of {mesh.size} ranks fit {declared} and FSDP's {fsdp} on mesh "
            f"{mesh}, which do not hold the same elements: give more shapes, or make the layout with Layout.parse"
        )
    if fits:
        return fits[0]
    raise LayoutError(
        f"the local shapes fit neither {declared} nor FSDP's {fsdp} on mesh {mesh}: "
        + ", ".join(f"rank {r} has {list(s)}" for r, s in list(local_shapes.items())[:4])
    )


def _declared(words: Sequence[Placement], mesh: Mesh) -> Layout:
    if len(words) != len(mesh.views[0]):
        raise LayoutError(f"{len(words)} placements for the {len(mesh.views[0])} axes of mesh {mesh}")
    cuts: dict[int, list[Cut]] = {}
    pending: list[tuple[str, str]] = []
    for (axis, _), p in zip(mesh.views[0], words, strict=True):
        if p.kind == "partial":
            pending.append((p.op, axis))
        elif p.kind == "shard":
            cuts.setdefault(p.dim, []).append(Cut(axis))
        elif p.kind == "strided":
            cuts.setdefault(p.dim, []).append(Cut(axis, "strided", (p.split_factor,)))
    ndim = max(cuts, default=-1) + 1
    dims = [Dim(VOID, cuts=tuple(cuts.get(i, ()))) for i in range(ndim)]
    return Layout((*dims, Dim("...")), (), tuple(pending))


def _fits(layout: Layout, mesh: Mesh, local_shapes: Mapping[int, Sequence[int]]) -> bool:
    return all(math.prod(s) == region(layout, mesh, r).size for r, s in local_shapes.items()) and all(
        (region(layout, mesh, r).local_shape or tuple(s)) == tuple(s) for r, s in local_shapes.items()
    )


def _fsdp_order(layout: Layout, mesh: Mesh) -> Layout:
    """Where a strided cut's factor is the number of parts of the later cuts, those cuts were made first."""

    def reorder(dim: Dim) -> Dim:
        cuts = list(dim.cuts)
        for i in reversed(range(len(cuts))):
            later = math.prod(mesh.axis(c.axis)[0] for c in cuts[i + 1 :])
            if cuts[i].map == "strided" and cuts[i].args == (later,):
                cuts.append(Cut(cuts.pop(i).axis))
        return replace(dim, cuts=tuple(cuts))

    return replace(layout, dims=tuple(reorder(d) for d in layout.dims))


def to_placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """DTensor placements over the first view of `mesh` whose regions equal the layout's on every rank.

    The layout must be bound. Raises LayoutError where DTensor has no words for it. Costs a region per rank.
    """
    validate(layout, mesh)
    order = [axis for axis, _ in mesh.views[0]]
    foreign = sorted(layout.axes.union(a for _, a in layout.pending) - set(order))
    if foreign or layout.flat or layout.at:
        what = f"axes {', '.join(foreign)} of another view" if foreign else "a flat cut" if layout.flat else "@"
        raise LayoutError(f"{layout} on mesh {mesh}: DTensor has no placement for {what}")
    where = {axis: found for i, dim in enumerate(layout.dims) for axis, found in _split_factors(i, dim, mesh, order)}
    ops = {axis: op for op, axis in layout.pending}
    out = tuple(
        where.get(a) or (Placement("partial", op=ops[a]) if a in ops else Placement("replicate")) for a in order
    )
    back = _declared(out, mesh).bind(layout.shape)
    for r in range(mesh.size):
        if region(back, mesh, r) != region(layout, mesh, r):
            raise LayoutError(
                f"{layout} on mesh {mesh}: no DTensor placements hold the same elements; the nearest, {back}, "
                f"gives rank {r} {region(back, mesh, r)} instead of {region(layout, mesh, r)}"
            )
    return out


def _split_factors(i: int, dim: Dim, mesh: Mesh, order: Sequence[str]) -> list[tuple[str, Placement]]:
    """The placement of each axis that cuts this dim; factors before it and axes cut earlier make the stride."""
    found = _cut_factor(dim)
    axes = [cut.axis for cut, _ in found]
    out: list[tuple[str, Placement]] = []
    for at, (cut, before) in enumerate(found):
        own = cut.args[0] if cut.map == "strided" and not isinstance(cut.args, str) else 1
        earlier = [a for a in axes[:at] if order.index(a) > order.index(cut.axis)]
        factor = before * own * math.prod(mesh.axis(a)[0] for a in earlier)
        out.append((cut.axis, Placement("shard", i) if factor == 1 else Placement("strided", i, factor)))
    return out


def _cut_factor(dim: Dim) -> list[tuple[Cut, int]]:
    """The cuts of a dim, inner ones first, each with the number of equal blocks before the factor it cuts."""
    out: list[tuple[Cut, int]] = []
    before = len(dim.terms) or 1
    for x in dim.terms[0] if dim.terms else ():
        if x.axes:
            out += [(cut, before * inner) for cut, inner in _cut_factor(x)]
            break
        before *= x.n
    return out + [(cut, 1) for cut in dim.cuts]


def from_partition_spec(text: str, ndim: int) -> Layout:
    """The layout of JAX's `PartitionSpec(None, ('dp', 'tp'))` (or `P(...)`) for a tensor of `ndim` dims, unbound.

    Raises LayoutError for text that is no PartitionSpec and for UNCONSTRAINED dims, which say nothing.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.keywords or ast.unparse(node.func).split(".")[-1] not in _SPECS:
            raise ValueError("not a PartitionSpec")
        entries = [ast.literal_eval(arg) for arg in node.args]
    except (SyntaxError, ValueError):
        raise LayoutError(f"{text!r} is not a PartitionSpec of axis names, None and tuples of names") from None
    if len(entries) > ndim:
        raise LayoutError(f"{text!r} has {len(entries)} entries, but the tensor has {ndim} dims")
    return from_dims_mapping([_names(e, text) for e in entries] + [()] * (ndim - len(entries)))


def _names(entry: object, text: str) -> tuple[str, ...]:
    names = cast("tuple[object, ...]", entry) if isinstance(entry, tuple) else () if entry is None else (entry,)
    out = tuple(n for n in names if isinstance(n, str))
    if len(out) != len(names):
        raise LayoutError(f"{text!r}: {entry!r} is not an axis name, None or a tuple of names")
    return out


def to_partition_spec(layout: Layout) -> str:
    """`PartitionSpec(...)` text. Raises LayoutError for what it cannot say: cut brackets, maps, `//`, sums, `@`."""
    plain = all(not dim.inner_axes and not any(cut.map for cut in dim.cuts) for dim in layout.dims)
    if not plain or layout.flat or layout.pending or layout.at:
        raise LayoutError(f"{layout}: a PartitionSpec says only which axes cut whole dims, in plain chunks")
    entries: list[str] = []
    for dim in layout.dims:
        names = tuple(cut.axis for cut in dim.cuts)
        entries.append(repr(names if len(names) > 1 else names[0] if names else None))
    return f"PartitionSpec({', '.join(entries)})"


def from_dims_mapping(mapping: Sequence[Sequence[str]], partial: Mapping[str, str] | None = None) -> Layout:
    """The layout of Paddle's `dims_mapping` with axis names: for each dim the axes that cut it, major first.

    `partial`: `{axis: op}` of pending reductions. Raises LayoutError for a reduction that is not in `OPS`.
    """
    for axis, op in (partial or {}).items():
        if op not in OPS:
            raise LayoutError(f"{op!r} over {axis} is no pending reduction: those are {', '.join(OPS)}")
    dims = tuple(Dim(VOID, cuts=tuple(Cut(axis) for axis in axes)) for axes in mapping)
    return Layout(dims, (), tuple((op, axis) for axis, op in (partial or {}).items()))
