"""A case by our rules: simulated ranks, each operator as the table says, and what the backward pass receives.

The forward bytes are those of the propagation. The gradients come through the copies that stand for collectives; what
their exchange receives is counted on a tape of the operators, by the derived backward: the cotangent of a cut result
is cut, of a pending or whole one whole; the gradient of a cut input is cut, of one that is whole where a factor is cut
a pending sum (whole, of one that is added once to a pending result), and of one that is whole where nothing is cut
whatever the cotangent was. Nothing is exchanged before an operator, or the end, needs it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench._sharding.cases import RANKS, Case, Sample, gradients_of, leaf, unlike
from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, region
from tangram.layout.syntax import VOID, Cut, Dim
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.simulate import SimTensor, SimWorld, cut, together
from tangram.sharding.propagation.axis_choices import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, HALO, REDUCE_SCATTER, received
from tangram.sharding.propagation.propagate import Propagation, PropagationStep

AXIS = "x"
MESH = Mesh.parse(f"{AXIS}={RANKS}")


class State(NamedTuple):
    """How a cotangent lies over the axis: `whole`, `sum` (pending), or `cut`, with what each rank has."""

    kind: str
    regions: tuple[Region, ...] = ()
    dim: int = -1
    """Of a plain cut, which dim is cut."""


WHOLE, SUM = State("whole"), State("sum")


@dataclass
class Tape:
    """The operators that ran, in order; the tensors are kept, so that none takes the place of another."""

    ran: list[tuple[Sequence[SimTensor | None], Propagation | None, list[tuple[Any, Layout | None, bool]]]] = field(
        default_factory=list[Any]
    )

    def note(self, given: Sequence[SimTensor | None], found: Propagation | None, made: Sequence[Any]) -> None:
        """Hear of an operator, or (without one) that a tensor is another one, moved or written."""
        results: list[tuple[Any, Layout | None, bool]] = [
            (one, one.own_layout, one.parts[0].requires_grad) if isinstance(one, SimTensor) else (one, None, False)
            for one in made
        ]
        self.ran.append((given, found, results))


def tried(sample: Sample, which: int, dim: int) -> Case:
    """Run one case. Never raises: what goes wrong is in the verdict."""
    tape = Tape()
    world = SimWorld(MESH, builtin(), on_operator=tape.note)
    leaves = [leaf(t) for t in sample.tensors]
    layouts = [plain(t.shape, dim if i == which else -1) for i, t in enumerate(leaves)]
    try:
        given = [cut(t, layout, world) for t, layout in zip(leaves, layouts, strict=True)]
        results = sample.call(given)
        whole = [together(r) if isinstance(r, SimTensor) else r for r in results]
        gradients, _ = gradients_of(whole, leaves, sample.plain.cotangents)
    except UserError as error:
        return Case("raises", why=str(error))
    except Exception as error:  # noqa: BLE001  whatever it is, the plain call does not raise it
        return Case("raises", why=f"{type(error).__name__}: {error}".partition("\n")[0])
    if wrong := unlike([r.detach() for r in whole], sample.plain.results) or unlike(gradients, sample.plain.gradients):
        return Case("wrong", why=wrong)
    count = Count(tape)
    wanted = [(r, c is not None) for r, c in zip(results, sample.plain.cotangents, strict=True)]
    used = iter(sample.plain.used)
    backward, closing = count.run(
        wanted, [(g, t.requires_grad and next(used, False)) for g, t in zip(given, leaves, strict=True)]
    )
    uncut = all(state(r.own_layout) == WHOLE for r in results if isinstance(r, SimTensor))
    return Case("right", world.moved, backward, closing, uncut and world.moved >= sample.gathered(which))


def plain(shape: Sequence[int], dim: int) -> Layout:
    """The layout of a tensor that is cut over one dim, or over none."""
    return Layout(tuple(Dim(VOID, n, cuts=(Cut(AXIS),) if d == dim else ()) for d, n in enumerate(shape)))


def state(layout: Layout) -> State:
    """How a tensor of this layout lies over the axis."""
    if layout.pending:
        return SUM
    dims = [d for d, one in enumerate(layout.dims) if AXIS in one.axes]
    if not dims:
        return WHOLE
    regions = _regions(layout)
    return State("cut", regions, dims[0] if regions == _regions(plain(layout.shape, dims[0])) else -1)


def _regions(layout: Layout) -> tuple[Region, ...]:
    return tuple(region(layout, MESH, rank) for rank in range(RANKS))


def dual(layout: Layout) -> State:
    """How the cotangent of a tensor of this layout is needed."""
    own = state(layout)
    return WHOLE if own == SUM else own


@dataclass
class Count:
    """The backward pass over a tape: what ranks receive."""

    tape: Tape
    nbytes: float = 0.0
    cotangents: dict[int, list[State]] = field(default_factory=dict[int, list[State]])

    def run(self, results: Sequence[tuple[Any, bool]], leaves: Sequence[tuple[SimTensor, bool]]) -> tuple[float, float]:
        """Bytes of the operators; those of closing. `results`: with whether they have a cotangent."""
        closing = 0.0
        for result, wanted in results:
            if isinstance(result, SimTensor):
                if result.own_layout.pending:
                    closing += RANKS * received(ALL_REDUCE, result.nbytes, RANKS)
                if wanted:
                    self.add(result, dual(result.own_layout))
        for given, found, made in reversed(self.tape.ran):
            if found is not None:
                self.step(given, found, made)
            elif given[0] is not None and id(made[0][0]) in self.cotangents:
                for one in self.cotangents.pop(id(made[0][0])):
                    self.add(given[0], one)
        backward, self.nbytes = self.nbytes, 0.0
        for one, wanted in leaves:
            if wanted and id(one) in self.cotangents:
                self.bring(one, state(one.own_layout))
        return backward, closing + self.nbytes

    def add(self, tensor: SimTensor, one: State) -> None:
        """A share of a tensor's cotangent."""
        known = self.cotangents.setdefault(id(tensor), [])
        if one not in known:
            known.append(one)

    def bring(self, tensor: SimTensor, target: State) -> None:
        """Bring a tensor's cotangent to how it is needed, and take it."""
        shares = self.cotangents.pop(id(tensor))
        nbytes = tensor.numel() * tensor.dtype.itemsize
        others = [one for one in shares if one not in (target, WHOLE)]
        if target == SUM or not others:
            return  # a share that is not pending is the first rank's; what is whole is cut without a word
        if SUM in others:  # what is cut joins what is pending
            self._receive(ALL_REDUCE if target == WHOLE else REDUCE_SCATTER, nbytes)
        else:
            for _ in others:
                what, held = (ALL_GATHER, nbytes / RANKS) if target == WHOLE else (ALL_TO_ALL, nbytes / RANKS)
                self._receive(what, held)

    def _receive(self, what: str, nbytes: float) -> None:
        self.nbytes += RANKS * received(what, nbytes, RANKS)

    def step(
        self,
        given: Sequence[SimTensor | None],
        found: Propagation,
        made: Sequence[tuple[Any, Layout | None, bool]],
    ) -> None:
        """The backward of one operator."""
        outs = [(i, t, lies) for i, (t, lies, wants) in enumerate(made) if wants and id(t) in self.cotangents]
        if not outs:
            return
        choice = found.choices.get(AXIS)
        kind = choice.kind if choice is not None else "whole"
        dims = found.bound.inputs
        if choice is not None and kind == "cut":
            for _, t, lies in outs:
                assert lies is not None
                self.bring(t, dual(lies))
            cuts = [any(choice.factor in some for some in own or ()) for own in dims]
            self.nbytes += RANKS * sum(one.nbytes for one in _exchanged(found))
            once = {int(i) for i in found.bound.rule.note("once") or ()}
            states = [_needed(found, j) if has else WHOLE if j in once else SUM for j, has in enumerate(cuts)]
            self._give(given, found, states)
            return
        shares = {one for _, t, _ in outs for one in self.cotangents[id(t)]}
        if kind == "whole" and SUM in shares:
            for _, t, _ in outs:
                self.bring(t, SUM)
            self._give(given, found, [SUM] * len(given))
            return
        passing = _passing(found, [(i, self.cotangents[id(t)]) for i, t, _ in outs])
        if passing is not None:
            factor, wanted = passing
            for i, t, _ in outs:
                self.bring(t, wanted[i])
            self._give(given, found, [_along(found, j, factor) for j in range(len(given))])
            return
        for _, t, _ in outs:
            self.bring(t, WHOLE)
        waits = choice.inputs if choice is not None and kind == "waits" else range(len(given))
        self._give(given, found, [WHOLE if j in waits else SUM for j in range(len(given))])

    def _give(self, given: Sequence[SimTensor | None], found: Propagation, states: Sequence[State]) -> None:
        for j, (t, one) in enumerate(zip(given, states, strict=True)):
            tensor = found.call.tensors[j]
            if t is not None and tensor is not None and t.parts[0].requires_grad:
                self.add(t, one)


