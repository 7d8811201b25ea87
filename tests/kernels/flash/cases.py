"""Cases of the laboratory as the kernels take them: spans for masks, bfloat16 for float64."""

import torch

from bench._numerics.cases import Case, Results
from tangram.kernels.attention import Heads, Partial
from tangram.kernels.flash import emulated, launch
from tangram.kernels.flash.launch import Call, Tile
from tangram.kernels.flash.spans import Spans, by_numbers, in_order
from tangram.kernels.lab.recipes import Recipe


def spans_of(case: Case) -> Spans:
    """Of a case whose mask is said in words."""
    (S, T), mask, rows = case.visible.shape, case.mask, len(case.q)  # noqa: N806
    if not mask.documents:
        return in_order(S, T, mask.causal, mask.window, rows)
    lengths = torch.tensor(mask.documents)
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    numbers = torch.stack([begins, torch.arange(T)], -1).expand(rows, -1, -1)
    return by_numbers(numbers, numbers, mask.window, mask.causal)


def heads_of(case: Case) -> Heads:
    return Heads(*(x.bfloat16() for x in (case.q, case.k, case.v)))


def by_kernels(
    case: Case, recipe: Recipe, spans: Spans, tile: Tile | None = None
) -> tuple[Results, torch.Tensor, Partial]:
    """Results, what the sinks are owed (H,), and the forward's."""
    call = Call(recipe, spans, case.scale, None if case.sinks is None else case.sinks.float(), tile)
    whole = launch.forward(heads_of(case), call)
    found, owed = launch.backward(case.grad.bfloat16(), heads_of(case), whole, call)
    return Results(whole.out.double(), *(x.double() for x in found)), -owed.sum((0, 2)), whole


def by_emulation(case: Case, recipe: Recipe, spans: Spans) -> tuple[Results, torch.Tensor, Partial]:
    sinks = None if case.sinks is None else case.sinks.float()
    whole = emulated.forward(heads_of(case), spans, sinks, case.scale, recipe)
    found, owed = emulated.backward(case.grad.bfloat16(), heads_of(case), whole, spans, sinks, case.scale, recipe)
    return Results(whole.out.double(), *(x.double() for x in found)), -owed.sum((0, 2)), whole
