"""One rule, one call, one way of cutting it: run every rank's part here, put the results together, compare.

    forward     a cut result is put together, a pending one is reduced; both must be what the operator gives whole
    backward    the same cotangent, cut where the result is cut and whole where it is pending; the gradient of a cut
                input is cut, that of a whole one is the sum over the ranks

What parts need of each other, by windows and scans, passes between the ranks' tensors in one graph, and gradients are
taken of all ranks together; elsewhere each rank's is by itself. The operator is reached as a user's model reaches it,
through torch's dispatcher, and backward is torch's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tangram.layout import Mesh, region
from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import Cuts, RankPart, layout_of, part_of, piece, run
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.propagation import halo, neighbour_needs

REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
EXPECTED_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, ZeroDivisionError)


@dataclass(frozen=True)
class Failure:
    """A way of cutting a call that the rule allows and that is wrong."""

    call: str
    cut: str
    """Which factors over which axes."""
    where: str
    """`output 0`, `gradient of input 1`."""
    what: str

    def __str__(self) -> str:
        return f"{self.call} with {self.cut}: {self.where} {self.what}"


@dataclass(frozen=True)
class ReferenceRun:
    """What an operator gives in one process."""

    results: tuple[Any, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    """Of the inputs, by place; None where there is none."""
    differentiated: frozenset[int]
    """The places whose gradients are taken."""


def run_reference(call: OpCall) -> ReferenceRun:
    """Run a call whole, and backward with random cotangents where it has gradients.

    Raises what the operator raises; torch refuses some derivatives, so fewer inputs are tried then.
    """
    places = [i for i, t in enumerate(call.tensors) if t is not None and (t.is_floating_point() or t.is_complex())]
    for wanted in (places, places[:-1], places[:1]):  # a mask, say, comes last
        try:
            return _reference(call, frozenset(wanted))
        except (NotImplementedError, RuntimeError):
            continue
    return _reference(call, frozenset())


def _reference(call: OpCall, target: frozenset[int]) -> ReferenceRun:
    leaves = _leaves(call.tensors, target)
    results = call.with_tensors(leaves).run()
    torch.manual_seed(0)
    cotangents = tuple(torch.randn_like(r) if isinstance(r, Tensor) and r.requires_grad else None for r in results)
    gradients = _gradients(leaves, results, cotangents)
    return ReferenceRun(tuple(_plain(r) for r in results), cotangents, gradients, target)


def _plain(result: Any) -> Any:
    return result.detach() if isinstance(result, Tensor) else result


def _leaves(tensors: Sequence[Tensor | None], target: frozenset[int]) -> list[Tensor | None]:
    return [t if t is None else t.detach().clone().requires_grad_(i in target) for i, t in enumerate(tensors)]


def _gradients(
    leaves: Sequence[Tensor | None], results: Sequence[Any], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(leaves)
    found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))
    return tuple(_dense(next(found)) if t is not None and t.requires_grad else None for t in leaves)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that may be told by its rows."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def check(call: OpCall, bound: BoundOp, cuts: Cuts, mesh: Mesh, expected: ReferenceRun) -> Failure | None:
    """Compare a cut call with the whole one. None: they agree."""
    shown = ", ".join(f"{factor}/{'/'.join(map(str, some))}" for factor, some in cuts.items())
    shown = f"{shown} over {mesh}"

    def failure(where: str, what: str) -> Failure:
        return Failure(str(call), shown, where, what)

    if len(expected.results) != len(bound.outputs):
        return failure("the rule", f"has {len(bound.outputs)} results, the operator {len(expected.results)}")
    parts = [part_of(bound, cuts, mesh, rank) for rank in range(mesh.size)]
    pending = [_pending(bound, cuts, i) for i in range(len(bound.outputs))]
    differentiable = all(op == "sum" for ops in pending for op in ops.values())
    pairs = list(zip(call.tensors, bound.inputs, strict=True))
    leaves: list[list[Tensor | None]] = []
    for part in parts:
        cut = [t if t is None or d is None else piece(t, d, part, bound) for t, d in pairs]
        leaves.append(_leaves(cut, expected.differentiated))
    linked = not bound.linked.isdisjoint(cuts)
    given = halo.exchanged(bound, parts, leaves) if linked else leaves
    found: list[tuple[Any, ...]] = []
    gradients: list[tuple[Tensor | None, ...]] = []
    for part, local in zip(parts, given, strict=True):
        try:
            found.append(run(call, bound, part, local))
            if differentiable and not linked:
                gradients.append(_gradients(local, found[-1], _cotangents(found[-1], expected, bound, part)))
        except EXPECTED_ERRORS as error:
            return failure(f"rank {part.rank}", f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if linked:
        found = halo.joined(bound, parts, found)
    results = [tuple(_plain(r) for r in own) for own in found]
    tried = _Tried(bound, cuts, mesh, parts)
    for i, want in enumerate(expected.results):
        if isinstance(want, Tensor) and not undefined(bound, i):
            wrong = tried.assembled([r[i] for r in results], want, bound.outputs[i], pending[i])
            if wrong:
                return failure(f"output {i}", wrong)
    if linked and differentiable:
        gradients = _joint_gradients(leaves, found, expected, bound, parts)
    wrong = tried.gradients(gradients, expected) if differentiable else None
    return failure(*wrong) if wrong else None


@dataclass(frozen=True)
class _Tried:
    """A way of cutting, to put parts together by."""

    bound: BoundOp
    cuts: Cuts
    mesh: Mesh
    parts: Sequence[RankPart]

    def gradients(self, found: Sequence[Sequence[Tensor | None]], expected: ReferenceRun) -> tuple[str, str] | None:
        """Where the ranks' gradients together are not those of the whole call, and how."""
        for i, (want, dims) in enumerate(zip(expected.gradients, self.bound.inputs, strict=True)):
            if want is None or dims is None:
                continue
            summed = [some for f, some in self.cuts.items() if not any(f in factors for factors in dims)]
            own = [
                torch.zeros_like(piece(want, dims, part, self.bound)) if some[i] is None else some[i]
                for some, part in zip(found, self.parts, strict=True)
            ]
            wrong = self.assembled(own, want, dims, {cut.axis: "sum" for some in summed for cut in some})
            if wrong:
                return f"gradient of input {i}", wrong
        return None

    def assembled(self, found: Sequence[Any], want: Tensor, dims: Dims, pending: dict[str, str]) -> str:
        """What is wrong with parts that together should be `want`; nothing when they are it."""
        if len(dims) != want.ndim:
            return f"has {want.ndim} dims, by the rule {len(dims)}"
        here = {f: some for f, some in self.cuts.items() if any(f in factors for factors in dims)}
        layout = layout_of(dims, want.shape, self.bound, here)
        if layout.shape != tuple(want.shape):
            return f"has shape {list(want.shape)}, by the rule {list(layout.shape)}"
        groups: dict[Any, tuple[Tensor, dict[Any, list[Tensor]]]] = {}
        for part, value in zip(self.parts, found, strict=True):
            if not isinstance(value, Tensor) or value.dtype != want.dtype:
                return f"is {getattr(value, 'dtype', type(value).__name__)} on a rank, not {want.dtype}"
            expected = piece(want, dims, part, self.bound)
            if value.shape != expected.shape:
                return f"has shape {list(value.shape)} on rank {part.rank}, not {list(expected.shape)}"
            replica = tuple((axis, i) for axis, i in sorted(self.mesh.coords(part.rank).items()) if axis not in pending)
            key = (region(layout, self.mesh, part.rank), expected.shape)  # nothing is nothing, but of different shapes
            groups.setdefault(key, (expected, {}))[1].setdefault(replica, []).append(value)
        reduce = REDUCE[next(iter(pending.values()), "sum")]
        for expected, replicas in groups.values():
            for values in replicas.values():
                wrong = differs(functools.reduce(reduce, values), expected)
                if wrong:
                    return wrong
        return ""


