"""`discover`: run an operator on cut inputs, propose its line, prove it.

Everything that runs the operator does so in forks of this process, for some operators end theirs when tensors do not
fit: first one fork for all calls; where that ends, one for each call, and for each way of cutting it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout.rule import Rule
from tangram.sharding.discover.cuts import (
    OF_VALUES,
    RANDOM,
    DimsTogether,
    NotTriedError,
    candidates,
    cuts_in,
    cuts_with,
)
from tangram.sharding.discover.draft import Draft, DraftCase, draft
from tangram.sharding.discover.prove_draft import ProvedDraft, settle
from tangram.sharding.discover.sample_calls import load, own_calls
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall, schema_of
from tangram.sharding.proof.samples import samples

LIMIT = 60.0
"""Seconds for an operator's cuts, and for its proof."""
CALLS = 24
"""Of an operator that are tried."""


@dataclass(frozen=True)
class Proposal:
    """What discovery has to say of one operator."""

    operator: str
    lines: tuple[str, ...] = ()
    """Its rules; none where nothing can be cut."""
    cases: int = 0
    """In which the rules were right."""
    why: str = ""
    """Why there is no rule."""
    remarks: tuple[str, ...] = ()
    """What was taken back, and which calls were left out."""


def discover(name: str, given: Callable[[], Iterable[Any]] | None = None) -> list[Proposal]:
    """The rules of an operator by its name, `sum.dim_IntList`, `sum` for all its overloads, `space::name`.

    `given`: gives the arguments of calls to try, each `args` or `(args, kwargs)`; else torch's samples are taken, and
    for operators that are not torch's own what can be drawn from the schema. Raises UserError where there is no call.
    """
    torch.set_num_threads(1)  # what is forked later has no other threads
    plain = name.removeprefix("aten::")
    if own := own_calls([name], given):
        return [propose(calls) for calls in own.values()]
    if not hasattr(torch.ops.aten, plain.partition(".")[0]):
        raise UserError(f"torch has no operator aten.{plain}; those of others are called namespace::name")
    found = {own: calls for own, calls in samples.recorded([plain]).items() if samples.is_named([plain], own)}
    if not found:
        raise UserError(f"torch's database has no sample of {plain}: give some with --samples FILE.py:function")
    return [propose(calls) for _, calls in sorted(found.items())]


def propose(calls: Sequence[OpCall]) -> Proposal:
    """The line of the operator of some calls."""
    name = calls[0].name
    load(calls[0].operator)
    calls = [*with_other_dims(calls)][:CALLS]
    cases, reasons = _cases(calls)
    left = tuple(f"{n} of {len(calls)} calls left out: {why}" for why, n in reasons.items())
    for why in (RANDOM, OF_VALUES):
        if why in reasons:
            return Proposal(name, why=why)
    if not cases:
        return Proposal(name, why="; ".join(reasons) or "no call of it can be run")
    drafts = drafted(name, cases)
    if not any(one.score for one in drafts):
        cases, drafts = _of_one_kind(name, cases)
        left = (*left, "only of calls with tensors of these numbers of dims: " + _ndims(cases[0]))
    if not any(one.score for one in drafts):
        return Proposal(name, why="no way of cutting its inputs was right in every call", remarks=left[:-1])
    rules = [Rule.parse(one.text) for one in drafts]
    settled = _settled(rules, [case.call for case in cases])
    if isinstance(settled, str):
        return Proposal(name, why=f"{'; '.join(map(str, rules))}: refuted: {settled}", remarks=left)
    return Proposal(name, tuple(map(str, settled.rules)), settled.cases, "", (*left, *settled.removed))


def with_other_dims(calls: Sequence[OpCall]) -> list[OpCall]:
    """The calls with most dims first; of two of them, all dims that an argument can name."""
    useful = [c for c in calls if not any(c.arguments.get(a) == 0 for a in ("alpha", "beta"))]
    ranked = sorted(useful or calls, key=lambda c: -sum(t.ndim for t in c.tensors if t is not None and t.numel() > 1))
    more: list[OpCall] = []
    for call in ranked[:2]:
        ndim = next((t.ndim for t in call.tensors if t is not None), 0)
        for name in DIM_ARGUMENTS & call.arguments.keys():
            own = call.arguments[name]
            if isinstance(own, int) and not isinstance(own, bool) and len(DIM_ARGUMENTS & call.arguments.keys()) == 1:
                more += [OpCall(call.operator, {**call.arguments, name: d}) for d in range(ndim) if d != own % ndim]
    return [*ranked[:2], *more, *ranked[2:]]


