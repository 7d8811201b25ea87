"""Mistakes planted in the table, one at a time: the proof must find each.

A mistake claims more than is true: a whole dim that may be cut, another pending reduction, a note that is forgotten,
dims of a result in another order, a sum that may wait though the operator is not linear, windows that read less. What
claims less is weaker, not wrong, and no mistake. One that the proof does not find is a case that it lacks, or a rule
that could say more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from tangram.hardware.host import workers
from tangram.layout.rule import Rule
from tangram.layout.syntax import VOID, Dim, Operand, Piece
from tangram.sharding.ops.rule_table import POINTWISE, RuleLine, RuleTable, builtin
from tangram.sharding.ops.windows import KINDS
from tangram.sharding.proof.prove import EACH, LIMIT, prove_operator
from tangram.sharding.proof.samples import samples

NEEDED = frozenset(
    "once offset scale product filled whole equal counted triangle outside places mean "  # noqa: SIM905
    "scan spill taken causal".split()
)
"""Notes without which a rule is wrong."""
SWAPPED = {"sum": "max", "max": "min", "min": "sum"}
SCANNED = {"sum": "prod", "prod": "sum", "logsumexp": "sum", "max": "min", "min": "max"}


@dataclass(frozen=True)
class RuleMutant:
    """A planted mistake, and whether the proof found it."""

    operator: str
    rule: str
    what: str
    found: bool = False
    why: str = ""


def mutations(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Every mistake of a rule, with what it is."""
    yield from _freed(rule)
    yield from _unnamed(rule)
    if any(p.beyond and not p.rest for operand in rule.inputs for p in operand.pieces):
        plain = (replace(o, pieces=tuple(replace(p, beyond=False) for p in o.pieces)) for o in rule.inputs)
        yield "a part reads no more than itself", replace(rule, inputs=tuple(plain))
    for i, operand in enumerate(rule.outputs):
        for k, (op, factor) in enumerate(operand.pending):
            pending = (*operand.pending[:k], (SWAPPED[op], factor), *operand.pending[k + 1 :])
            yield f"{op}:{factor} as {SWAPPED[op]}", _with_output(rule, i, replace(operand, pending=pending))
        named = [k for k, piece in enumerate(operand.pieces) if _name(piece)]
        for a, b in itertools.pairwise(named):
            pieces = list(operand.pieces)
            pieces[a], pieces[b] = pieces[b], pieces[a]
            yield f"{pieces[b]} and {pieces[a]} swapped", _with_output(rule, i, replace(operand, pieces=tuple(pieces)))
    for i, (name, args) in enumerate(rule.notes):
        if name in NEEDED:
            without = (*rule.notes[:i], *rule.notes[i + 1 :])
            yield f"without {name}({' '.join(args)})", replace(rule, notes=without)
        if name == "each" and len(args) > 1:
            notes = (*rule.notes[:i], ("linear", args), *rule.notes[i + 1 :])
            yield "linear in each said to be linear in all", replace(rule, notes=notes)
        if name in KINDS:
            for n in range(1, len(args)):
                notes = (*rule.notes[:i], (name, args[:n]), *rule.notes[i + 1 :])
                yield f"{name} without {args[n]} and what follows", replace(rule, notes=notes)
        if name == "scan" and len(args) == 2:
            notes = (*rule.notes[:i], (name, (args[0], SCANNED[args[1]])), *rule.notes[i + 1 :])
            yield f"a scan by {SCANNED[args[1]]}", replace(rule, notes=notes)