def undefined(bound: BoundOp, output: int) -> bool:
    """Whether the values of a result are whatever was in its memory."""
    said = bound.rule.note("undefined")
    return said is not None and (not said or str(output) in said)


def _pending(bound: BoundOp, cuts: Cuts, output: int) -> dict[str, str]:
    """By axis, what is pending of an output."""
    found: dict[str, str] = {}
    for factor, some in cuts.items():
        after = bound.after(factor, output)
        if after not in ("cut", ""):
            found |= {cut.axis: after for cut in some}
    return found


def _joint_gradients(
    leaves: Sequence[Sequence[Tensor | None]],
    results: Sequence[Sequence[Any]],
    expected: ReferenceRun,
    bound: BoundOp,
    parts: Sequence[RankPart],
) -> list[tuple[Tensor | None, ...]]:
    """The gradients of all ranks' leaves in one graph, rank by rank."""
    pairs = zip(results, parts, strict=True)
    cotangents = [c for own, part in pairs for c in _cotangents(own, expected, bound, part)]
    found = _gradients([t for own in leaves for t in own], [r for own in results for r in own], cotangents)
    n = len(leaves[0])
    return [found[i : i + n] for i in range(0, len(found), n)]


def _cotangents(results: Sequence[Any], expected: ReferenceRun, bound: BoundOp, part: RankPart) -> list[Tensor | None]:
    return [
        None if c is None or not (isinstance(r, Tensor) and r.requires_grad) else piece(c, dims, part, bound)
        for c, dims, r in zip(expected.cotangents, bound.outputs, results, strict=True)
    ]


