"""Companions: the layout of a tensor made of some of another's factors: scales, factored states, LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tangram.layout.errors import LayoutError
from tangram.layout.syntax import VOID, Cut, Dim, Layout


def follow(base: Layout, dims: str | Sequence[Dim]) -> Layout:
    """The layout of a companion with these dims: every factor keeps the cuts that it has in `base`.

    A cut bracket is kept when the companion has a bracket of the same factors; when it has only some of them the cut
    goes through factors that the companion lacks, and LayoutError is raised. `@` is kept; pending reductions are not.

    >>> print(follow(Layout.parse("(heads/tp d)/dp i @pp=1"), "(heads d) rank"))
    (heads/tp d)/dp rank @pp=1
    """
    target = Layout.parse(dims).dims if isinstance(dims, str) else tuple(dims)
    if base.flat:
        raise LayoutError(f"{base}: a flat cut goes through all factors; a companion has no layout of its own")
    names = {leaf.name for dim in target for leaf in dim.leaves if leaf.name}
    factors: dict[str, tuple[Cut, ...]] = {}
    brackets: dict[tuple[object, ...], tuple[Cut, ...]] = {}
    for node in (node for dim in base.dims for node in dim.nodes):
        if not node.terms:
            if node.name not in ("", VOID):
                factors[node.name] = node.cuts
            continue
        inner = {leaf.name for leaf in node.leaves if leaf.name}
        if node.cuts and inner & names and not inner <= names:
            raise LayoutError(f"{node}: the cut goes through factors that {' '.join(map(str, target))!r} lacks")
        brackets[_key(node)] = node.cuts
    kept = tuple(_recut(dim, factors, brackets) for dim in target)
    return Layout(kept, at=base.at)


def _key(dim: Dim) -> tuple[object, ...]:
    """What makes two brackets the same: their leaves, by name where they have one."""
    return tuple(leaf.name or leaf.size for leaf in dim.leaves)


def _recut(dim: Dim, factors: dict[str, tuple[Cut, ...]], brackets: dict[tuple[object, ...], tuple[Cut, ...]]) -> Dim:
    if not dim.terms:
        return replace(dim, cuts=factors.get(dim.name, ()) if dim.name else ())
    terms = tuple(tuple(_recut(x, factors, brackets) for x in term) for term in dim.terms)
    return replace(dim, terms=terms, cuts=brackets.get(_key(dim), ()))
