"""An operator of a derivation in a line: its rule in the notation, with the cuts on the factors.

    mm       m k/tp, k/tp n -> m n sum:tp
    view     a b/dp (c/tp d) -> a b/dp c/tp d

Factors that the rule calls by no name of their own (`...`, views) are letters; what bears `^` must be whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase

from tangram.sharding.derive.derive import Derived, Over
from tangram.sharding.derive.explain.show import folded_name, short
from tangram.sharding.derive.layouts import layout_of
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import SUM, State
from tangram.sharding.ops.bind import Dims

_VIEWS = "view _unsafe_view reshape transpose permute t expand unsqueeze squeeze slice select alias clone contiguous"
VIEWS = frozenset(f"{_VIEWS} detach _to_copy split split_with_sizes chunk".split())
"""Operators that compute nothing: what a reader may pass over."""


def title(step: FoldedStep) -> str:
    """The operator's name without its namespace and overload, as `mm`."""
    return step.node.operator.name().partition("::")[2].partition(".")[0]


def line_of(source: str) -> str:
    """A source line without its folders: `modeling_llama.py:254`."""
    return source.rpartition("/")[2]


def written(step: FoldedStep, axes: Sequence[Over]) -> str:
    """The rule of an operator in this call, with what each axis cuts."""
    bound, names = step.bound, factor_names(step)
    cuts: dict[str, list[tuple[str, int]]] = {}
    for over in axes:
        label = over.communication[step.number].label
        if label is not None:
            cuts.setdefault(label.factor, []).append((over.axis, label.inner))

    def factor(name: str) -> str:
        shown = names[name] + "^" * (name in bound.uncut)
        return _cut(shown, cuts.get(name, ()))

    def operand(dims: Dims, shape: Sequence[int], states: Mapping[str, State]) -> str:
        texts: list[str] = []
        for n, factors in zip(shape, dims, strict=True):
            inner = " ".join(map(factor, factors))
            texts.append(f"({inner})" if len(factors) > 1 else inner or ("1" if n == 1 else "_"))
        return " ".join([*texts, *(f"sum:{axis}" for axis, state in states.items() if state == SUM)]) or "()"

    taken = [
        operand(dims, tensor.shape, states_in(step, axes, i))
        for i, (dims, tensor) in enumerate(zip(bound.inputs, step.call.tensors, strict=False))
        if dims is not None and tensor is not None
    ]
    made = [
        operand(dims, _shape(dims, bound.sizes), states_out(step, axes, i))
        for i, dims in enumerate(bound.outputs[: len(step.outputs)])
    ]
    return f"{', '.join(taken)} -> {', '.join(made)}"


def states_in(step: FoldedStep, axes: Sequence[Over], place: int) -> dict[str, State]:
    """By axis, how an operator needs one of its tensors, where it reads it."""
    found = {over.axis: over.communication[step.number].inputs[place] for over in axes}
    return {axis: state for axis, state in found.items() if state is not None}


def states_out(step: FoldedStep, axes: Sequence[Over], output: int) -> dict[str, State]:
    """By axis, how an operator gives one of its results."""
    return {over.axis: over.communication[step.number].outputs[output] for over in axes}


def _shape(dims: Dims, sizes: Mapping[str, int]) -> list[int]:
    """Of dims without factors 1, as good as any."""
    return [max((sizes[f] for f in factors), default=1) for factors in dims]


def factor_names(step: FoldedStep) -> dict[str, str]:
    """By factor, what a person reads: its own name where it is a word, else the next letter."""
    bound = step.bound
    every = [f for dims in (*bound.inputs, *bound.outputs) for dim in dims or () for f in dim]
    own = {f: f for f in every if f.isidentifier() and not (f[0] == "v" and f[1:].isdigit())}
    letters = (x for x in (*ascii_lowercase, *(f"x{i}" for i in range(len(every)))) if x not in own.values())
    found = dict(own)
    for f in every:
        if f not in found:
            found[f] = next(letters)
    return found


def _cut(name: str, cuts: Sequence[tuple[str, int]]) -> str:
    """A factor, cut by axes each after so many blocks: `d/tp`, `(4/dp d/tp)`."""
    borders = sorted({1, *(inner for _, inner in cuts)})
    texts: list[str] = []
    for start, end in zip(borders, [*borders[1:], 0], strict=True):
        own = "".join(f"/{axis}" for axis, inner in cuts if inner == start)
        texts.append((str(end // start) if end else name) + own)
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


def layout_text(shape: Sequence[int], states: Mapping[str, State]) -> str:
    """A layout, and over which axes the gradient is a pending sum."""
    several = [axis for axis, state in states.items() if state.kind == "several"]
    pending = f" (grad {' '.join(f'sum:{axis}' for axis in several)})" if several else ""
    return (short(layout_of(shape, states)) or "()") + pending


def module_of(found: Derived, step: FoldedStep) -> str:
    """The module that runs an operator, equal layers as one."""
    return folded_name(found, step.node.module) or "the model"
