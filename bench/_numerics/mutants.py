"""Wrong kernels: mistakes that are made in real ones, each put into a recipe's emulation or into its results."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench._numerics.attention import Steps
from bench._numerics.cases import Case, Results, summed, visible
from bench._numerics.miscasts import CASTS
from bench._numerics.mutant import Mutant
from tangram.kernels.lab import recipes
from tangram.kernels.lab.formats import BF16, cast
from tangram.kernels.lab.recipes import Freedom, Recipe

# ---------------------------------------------------------------- results


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Results], Results]:
    return lambda results: Results(*(change(one) for one in results))


def _one(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[Results], Results]:
    return lambda results: Results(*(change(x) if i == index else x for i, x in enumerate(results)))


def _memory_transposed(x: Tensor) -> Tensor:
    """Heads and tokens taken for each other: written as (B, H, S, E), read as (B, S, H, E)."""
    return x.transpose(1, 2).reshape(x.shape)


def _unwritten_tail(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :-3], torch.zeros_like(x[:, :, -3:])], 2)


def _swapped_keys(results: Results) -> Results:
    return Results(results.o, results.dq, results.dv, results.dk)


def _several_heads(recipe: Recipe, case: Case) -> bool:
    return case.k.shape[1] > 1


def _same_widths(recipe: Recipe, case: Case) -> bool:
    return case.k.shape == case.v.shape


_RESULTS = (
    Mutant("all zeros", "results", results=_each(torch.zeros_like)),
    *(Mutant(f"{name} zeros", "results", results=_one(i, torch.zeros_like)) for i, name in enumerate(Results._fields)),
    Mutant("all negated", "results", results=_each(torch.neg)),
    *(Mutant(f"{name} negated", "results", results=_one(i, torch.neg)) for i, name in enumerate(Results._fields)),
    Mutant("tokens reversed", "results", results=_each(lambda x: x.flip(2))),
    Mutant("tokens moved by one", "results", results=_each(lambda x: x.roll(1, 2))),
    Mutant("channels reversed", "results", results=_each(lambda x: x.flip(3))),
    Mutant("heads and tokens transposed", "results", _several_heads, results=_each(_memory_transposed)),
    Mutant("heads swapped", "results", _several_heads, results=_each(lambda x: x.roll(1, 1))),
    Mutant("dK and dV swapped", "results", _same_widths, results=_swapped_keys),
    Mutant("last three tokens not written", "results", results=_each(_unwritten_tail)),
    Mutant("doubled", "results", results=_each(lambda x: 2 * x)),
    Mutant("one hundredth too large", "results", lambda r, c: r.name == "bf16", results=_each(lambda x: 1.01 * x)),
    Mutant("a NaN", "results", results=_each(lambda x: x.index_fill(3, torch.tensor(0), torch.nan))),
)


# ---------------------------------------------------------------- masks, scales, sinks


def _mask(**changes: Any) -> Callable[[Case], Tensor]:
    def spoiled(case: Case) -> Tensor:
        S, T, mask = case.q.shape[2], case.k.shape[2], case.mask
        own: dict[str, Any] = {"causal": mask.causal, "window": mask.window, "documents": mask.documents, "ahead": 0}
        window = own["window"] + changes.get("wider", 0)
        given = {key: value for key, value in changes.items() if key != "wider"}
        return visible(S, T, **(own | {"window": window} | given))

    return spoiled


def _with(mask: Callable[[Case], Tensor]) -> Callable[[Case], Case]:
    return lambda case: case.with_mask(mask(case))


def _shifted_documents(case: Case) -> Tensor:
    """Every border between documents one token late."""
    first, *rest = case.mask.documents
    if rest:
        rest[-1] -= 1
    return _mask(documents=(first + 1, *rest))(case)


def _causal(recipe: Recipe, case: Case) -> bool:
    return case.mask.causal


def _windowed(recipe: Recipe, case: Case) -> bool:
    return 1 < case.mask.window < case.k.shape[2]


def _packed(recipe: Recipe, case: Case) -> bool:
    return len(case.mask.documents) > 1 and min(case.mask.documents) > 1


def _sinks(recipe: Recipe, case: Case) -> bool:
    return case.sinks is not None


def _unlike_sinks(case: Case) -> Case:
    assert case.sinks is not None
    return replace(case, sinks=case.sinks.roll(1))


def _grouped(recipe: Recipe, case: Case) -> bool:
    return case.k.shape[1] > 1 and case.rows > 1


def _modulo(x_BGT: Tensor, heads: int) -> Tensor:
    return x_BGT.repeat(1, heads // x_BGT.shape[1], 1, 1)


def _first_of_group(x_BHT: Tensor, groups: int) -> Tensor:
    return x_BHT[:, :: x_BHT.shape[1] // groups]


def _mean_of_group(x_BHT: Tensor, groups: int) -> Tensor:
    return summed(x_BHT, groups) * (groups / x_BHT.shape[1])


_MASKS = (
    Mutant("mask: a query does not see itself", "mask", _causal, case=_with(_mask(ahead=-1))),
    Mutant("mask: one token ahead is seen", "mask", _causal, case=_with(_mask(ahead=1))),
    Mutant("mask: not causal", "mask", _causal, case=_with(_mask(causal=False))),
    Mutant("mask: forgotten in the backward", "mask", _causal, backward_mask=_mask(causal=False)),
    Mutant("mask: one ahead in the backward", "mask", _causal, backward_mask=_mask(ahead=1)),
    Mutant("window: one key more", "mask", _windowed, case=_with(_mask(wider=1))),
    Mutant("window: one key less", "mask", _windowed, case=_with(_mask(wider=-1))),
    Mutant("window: forgotten in the backward", "mask", _windowed, backward_mask=_mask(window=0)),
    Mutant("documents: not kept apart", "mask", _packed, case=_with(_mask(documents=()))),
    Mutant("documents: borders one token late", "mask", _packed, case=_with(_shifted_documents)),
    Mutant("sink: missing", "sinks", _sinks, case=lambda case: replace(case, sinks=None)),
    Mutant("sink: of another head", "sinks", _sinks, case=_unlike_sinks),
    Mutant("heads of keys: modulo for division", "groups", _grouped, steps=Steps(share=_modulo)),
    Mutant("gradients of keys: a group's first head", "groups", _grouped, steps=Steps(sum_group=_first_of_group)),
    Mutant("gradients of keys: mean of a group", "groups", _grouped, steps=Steps(sum_group=_mean_of_group)),
    Mutant("scale: forgotten", "scale", case=lambda case: replace(case, scale=1.0)),
    Mutant("scale: 1 / width for its root", "scale", case=lambda case: replace(case, scale=1 / case.q.shape[-1])),
    Mutant("scale: of a width filled up", "scale", case=lambda case: replace(case, scale=case.scale / 1.25**0.5)),
    Mutant("scale: forgotten in dQ", "scale", steps=Steps(scale=lambda n, s: 1.0 if n == "dq" else s)),
    Mutant("scale: forgotten in dK", "scale", steps=Steps(scale=lambda n, s: 1.0 if n == "dk" else s)),
    Mutant("scale: twice in dQ", "scale", steps=Steps(scale=lambda n, s: s * s if n == "dq" else s)),
    Mutant("exponents of two, logarithm of e forgotten", "softmax", steps=Steps(exponent=torch.exp2)),
)  # fmt: skip


# ---------------------------------------------------------------- softmax and gradients


def _stale(old: Tensor, tile: Tensor) -> Tensor:
    """The first tile's maximum is kept where there is one."""
    return torch.where(old == -torch.inf, tile, old)


