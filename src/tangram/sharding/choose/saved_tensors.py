"""What the backward needs of a forward, as autograd itself says: each operator is run without memory, and asked.

Tensors that share memory count once. What is made of parameters alone is not counted: parameters are, and what is
gathered is gathered again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tangram.sharding.derive.problem.folding import Folded, FoldedStep


class SavedBytes(NamedTuple):
    """By place, what an operator saves."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def saved(folded: Folded, step: FoldedStep) -> SavedBytes:
    """What an operator saves of its tensors; remembered with its call. One that cannot be asked: all that it takes."""
    known = vars(step.call)
    if "_saved" not in known:
        known["_saved"] = _saved(folded, step)
    return known["_saved"]


def _saved(folded: Folded, step: FoldedStep) -> SavedBytes:
    if not any(v in folded.differentiable for v in step.outputs):
        return SavedBytes(frozenset(), frozenset())
    given: list[Tensor | None] = []
    for v, tensor in zip(step.inputs, step.call.tensors, strict=True):
        if v is None or tensor is None:
            given.append(None)
            continue
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        follows = v in folded.differentiable or v in folded.standing
        given.append(own.requires_grad_(follows and (own.is_floating_point() or own.is_complex())))
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(_memory(x))
        return x

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = step.call.with_tensors(given).run()
    except (NotImplementedError, RuntimeError):  # nothing runs it without memory: count all that it takes
        return SavedBytes(frozenset(i for i, v in enumerate(step.inputs) if v is not None), frozenset())
    made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    into = {_memory(x): i for i, x in enumerate(given) if x is not None}
    out = {_memory(x): i for i, x in enumerate(made) if i < len(step.outputs)}
    return SavedBytes(
        frozenset(into[one] for one in kept if one in into),
        frozenset(out[one] for one in kept if one in out and one not in into),
    )


def _memory(x: Tensor) -> int:
    return int(cast(Any, x.untyped_storage())._cdata)


def memories(folded: Folded) -> dict[int, int]:
    """Of each class, the one whose memory it is a view of; itself where it has its own."""
    found: dict[int, int] = {}
    for step in folded.steps:
        returns = cast(Any, step.node.operator)._schema.returns
        views = step.call.name == "_unsafe_view" or any(one.alias_info is not None for one in returns)
        of = next((v for v in step.inputs if v is not None), None)
        for v in step.outputs:
            if views and of is not None and v != of:
                found[v] = found.get(of, of)
    return found
