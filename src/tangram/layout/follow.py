"""Companions: the layout of a tensor made of some of another's factors: scales, factored states, LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tangram.layout.errors import LayoutError
from tangram.layout.notation import Layout
from tangram.layout.syntax import VOID, Cut, Dim


def follow(base: Layout, dims: str | Sequence[Dim]) -> Layout:
    """The layout of a companion with these dims: every factor keeps the cuts that it has in `base`.

    A cut bracket is kept when the companion has a bracket of the same factors; when it has only some of them, or has
    them otherwise, the cut cannot be said of the companion, and LayoutError is raised. `@` is kept; pending reductions
    are not.

    >>> print(follow(Layout.parse("(heads/tp d)/dp i @pp=1"), "(heads d) rank"))
    (heads/tp d)/dp rank @pp=1
    """
    target = Layout.parse(dims).dims if isinstance(dims, str) else tuple(dims)
    if base.flat:
        raise LayoutError(f"{base}: a flat cut goes through all factors; a companion has no layout of its own")
    names = {leaf.name for dim in target for leaf in dim.leaves if leaf.name}
    there = {_key(node) for dim in target for node in dim.nodes if node.terms}
    text = repr(" ".join(map(str, target)))
    cuts: dict[Key, tuple[Cut, ...]] = {}
    for node in (node for dim in base.dims for node in dim.nodes):
        inner = {leaf.name for leaf in node.leaves} - {"", VOID}
        if not inner & names:
            continue
        if node.terms and node.cuts:
            if not inner <= names:
                raise LayoutError(f"{node}: the cut goes through factors that {text} lacks")
            if _key(node) not in there:
                raise LayoutError(f"{node}: the cut is of the whole bracket, and {text} has no such bracket")
        if _key(node) in there and any(leaf.cuts for leaf in node.leaves if leaf.name in ("", VOID)):
            raise LayoutError(f"{node}: a factor without a name is cut; give it one, so that {text} can follow")
        if cuts.setdefault(_key(node), node.cuts) != node.cuts:
            raise LayoutError(f"{base}: {node.uncut()} has two ways of being cut, so that a companion has none")
    return Layout(tuple(_recut(dim, cuts) for dim in target), at=base.at)


Key = tuple[object, ...]


def _key(dim: Dim) -> Key:
    """What makes two dims the same: `("factor", name)`, or a bracket's factors; brackets in a product do not count."""
    if not dim.terms:
        return ("factor", dim.name or dim.size)
    terms = tuple(tuple(_factors(term)) for term in dim.terms)
    return ("bracket", *terms)


def _factors(term: Sequence[Dim]) -> Iterator[object]:
    for x in term:
        if len(x.terms) == 1:
            yield from _factors(x.terms[0])
        else:
            yield _key(x)


def _recut(dim: Dim, cuts: dict[Key, tuple[Cut, ...]]) -> Dim:
    terms = tuple(tuple(_recut(x, cuts) for x in term) for term in dim.terms)
    known = () if dim.name == VOID else cuts.get(_key(dim), ())
    return replace(dim, terms=terms, cuts=known)