def _freed(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """What is whole, by its sign, everywhere at once: it may be cut then."""
    marked = {str(p.what): p for o in (*rule.inputs, *rule.outputs) for p in o.pieces if p.uncut and not p.rest}
    for text in marked:

        def free(operand: Operand, text: str = text, output: bool = False) -> Operand:
            pieces = tuple(replace(p, uncut=p.uncut and str(p.what) != text) for p in operand.pieces)
            lost = output and not any(str(p.what) == text for p in pieces)  # then it waits as a sum
            return replace(operand, pieces=pieces, pending=(*operand.pending, *[("sum", text)] * lost))

        outputs = tuple(free(operand, output=True) for operand in rule.outputs)
        yield f"{text} may be cut", replace(rule, inputs=tuple(map(free, rule.inputs)), outputs=outputs)


def _unnamed(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """A dim without a name that is given one, in the first input and the first output: it may be cut then."""
    inside, outside = rule.inputs[0], rule.outputs[0]
    places = [[k for k, p in enumerate(o.pieces) if _is_void(p)] for o in (inside, outside)]
    for a, b in zip(places[0][::-1], places[1][::-1], strict=False):
        named = Piece(Dim("planted"))
        first = replace(inside, pieces=(*inside.pieces[:a], named, *inside.pieces[a + 1 :]))
        last = replace(outside, pieces=(*outside.pieces[:b], named, *outside.pieces[b + 1 :]))
        yield (
            "an unnamed dim may be cut",
            replace(rule, inputs=(first, *rule.inputs[1:]), outputs=(last, *rule.outputs[1:])),
        )


def _with_output(rule: Rule, i: int, operand: Operand) -> Rule:
    return replace(rule, outputs=(*rule.outputs[:i], operand, *rule.outputs[i + 1 :]))


def _name(piece: Piece) -> str:
    return piece.what.name if isinstance(piece.what, Dim) and not piece.rest and not _is_void(piece) else ""


def _is_void(piece: Piece) -> bool:
    return isinstance(piece.what, Dim) and piece.what.name == VOID


def planted(table: RuleTable, line: RuleLine, rule: Rule) -> RuleTable:
    """The table with another rule in place of a line."""
    other = replace(line, rule=rule)
    return RuleTable({name: tuple(other if one is line else one for one in some) for name, some in table.lines.items()})


def score(names: Sequence[str] = (), every: int = 1) -> list[RuleMutant]:
    """Plant every `every`-th mistake in the lines that speak of some operators (all by default)."""
    given: dict[str, workers.Json] = {"names": list(names), "every": every}
    shares = workers.in_parts(f"{__name__}:job", given, 3 * LIMIT, "the mistakes could not be tried")
    return sorted((RuleMutant(**one) for share in shares for one in share), key=lambda m: (m.operator, m.what))


def job(names: list[str], every: int, part: int, parts: int) -> Any:
    """One process's share of the mistakes."""
    torch.set_num_threads(1)
    table, calls = builtin(), samples.recorded()
    lines = list(dict.fromkeys(line for some in table.lines.values() for line in some))
    mutants: list[tuple[RuleLine, list[str], str, Rule]] = []
    for line in lines:
        own = [name for name in calls if _reached(table, line, calls[name])]
        if own and (not names or set(names) & set(line.rule.operators)):
            mutants += [(line, own, what, rule) for what, rule in mutations(line.rule)]
    found: list[Any] = []
    for line, own, what, rule in mutants[::every][part::parts]:
        made = RuleMutant(own[0], str(rule), what)
        for name in own:  # what is wrong for one operator of a line may be right for another
            value = workers.forked(lambda a=(line, name, rule): asdict(_try(table, *a, calls)), EACH)
            verdict = cast("dict[str, Any]", value or {"kind": "crashed", "why": "its process ended"})
            if verdict["kind"] in ("refuted", "crashed"):
                made = RuleMutant(name, str(rule), what, True, verdict["why"])
                break
        found.append(asdict(made))
    return found


def _reached(table: RuleTable, line: RuleLine, calls: Sequence[Any]) -> bool:
    return line.rule.operators != (POINTWISE,) and any(table.find(call) is line for call in calls)


def _try(table: RuleTable, line: RuleLine, name: str, rule: Rule, calls: Any) -> Any:
    own = [call for call in calls[name] if table.find(call) is line]
    return prove_operator(planted(table, line, rule), name, own)
