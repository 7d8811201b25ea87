"""Prove a whole table: every rule with the calls that its operators get, cut in every way that it allows.

    sizes       parts over 2, 3 and 5 ranks, so that some are uneven and some of nothing; two factors over two axes,
                and one over two, in both orders
    maps        every factor by an index map, and those whose parts need each other by every map (`ways_by_maps`)
    values      those of the samples and drawn anew, with both signs
    spelling    dims counted from either end
    types       integers, booleans, complex numbers and bfloat16 where the operator takes them
    pending     sums on the way in, where the rule says that the operator is linear
    lists       an operator over lists gives what its elements' operator gives, which is then tried as any other

Each operator is tried in a process of its own, forked from one that has everything loaded: some end theirs when tensors
do not fit. A rule is refuted by the first case that is wrong; it is printed with the call.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout import Mesh
from tangram.layout.rule import Rule
from tangram.sharding.local_ops import local_variants
from tangram.sharding.local_ops.local_call import Cuts
from tangram.sharding.ops import foreach, rule_table
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.decompose import is_decomposed
from tangram.sharding.ops.rule_table import POINTWISE, RuleTable, builtin, read_lines
from tangram.sharding.proof import lists, routes, shapes
from tangram.sharding.proof.execute import (
    Failure,
    ProofVerdict,
    ReferenceRun,
    check,
    differs,
    run_reference,
    ways,
    ways_by_maps,
)
from tangram.sharding.proof.samples import samples

WORLDS = (2, 3, 5)
CALLS, EACH_LINE = 4, 2
"""Of an operator that are tried; of those for each line of its rule, at least."""
LIMIT = 600.0
"""Seconds for a whole table."""
EACH = 60.0
"""Seconds for an operator."""
_UNKNOWN = "no sample of torch's database reaches an operator {}: give it as aten calls it"

_COMPOSITE = "torch takes {} apart into other operators before any of it is seen: check those, as mm or view"


def calls_of(table: RuleTable, calls: Sequence[OpCall]) -> list[OpCall]:
    """The calls in which most can be cut, also for each line of a rule, and the first."""

    def cuttable(call: OpCall) -> int:
        try:
            return len(rule_table.bound(table, call).cuttable)
        except UserError:
            return 99  # a rule that does not fit is to be seen
        except Exception:  # noqa: BLE001  so is one whose operator refuses
            return 99

    ranked = sorted(enumerate(calls), key=lambda pair: (-cuttable(pair[1]), pair[0]))
    chosen = {i for i, _ in ranked[:CALLS]} | {0}
    lines: dict[int, list[int]] = {}
    for i, call in ranked:
        lines.setdefault(id(table.find(call)), []).append(i)
    chosen.update(i for some in lines.values() for i in some[:EACH_LINE])
    return [call for i, call in enumerate(calls) if i in chosen]


@dataclass(frozen=True)
class ProofTrial:
    """One way of cutting one call, and what is wrong with it."""

    call: OpCall
    bound: BoundOp
    cuts: Cuts
    mesh: Mesh
    failure: Failure | None = None
    tried: bool = True
    """False: there was nothing to cut."""
    gradients: tuple[str, ...] = ()
    """The arguments whose gradients were compared."""
    without: tuple[str, ...] = ()
    """The arguments of numbers whose derivatives torch refuses."""


def trials(table: RuleTable, calls: Sequence[OpCall]) -> Iterator[ProofTrial]:
    """Everything that is tried of an operator's rule. Raises UserError where there is none or it does not fit."""
    mapped_once: list[Rule] = []
    for call in calls_of(table, calls):
        for i, (variant, worlds) in enumerate(_variants(call)):
            bound, alone = rule_table.bound(table, variant), Mesh.parse("x=1")
            expected = _expected(local_variants.for_comparison(variant, bound)) if bound.cuttable else None
            if expected is not None:
                refused = _refused(variant, expected)
                by_maps = () if i or any(rule is bound.rule for rule in mapped_once) else ways_by_maps(bound, worlds)
                mapped_once += [] if i else [bound.rule]
                for cuts, mesh in (*ways(bound, worlds), *by_maps):
                    failure, taken = (
                        check(variant, bound, cuts, mesh, expected),
                        _compared(variant, bound, cuts, expected),
                    )
                    yield ProofTrial(variant, bound, cuts, mesh, failure, gradients=taken, without=refused)
                for failure in check_pending(variant, bound, expected):
                    yield ProofTrial(variant, bound, {}, alone, failure)
            elif not bound.cuttable or i:
                yield ProofTrial(variant, bound, {}, alone, tried=False)
            else:
                yield ProofTrial(
                    variant,
                    bound,
                    {},
                    alone,
                    Failure(str(variant), "nothing cut", "the operator", "cannot be run"),
                    tried=False,
                )


