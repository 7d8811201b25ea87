"""The op rules in the place of DTensor's own: `with register(): ...`, or `register()` once, before DTensors are used.

For each operator with a rule DTensor is given one of two things. A strategy, where placements say all: torch carries
the call out and keeps what was decided. Or a handler of the whole call, where parts need other arguments than the whole
(see `execute`), which also replaces the handlers that torch has for itself (convolution, argmax). Autograd stands above
DTensor's dispatcher, so no handler can bring its own derivative: backward operators whose rules are wrong in torch have
rules here (`dtensor.rules`), the others stay torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]

from tangram.errors import UserError
from tangram.layout.rule import Rule
from tangram.layout.syntax import Dim
from tangram.sharding.dtensor.execute import (
    CORRECTED,
    Executor,
    not_into_a_copy,
    with_its_shape,
    with_replicated_keywords,
)
from tangram.sharding.ops import views
from tangram.sharding.ops.calls import is_written, name_of, schema_of, tensor_arguments
from tangram.sharding.ops.rule_table import RuleTable, builtin, parse_lines
from tangram.text import packaged

WRITES_UNSAID = ("batch_norm",)
"""Part of the names of operators that write tensors of which their schema does not say it."""
VIEWS = ("diagonal",)
"""Views that torch's own rules gather for though the cut could stay; so are those that give several tensors."""
MENDED = {"squeeze_": with_its_shape}
"""What stays torch's but for one thing."""
_ABSENT = object()
_torch: Any = torch._C  # pyright: ignore[reportPrivateUsage]


