"""Who of a mesh holds the same as a rank, and what of it that rank writes where others hold only some of the same."""

from functools import lru_cache

from tangram.layout import Layout, Mesh, Region, owners, ranks_of, region


@lru_cache(1 << 12)
def replicas(
    mesh: Mesh, cut: frozenset[str], rank: int, held: tuple[tuple[str, tuple[int, ...]], ...] = ()
) -> tuple[int, ...]:
    """The ranks of a mesh that differ from one in no axis that cuts, that one included.

    `held`: the coordinates of the ranks that hold the tensor at all, as a layout's `at` has them; empty: all do.
    """
    own = mesh.coords(rank)
    alike = mesh.ranks(tuple((axis, own[axis]) for axis in sorted(cut)))
    return tuple(r for r in alike if all(mesh.coords(r)[axis] in where for axis, where in held))


@lru_cache(1 << 12)
def uneven_share(layout: Layout, mesh: Mesh, rank: int) -> Region | None:
    """What a rank writes of what it holds, where other ranks hold some of that and not the rest: what no lower one has.

    So with `(g/kv (r/rep + 1 + 1) d) h`, where the query heads of a group are cut and its key and value are not. None
    where whoever holds any of it holds all of it: then the replicas take turns.
    """
    here = region(layout, mesh, rank)
    if len(layout.axes) < 2 or not here:
        return None
    holders = [(tuple(sorted(ranks_of(layout, mesh, owner))), owner.boxes) for owner in owners(layout, mesh, here)]
    if all(ranks == holders[0][0] for ranks, _ in holders):
        return None
    return here - Region.of([box for ranks, boxes in holders if ranks[0] < rank for box in boxes])