def _compared(call: OpCall, bound: BoundOp, cuts: Cuts, expected: ReferenceRun) -> tuple[str, ...]:
    """The arguments whose gradients `check` compares: none where a maximum or minimum is pending."""
    if any(bound.after(f, i) in ("max", "min") for f in cuts for i in range(len(bound.outputs))):
        return ()
    return tuple(name for (name, _), g in zip(call.places, expected.gradients, strict=True) if g is not None)


def _refused(call: OpCall, expected: ReferenceRun) -> tuple[str, ...]:
    """The arguments of numbers whose gradients are not even asked for."""
    pairs = enumerate(zip(call.places, call.tensors, strict=True))
    return tuple(
        name
        for i, ((name, _), t) in pairs
        if t is not None and (t.is_floating_point() or t.is_complex()) and i not in expected.differentiated
    )


def _elements(calls: Sequence[OpCall]) -> Iterator[OpCall | Failure]:
    """The calls that are tried: of an operator over lists those of its elements, once it is seen that it is they."""
    for call in calls:
        if foreach.base_of(call.operator) is None:
            yield call
            continue
        failure = lists.check(call)
        if failure is not None:
            yield failure
        yield from lists.elements(call)


def prove_operator(table: RuleTable, name: str, calls: Sequence[OpCall]) -> ProofVerdict:
    """Try one operator's rule with some calls. Never raises: what goes wrong is in the verdict."""
    begun, cases, most = time.monotonic(), 0, 0
    gradients, without = Counter[str](), Counter[str]()

    def verdict(kind: str, why: str = "") -> ProofVerdict:
        return ProofVerdict(name, kind, most, cases, time.monotonic() - begun, why, dict(gradients), dict(without))

    try:
        own: list[OpCall] = []
        for one in _elements(calls):
            if isinstance(one, Failure):
                return verdict("refuted", str(one))
            own.append(one)
        for trial in trials(table, own):
            most = max(most, len(trial.bound.cuttable))
            cases += trial.tried
            gradients.update(trial.gradients)
            without.update(trial.without)
            if trial.failure is not None:
                return verdict("refuted", str(trial.failure))
    except rule_table.NoRuleError as error:
        return verdict("whole", "it goes in steps") if is_decomposed(name) else verdict("no rule", str(error))
    except UserError as error:
        return verdict("refuted", str(error))
    except Exception as error:  # noqa: BLE001  whatever an operator raises refutes its rule
        return verdict("refuted", f"{type(error).__name__}: {error}".splitlines()[0])
    return verdict("proved" if most else "whole")


def _variants(call: OpCall) -> Iterator[tuple[OpCall, tuple[int, ...]]]:
    """The call as it is, with other values, with its dims spelled otherwise, with other types."""
    yield call, WORLDS
    yield samples.drawn(call, 1), (3,)
    for other in samples.respelled(call):
        yield other, (2,)
    for dtype in (torch.int64, torch.bool, torch.complex128, torch.bfloat16):
        other = samples.of_dtype(call, dtype)
        if other is not None:
            yield other, (3,)


