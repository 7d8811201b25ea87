"""Proof of decompositions: every dim of a call cut, the operator carried out step by step on simulated ranks, compared.

    sizes       each dim of each tensor over 2, 3 and 5 ranks; one over two axes in both orders; two dims over two axes;
                a pending sum
    values      those of torch's samples, drawn anew, rounded (so that maxima meet and elements are 0), large (so that
                powers of e overflow), other types
    results     and gradients of every input, beside those of the whole call

Tensors of the shape of the one that is cut are cut alike. The decomposition is taken whatever it moves, for samples
are so small that gathering them may be cheaper.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.decompose import decomposition
from tangram.sharding.ops.rule_table import RuleTable, builtin
from tangram.sharding.proof.execute import EXPECTED_ERRORS, Failure, ProofVerdict, ReferenceRun, differs, run_reference
from tangram.sharding.proof.samples import samples
from tangram.sharding.proof.simulate import SimTensor, SimWorld, carried_out, cut, together

WORLDS = (2, 3, 5)
CALLS = 4
"""Of an operator that are tried."""
_RMS_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
COMPOSITE: Mapping[str, Callable[[], list[OpCall]]] = {
    "_fused_rms_norm": lambda: [
        OpCall.of(torch.ops.aten._fused_rms_norm.default, (_some(5, 6), [6], _some(6), 1e-5), {}),
        OpCall.of(torch.ops.aten._fused_rms_norm.default, (_some(5, 3, 4), [3, 4], None, None), {}),
    ],
    "_fused_rms_norm_backward": lambda: [
        OpCall.of(_RMS_BACKWARD, (_some(5, 6), _some(5, 6), [6], _some(5, 1), _some(6), [True, True]), {}),
        OpCall.of(_RMS_BACKWARD, (_some(5, 3, 4), _some(5, 3, 4), [3, 4], _some(5, 1, 1), None, [True, False]), {}),
        OpCall.of(_RMS_BACKWARD, (_some(5, 2, 6), _some(5, 2, 6), [6], _some(5, 2, 1), _some(6), [True, True]), {}),
    ],
}
"""Calls of operators that a processor takes apart before they are seen, or has not at all, and a GPU has."""
LARGE = 1000.0
VALUES = frozenset({"nll_loss_backward", "nll_loss2d_backward", "torch_nn._linear_cross_entropy_batch_chunked"})
"""Operators whose own gradient supposes that their arguments belong together, or is a result of theirs that is asked
for by arguments: of these the results are compared."""
Layouts = list[Layout | None]


def rms_norm_backward(call: OpCall) -> tuple[Tensor | None, ...]:
    """The gradients of an RMS norm and of its weight, from the reciprocal roots that are given: by hand."""
    y, x, rstd, w = (None if t is None else t.double() for t in call.tensors)
    assert y is not None
    assert x is not None
    assert rstd is not None
    first, shape = x.ndim - len(call.arguments["normalized_shape"]), call.tensors[1]
    assert shape is not None
    inner, outer = [*range(first, x.ndim)], [*range(first)]
    scaled = y if w is None else y * w
    n = x[(0,) * first].numel()
    found = rstd * scaled - x * rstd**3 * (scaled * x).sum(inner, keepdim=True) / n
    weight = (y * x * rstd).sum(outer) if w is not None and call.arguments["output_mask"][1] else None
    return found.to(shape.dtype), None if weight is None else weight.to(shape.dtype)


BY_HAND: Mapping[str, Callable[[OpCall], tuple[Tensor | None, ...]]] = {"_fused_rms_norm_backward": rms_norm_backward}
"""What operators give that no processor runs."""


def verdict(name: str, calls: Sequence[OpCall], table: RuleTable | None = None) -> ProofVerdict:
    """Prove the decomposition of one operator with some calls. Never raises: what goes wrong is in the verdict."""
    begun, cases, most = time.monotonic(), 0, 0
    calls = [*calls, *(COMPOSITE[name]() if name in COMPOSITE else ())]
    shown = f"{name} in steps"
    for call in _chosen(calls):
        for variant, worlds in _variants(call):
            expected = _expected(variant)
            for layouts, mesh in ways(variant, worlds) if expected else ():
                assert expected is not None
                failure = check(variant, layouts, mesh, expected, table)
                cases += 1
                most = max(most, sum(n > 1 for t in variant.tensors if t is not None for n in t.shape))
                if failure is not None:
                    return ProofVerdict(shown, "refuted", most, cases, time.monotonic() - begun, str(failure))
    return ProofVerdict(shown, "proved" if cases else "whole", most, cases, time.monotonic() - begun)


def _some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _chosen(calls: Sequence[OpCall]) -> list[OpCall]:
    """The calls that are decomposed: those with most dims to cut, of as many different numbers of dims as there are."""
    fit = [call for call in calls if decomposition(call) is not None and any(_cuttable(call))]
    alike: dict[tuple[int, ...], int] = {}
    ranked: list[tuple[int, int, OpCall]] = []
    for i, call in enumerate(fit):
        key = tuple(-1 if t is None else t.ndim for t in call.tensors)
        alike[key] = alike.get(key, 0) + 1
        ranked.append((alike[key], i, call))
    return [call for _, _, call in sorted(ranked, key=lambda one: one[:2])][:CALLS]


def _cuttable(call: OpCall) -> Iterator[bool]:
    return (n > 1 for t in call.tensors if t is not None for n in t.shape)


def _variants(call: OpCall) -> Iterator[tuple[OpCall, Sequence[int]]]:
    other = samples.drawn(call, 1)
    yield call, WORLDS
    yield other, (3,)
    yield other.with_tensors([_rounded(t) for t in other.tensors]), (2,)
    if "backward" not in call.name:
        yield other.with_tensors([_large(t) for t in other.tensors]), (2,)
    for spelled in samples.respelled(call):
        yield spelled, (2,)
    typed = any(isinstance(value, torch.dtype) for value in call.arguments.values())
    for dtype in () if typed else (torch.bfloat16, torch.int64):
        cast = samples.of_dtype(call, dtype)
        if cast is not None and decomposition(cast) is not None:
            yield cast, (3,)


def _rounded(tensor: Tensor | None) -> Tensor | None:
    return tensor.round() if tensor is not None and tensor.is_floating_point() else tensor


def _large(tensor: Tensor | None) -> Tensor | None:
    return tensor * LARGE if tensor is not None and tensor.is_floating_point() else tensor


def _expected(call: OpCall) -> ReferenceRun | None:
    if call.name in BY_HAND:
        made, n = BY_HAND[call.name](call), len(call.tensors)
        return ReferenceRun(made, (None,) * len(made), (None,) * n, frozenset())
    try:
        found = run_reference(call)
        return replace(found, gradients=(None,) * len(found.gradients)) if call.name in VALUES else found
    except EXPECTED_ERRORS:  # of this type, say, the operator has no kernel
        return None


def ways(call: OpCall, worlds: Sequence[int]) -> Iterator[tuple[Layouts, Mesh]]:
    """Layouts of a call's tensors, and the mesh."""
    for world in worlds:
        for i, tensor in enumerate(call.tensors):
            for d, n in enumerate(tensor.shape if tensor is not None else ()):
                if n > 1:
                    yield _cut_alike(call, i, {d: ("x",)}), Mesh.parse(f"x={world}")
    first = call.tensors[0]
    large = [d for d, n in enumerate(first.shape) if n > 1] if first is not None else []
    both = Mesh.parse("x=2 y=3")
    if len(worlds) > 1:
        for d in large:
            for axes in ("xy", "yx"):
                yield _cut_alike(call, 0, {d: tuple(axes)}), both
        for d, other in itertools.pairwise(large):
            yield _cut_alike(call, 0, {d: ("x",), other: ("y",)}), both
        if first is not None and first.is_floating_point():
            plain = _cut_alike(call, 0, {})
            pending = Layout(plain[0].dims, (), (("sum", "x"),)) if plain[0] is not None else None
            yield [pending, *plain[1:]], Mesh.parse("x=3")


