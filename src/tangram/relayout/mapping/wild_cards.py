"""Wild cards in names: a statement with `{name*}` becomes one statement for each name that nothing before it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tangram.layout.syntax import Side, Statement, TensorPattern, Wild
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import NameTable, known_size, template_of


def fill_wilds(
    statements: Iterable[Statement], source: NameTable, target: NameTable | None, known: Mapping[str, int]
) -> list[Statement]:
    """Statements without `{name*}`: one for each value that the names give, where no plain statement takes the name.

    `known` are sizes given from outside: `{l}` of a known size takes just its range of numbers.
    """
    plain: list[Statement] = []
    wild: list[Statement] = []
    for statement in statements:
        (wild if any(t.wilds for t in statement.tensors) else plain).append(statement)
    taken = (_claimed(plain, 0, source, known), _claimed(plain, 1, target, known))
    out = list(plain)
    for statement in wild:
        side, table = (0, source) if statement.source else (1, target)
        if table is None:
            raise RelayoutError(f"{statement}: which tensors these are follows only from the target's names; pass them")
        wanted = frozenset(w for t in statement.tensors for w in t.wilds)
        values: dict[tuple[tuple[str, str], ...], None] = {}
        for pattern in (t for group in (statement.source, statement.target)[side] for t in group):
            if pattern.wilds != wanted:
                raise RelayoutError(f"{statement}: every tensor names the same wild cards")
            for name, found in table.wild_values(pattern).items():
                if name not in taken[side]:
                    values.setdefault(tuple(sorted(found.items())))
        out += [_filled(statement, dict(v)) for v in values]
    return out


def _claimed(statements: Iterable[Statement], side: int, table: NameTable | None, known: Mapping[str, int]) -> set[str]:
    """The names of one side that plain statements take."""
    if table is None:
        return set()
    patterns = [t for s in statements for group in (s.source, s.target)[side] for t in group]
    out = {t.name for t in patterns}
    for t in patterns:
        sizes = [known_size(i.dim, known) for i in t.index]
        limits = [(i.offset, None if n is None else i.offset + n) for i, n in zip(t.index, sizes, strict=True)]
        for numbers, name in table.members(template_of(t)[0]):
            if all(x >= lo and (hi is None or x < hi) for x, (lo, hi) in zip(numbers, limits, strict=True)):
                out.add(name)
    return out


def _filled(statement: Statement, values: Mapping[str, str]) -> Statement:
    def tensor(t: TensorPattern) -> TensorPattern:
        return TensorPattern(tuple([values[p.name] if isinstance(p, Wild) else p for p in t.parts]), t.alias, t.dims)

    def side(s: Side) -> Side:
        return tuple([tuple([tensor(t) for t in group]) for group in s])

    source = side(statement.source)
    # what keeps its name is the same value on both sides: there may be a million
    target = source if statement.target == statement.source else side(statement.target)
    return Statement(source, target, statement.options)