def differs(found: Tensor, want: Tensor) -> str:
    """How much two tensors differ; nothing when they are equal up to rounding."""
    if not want.is_floating_point() and not want.is_complex():
        n = int((found != want).sum())
        return f"differs in {n} of {want.numel()} elements" if n else ""
    # Parts are summed in another order than the whole: an element may be off by a share of the largest one, since small
    # ones can be differences of large ones.
    exact = want.dtype in (torch.float64, torch.complex128)
    relative = 1e-8 if exact else 5e-2 if want.itemsize == 2 else 2e-4
    size = torch.nan_to_num(want.abs().double(), posinf=0.0)
    largest = float(size.max()) if size.numel() else 0.0
    absolute = relative * max(largest, 0.0 if exact else 1.0) / (10 if exact else 1) + 1e-12
    if torch.allclose(found, want, relative, absolute, equal_nan=True):
        return ""
    worst = torch.nan_to_num((found - want).abs().double()).max()
    return f"differs by up to {float(worst):.3g} from values up to {float(torch.nan_to_num(want).abs().max()):.3g}"


def ways(bound: BoundOp, worlds: Iterable[int]) -> Iterable[tuple[Cuts, Mesh]]:
    """Every factor cut over each number of ranks; then two factors, or one twice, in both orders of the axes."""
    factors = bound.cuttable
    for world, factor in itertools.product(worlds, factors):
        yield {factor: (Cut("x"),)}, Mesh.parse(f"x={world}")
    for first, second in itertools.permutations(factors[:3], 2):
        yield {first: (Cut("x"),), second: (Cut("y"),)}, Mesh.parse("x=2 y=3")
    for factor in factors[:2]:
        for order in ("xy", "yx"):
            yield {factor: tuple(Cut(axis) for axis in order)}, Mesh.parse("x=2 y=3")
    yield from _ways_of_linked(bound, factors)


def _ways_of_linked(bound: BoundOp, factors: Sequence[str]) -> Iterable[tuple[Cuts, Mesh]]:
    """The same of factors whose parts need each other, where they do not come first; and by sizes, where those fit."""
    linked = [f for f in factors if f in bound.linked]
    for first, second in itertools.permutations([*linked[:2], *(f for f in factors[:1] if f not in linked)], 2):
        if not {first, second} <= {*factors[:3]}:
            yield {first: (Cut("x"),), second: (Cut("y"),)}, Mesh.parse("x=2 y=3")
    for factor in linked[:2]:
        if factor not in factors[:2]:
            yield {factor: (Cut("x"), Cut("y"))}, Mesh.parse("x=2 y=3")
        n = bound.sizes[factor]
        if factor not in bound.windows or bound.windows[factor].n == n:
            yield {factor: (Cut("x", "sizes", (1, 0, n - 1)),)}, Mesh.parse("x=3")


@dataclass(frozen=True)
class ProofVerdict:
    """What came of one operator."""

    operator: str
    kind: str
    """`proved`, `whole` (nothing can be cut in any call), `refuted`, `no rule`, `crashed`, or `unproved` (it has a
    rule, and nothing on this machine runs it)."""
    factors: int = 0
    """The most that can be cut in one call."""
    cases: int = 0
    seconds: float = 0.0
    why: str = ""
    gradients: Mapping[str, int] = field(default_factory=dict[str, int])
    """By argument: in how many cases its gradient was compared."""
    without: Mapping[str, int] = field(default_factory=dict[str, int])
    """By argument: in how many it has numbers, and torch refuses its derivative."""


def maps(n: int, k: int) -> Iterator[Cut]:
    """Cuts of `n` elements over `k` ranks, by every map; with listed sizes some are nothing."""
    yield Cut("x", "zigzag")
    yield Cut("x", "strided", (2,))
    yield Cut("x", "cyclic")
    yield Cut("x", "sizes", (1, *[0] * (k - 2), n - 1))
    yield Cut("x", "zigzag", (n // 2, 0, n - n // 2))
    yield Cut("x", "cyclic", (2,))
    yield Cut("x", "strided", (3,))


def ways_by_maps(bound: BoundOp, worlds: Sequence[int]) -> Iterator[tuple[Cuts, Mesh]]:
    """Every way of cutting a call by index maps that is to be tried once of a rule.

    A factor by one map, another for each; those whose parts need each other, where a map says what passes between
    ranks, by every map over every number of ranks, two of them by two maps, and one by two maps in turn.
    """
    linked = [f for f in bound.cuttable if f in bound.linked]
    k = worlds[len(worlds) // 2]
    for i, factor in enumerate(f for f in bound.cuttable if f not in linked):
        several = [*maps(_elements(bound, factor), k)]
        yield {factor: (several[i % len(several)],)}, Mesh.parse(f"x={k}")
    for world, factor in itertools.product(worlds, linked):
        for cut in maps(_elements(bound, factor), world):
            if not neighbour_needs.refusal(bound, factor, (cut,)):
                yield {factor: (cut,)}, Mesh.parse(f"x={world}")
    both, mesh = (Cut("x", "zigzag"), Cut("y", "cyclic")), Mesh.parse("x=2 y=3")
    for first, second in itertools.pairwise(linked):
        yield {first: both[:1], second: both[1:]}, mesh
    for factor, order in itertools.product(linked[:1], (both, both[::-1])):
        yield {factor: order}, mesh


def _elements(bound: BoundOp, factor: str) -> int:
    """How many are cut: of what is read by windows, those of the input."""
    return bound.windows[factor].n if factor in bound.windows else bound.sizes[factor]
