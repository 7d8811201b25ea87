"""Sizes: the text of a layout or a mapping has none; they are solved from the tensors' shapes.

One scope per statement: a name has one size wherever it stands. Each dim of known size is one equation; a dim with one
unknown factor, in which it is linear, is solved, until nothing changes. What then has no size is an error: never a
guess.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import SupportsIndex

from tangram.layout.errors import LayoutError
from tangram.layout.intervals import MAPS
from tangram.layout.syntax import REST, VOID, Cut, Dim

Shape = tuple[int, ...]


def bind_dims(
    dims: Sequence[Dim], flat: Sequence[Cut], shape: Shape | None, known: Mapping[str, int | Shape]
) -> tuple[tuple[Dim, ...], tuple[Cut, ...]]:
    """`Layout.bind`: sizes for every factor, lists for every `[name]` of a map."""
    sizes = {k: integer(k, v) for k, v in known.items() if isinstance(v, str) or not isinstance(v, Sized)}
    lists = {k: tuple([integer(k, x) for x in v]) for k, v in known.items() if k not in sizes and isinstance(v, Sized)}
    empty = [k for k, v in lists.items() if not v]
    if empty:
        raise LayoutError(f"the list {empty[0]} is empty")
    (solved,), _ = solve([(expand_rest(dims, shape), shape)], sizes)
    return tuple(_fill_lists(dim, lists) for dim in solved), tuple(_fill_cut(cut, lists) for cut in flat)


def integer(name: str, value: SupportsIndex | str) -> int:
    """A size that is given from outside. Raises LayoutError when it is no whole number."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise LayoutError(f"{name}={value!r}: a size is a whole number") from None


def expand_rest(dims: Sequence[Dim], shape: Shape | None) -> tuple[Dim, ...]:
    """`...` as as many `_` as the shape asks for. Raises LayoutError when the number of dims does not fit."""
    if any(d.name == REST for d in dims):
        if shape is None:
            raise LayoutError("'...' needs the tensor's shape")
        at = next(i for i, d in enumerate(dims) if d.name == REST)
        missing = len(shape) - len(dims) + 1
        dims = (*dims[:at], *[Dim(VOID)] * max(missing, 0), *dims[at + 1 :])
    if shape is not None and len(dims) != len(shape):
        raise LayoutError(f"{show(dims)!r} has {len(dims)} dims, but the tensor has shape {list(shape)}")
    return tuple(dims)


def solve(
    tensors: Sequence[tuple[Sequence[Dim], Shape | None]], known: Mapping[str, int]
) -> tuple[list[tuple[Dim, ...]], dict[str, int]]:
    """Give every factor of these tensors its size, in one scope.

    Returns the sized dims and the sizes by name. An unnamed factor `_` is an unknown of its own. Raises LayoutError
    when the shapes contradict the text or leave a size open.
    """
    counter = itertools.count()
    named = [(tuple(name_voids(d, counter) for d in dims), shape) for dims, shape in tensors]
    env = _inline(named, known)
    equations = [(d, n) for dims, shape in named for d, n in zip(dims, shape or (), strict=False)]
    open_ = list(equations)
    while True:
        left = [(d, n) for d, n in open_ if not _try_solve(d, n, env)]
        if len(left) == len(open_):
            break
        open_ = left
    bound = [tuple(_sized(d, env) for d in dims) for dims, _ in named]
    _check(named, bound, env)
    return [tuple(_anonymous(d) for d in dims) for dims in bound], {k: v for k, v in env.items() if k[0] != VOID}


def name_voids(dim: Dim, counter: Iterator[int]) -> Dim:
    """Give every `_` a name of its own (`_0`, `_1`, ...), so that it is a factor like any other."""
    if dim.terms:
        return replace(dim, terms=tuple(tuple(name_voids(x, counter) for x in term) for term in dim.terms))
    return replace(dim, name=f"{VOID}{next(counter)}") if dim.name == VOID else dim


def _anonymous(dim: Dim) -> Dim:
    if dim.terms:
        return replace(dim, terms=tuple(tuple(_anonymous(x) for x in term) for term in dim.terms))
    return replace(dim, name=VOID) if dim.name[:1] == VOID else dim


