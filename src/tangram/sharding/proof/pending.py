"""Proof of what a rule says of pending sums on the way in: `linear`, `each`, `unread`.

linear, linear(0 1)    a sum that is pending on all of these inputs at once may wait: the result is a pending sum
each(0 1)              a sum that is pending on one of them may wait, the others being whole
unread(0)              whatever the values of an input, the result is the same: a pending sum is left as it is
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.proof.execute import Failure, Whole, differs
from tangram.sharding.propagation.axis_choices import waiting


def check_pending(call: OpCall, bound: BoundOp, expected: Whole) -> Iterator[Failure | None]:
    """Every set of inputs as a sum of two: the results must add up to the whole one."""
    yield from _check_unread(call, bound, expected)
    for places in waiting(bound, call):
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


def _check_unread(call: OpCall, bound: BoundOp, expected: Whole) -> Iterator[Failure | None]:
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