def _expected(call: OpCall) -> Any:
    try:
        return run_reference(call)
    except Exception:  # noqa: BLE001  of this type, say, the operator has no kernel
        return None


def prove(
    names: Sequence[str] = (), rules: Path | None = None, told: Callable[[ProofVerdict], None] | None = None
) -> list[ProofVerdict]:
    """Prove the table, or some operators of it, over the cores of the machine. `rules`: a file with more of them.

    Raises UserError where a name is no operator with a sample, or a line of the file is no rule.
    """
    table = table_with(rules)  # its mistakes are seen here rather than in each process
    for name in names:  # before the whole database is run to find it
        space, _, plain = name.partition(".")[0].rpartition("::")
        if name not in table.lines and not hasattr(getattr(torch.ops, space or "aten"), plain):
            raise UserError(_UNKNOWN.format(name))
        if name not in table.lines.keys() | shapes.calls().keys() | routes.COMPOSITE.keys() and _is_composite(name):
            raise UserError(_COMPOSITE.format(name))
    run = [name for name in names if name not in shapes.calls()]
    given: dict[str, workers.Json] = {"names": list(run), "rules": str(rules or "")}
    parts = 2 if not names else 1 if run else 0
    shares = workers.in_parts(f"{__name__}:job", given, LIMIT, "the proof did not end", parts)
    found = [ProofVerdict(**one) for share in shares for one in share]
    for name in sorted(names or {*table.lines, *shapes.calls()} - {POINTWISE}):
        if any(samples.is_named([name], verdict.operator.partition(" ")[0]) for verdict in found):
            continue
        if name not in table.lines and name not in shapes.calls():
            raise UserError(_UNKNOWN.format(name))
        found.append(_unproved(table, name))
    for verdict in found:
        if told is not None:
            told(verdict)
    return sorted(found, key=lambda v: v.operator)


def _is_composite(name: str) -> bool:
    """Whether the dispatcher takes an operator apart whatever the device, so that no call of it is ever seen."""
    space, _, plain = name.rpartition("::")
    plain, _, overload = plain.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), plain)
    all_of_it: list[str] = [overload] if overload else [one for one in packet.overloads() if not one.endswith("out")]
    known: Any = cast(Any, torch)._C
    full = [f"{space or 'aten'}::{plain}{'' if one == 'default' else f'.{one}'}" for one in all_of_it]
    there = [one for one in full if known._dispatch_has_kernel(one)]  # some are of TorchScript alone
    return bool(there) and all(
        known._dispatch_has_kernel_for_dispatch_key(one, "CompositeImplicitAutograd") for one in there
    )


def _unproved(table: RuleTable, name: str) -> ProofVerdict:
    """What can be said of an operator that nothing here runs."""
    tried = 0
    for call in shapes.calls().get(name, ()):
        more, wrong = shapes.check(table, call)
        tried += more
        if wrong:
            return ProofVerdict(name, "refuted", why=wrong)
    agree = f"; the shapes of its parts agree in {tried} cuts" if tried else ""
    return ProofVerdict(name, "unproved", why=f"no sample of it runs on this machine{agree}")


def prove_calls(calls: Mapping[str, Sequence[OpCall]], rules: Path | None = None) -> list[ProofVerdict]:
    """Prove the rules of operators with calls of one's own, in forks of this process.

    Raises UserError where a line of the file `rules` is no rule.
    """
    torch.set_num_threads(1)  # what is forked has no other threads
    table, found = table_with(rules), list[ProofVerdict]()
    for name, some in sorted(calls.items()):
        value = workers.forked(lambda name=name, some=some: asdict(prove_operator(table, name, some)), EACH)
        crashed = ProofVerdict(name, "crashed", why="its process ended")
        found.append(crashed if value is None else ProofVerdict(**cast("dict[str, Any]", value)))
    return found


def table_with(rules: Path | None) -> RuleTable:
    """The table with the lines of a file. Raises UserError where the file cannot be read, or a line is no rule."""
    return builtin() if rules is None else builtin().with_lines(replace(line, exact=True) for line in read_lines(rules))


