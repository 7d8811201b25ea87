"""Operators that no machine without their device runs: that parts have the shapes that their rules say.

Torch knows the shapes of their results on tensors without memory. That is no proof, and `prove` says so; a factor that
stands at a wrong dim is found, and a result that a rule forgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tangram.sharding.local_ops.local_call import RankPart, part_of, run
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.ops.rule_table import bound as find_bound
from tangram.sharding.proof.execute import EXPECTED_ERRORS, ways

aten = torch.ops.aten


def _some(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def _ends(n: int) -> Tensor:
    return torch.empty((n,), dtype=torch.int32, device="meta")


def _sdpa(*more: Any) -> tuple[Any, ...]:
    return (_some(3, 6, 5, 8), _some(3, 6, 7, 8), _some(3, 6, 7, 8), *more)


def _rows(*more: Any) -> tuple[Any, ...]:
    return (_some(3, 5, 6, 8), _some(3, 7, 2, 8), _some(3, 7, 2, 8), *more)


def _packed(*more: Any) -> tuple[Any, ...]:
    return (_some(15, 6, 8), _some(21, 2, 8), _some(21, 2, 8), _ends(4), _ends(4), 5, 7, *more)


CALLS: Mapping[Any, tuple[Callable[[], tuple[Any, ...]], ...]] = {
    aten._scaled_dot_product_flash_attention.default: (
        _sdpa,
        lambda: _sdpa(0.0, True),
        lambda: (_some(3, 6, 5, 8), _some(3, 2, 7, 8), _some(3, 2, 7, 8)),
    ),
    aten._scaled_dot_product_efficient_attention.default: (
        lambda: _sdpa(None, True),
        lambda: _sdpa(_some(3, 6, 5, 7), True),
        lambda: _sdpa(_some(1, 1, 5, 7), False),
    ),
    aten._scaled_dot_product_cudnn_attention.default: (lambda: _sdpa(None, True), lambda: _sdpa(None, True, 0.0, True)),
    aten._scaled_dot_product_fused_attention_overrideable.default: (_sdpa, lambda: _sdpa(_some(3, 1, 5, 7))),
    aten._flash_attention_forward.default: (
        lambda: _rows(None, None, 5, 7, 0.0, True, False),
        lambda: _packed(0.0, False, False),
    ),
    aten._efficient_attention_forward.default: (
        lambda: (*(_some(3, n, 6, 8) for n in (5, 7, 7)), None, None, None, None, None, 0.0, 0, True),
        lambda: (*(_some(1, n, 6, 8) for n in (15, 21, 21)), None, _ends(4), _ends(4), 5, 7, 0.0, 0, True),
    ),
}
"""Operators of other devices, and what they are called with."""


def calls() -> dict[str, list[OpCall]]:
    """Their calls, by name."""
    made = [(operator, [OpCall.of(operator, one(), {}) for one in some]) for operator, some in CALLS.items()]
    return {some[0].name: some for _, some in made}


def check(table: RuleTable, call: OpCall) -> tuple[int, str]:
    """In how many cuts the shapes of parts agree with the rule, and what is wrong with the next; nothing, where all do.

    Raises UserError where there is no rule, or it does not fit.
    """
    bound, tried = find_bound(table, call), 0
    whole = call.run()
    for cuts, mesh in ways(bound, (2, 3, 5)):
        for rank in range(mesh.size):
            part = part_of(bound, cuts, mesh, rank)
            if any(not held for held in part.indices.values()):
                continue  # of nothing it is not run
            pairs = zip(call.tensors, bound.inputs, strict=True)
            local = [None if t is None or d is None else t.new_empty(_shape(t, d, bound, part)) for t, d in pairs]
            shown = f"{call} with {', '.join(cuts)} over {mesh}"
            try:
                found = run(call, bound, part, local)
            except EXPECTED_ERRORS as error:
                return tried, f"{shown}: {type(error).__name__}: {error}".splitlines()[0]
            for i, (own, want) in enumerate(zip(found, whole, strict=True)):
                dims = bound.outputs[min(i, len(bound.outputs) - 1)]
                if isinstance(want, Tensor) and dims and [*own.shape] != (shape := _shape(want, dims, bound, part)):
                    return tried, f"{shown}: output {i} has shape {[*own.shape]}, by the rule {shape}"
        tried += 1
    return tried, ""


def _shape(tensor: Tensor, dims: Dims, bound: BoundOp, part: RankPart) -> list[int]:
    """Of a part."""
    found: list[int] = []
    for factors, n in zip(dims, tensor.shape, strict=True):
        sizes = [sum(b - a for a, b in part.indices[f]) if f in part.indices else bound.sizes[f] for f in factors]
        found.append(math.prod(sizes) if factors else n)
    return found
