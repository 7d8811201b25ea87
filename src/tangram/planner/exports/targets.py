"""Whom a strategy can be written for: a row each. A new one is a module beside this and its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.exports.accelerate import accelerate
from tangram.planner.exports.deepspeed import deepspeed
from tangram.planner.exports.megatron import megatron
from tangram.planner.exports.numbers import Numbers, Written, numbers_of
from tangram.planner.exports.paddleformers import paddleformers
from tangram.planner.exports.torchtitan import SHARES, options, torchtitan
from tangram.planner.legality.engine import Facts, Mask, Rule, divides, even
from tangram.planner.legality.enumerate import ALL, Able
from tangram.planner.search.strategy import Ask, Choice
from tangram.planner.space.grid import Grid
from tangram.planner.space.layers_per_stage import ends
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, SETS, WHOLE
from tangram.text import nearest_hint

ENDS = (NOTHING, ALL_BLOCKS)


def _by_layers(facts: Facts, g: Grid) -> NDArray[np.float64]:
    """How many virtual stages there are where each has as many layers as an even cut gives the largest."""
    blocks = np.maximum(facts.layers + g.ahead + g.behind, 1)
    return np.ceil(blocks / np.ceil(blocks / (g.pipeline * g.virtual)))


def _beside_experts(g: Grid) -> Mask:
    """Where all ranks divide states, as many as go into those that have the same experts."""
    inner = np.maximum(np.floor(g.data * g.context * g.tensor / g.expert), 1)
    return (g.shard == g.data * g.context) & divides(g.shard, inner)


DIVIDED = Rule(
    "divided states",
    lambda f, g: (g.zero == 0) | divides(g.shard, g.context),
    lambda f, at: f"states are divided over all {at['context']} CP ranks",
)
FULL_REPLICAS = Rule(
    "full replicas",
    lambda f, g: ((g.zero > 0) & (g.shard > 1)) | (g.data * g.context == 1) | (g.pipeline * g.tensor * g.context == 1),
    lambda f, at: "full replicas are of DP ranks alone",
)
COPIED = Rule(
    "copies of divided states",
    lambda f, g: (g.zero == 0) | (g.shard == g.data * g.context) | (g.shard > g.context),
    lambda f, at: "copies are of what DP ranks divide",
)
ONE_EXPERT_RANK = Rule(
    "TP ranks of experts",
    lambda f, g: (g.expert == 1) | (g.expert_tensor == 1),
    lambda f, at: "experts of EP ranks have no TP ranks",
)

PADDLES = (
    Rule(
        "layers of a virtual stage",
        lambda f, g: divides(f.layers, g.pipeline * g.virtual),
        lambda f, at: f"{f.layers} layers are uneven over {at.size('pipeline', 'virtual')} virtual stages",
    ),
    Rule(
        "CP ranks of its divided states",
        lambda f, g: (g.context == 1) | ((g.zero > 0) & divides(g.shard, g.context)),
        lambda f, at: "CP ranks are of those that divide states",
    ),
    Rule(
        "TP ranks of its experts",
        lambda f, g: (g.expert_tensor == 1) | np.full(len(g), f.experts == 0),
        lambda f, at: "experts have no TP ranks",
    ),
    Rule(
        "ranks of its experts",
        lambda f, g: (g.expert == 1) | ((g.zero > 0) & _beside_experts(g)),
        lambda f, at: "EP ranks are beside states that all ranks divide",
    ),
    Rule(
        "recompute of virtual stages",
        lambda f, g: (g.virtual == 1) | (g.recompute == 0) | (g.recomputed == 1),
        lambda f, at: "of virtual stages all layers or none are recomputed",
    ),
)
"""What PaddleFormers does not run beyond what an `Able` says by numbers."""
LAYERS_AT_BOTH_ENDS = Rule(
    "layers of the first and the last virtual stage",
    lambda f, g: (np.minimum(*ends(f.layers, g)) >= 1) | (g.pipeline == 1),
    lambda f, at: "the first and the last virtual stage have a layer beside embedding and head",
)
TITANS = (
    LAYERS_AT_BOTH_ENDS,
    Rule(
        "virtual stages of its schedules",
        lambda f, g: (g.schedule == 0) | (g.virtual > 1),
        lambda f, at: "its schedules of several virtual stages take two of each rank or more",
    ),
    Rule(
        "layers of a virtual stage",
        lambda f, g: (g.virtual == np.where(g.schedule == 0, 1, 2)) | (_by_layers(f, g) == g.pipeline * g.virtual),
        lambda f, at: f"no number of layers makes {at.size('pipeline', 'virtual')} virtual stages of {f.layers}",
    ),
    Rule(
        "TP ranks of its experts",
        lambda f, g: (g.expert_tensor == g.tensor) | ((g.expert > 1) & (g.expert_tensor == 1)),
        lambda f, at: f"experts have 1 or {at['tensor']} TP ranks, the latter where there are no EP ranks",
    ),
    FULL_REPLICAS,
    DIVIDED,
    Rule(
        "ranks of its experts",
        lambda f, g: (g.expert == 1) | divides(g.shard * g.tensor, g.expert * g.expert_tensor),
        lambda f, at: "EP ranks are of those that divide parameters and of TP ranks",
    ),
    Rule(
        "tokens of a rank",
        lambda f, g: divides(g.sequence, g.tensor * np.where(g.context > 1, 2 * g.context, 1)),
        lambda f, at: f"a sample of {at['sequence']} tokens is divided by TP ranks and twice the CP ranks",
    ),
    even("key-value heads", "key-value heads (num_key_value_heads)", "kv_heads", "tensor"),
)
"""What torchtitan does not run beyond what an `Able` says by numbers."""


@dataclass(frozen=True)
class Target:
    """A project: how a strategy is written for it, what of the space it is able to run, whose figures are its own."""

    write: Callable[[Numbers, Outline, Cluster], Written]
    """Raises UserError for what it cannot run."""
    framework: str
    """An entry of `frameworks.toml`."""
    able: Callable[[Outline], Able]
    others: tuple[str, ...] = ()
    """Further entries that the same project runs."""
    loss: str = ""
    """How it makes the loss where nothing else is asked for; "": as the entry says."""


def _megatron(outline: Outline) -> Able:
    mixtures = all(block.experts for block, _ in outline.runs)
    return Able(staged=(0, 1), again=(*WHOLE, *(SETS if mixtures else ())))


def _titan(outline: Outline) -> Able:
    staged = 1 if outline.tied else 0
    return Able(
        zero=(0, 2, 3), staged=(0, 2, 3), again=WHOLE, shares=SHARES, pipeline=staged, ulysses=1, inner=False,
        rules=TITANS,
    )  # fmt: skip


EXPORTS: Mapping[str, Target] = {
    "megatron-lm": Target(megatron, "megatron-core", _megatron, ("megatron", "megatron-2021", "nemo")),
    "torchtitan": Target(torchtitan, "torchtitan", _titan),
    "torchtitan-options": Target(
        options,
        "torchtitan",
        lambda outline: replace(_titan(outline), again=ENDS, shares=None, rules=(*TITANS, ONE_EXPERT_RANK)),
        loss="chunked",
    ),
    "deepspeed": Target(
        deepspeed, "deepspeed", lambda _: Able(again=ENDS, pipeline=1, context=1, tensor=1, near=False)
    ),
    "accelerate": Target(
        accelerate,
        "fsdp",
        lambda _: Able(
            zero=(0, 2, 3),
            again=ENDS,
            pipeline=1,
            tensor=1,
            expert=1,
            ulysses=1,
            rules=(DIVIDED, COPIED, FULL_REPLICAS),
        ),
    ),
    "paddleformers": Target(
        paddleformers,
        "paddlenlp",
        lambda _: Able(staged=(0, 1), again=WHOLE, ulysses=1, near=False, uneven=0, inner=False, rules=PADDLES),
    ),
}
"""By what they are called on the command line."""


def export(name: str, choice: Choice, outline: Outline, ask: Ask, cluster: Cluster) -> Written:
    """A choice for a project. Raises UserError for one that is not known, or cannot run it so."""
    target(name)
    kind = f"the optimiser {choice.optimiser}" if choice.optimiser != "adamw" else ""
    away = f"{choice.offload} on the host" if choice.offload else ""
    if said := kind or away or ("low-rank adapters" if outline.adapted else ""):
        raise UserError(f"what is written for {name} does not say {said}: plan without")
    return written(name, numbers_of(choice, ask), outline, cluster)


def written(name: str, one: Numbers, outline: Outline, cluster: Cluster) -> Written:
    """The numbers of a strategy for a project, the same way."""
    if one.ulysses > 1 and target(name).able(outline).ulysses == 1:
        raise UserError(f"what is written for {name} has no CP ranks that exchange heads: plan with rings alone")
    if one.inner and one.pipeline > 1 and not target(name).able(outline).inner:
        raise UserError(
            f"what is written for {name} has DP ranks within PP ranks: plan for it with `tangram plan export`"
        )
    return target(name).write(one, outline, cluster)


def target(name: str) -> Target:
    """Raises UserError for a name that is none."""
    if name not in EXPORTS:
        raise UserError(
            f"there is no export {name!r}{nearest_hint(name, EXPORTS)}: there are {', '.join(EXPORTS)}, and of a job "
            "tangram"
        )
    return EXPORTS[name]


def able_of(framework: str, outline: Outline) -> Able:
    """What of the space a framework is able to run, by the project that is written for it; all where none is."""
    for one in EXPORTS.values():
        if framework in (one.framework, *one.others):
            return one.able(outline)
    return ALL


def picked(name: str, choices: Sequence[Choice], pick: int, outline: Outline, ask: Ask, cluster: Cluster) -> Written:
    """The row of a ranking for a project; where it cannot be written, which others can. Raises UserError."""
    if not 1 <= pick <= len(choices):
        raise UserError(f"--pick {pick}: the rows of the ranking are 1 to {len(choices)}")
    try:
        return export(name, choices[pick - 1], outline, ask, cluster)
    except UserError as reason:
        others = [str(row) for row, one in enumerate(choices, start=1) if _can(name, one, outline, ask, cluster)]
        if len(choices) == 1 or name not in EXPORTS:
            raise
        said = f"rows that can be are {', '.join(others)}" if others else "no row can be: name more with --top"
        raise UserError(f"row {pick} cannot be written for {name}: {reason}; {said}") from None


def _can(name: str, choice: Choice, outline: Outline, ask: Ask, cluster: Cluster) -> bool:
    try:
        export(name, choice, outline, ask, cluster)
    except UserError:
        return False
    return True