def _ones(old: Tensor, new: Tensor) -> Tensor:
    return torch.where(old == -torch.inf, torch.zeros_like(old), torch.ones_like(old))


def _several_tiles(recipe: Recipe, case: Case) -> bool:
    return case.k.shape[2] > Freedom().tile


def _no_tail(tiles: list[slice]) -> list[slice]:
    return tiles[:-1] if len(tiles) > 1 else tiles


def _twice(tiles: list[slice]) -> list[slice]:
    return [*tiles[:1], *tiles]


def _bracket(p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    return p * dp - delta


def _bf16_sums(name: str, a: Tensor, b: Tensor, by: recipes.Accumulator) -> Tensor:
    """Each sixteen products are added to a number of bfloat16."""
    del name, by
    total = torch.zeros_like(a[..., :1] @ b[..., :1, :])
    for i in range(0, a.shape[-1], 16):
        total = cast(total + a[..., i : i + 16] @ b[..., i : i + 16, :], BF16)
    return total


def _last_product(name: str, a: Tensor, b: Tensor, by: recipes.Accumulator) -> Tensor:
    """Of dK and dV the last 8 queries are left out."""
    keep = a.shape[-1] - 8 if name in {"dk", "dv"} and a.shape[-1] > 8 else a.shape[-1]
    return recipes.product(a[..., :keep], b[..., :keep, :], by)


def _transposed_scores(name: str, a: Tensor, b: Tensor, by: recipes.Accumulator) -> Tensor:
    return recipes.product(a.mT if name == "dk" else a, b, by)


def _square(recipe: Recipe, case: Case) -> bool:
    return case.q.shape[2] == case.k.shape[2]


def _ungiven_sums(lse: Tensor) -> Tensor:
    """One row's sums given to the next."""
    return lse.roll(1, 2)


_SOFTMAX = (
    Mutant("softmax: a stale maximum", "softmax", _several_tiles,
           steps=Steps(maximum=_stale, exponent=lambda x: torch.exp(x.clamp_max(0.0)))),
    Mutant("softmax: O is not rescaled", "softmax", _several_tiles, steps=Steps(rescale_out=_ones)),
    Mutant("softmax: sums are not rescaled", "softmax", _several_tiles, steps=Steps(rescale_sum=_ones)),
    Mutant("softmax: the last tile is left out", "softmax", _several_tiles, steps=Steps(tiles=_no_tail)),
    Mutant("softmax: the first tile is taken twice", "softmax", _several_tiles, steps=Steps(tiles=_twice)),
    Mutant("softmax: O is not divided", "softmax", steps=Steps(normalise=lambda out, total: out)),
    Mutant("backward: sums of the row before", "backward", steps=Steps(sums=_ungiven_sums)),
    Mutant("backward: delta dropped", "backward", steps=Steps(delta=lambda g, o: torch.zeros_like(g[..., :1]))),
    Mutant("backward: half of delta", "backward", steps=Steps(delta=lambda g, o: (g * o / 2).sum(-1, keepdim=True))),
    Mutant("backward: delta of the row before", "backward",
           steps=Steps(delta=lambda g, o: (g * o).sum(-1, keepdim=True).roll(1, 2))),
    Mutant("backward: P dP - delta", "backward", steps=Steps(scores_owed=_bracket)),
    Mutant("backward: P forgotten in dS", "backward", steps=Steps(scores_owed=lambda p, dp, d: dp - d)),
    Mutant("backward: dS transposed for dK", "backward", _square, steps=Steps(product=_transposed_scores)),
    Mutant("backward: last queries left out of dK and dV", "backward", steps=Steps(product=_last_product)),
    Mutant("sums in bfloat16", "arithmetic", steps=Steps(product=_bf16_sums)),
)  # fmt: skip
MUTANTS = (*_RESULTS, *_MASKS, *_SOFTMAX, *CASTS)
