"""Mutants of casts: scales that are dropped or mixed up, roundings that are not to the nearest, formats mistaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench._numerics.attention import Steps
from bench._numerics.cases import Case
from bench._numerics.mutant import Applies, Mutant
from tangram.kernels.lab.formats import E2M1, E4M3, E5M2, INT8, Format, cast, values
from tangram.kernels.lab.quant import Along, Operand, Quantised, Rounding, quantise
from tangram.kernels.lab.recipes import Recipe


def _scale_dropped(which: str) -> Steps:
    """One operand's codes are used without their scale: too large by the largest code over the largest element."""

    def spoiled(name: str, x: Tensor, operand: Operand, along: Along, dice: torch.Generator | None) -> Quantised:
        found = quantise(x, operand, along, dice)
        if name != which or operand.format is None:
            return found
        if operand.scaling.per == "static":
            return found._replace(values=found.values * operand.scaling.factor)
        largest = operand.format.largest * (E4M3.largest if operand.scaling.kind == "e4m3" else 1.0)
        return found._replace(values=found.values * (largest / x.abs().max()))

    return Steps(quantise=spoiled)


def _scale_of_neighbour(which: str) -> Steps:
    """One operand's heads are multiplied by the scale of another head."""

    def spoiled(name: str, x: Tensor, operand: Operand, along: Along, dice: torch.Generator | None) -> Quantised:
        found = quantise(x, operand, along, dice)
        if name != which:
            return found
        most = x.abs().amax((2, 3), keepdim=True)
        return found._replace(values=found.values * most.roll(1, 1) / most)

    return Steps(quantise=spoiled)


def _recast(rounding: Rounding) -> Steps:
    """All casts to 8 and 4 bits are done by another function of the scaled values."""

    def spoiled(name: str, x: Tensor, operand: Operand, along: Along, dice: torch.Generator | None) -> Quantised:
        del name
        few = operand.format is not None and operand.format.bits <= 8
        return quantise(x, operand, along, dice, rounding if few else cast)

    return Steps(quantise=spoiled)


def _towards_zero(x: Tensor, to: Format, dice: torch.Generator | None) -> Tensor:
    """The last bits are dropped."""
    near = cast(x, to, dice)
    steps = values(to)
    below = steps[(torch.searchsorted(steps, near.abs()) - 1).clamp_min(0)]
    return torch.where(near.abs() > x.abs(), below.copysign(x), near)


def _carry_lost(x: Tensor, to: Format, dice: torch.Generator | None) -> Tensor:
    """What is rounded up to a power of two falls to the one below: the cast of Triton's interpreter (3.9)."""
    near = cast(x, to, dice)
    carried = (near.abs() > x.abs()) & (torch.frexp(near.abs())[0] == 0.5) & (near.abs() > 2.0**to.lowest)
    return torch.where(carried, near / 2, near)


def _flushed(x: Tensor, to: Format, dice: torch.Generator | None) -> Tensor:
    """What is smaller than the smallest normal number is zero."""
    near = cast(x, to, dice)
    return torch.where(near.abs() < 2.0**to.lowest, torch.zeros_like(near), near)


def _other_format(part: Any, names: tuple[str, ...]) -> Any:
    """Operands of E4M3 with E5M2 in its place."""
    own = {name: getattr(part, name) for name in names if hasattr(part, name)}
    return replace(part, **{n: replace(x, format=E5M2) for n, x in own.items() if x.format == E4M3})


def _format_mistaken(*names: str) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(
        recipe, forward=_other_format(recipe.forward, names), backward=_other_format(recipe.backward, names)
    )


def _is(name: str, to: Format | None = None, *pers: str) -> Applies:
    """Whether an operand has few bits, of a certain format, with certain scales."""

    def applies(recipe: Recipe, case: Case) -> bool:
        operand: Operand = {**vars(recipe.backward), **vars(recipe.forward)}[name]
        few = operand.format is not None and operand.format.bits <= 8
        return few and (to is None or operand.format == to) and (not pers or operand.scaling.per in pers)

    return applies