def _inline(tensors: Iterable[tuple[Sequence[Dim], Shape | None]], known: Mapping[str, int]) -> dict[str, int]:
    """The sizes given from outside and in the text (`heads=32`), which must agree."""
    env = dict(known)
    for name, n in env.items():
        if n < 0:
            raise LayoutError(f"{name}={n}: a size is not negative")
    for dims, shape in tensors:
        if min(shape or (), default=0) < 0:
            raise LayoutError(f"{show(dims)!r}: no tensor has shape {list(shape or ())}")
        for leaf in (leaf for dim in dims for leaf in dim.leaves):
            if leaf.name and leaf.size is not None and env.setdefault(leaf.name, leaf.size) != leaf.size:
                raise LayoutError(f"{leaf.name} is {env[leaf.name]} in one place and {leaf.size} in another")
    return env


def _value(dim: Dim, env: Mapping[str, int]) -> int:
    if not dim.terms:
        return env[dim.name] if dim.name else dim.n
    total = 0
    for term in dim.terms:
        n = 1
        for x in term:
            n *= _value(x, env)
        total += n
    return total


def _try_solve(dim: Dim, n: int, env: dict[str, int]) -> bool:
    """Whether the equation `dim = n` has no unknown left; solves it when it has one. Raises when it has no solution."""
    unknown = {leaf.name for leaf in dim.leaves if leaf.name and leaf.name not in env}
    if not unknown:
        return True
    if len(unknown) > 1:
        return False
    (name,) = unknown
    n0, n1 = _value(dim, {**env, name: 0}), _value(dim, {**env, name: 1})
    if n1 == n0:
        return False  # multiplied by a zero: this equation says nothing about it
    x, rest = divmod(n - n0, n1 - n0)
    if rest or x < 0 or _value(dim, {**env, name: x}) != n:
        what = "no size" if name[0] == VOID else f"no size of {name}"
        raise LayoutError(f"{what} makes {_anonymous(_sized(dim, env))} equal {n}")
    env[name] = x
    return True


def _sized(dim: Dim, env: Mapping[str, int]) -> Dim:
    if dim.terms:
        return replace(dim, terms=tuple(tuple(_sized(x, env) for x in term) for term in dim.terms))
    return replace(dim, size=env.get(dim.name, dim.size)) if dim.name else dim


def _check(
    named: Sequence[tuple[tuple[Dim, ...], Shape | None]], bound: Sequence[tuple[Dim, ...]], env: Mapping[str, int]
) -> None:
    unknown = {
        leaf.name for dims, _ in named for dim in dims for leaf in dim.leaves if leaf.name and leaf.name not in env
    }
    if unknown:
        names = sorted(n for n in unknown if n[0] != VOID)
        what = ", ".join(names) if names else "an unnamed factor _"
        how = f": give {names[0]}=..." if names else ": give it a name or a size"
        where = next(dim for dims, _ in named for dim in dims if unknown & {leaf.name for leaf in dim.leaves})
        raise LayoutError(f"the size of {what} does not follow from the shapes (in {_anonymous(where)}){how}")
    for dims, (_, shape) in zip(bound, named, strict=True):
        for dim, n in zip(dims, shape or (), strict=False):
            if dim.n != n:
                raise LayoutError(f"{_anonymous(dim)} has size {dim.n}, but the tensor has {n}")


def _fill_lists(dim: Dim, lists: Mapping[str, Shape]) -> Dim:
    if not any(isinstance(cut.args, str) for node in dim.nodes for cut in node.cuts):
        return dim
    terms = tuple(tuple(_fill_lists(x, lists) for x in term) for term in dim.terms)
    return replace(dim, terms=terms, cuts=tuple(_fill_cut(cut, lists) for cut in dim.cuts))


def _fill_cut(cut: Cut, lists: Mapping[str, Shape]) -> Cut:
    if not isinstance(cut.args, str):
        return cut
    if cut.args not in lists:
        raise LayoutError(f"/{cut} names the list {cut.args!r}: give {cut.args}=[...] when the layout is bound")
    return replace(cut, args=lists[cut.args])


def check_cut(cut: Cut, n: int, k: int) -> tuple[int, ...]:
    """The bound arguments of a cut of `n` elements into `k` parts. Raises LayoutError when they do not fit."""
    if isinstance(cut.args, str):
        raise LayoutError(f"/{cut} names the list {cut.args!r}: bind the layout with {cut.args}=[...]")
    MAPS[cut.map].check(n, k, cut.args)
    return cut.args


def show(dims: Iterable[Dim]) -> str:
    """Dims as text."""
    return " ".join(map(str, dims))
