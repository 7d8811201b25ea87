"""`discover`: run an operator on cut inputs, propose its line, prove it.

Everything that runs the operator does so in forks of this process, for some operators end theirs when tensors do not
fit: first one fork for all calls; where that ends, one for each call, and for each way of cutting it.

A draft is proved: a factor with which a case is wrong becomes whole, and the proof begins anew. Then, one at a time,
what may be added is tried: indices into a factor that is whole (`offset`), sums that may wait (`linear`, `each`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout.rule import Rule
from tangram.layout.syntax import VOID, Dim, Note, Operand, Piece, Slot
from tangram.sharding.discover.cuts import (
    OF_VALUES,
    RANDOM,
    DimsTogether,
    NotTriedError,
    candidates,
    cuts_in,
    cuts_with,
)
from tangram.sharding.discover.draft import Draft, DraftCase, draft, operand_of
from tangram.sharding.discover.sample_calls import fitting_calls, load, near, own_calls, with_other_dims
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall, schema_of
from tangram.sharding.ops.rule_table import RuleLine, RuleTable
from tangram.sharding.proof.prove import ProofTrial, trials
from tangram.sharding.proof.samples import samples

ROUNDS = 12
"""Of taking something back."""
FREE = "vwxyzpq"
"""Letters for factors that are added."""


@dataclass(frozen=True)
class ProvedDraft:
    """Rules that hold for all calls, in how many cases, and what was taken back."""

    rules: tuple[Rule, ...]
    cases: int
    removed: tuple[str, ...] = ()


def settle(rules: Sequence[Rule], calls: Sequence[OpCall]) -> ProvedDraft | str:
    """The strongest form of some rules of one operator that the proof does not refute; else why there is none."""
    rules, taken = list(rules), list[str]()
    for _ in range(ROUNDS):
        outcome = _outcome(rules, calls)
        if isinstance(outcome, int):
            rules, more = _with_notes(rules, calls)
            return ProvedDraft(tuple(rules), more or outcome, tuple(taken))
        if isinstance(outcome, str):
            return outcome
        at = next((i for i, rule in enumerate(rules) if rule == outcome.bound.rule), None)
        weaker = None if at is None else _weaker(rules[at], outcome)
        if at is None or weaker is None:
            return str(outcome.failure)
        if weaker.note("filled") == rules[at].note("filled"):
            taken.append(str(outcome.failure))
        rules[at] = weaker
    return f"it took back more than {ROUNDS} factors"


def _outcome(rules: Sequence[Rule], calls: Sequence[OpCall]) -> int | ProofTrial | str:
    """How many cases were right if all were; the first that was wrong; or why a rule fits no call."""
    cases = 0
    try:
        for trial in trials(_table_of(rules), calls):
            if trial.failure is not None:
                return trial
            cases += trial.tried
    except UserError as error:
        return str(error)
    return cases


def _table_of(rules: Sequence[Rule]) -> RuleTable:
    return RuleTable().with_lines([RuleLine(rule, "", 0, str(rule)) for rule in rules])


def _weaker(rule: Rule, trial: ProofTrial) -> Rule | None:
    """The rule without what was wrong."""
    assert trial.failure is not None
    nothing = any(cut.axis and trial.bound.sizes[f] < trial.mesh.size for f, some in trial.cuts.items() for cut in some)
    if nothing and rule.note("filled") is None:  # perhaps it only refuses parts of nothing
        return replace(rule, notes=(*rule.notes, ("filled", ())))
    for factor in trial.cuts:
        weaker = without_factor(rule, factor)
        if weaker != rule:
            return weaker
    return None


def without_factor(rule: Rule, factor: str) -> Rule:
    """The rule with one of its factors whole, as `bind` names them."""

    def is_it(piece: Piece) -> bool:
        what = piece.what
        if isinstance(what, Slot):
            return factor.startswith(f"{{{what.argument}}}")
        return (piece.rest and factor[0] == ".") or factor in {leaf.name for leaf in what.leaves}

    def of(operand: Operand) -> Operand:
        pieces = tuple(replace(p, uncut=p.uncut or is_it(p)) for p in operand.pieces)
        return Operand(pieces, tuple(one for one in operand.pending if not _same(one[1], factor)))

    kept = tuple(
        (name, tuple(a for a in args if not _same(a, factor))) if name in ("scale", "offset") else (name, args)
        for name, args in rule.notes
    )
    notes = tuple((name, args) for name, args in kept if name != "scale" or args)
    notes = tuple((name, args) for name, args in notes if name != "offset" or len(args) > 1)
    return Rule(rule.operators, tuple(map(of, rule.inputs)), tuple(map(of, rule.outputs)), notes)


def _same(written: str, factor: str) -> bool:
    return written == factor or (written[0] == "{" and factor.startswith("{" + written.strip("{#}") + "}"))


def _with_notes(rules: list[Rule], calls: Sequence[OpCall]) -> tuple[list[Rule], int]:
    """The rules with all that holds beside; and in how many cases."""
    cases = 0
    for i in range(len(rules)):
        for tried in (_indices, _sums):
            for richer in tried(rules[i], calls):
                outcome = _outcome([*rules[:i], richer, *rules[i + 1 :]], calls)
                if isinstance(outcome, int):
                    rules[i], cases = richer, outcome
                    break
    return rules, cases


def _indices(rule: Rule, calls: Sequence[OpCall]) -> Iterator[Rule]:
    """Rules in which an input of whole numbers holds indices into a factor that is whole."""
    numbers, floats = _kinds(calls, len(rule.inputs))
    named = [n for n in calls[0].arguments if re.search("idx|index", n) and isinstance(calls[0].arguments[n], int)]
    free = next(c for c in FREE if c not in str(rule).split())
    for i in sorted(numbers):
        for o in sorted(floats - {i}):
            for k, piece in enumerate(rule.inputs[o].pieces):
                if not (piece.uncut or (isinstance(piece.what, Dim) and piece.what.name == VOID)) or piece.rest:
                    continue
                for freed in _freed(rule, o, k, i, free):
                    name = str(freed.inputs[o].pieces[k].what)
                    notes: tuple[Note, ...] = (*freed.notes, ("offset", (str(i), name)))
                    more: tuple[Note, ...] = tuple(("offset", (n, name)) for n in named)
                    yield from (replace(freed, notes=(*notes, *m)) for m in ((more, ()) if more else ((),)))


def _freed(rule: Rule, o: int, k: int, i: int, free: str) -> Iterator[Rule]:
    """The rule with a whole piece that is cut, and a pending sum; where it is a slot, indices stand in its place."""
    piece = rule.inputs[o].pieces[k]
    own = Piece(Dim(free))
    slot = isinstance(piece.what, Slot)
    name = str(piece.what) if slot else free
    at = replace(rule.inputs[o], pieces=_put(rule.inputs[o], k, Piece(piece.what) if slot else own))
    inputs = (*rule.inputs[:o], at, *rule.inputs[o + 1 :])
    outputs = tuple(replace(one, pending=(*one.pending, ("sum", name))) for one in rule.outputs)
    if slot and any(p.what == piece.what for one in rule.outputs for p in one.pieces):

        def moved(operand: Operand) -> Operand:
            return replace(operand, pieces=tuple(own if p.what == piece.what else p for p in operand.pieces))

        inputs = tuple(moved(one) if n == i else one for n, one in enumerate(inputs))
        outputs = tuple(map(moved, outputs))
    yield replace(rule, inputs=inputs, outputs=outputs)


def _put(operand: Operand, k: int, piece: Piece) -> tuple[Piece, ...]:
    return (*operand.pieces[:k], piece, *operand.pieces[k + 1 :])


def _sums(rule: Rule, calls: Sequence[OpCall]) -> Iterator[Rule]:
    """Rules in which sums that are pending on the way in may wait: on all inputs at once, else on each by itself."""
    _, floats = _kinds(calls, len(rule.inputs))
    if not floats:
        return
    every = len(floats) == len(rule.inputs)
    yield replace(rule, notes=(*rule.notes, ("linear", () if every else tuple(map(str, sorted(floats))))))
    each = tuple(map(str, sorted(floats)))
    if len(each) > 1:
        yield replace(rule, notes=(*rule.notes, ("each", each)))
        yield from (replace(rule, notes=(*rule.notes, ("each", (one,)))) for one in each)


def _kinds(calls: Sequence[OpCall], count: int) -> tuple[set[int], set[int]]:
    """The inputs that are whole numbers, and those that are numbers of other kinds."""
    numbers, floats = set[int](), set[int]()
    for call in calls:
        for operand, tensor in zip(operand_of(call), call.tensors, strict=True):
            if tensor is not None and operand < count:
                kind = numbers if tensor.dtype in (torch.int64, torch.int32) else floats
                if tensor.dtype != torch.bool:
                    kind.add(operand)
    return numbers - floats, floats


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
    plain = name.removeprefix("aten::").removeprefix("aten.")
    if own := own_calls([name], given):
        return [propose(calls, drawn=True) for calls in own.values()]
    if not hasattr(torch.ops.aten, plain.partition(".")[0]):
        hint = near(f"aten::{plain}")
        raise UserError(f"torch has no operator aten.{plain}; those of others are called namespace::name{hint}")
    found = {own: calls for own, calls in samples.recorded([plain]).items() if samples.is_named([plain], own)}
    if not found:
        raise UserError(f"torch's database has no sample of {plain}: give some with --samples FILE.py:function")
    return [propose(calls) for _, calls in sorted(found.items())]


def propose(calls: Sequence[OpCall], *, drawn: bool = False) -> Proposal:
    """The line of the operator of some calls. `drawn`: what is proved before it is used, with drawn calls beside."""
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
    tried = [case.call for case in cases]
    more = fitting_calls(tried[0].operator, _table_of(rules), tried) if drawn else []
    settled = _settled(rules, [*tried, *more])
    if isinstance(settled, str):
        return Proposal(name, why=f"{'; '.join(map(str, rules))}: refuted: {settled}", remarks=left)
    return Proposal(name, tuple(map(str, settled.rules)), settled.cases, "", (*left, *settled.removed))


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
