"""Rows that are sorted by a group, worked on and put back, as tokens by their experts: what can be done in parts.

    sort            groups of rows, and where each row came from
    rows            of tokens by that number; all that is done with each row by itself; products of groups
    counts, ends    how many rows each group has, and where it ends
    put back        rows by the inverse of that number

What comes of it does not depend on the order in between, so ranks that have parts of the tokens can each sort their own
(`own`), and between the first and the last product a rank may have the rows of its own groups, from all ranks (`sent`):
products of experts that lie on several ranks then need no token but those that go to them.

A region is found by its operators, each by what it needs and gives (`_ROLES`); a tensor that something else takes has
no such state there, and as nothing brings it to another one, the whole region is then worked on in the other ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tangram.sharding.derive.collectives_between import Comm, Label, groups, place_of
from tangram.sharding.derive.problem.folding import Folded, FoldedStep
from tangram.sharding.derive.problem.states import (
    OWN,
    OWN_ENDS,
    OWN_IDS,
    SENT,
    SENT_ENDS,
    SENT_IDS,
    SEVERAL,
    SORTED,
    Routed,
    State,
    cut,
)
from tangram.sharding.local_ops.local_variants import RUNNERS
from tangram.sharding.ops.bind import Dims

IDS, ORDER, TOKENS, ROWS, COUNTS, ENDS, BLANK, NUMBERS, BACK = (
    "ids", "order", "tokens", "rows", "counts", "ends", "blank", "numbers", "back"
)  # fmt: skip
_SIZED = ("size", "product")
"""Notes of arguments that say how many rows a part has."""


@dataclass(frozen=True)
class WithinOperators:
    """What ranks may do with each other within an operator."""

    routed: bool = True
    """Sort rows of their own, and send them."""
    linked: bool = True
    """Read of each other."""
    customs: bool = True
    """Leave whole what a model's own `torch.autograd.Function` takes."""


BOTH = WithinOperators()


@dataclass(frozen=True)
class SortedRegion:
    """One sort and what follows from it."""

    number: int
    """Of the node that sorts."""
    rows: int
    groups: int
    """How many there are; 0 where nothing counts them."""
    source: int
    """The class that is sorted: groups of rows, as the tokens lie."""

    def state(self, kind: str, outer: int) -> Routed:
        """A state of its tensors."""
        return Routed(kind, outer, self.number, self.groups)


@dataclass(frozen=True)
class Role:
    """What a tensor is in a region."""

    region: int
    what: str
    per_token: int = 1
    """Of numbers of tokens: how many rows each token has."""


@dataclass
class Regions:
    """All of a graph."""

    folded: Folded
    regions: dict[int, SortedRegion] = field(default_factory=dict[int, SortedRegion])
    roles: dict[int, Role] = field(default_factory=dict[int, Role])
    """By class."""
    parts: dict[int, Callable[[SortedRegion, int, int], list[Comm]]] = field(
        default_factory=dict[int, Callable[[SortedRegion, int, int], list[Comm]]]
    )
    """By the number of a node: its moves in a region, over tokens cut in so many blocks, by k ranks."""
    of: dict[int, int] = field(default_factory=dict[int, int])
    """By the number of a node: its region."""
    free: dict[int, str] = field(default_factory=dict[int, str])
    """By the number of a node: the factor of its groups, which can be cut over an axis beside."""

    def communication(self, step: FoldedStep, outers: Mapping[int, Sequence[int]], k: int) -> list[Comm]:
        """Those of an operator; `outers`: by region, the blocks in which tokens can be cut."""
        region = self.of.get(step.number)
        if region is None:
            return []
        own = self.regions[region]
        return [move for outer in outers.get(region, ()) for move in self.parts[step.number](own, outer, k)]

    def states(self, v: int, outers: Mapping[int, Sequence[int]]) -> Iterator[State]:
        """Those that a tensor that has a role may be used in."""
        role = self.roles[v]
        for outer in outers.get(role.region, ()):
            yield from (self.regions[role.region].state(kind, outer) for kind in _KINDS.get(role.what, (OWN,)))


