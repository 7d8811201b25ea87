"""From a draft to a line that holds: prove it, take back what is refuted, add what notes can be found.

A factor with which a case is wrong becomes whole, and the proof begins anew. Then, one at a time, what may be added is
tried: indices into a factor that is whole (`offset`), sums that may wait (`linear`, `each`). What holds stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tangram.errors import UserError
from tangram.layout.rule import Rule
from tangram.layout.syntax import VOID, Dim, Note, Operand, Piece, Slot
from tangram.sharding.discover.draft import operand_of
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleLine, RuleTable
from tangram.sharding.proof.prove import ProofTrial, trials

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
    table, cases = RuleTable().with_lines([RuleLine(rule, "", 0, str(rule)) for rule in rules]), 0
    try:
        for trial in trials(table, calls):
            if trial.failure is not None:
                return trial
            cases += trial.tried
    except UserError as error:
        return str(error)
    return cases


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