def drafted(name: str, cases: Sequence[DraftCase]) -> list[Draft]:
    """One line, or one for each value of an argument where more can be cut so."""
    single = draft(name, cases)
    best = [single] if single is not None else []
    score = single.score if single is not None else -1
    for argument in schema_of(cases[0].call.operator).arguments:
        values = {repr(c.call.arguments[argument.name]): c.call.arguments[argument.name] for c in cases}
        few = len(values) > 1 and all(text in ("True", "False", "0", "1", "2") for text in values)
        if not few or argument.name in DIM_ARGUMENTS:
            continue
        some = [
            draft(name, [c for c in cases if c.call.arguments[argument.name] == v], _condition(argument.name, v))
            for _, v in sorted(values.items())
        ]
        made = [one for one in some if one is not None]
        total = sum(one.score for one in made)
        if len(made) == len(some) and total > score:
            best, score = made, total
    return best


def _of_one_kind(name: str, cases: Sequence[DraftCase]) -> tuple[list[DraftCase], list[Draft]]:
    """Of the calls whose tensors have the same numbers of dims, those of which most can be cut, with their lines."""
    kinds: dict[str, list[DraftCase]] = {}
    for case in cases:
        kinds.setdefault(_ndims(case), []).append(case)
    drafts = {kind: drafted(name, some) for kind, some in kinds.items()}
    best = max(kinds, key=lambda kind: sum(one.score for one in drafts[kind]))
    return kinds[best], drafts[best]


def _ndims(case: DraftCase) -> str:
    return ", ".join("none" if t is None else str(t.ndim) for t in case.call.tensors)


def _condition(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"if({name})" if value else f"unless({name})"
    return f"if({name} {value})"


def _cases(calls: Sequence[OpCall]) -> tuple[list[DraftCase], dict[str, int]]:
    """What was found of each call; and why nothing was of others, with how many."""
    cases, reasons = list[DraftCase](), dict[str, int]()
    for call, one in zip(calls, findings(calls), strict=True):
        if isinstance(one, str):
            reasons[one] = reasons.get(one, 0) + 1
        else:
            found, shapes = one
            cases.append(DraftCase(call, found, shapes))
    return cases, reasons


Finding = tuple[list[DimsTogether], list[tuple[int, ...]]] | str


def findings(calls: Sequence[OpCall]) -> list[Finding]:
    """What can be cut in each call, with the shapes of its results; or why nothing is known."""
    together = workers.forked(lambda: [_finding(call) for call in calls], LIMIT)
    if together is not None:
        return [_decoded(one) for one in cast("list[Any]", together)]
    return [_alone(call) for call in calls]


def _alone(call: OpCall) -> Finding:
    """A call by itself; where its process ends, each way of cutting it by itself."""
    found = workers.forked(lambda: _finding(call), LIMIT)
    if found is not None:
        return _decoded(found)
    shapes = workers.forked(lambda: cast(Any, [list(r.shape) for r in call.run()]), LIMIT)
    if shapes is None:
        return "its process ends when it is run"
    some, done = list[DimsTogether](), set[tuple[int, int]]()
    for dims in itertools.islice(candidates(call), 48):
        if done.isdisjoint(dims):
            one = workers.forked(lambda dims=dims: cast(Any, [asdict(f) for f in cuts_with(call, [dims])]), LIMIT)
            for f in cast("list[Any]", one or []):
                some.append(_proposal(f))
                done.update(dims)
    return some, [tuple(s) for s in cast("list[list[int]]", shapes)]


def _finding(call: OpCall) -> Any:
    try:
        return [asdict(f) for f in cuts_in(call)], [list(r.shape) for r in call.run()]
    except NotTriedError as error:
        return str(error)


def _decoded(one: Any) -> Finding:
    return one if isinstance(one, str) else ([_proposal(f) for f in one[0]], [tuple(s) for s in one[1]])


def _proposal(one: Any) -> DimsTogether:
    dims, outputs = (tuple((a, b) for a, b in one[key]) for key in ("dims", "outputs"))
    return DimsTogether(dims, outputs, tuple(one["once"]), one["scale"])


def _settled(rules: Sequence[Rule], calls: Sequence[OpCall]) -> ProvedDraft | str:
    def act() -> Any:
        found = settle(rules, calls)
        return found if isinstance(found, str) else [[str(r) for r in found.rules], found.cases, list(found.removed)]

    one = workers.forked(act, LIMIT)
    if one is None:
        return _filled(rules, calls)
    return one if isinstance(one, str) else _settled_of(cast(Any, one))


def _settled_of(one: Any) -> ProvedDraft:
    return ProvedDraft(tuple(Rule.parse(text) for text in one[0]), one[1], tuple(one[2]))


def _filled(rules: Sequence[Rule], calls: Sequence[OpCall]) -> ProvedDraft | str:
    """Some end their process over parts of nothing only."""
    if all(rule.note("filled") is not None for rule in rules):
        return "its process ends in the proof"
    return _settled([replace(rule, notes=(*rule.notes, ("filled", ()))) for rule in rules], calls)