_KINDS: Mapping[str, tuple[str, ...]] = {
    IDS: (OWN_IDS, SENT_IDS),
    ROWS: (OWN, SENT),
    COUNTS: (OWN_ENDS,),
    ENDS: (OWN_ENDS, SENT_ENDS),
}


def regions_of(folded: Folded) -> Regions:
    """Find every region of a graph."""
    found = Regions(folded)
    makers = {v: step for step in folded.steps for v in step.outputs}
    for step in folded.steps:
        if step.call.name.partition(".")[0] == "sort" and _sorts(step):
            v = step.inputs[0]
            assert v is not None
            found.regions[step.number] = SortedRegion(step.number, folded.value(v).shape[0], 0, v)
            found.roles[step.outputs[0]] = Role(step.number, IDS)
            found.roles[step.outputs[1]] = Role(step.number, ORDER)
            _keep(found, step, step.number, _sorted)
            continue
        own = [found.roles.get(v) if v is not None else None for v in step.inputs]
        some = {role.region for role in own if role is not None}
        if len(some) == 1:
            _operator(found, step, own, some.pop(), makers)
    return found


def _sorts(step: FoldedStep) -> bool:
    x = step.call.tensors[0]
    return x is not None and x.ndim == 1 and not x.is_floating_point() and not step.call.arguments["descending"]


def _sorted(region: SortedRegion, outer: int, k: int) -> list[Comm]:
    return [Comm(None, (cut(0, outer),), (region.state(SORTED, outer), region.state(OWN, outer)), 1 / k)]


def _keep(found: Regions, step: FoldedStep, region: int, made: Callable[[SortedRegion, int, int], list[Comm]]) -> None:
    found.parts[step.number], found.of[step.number] = made, region


# ---------------------------------------------------------------- operators


def _operator(
    found: Regions, step: FoldedStep, roles: Sequence[Role | None], region: int, makers: Mapping[int, FoldedStep]
) -> None:
    """See what an operator that takes tensors of a region does there."""
    of = found.regions[region]
    name = step.call.name.partition(".")[0]
    what = [role.what if role is not None else "" for role in roles]
    given = step.call.arguments
    first = step.call.tensors[0]
    assert first is not None
    if name == "floor_divide" and what[0] == ORDER and isinstance(given["other"], int):
        if of.rows % given["other"] == 0:
            _give(found, step, Role(region, TOKENS, given["other"]))
            _keep(found, step, region, _plainly([OWN], OWN, len(what)))
    elif name == "index" and len(what) == 2 and _alone(given["indices"]):
        _indexed(found, step, roles, of)
    elif name == "histc" and what == [ROWS] and given["min"] == 0 and given["max"] == given["bins"] - 1:
        maker = makers.get(step.inputs[0] or -1)
        if maker is not None and _role(found, maker.inputs[0]) == IDS and of.groups in (0, given["bins"]):
            found.regions[region] = SortedRegion(of.number, of.rows, given["bins"], of.source)
            _give(found, step, Role(region, COUNTS))
            _keep(found, step, region, _plainly([OWN], OWN_ENDS))
    elif name == "cumsum" and what == [COUNTS]:
        _give(found, step, Role(region, ENDS))
        _keep(found, step, region, _plainly([OWN_ENDS], OWN_ENDS))
    elif groups(step.call, step.bound) is not None and what[0] == ROWS and what[2] == ENDS and what[1:2] == [""]:
        label = groups(step.call, step.bound)
        found.free[step.number] = label.factor if label is not None else ""
        _give(found, step, Role(region, ROWS))
        _keep(found, step, region, _product(step))
    elif name == "empty_like" and what == [ORDER]:
        _give(found, step, Role(region, BLANK))
        _keep(found, step, region, _plainly([OWN], OWN))
    elif name in ("index_put", "index_put_") and what[:2] == [BLANK, ORDER] and not given["accumulate"]:
        _inverted(found, step, of, makers)
    elif all(one in ("", IDS, ROWS) for one in what):
        _each_row(found, step, what, of)