def job(names: list[str], rules: str, part: int, parts: int) -> Any:
    """One process's share of a proof: every `parts`-th operator, from `part` on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = table_with(Path(rules) if rules else None)
    calls: dict[str, list[OpCall]] = lists.recorded(tuple(names))
    rest = [name for name in names if not any(samples.is_named([name], own) for own in calls)]
    if rest or not names:
        calls = samples.recorded(rest) | calls
    chosen = sorted(name for name in calls if samples.is_named(names, name))
    steps = sorted(name for name in calls.keys() | routes.COMPOSITE.keys() if samples.is_named(names, name))
    todo: list[tuple[str, Callable[[], ProofVerdict]]] = [
        *((name, lambda name=name: prove_operator(table, name, calls[name])) for name in chosen),
        *(
            (f"{name} in steps", lambda name=name: routes.verdict(name, calls.get(name, ()), table))
            for name in steps
            if is_decomposed(name)
        ),
    ]
    found: list[Any] = []
    for name, proved in todo[part::parts]:
        value = workers.forked(lambda proved=proved: asdict(proved()), EACH)
        found.append(asdict(ProofVerdict(name, "crashed", why="its process ended")) if value is None else value)
    return found


# ----------------------------------------------------------------
# Proof of what a rule says of pending sums on the way in: `linear`, `each`, `unread`.
# linear, linear(0 1)    a sum that is pending on all of these inputs at once may wait: the result is a pending sum
# each(0 1)              a sum that is pending on one of them may wait, the others being whole
# unread(0)              whatever the values of an input, the result is the same: a pending sum is left as it is


def check_pending(call: OpCall, bound: BoundOp, expected: ReferenceRun) -> Iterator[Failure | None]:
    """Every set of inputs as a sum of two: the results must add up to the whole one."""
    yield from _check_unread(call, bound, expected)
    for places in bound.waiting(call):
        tensors = call.tensors
        if not all(_is_number(tensors[i]) for i in places):
            continue
        generator = torch.Generator().manual_seed(7)
        one: list[Tensor | None] = list(tensors)
        other: list[Tensor | None] = list(tensors)
        for i in places:
            tensor = tensors[i]
            assert tensor is not None
            part = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            one[i], other[i] = part, tensor.detach() - part
        left, right = call.with_tensors(one).run(), call.with_tensors(other).run()
        given = min((t.dtype for i in places if (t := tensors[i]) is not None), key=lambda dtype: dtype.itemsize)
        failure: Failure | None = None
        for i, (a, b, want) in enumerate(zip(left, right, expected.results, strict=True)):
            coarse = given.itemsize < want.itemsize and want.is_floating_point()  # so are the parts
            wrong = differs((a + b).to(given), want.to(given)) if coarse else differs(a + b, want)
            if wrong:
                shown = f"a pending sum on input{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
                failure = Failure(str(call), shown, f"output {i}", wrong)
        yield failure


def _check_unread(call: OpCall, bound: BoundOp, expected: ReferenceRun) -> Iterator[Failure | None]:
    """Inputs whose values do not count with other values: the results must be the same."""
    unread = [int(a) for a in bound.rule.note("unread") or ()]
    if not unread or bound.rule.note("undefined") is not None:
        return
    tensors = [(t * 0 + 1).to(t.dtype) if t is not None and i in unread else t for i, t in enumerate(call.tensors)]
    other = call.with_tensors(tensors).run()
    wrong = next((said for a, b in zip(other, expected.results, strict=True) if (said := differs(a, b))), "")
    yield Failure(str(call), f"other values of input {unread[0]}", "output 0", wrong) if wrong else None


def _is_number(tensor: Tensor | None) -> bool:
    """Whether it can be a sum: of complex numbers that are infinite, parts do not add up to what they are of."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return not tensor.is_complex() or bool(tensor.isfinite().all())
