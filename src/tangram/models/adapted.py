"""An outline with low-rank adapters (LoRA): frozen products, and beside each two small ones that are trained.

Every product of a block that is no router's and no expert's has an adapter, as "all linear" has in PEFT and in QLoRA
(Hu et al. 2021; Dettmers et al. 2023); embedding, norms and head are frozen. TP ranks cut an adapter where they cut
what it is beside: the second of its products where that is cut by outputs, the first where by inputs.

The trade-off: inputs of frozen products are taken as kept where an adapter needs them, and of experts, which have none,
too: an upper bound.
"""

from __future__ import annotations

from dataclasses import replace

from tangram.errors import UserError
from tangram.models.outline import Block, Kept, Outline, Product

__all__ = ["adapted", "frozen_flops"]


def adapted(outline: Outline, rank: int) -> Outline:
    """With adapters of a rank beside all products; 0: as it is. Raises UserError for other ranks below 1."""
    if rank == 0:
        return outline
    if rank < 0:
        raise UserError(f"{rank} is no rank of adapters: give a number from 1")
    return replace(outline, runs=tuple((_block(block, rank), count) for block, count in outline.runs))


def frozen_flops(outline: Outline) -> float:
    """Of a token's forward, those of products whose weights need no gradients."""
    if not outline.adapted:
        return 0.0
    each = (
        count * 2.0 * one.inputs * one.outputs * (block.per_token if one.experts else 1)
        for block, count in outline.runs
        for one in block.products
        if one.frozen
    )
    return 2.0 * outline.vocab * outline.hidden + sum(each)


def _block(block: Block, rank: int) -> Block:
    beside = [one for one in block.products if not one.experts and (one.cut or one.outputs != block.experts)]
    products = [replace(one, frozen=True) for one in block.products]
    for one in beside:
        products += [
            Product(f"{one.name}: to its rank", one.inputs, rank, "in" if one.cut == "in" else "", one.group),
            Product(f"{one.name}: from its rank", rank, one.outputs, "out" if one.cut == "out" else "", one.group),
        ]
    kept = tuple(Kept(f"{one.name}: of its rank", rank, "tokens", one.group) for one in beside)
    return replace(block, products=tuple(products), kept=block.kept + kept)