def _role(found: Regions, v: int | None) -> str:
    role = found.roles.get(v) if v is not None else None
    return role.what if role is not None else ""


def _give(found: Regions, step: FoldedStep, role: Role) -> None:
    found.roles.update(dict.fromkeys(step.outputs, role))


def _alone(indices: Sequence[object]) -> bool:
    return len(indices) == 1 and indices[0] is not None


def _plainly(takes: Sequence[str], gives: str, count: int = 0) -> Callable[[SortedRegion, int, int], list[Comm]]:
    def made(region: SortedRegion, outer: int, k: int) -> list[Comm]:
        ins = tuple(region.state(kind, outer) for kind in takes) + (None,) * (count - len(takes))
        return [Comm(None, ins, (region.state(gives, outer),), 1 / k)]

    return made


def _indexed(found: Regions, step: FoldedStep, roles: Sequence[Role | None], of: SortedRegion) -> None:
    """Rows of tokens, weights of rows, rows put back, or what each group has for all its rows."""
    x, role = step.call.tensors[0], roles[1]
    assert x is not None
    what = role.what if role is not None else ""
    if roles[0] is None and role is not None and what in (ORDER, TOKENS) and x.shape[0] * role.per_token == of.rows:
        _give(found, step, Role(of.number, ROWS))

        def sorted_rows(region: SortedRegion, outer: int, k: int) -> list[Comm]:
            even = x.shape[0] % (outer * k) == 0
            return [Comm(None, (cut(0, outer), region.state(OWN, outer)), (region.state(OWN, outer),), 1 / k)] * even

        _keep(found, step, of.number, sorted_rows)
    elif roles[0] is not None and roles[0].what == ROWS and what == BACK:

        def put_back(region: SortedRegion, outer: int, k: int) -> list[Comm]:
            own = region.state(OWN, outer)
            return [Comm(None, (own, own), (cut(0, outer),), 1 / k)]

        _keep(found, step, of.number, put_back)
    elif roles[0] is None and what == IDS and of.groups == x.shape[0]:
        _give(found, step, Role(of.number, ROWS))

        def of_group(region: SortedRegion, outer: int, k: int) -> list[Comm]:
            ways = [Comm(None, (SEVERAL, region.state(OWN_IDS, outer)), (region.state(OWN, outer),), 1 / k)]
            sent = Comm(None, (cut(0), region.state(SENT_IDS, outer)), (region.state(SENT, outer),), 1 / k)
            return [*ways, *[sent] * (region.groups % k == 0)]

        dims = step.bound.inputs[0]
        found.free[step.number] = dims[0][0] if dims and dims[0] else ""
        _keep(found, step, of.number, of_group)


def _inverted(found: Regions, step: FoldedStep, of: SortedRegion, makers: Mapping[int, FoldedStep]) -> None:
    """Where rows stand, from where they came: what is put are the numbers from 0 on."""
    v = step.inputs[2]
    maker = makers.get(v) if v is not None else None
    if v is None or maker is None or v in found.roles or not _alone(step.call.arguments["indices"]):
        return
    given = maker.call.arguments
    counts = maker.call.name.startswith("arange") and given.get("start", 0) == 0 and given.get("step", 1) == 1
    if counts and given["end"] == of.rows:
        found.roles[v] = Role(of.number, NUMBERS)
        _keep(found, maker, of.number, _plainly([], OWN))
        _give(found, step, Role(of.number, BACK))
        _keep(found, step, of.number, _plainly([OWN, OWN, OWN], OWN))