@dataclass
class Registered:
    """What was registered, until `undo()` or the end of the `with`."""

    strategies: tuple[str, ...]
    """Operators that torch carries out with our placements."""
    handlers: tuple[str, ...]
    """Operators that are carried out by the rules from inputs to results."""
    refused: Mapping[str, str]
    """Operators that stay torch's, each with the reason."""
    _before: list[tuple[dict[Any, Any], OpOverload, Any]] = field(default_factory=list[Any], repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All that are registered."""
        return tuple(sorted((*self.strategies, *self.handlers)))

    def undo(self) -> None:
        """Bring back what was there; a second time it does nothing. Undo what was registered last first."""
        for table, operator, value in reversed(self._before):
            if value is _ABSENT:
                table.pop(operator, None)
            else:
                table[operator] = value
        self._before.clear()
        _clear_sharding_prop_cache()

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def exported(table: RuleTable | None = None) -> RuleTable:
    """A table (the one that comes with Tangram) with what DTensor asks for beside it."""
    text = packaged("tangram.sharding.dtensor", "dtensor.rules")
    return (builtin() if table is None else table).with_lines(parse_lines(text, "dtensor.rules"))


def register(table: RuleTable | None = None, operators: Iterable[str | OpOverload] | None = None) -> Registered:
    """Put rules in the place of DTensor's own, for all operators that they hold for, or for some.

    `operators`: as aten calls them, `sum.dim_IntList`, or `sum` for all overloads; or operators of anybody's. Raises
    UserError where torch has no such operator. What is decided before is forgotten in this thread only: register before
    other threads use DTensors (as backward does on accelerators).
    """
    rules = exported(table)
    executor = Executor(rules)
    dispatcher = cast(Any, DTensor)._op_dispatcher
    propagator = dispatcher.sharding_propagator
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    others = (
        propagator.op_to_rules,
        propagator.op_single_dim_strategy_funcs,
        propagator.op_to_schema_info_for_single_dim_strategy,
    )
    found: dict[bool, list[str]] = {True: [], False: []}
    refused: dict[str, str] = {}
    done = Registered((), (), refused)
    for operator in [*_requested(operators)]:  # a name that torch lacks is told before anything is done
        name = name_of(operator)
        why = _refusal(rules, operator)
        mended = with_replicated_keywords if _has_flags_by_keyword(operator) else MENDED.get(name.partition(".")[0])
        if mended is None and why:
            refused[name] = why
            mended = not_into_a_copy if _writes_self(operator) and operator not in handlers else None
        elif mended is not None:
            found[False].append(name)
        if mended is not None:  # around torch's own rule
            done._before.append((handlers, operator, handlers.get(operator, _ABSENT)))  # pyright: ignore[reportPrivateUsage]
            handlers[operator] = mended
        if mended is not None or why:
            continue
        tables = (handlers, propagator.op_strategy_funcs, propagator.op_to_schema_info, *others)
        done._before += [(one, operator, one.get(operator, _ABSENT)) for one in tables]  # pyright: ignore[reportPrivateUsage]
        for one in (handlers, *others):
            one.pop(operator, None)
        by_strategy = _placements_say_all(rules, operator)
        found[by_strategy].append(name)
        if by_strategy:
            propagator.register_op_strategy(operator, executor.strategy, _every_argument(operator))
        else:
            propagator.op_to_schema_info[operator] = _every_argument(operator)
            handlers[operator] = executor.handle
    _clear_sharding_prop_cache()
    done.strategies, done.handlers = tuple(found[True]), tuple(found[False])
    return done


def _requested(operators: Iterable[str | OpOverload] | None) -> Iterator[OpOverload]:
    if operators is None:
        names: list[str] = _torch._dispatch_get_all_op_names()
        for packet, _, overload in sorted(
            name.removeprefix("aten::").partition(".") for name in names if name.startswith("aten::")
        ):
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")
        return
    for one in operators:
        if isinstance(one, OpOverload):
            yield one
            continue
        packet, _, overload = one.removeprefix("aten::").removeprefix("aten.").partition(".")
        found = getattr(torch.ops.aten, packet, None)
        if found is None or (overload and overload not in found.overloads()):
            raise UserError(f"torch has no operator aten.{one}; name one of its own, or give the operator itself")
        yield from (getattr(found, name) for name in found.overloads() if overload in ("", name))


def _every_argument(operator: OpOverload) -> RuntimeSchemaInfo:
    """So that torch's key of a call has all of it: what is not in the key is as it was in the first such call."""
    arguments = schema_of(operator).arguments
    listed = any("List[Tensor]" in str(a.type) or "List[Optional[Tensor]]" in str(a.type) for a in arguments)
    return RuntimeSchemaInfo(0, [a.name for a in arguments if a.kwarg_only], listed)


def _writes_self(operator: OpOverload) -> bool:
    """Whether it writes its first tensor: random numbers and the like, which may be a view, too."""
    return any(is_written(a) and a.name == "self" and str(a.type) == "Tensor" for a in schema_of(operator).arguments)


def _has_flags_by_keyword(operator: OpOverload) -> bool:
    """An optimiser's step, which takes by keyword whether to skip: torch passes each rank's own part of that."""
    name = name_of(operator)
    return (
        name.startswith("_fused_") and name.partition(".")[0].endswith("_") and "found_inf" in str(schema_of(operator))
    )


def _placements_say_all(rules: RuleTable, operator: OpOverload) -> bool:
    """Whether a part's call has the whole call's arguments, and torch's runtime redistributes all that it is given."""
    schema = schema_of(operator)
    noted = {name for line in rules.all_of(operator) for name, _ in line.rule.notes}
    extremes = any(op != "sum" for line in rules.all_of(operator) for out in line.rule.outputs for op, _ in out.pending)
    by_keyword = any(a.kwarg_only and "Tensor" in str(a.type) for a in schema.arguments)
    lists = any("List" in str(a.type) and "Tensor" in str(a.type) for a in (*schema.arguments, *schema.returns))
    letters = {leaf.name for line in rules.all_of(operator) for leaf in _leaves(line.rule)}
    counted = any(a.name in letters for a in schema.arguments)
    written = any(is_written(a) for a in schema.arguments)
    return not (noted & CORRECTED or extremes or by_keyword or lists or written or counted) and bool(
        rules.all_of(operator)
    )


def _leaves(rule: Rule) -> Iterator[Dim]:
    for operand in (*rule.inputs, *rule.outputs):
        for piece in operand.pieces:
            if isinstance(piece.what, Dim):
                yield from piece.what.leaves


def _refusal(rules: RuleTable, operator: OpOverload) -> str:
    """Why an operator stays torch's; nothing where it does not."""
    schema, name = schema_of(operator), name_of(operator)
    lines = rules.all_of(operator)
    many = len(schema.returns) == 1 and "List" in str(schema.returns[0].type)
    seen = views.view_of(operator) is not None and (many or name in VIEWS)
    if not lines and not seen:
        return "a view, of which torch's own rule is right" if views.view_of(operator) else "it has no rule"
    if not tensor_arguments(operator):
        return "it takes no tensor"
    if not schema.returns or not all("Tensor" in str(r.type) for r in schema.returns):
        return "it gives no tensor, or more than tensors"
    if schema._is_view_op() and not seen:
        return "a view, of which torch's own rule is right"
    if name.startswith(("_foreach", "_amp_foreach")):
        return "each tensor of its lists is by itself, as in torch's own rule"
    if any(line.rule.note("random") is not None for line in lines):
        return "random numbers are torch's generators' matter"
    if lines and all(p.uncut for line in lines for op in line.rule.inputs for p in op.pieces):
        return "its tensors can only be whole"
    if name.partition(".")[0].endswith("_like"):
        return "it reads no element"
    if any(part in name for part in WRITES_UNSAID):
        return "it writes its running statistics"
    if _torch._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return "torch takes it apart before DTensor sees it"
    written = [a for a in schema.arguments if is_written(a)]
    if any("List" in str(a.type) for a in written) or any(not a.is_out and a.name != "self" for a in written):
        return f"it writes {', '.join(a.name for a in written)}"
    return ""