def _cut_alike(call: OpCall, which: int, cuts: dict[int, tuple[str, ...]]) -> Layouts:
    """A tensor cut, and all of its shape with it."""
    own = call.tensors[which]
    assert own is not None
    return [None if t is None else _layout(t.shape, cuts if t.shape == own.shape else {}) for t in call.tensors]


def _layout(shape: Sequence[int], cuts: dict[int, tuple[str, ...]]) -> Layout:
    return Layout(tuple(Dim(VOID, n, cuts=tuple(map(Cut, cuts.get(d, ())))) for d, n in enumerate(shape)))


def check(
    call: OpCall, layouts: Sequence[Layout | None], mesh: Mesh, expected: ReferenceRun, table: RuleTable | None = None
) -> Failure | None:
    """Compare a call that goes by its decomposition with the whole one. None: they agree."""
    shown = f"inputs {', '.join(map(str, layouts))} over {mesh}"
    world = SimWorld(mesh, table or builtin(), forced=True)
    tensors = zip(call.tensors, layouts, strict=True)
    leaves = [
        None if t is None else t.detach().clone().requires_grad_(i in expected.differentiated)
        for i, (t, _) in enumerate(tensors)
    ]
    given = [
        t if t is None or layout is None else cut(t, layout.bind(tuple(t.shape)), world)
        for t, layout in zip(leaves, layouts, strict=True)
    ]
    try:
        made = carried_out(call.with_tensors(given), world)  # not through torch, which would take some apart itself
        results = [together(r) if isinstance(r, SimTensor) else r for r in tree_leaves(made, lambda one: one is None)]
        gradients = _gradients(leaves, results, expected)
    except (UserError, *EXPECTED_ERRORS) as error:
        return Failure(str(call), shown, "a step", f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if not world.decomposed:
        return Failure(str(call), shown, "the operator", "does not go by its decomposition")
    for i, (found, want) in enumerate(zip(results, expected.results, strict=True)):
        if isinstance(want, Tensor) and (wrong := _unlike(found, want)):
            return Failure(str(call), shown, f"output {i}", wrong)
        if (
            isinstance(found, Tensor)
            and found.requires_grad
            and expected.differentiated
            and expected.cotangents[i] is None
        ):
            return Failure(str(call), shown, f"output {i}", "has a gradient, which torch does not give")
    for i, (before, found, want) in enumerate(zip(call.tensors, given, _written(call), strict=True)):
        if want is None or before is None or torch.equal(before, want):
            continue
        if wrong := _unlike(together(found) if isinstance(found, SimTensor) else found, want):
            return Failure(str(call), shown, f"input {i}, which is written,", wrong)
    for i, (found, want) in enumerate(zip(gradients, expected.gradients, strict=True)):
        if want is not None and (wrong := _unlike(torch.zeros_like(want) if found is None else found, want)):
            return Failure(str(call), shown, f"gradient of input {i}", wrong)
    return None


def _written(call: OpCall) -> Sequence[Tensor | None]:
    """The tensors of a call after it: torch does not say of all operators what they write."""
    after = [None if t is None else t.detach().clone() for t in call.tensors]
    if call.name in BY_HAND:
        return after
    call.with_tensors(after).run(in_place=True)
    return after


def _gradients(
    leaves: Sequence[Tensor | None], results: Sequence[Tensor | None], expected: ReferenceRun
) -> list[Tensor | None]:
    pairs = [
        (r, c)
        for r, c in zip(results, expected.cotangents, strict=True)
        if c is not None and r is not None and r.requires_grad
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in leaves]


def _unlike(found: Tensor | None, want: Tensor) -> str:
    if found is None:
        return "is absent"
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"is {found.dtype} {list(found.shape)}, not {want.dtype} {list(want.shape)}"
    return differs(found.detach(), want)
