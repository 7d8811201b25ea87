"""An outline with low-rank adapters (LoRA): frozen products, and beside each two small ones that are trained.

Every product of a block that is no router's has an adapter, as "all linear" has in PEFT and in QLoRA (Hu et al. 2021;
Dettmers et al. 2023), or those that are named; embedding, norms and head are frozen. TP ranks cut an adapter where they
cut what it is beside: the second of its products where that is cut by outputs, the first where by inputs.

The trade-off: inputs of frozen products are taken as kept where an adapter needs them, and of those that have none,
too, and adapters of some layers are taken to be in all: upper bounds. Of experts that lie in one tensor the work is
that of their tokens, not of adding both factors to all experts' weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tangram.errors import UserError
from tangram.models.outlines.outline import Block, Group, Kept, Outline, Product

ALL = "all-linear"
WHOLE = ""
ROOMS = {
    True: ("self_attn", "attn", "attention", "self_attention"),
    False: ("mlp", "feed_forward", "mlp.shared_expert"),
}
OF_EXPERTS = tuple(f"{room}.experts" for room in ("mlp", "feed_forward", "block_sparse_moe", "mixer"))
"""What attention and MLPs are called in models."""
MODULES: Mapping[str, Mapping[str, str]] = {
    "qkv": {
        "q_proj": "q", "k_proj": "k", "v_proj": "v",
        **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "linear_qkv"), WHOLE),
    },
    "q down": dict.fromkeys(("q_a_proj", "linear_q_down_proj"), WHOLE),
    "q up": dict.fromkeys(("q_b_proj", "q_proj", "linear_q_up_proj", "linear_q_proj"), WHOLE),
    "kv down": dict.fromkeys(("kv_a_proj_with_mqa", "linear_kv_down_proj"), WHOLE),
    "kv up": dict.fromkeys(("kv_b_proj", "linear_kv_up_proj"), WHOLE),
    "out": dict.fromkeys(("o_proj", "out_proj", "c_proj", "dense", "linear_proj"), WHOLE),
    "up": {
        "gate_proj": "gate", "up_proj": "up",
        **dict.fromkeys(("w1", "w2"), "gate"),  # Qwen's first models, whose w2 is the gate
        **dict.fromkeys(("gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "linear_fc1"), WHOLE),
    },
    "down": dict.fromkeys(("down_proj", "fc2", "c_proj", "dense_4h_to_h", "linear_fc2"), WHOLE),
    "experts up": dict.fromkeys(("gate_up_proj", "up_proj", "linear_fc1"), WHOLE),
    "experts down": dict.fromkeys(("down_proj", "linear_fc2"), WHOLE),
}  # fmt: skip
"""What the linear layers of an outline's products are called in models, Megatron-core's as well (`linear_qkv`), and
which part of a product each is."""


def adapted(outline: Outline, rank: int, targets: str | Sequence[str] = ALL) -> Outline:
    """With adapters of a rank beside all products, or those of the linear layers that `targets` names, by the ends of
    their names or patterns; rank 0: as it is. Raises UserError for other ranks below 1, and for targets of which no
    product is known."""
    if rank == 0:
        return outline
    if rank < 0:
        raise UserError(f"{rank} is no rank of adapters: give a number from 1")
    named = (targets,) if isinstance(targets, str) else tuple(targets)
    if named == (ALL,):
        return replace(outline, runs=tuple((_block(block, rank), count) for block, count in outline.runs))
    places = {
        one: parts for block, _ in outline.kinds for one in block.products if (parts := _parts(one, block, named))
    }
    for target in named:
        if not any(_parts(one, block, (target,)) for block, _ in outline.kinds for one in block.products):
            raise UserError(
                f'lora.targets: of "{target}" the planner of clusters knows no linear layer of {outline.name}: plan '
                f"with {ALL}, or with the ends of names as q_proj, v_proj, down_proj"
            )
    return replace(outline, runs=tuple((_block(block, rank, places), count) for block, count in outline.runs))


Parts = tuple[tuple[str, int], ...]
"""Of a product the linear layers that have adapters: their names and outputs."""


def _parts(one: Product, block: Block, targets: Sequence[str]) -> Parts:
    """Of what targets name. A fused product's layers have its inputs, and their own outputs."""
    if one.name == "router":
        return ()
    known = MODULES.get(one.name.removeprefix("shared "), {})
    rooms = OF_EXPERTS if one.experts else ROOMS[bool(one.group & Group.ATTENTION)]
    found = {
        name: part
        for name, part in known.items()
        if any(_names(target, f"{room}.{name}") for target in targets for room in rooms)
    }
    sizes = _sizes(one, block)
    own = tuple((name, sizes[part]) for name, part in found.items() if part in sizes)  # before fused ones, of patterns
    return own or tuple((name, one.outputs) for name, part in found.items() if part == WHOLE)[:1]


def _sizes(one: Product, block: Block) -> dict[str, int]:
    """Outputs of the layers that a fused product has the weights of, by their parts."""
    if one.name == "qkv":
        scores = block.scores[0]
        keys, values = scores.kv_heads * scores.qk_dim, scores.kv_heads * scores.v_dim
        return {"q": scores.heads * scores.qk_dim, "k": keys, "v": values}
    down = f"{one.name.removesuffix('up')}down"
    inner = next((other.inputs for other in block.products if other.name == down), one.outputs)
    return {"up": inner, **({"gate": inner} if one.outputs > inner else {})}


def _names(target: str, module: str) -> bool:
    """Whether a target is a module's, in whichever layer."""
    name, pattern = f"model.layers.0.{module}", re.sub(r"(?<![^.])\d+(?![^.])", "0", target)
    return name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


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
    return (2.0 * outline.vocab * outline.hidden if outline.frozen_ends else 0.0) + sum(each)


def _block(block: Block, rank: int, places: Mapping[Product, Parts] | None = None) -> Block:
    """`places`: of products the layers that have adapters; None: each has one."""
    products = [replace(one, frozen=True) for one in block.products]
    kept: list[Kept] = []
    for one in block.products:
        alone = bool(one.cut) or one.outputs != block.experts
        beside = (((one.name, one.outputs),) if alone else ()) if places is None else places.get(one, ())
        for name, outputs in beside:
            products += [
                Product(
                    f"{name}: to its rank", one.inputs, rank, "in" if one.cut == "in" else "", one.group, one.experts
                ),
                Product(
                    f"{name}: from its rank", rank, outputs, "out" if one.cut == "out" else "", one.group, one.experts
                ),
            ]
            if not one.experts:  # whose weights are made with both factors
                kept.append(Kept(f"{name}: of its rank", rank, "tokens", one.group))
    return replace(block, products=tuple(products), kept=(*block.kept, *kept))