def _exchanged(found: Propagation) -> list[PropagationStep]:
    """What an operator reads of other parts while it runs: their gradients go the same way back."""
    return [*found.totals, *(one for relayout in found.relayouts for one in relayout.steps if one.kind == HALO)]


def _needed(found: Propagation, place: int) -> State:
    layout = found.inputs[place]
    return WHOLE if layout is None else state(layout)


def _passing(found: Propagation, shares: Sequence[tuple[int, list[State]]]) -> tuple[str, dict[int, State]] | None:
    """A factor by which the cotangents of all results are cut already, though forward nothing was; how each lies."""
    factors: set[str] = set()
    wanted: dict[int, State] = {}
    for i, own in shares:
        cuts = [one for one in own if one.kind == "cut"]
        if len(cuts) != 1 or SUM in own or cuts[0].dim < 0 or i >= len(found.bound.outputs):
            return None
        dims = found.bound.outputs[i]
        if cuts[0].dim >= len(dims):
            return None
        held = dims[cuts[0].dim]
        major = next(iter(held), "")
        if major not in found.bound.cuttable or (len(held) > 1 and found.bound.sizes[major] % RANKS):
            return None
        factors.add(major)
        wanted[i] = cuts[0]
    return (factors.pop(), wanted) if len(factors) == 1 else None


def _along(found: Propagation, place: int, factor: str) -> State:
    """How the gradient of an input lies when a factor is cut."""
    dims, tensor = found.bound.inputs[place], found.call.tensors[place]
    if dims is None or tensor is None:
        return WHOLE
    for d, own in enumerate(dims):
        if factor in own:
            if own.index(factor) == 0 and (len(own) == 1 or not found.bound.sizes[factor] % RANKS):
                return state(plain(tensor.shape, d))
            return SUM  # of zeros but for a rank's own
    return SUM