def _scaled_cast(name: str) -> Applies:
    def applies(recipe: Recipe, case: Case) -> bool:
        operand: Operand = {**vars(recipe.backward), **vars(recipe.forward)}[name]
        return _is(name)(recipe, case) and not (operand.scaling.per == "static" and operand.scaling.factor == 1.0)

    return applies


def _unlike_heads(name: str) -> Applies:
    """Whether the scales of two heads differ by more than a twentieth: else to mix them up is next to right."""
    scaled = _is(name, None, "head", "block", "row", "group")

    def applies(recipe: Recipe, case: Case) -> bool:
        smooth = recipe.smooth_k and name == "k"
        x = {"k": case.k - case.k.mean(2, keepdim=True) if smooth else case.k, "v": case.v, "dv_do": case.grad}[name]
        most = x.abs().amax((2, 3))
        return scaled(recipe, case) and bool((most.roll(1, 1) / most - 1).abs().max() > 0.05)

    return applies


def _corrected(recipe: Recipe, case: Case) -> bool:
    return recipe.smooth_q or (recipe.smooth_k and case.sinks is not None)


def _turned(recipe: Recipe, case: Case) -> bool:
    return recipe.hadamard


def _turned_backward(recipe: Recipe, case: Case) -> bool:
    return recipe.hadamard and _is("dq_k")(recipe, case)


_DROPPED = ("q", "k", "v", "p", "dv_p", "dv_do", "dp_do", "dp_v", "dq_ds", "dq_k", "dk_ds", "dk_q")
CASTS = (
    *(Mutant(f"scale of a cast dropped: {name}", "casts", _scaled_cast(name), steps=_scale_dropped(name))
      for name in _DROPPED),
    *(Mutant(f"scale of a cast of another head: {name}", "casts", _unlike_heads(name), steps=_scale_of_neighbour(name))
      for name in ("k", "v", "dv_do")),
    Mutant("casts drop bits", "casts", _is("q"), steps=_recast(_towards_zero)),
    Mutant("casts lose the carry", "casts", lambda r, c: _is("q")(r, c) and r.forward.q.format != INT8,
           steps=_recast(_carry_lost)),
    Mutant("casts make subnormal numbers zero", "casts", _is("q", E2M1), steps=_recast(_flushed)),
    Mutant("E5M2 for E4M3: queries", "casts", _is("q", E4M3), recipe=_format_mistaken("q")),
    Mutant("E5M2 for E4M3: values", "casts", _is("v", E4M3), recipe=_format_mistaken("v")),
    Mutant("E5M2 for E4M3: probabilities", "casts", _is("p", E4M3), recipe=_format_mistaken("p", "dv_p")),
    Mutant("E5M2 for E4M3: gradients", "casts", _is("dp_do", E4M3),
           recipe=_format_mistaken("dv_do", "dp_do", "dq_ds", "dk_ds")),
    Mutant("smoothing: what was taken away is not added", "smoothing", _corrected,
           steps=Steps(correct=torch.zeros_like)),
    Mutant("Hadamard: queries are not turned", "smoothing", _turned,
           steps=Steps(turn=lambda x: torch.eye(len(x), dtype=x.dtype))),
    Mutant("Hadamard: gradients are not turned back", "smoothing", _turned_backward,
           steps=Steps(turn_back=lambda x: torch.eye(x.shape[0], dtype=x.dtype))),
    Mutant("scores of the backward are not those of the forward", "recipe",
           lambda r, c: r.matched and r.forward.q.format != r.backward.q.format,
           recipe=lambda r: replace(r, matched=False)),
    Mutant("delta of the O that was cast", "recipe", lambda r, c: r.delta == "high" and r.forward.p.format is not None,
           recipe=lambda r: replace(r, delta="low")),
)  # fmt: skip
