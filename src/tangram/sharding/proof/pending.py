"""Proof of what a rule says of pending sums on the way in: `linear`, `each`.

linear, linear(0 1)    a sum that is pending on all of these inputs at once may wait: the result is a pending sum
each(0 1)              a sum that is pending on one of them may wait, the others being whole
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tangram.sharding.bind import Bound
from tangram.sharding.calls import Call
from tangram.sharding.proof.execute import Failure, Whole, differs


def linear_in(bound: Bound, call: Call) -> list[tuple[int, ...]]:
    """The sets of inputs that may have a pending sum together."""
    found: list[tuple[int, ...]] = []
    there = [i for i, t in enumerate(call.tensors) if t is not None]
    for name, args in bound.rule.notes:
        if name == "linear":
            found.append(tuple(int(a) for a in args) or tuple(there))
        if name == "each":
            found += [(int(a),) for a in args]
    return [places for places in found if all(i in there for i in places)]


def check_pending(call: Call, bound: Bound, expected: Whole) -> Iterator[Failure | None]:
    """Every set of inputs as a sum of two: the results must add up to the whole one."""
    for places in linear_in(bound, call):
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


def _is_number(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