def _product(step: FoldedStep) -> Callable[[SortedRegion, int, int], list[Comm]]:
    """Each rank with all matrices, or with those of its groups and the rows of these."""
    bound, label = step.bound, groups(step.call, step.bound)
    assert label is not None
    assert bound.inputs[1] is not None
    matrices = place_of(bound, bound.inputs[1], label)
    assert matrices is not None

    def made(region: SortedRegion, outer: int, k: int) -> list[Comm]:
        found: list[Comm] = []
        for rows, b, ends in ((OWN, SEVERAL, OWN_ENDS), (SENT, matrices, SENT_ENDS)):
            if rows == OWN or region.groups % k == 0:
                ins = (region.state(rows, outer), b, region.state(ends, outer))
                more = (None,) * (len(bound.inputs) - 3)
                found.append(Comm(None, (*ins, *more), (region.state(rows, outer),), 1 / k))
        return found

    return made


def _each_row(found: Regions, step: FoldedStep, what: Sequence[str], of: SortedRegion) -> None:
    """What does the same with every row, whichever it is, and gives rows."""
    bound = step.bound
    sides = [*zip(bound.inputs, what, strict=True), *((dims, ROWS) for dims in bound.outputs)]
    rows = {dims[0] for dims, one in sides if one and dims}
    if len(rows) != 1 or len(own := rows.pop()) != 1 or any(one and not dims for dims, one in sides):
        return
    factor = own[0]
    others = [f for dims, one in sides for dim in (dims or ())[1 if one else 0 :] for f in dim]
    told = [name for name, args in bound.rule.notes if name not in _SIZED and factor in args]
    numbered = any(name in RUNNERS for name, _ in bound.rule.notes)
    if factor in others or told or numbered or factor not in set(bound.cuttable) - bound.linked:
        return
    if bound.sizes[factor] != of.rows:
        return
    sized = bound.rule.note("size") is not None or factor in (bound.rule.note("product") or ())
    _give(found, step, Role(of.number, ROWS))

    def made(region: SortedRegion, outer: int, k: int) -> list[Comm]:
        ways: list[Comm] = []
        for kind, label in ((OWN, Label(factor)), (SENT, None)):
            if kind == SENT and (sized or IDS in what):
                continue
            own = region.state(kind, outer)
            ids = region.state(OWN_IDS, outer)
            ins = tuple(
                None if dims is None else ids if one == IDS else own if one else SEVERAL
                for dims, one in zip(bound.inputs, what, strict=True)
            )
            ways.append(Comm(label, ins, (own,) * len(bound.outputs), 1 / k))
        return ways

    _keep(found, step, of.number, made)


# ---------------------------------------------------------------- several axes


def together(regions: Regions, step: FoldedStep, move: Comm, before: Sequence[Comm]) -> bool:
    """Whether a move over an axis can be made on top of those over other axes: in a region, rows are counted by what a
    rank has of them, and only one axis sends them."""
    mine = kinds_of(move)
    sides: list[Dims] = [dims for dims in (*step.bound.inputs, *step.bound.outputs) if dims]
    first = {f for dims in sides for f in dims[0]}
    for other in before:
        theirs = kinds_of(other)
        for one, two, label in ((mine, theirs, other.label), (theirs, mine, move.label)):
            free = SENT not in one and label is not None and regions.free.get(step.number) == label.factor
            if one and not two and label is not None and label.factor in first and not free:
                return False
        if SENT in mine and SENT in theirs:
            return False
    return True


def kinds_of(move: Comm) -> frozenset[str]:
    """Whether a move sends rows, or works on a rank's own; none: it is made outside of a region."""
    return frozenset(
        SENT if state.kind in (SENT, SENT_IDS, SENT_ENDS) else OWN
        for state in (*move.inputs, *move.outputs)
        if isinstance(state, Routed)
    )


def even(region: SortedRegion, outer: int, ks: Sequence[int]) -> bool:
    """Whether rows that are cut over axes, each in blocks, come in even parts."""
    return region.rows % (outer * math.prod(ks)) == 0
