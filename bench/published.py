"""Derivation beside published plans, for types of model whose plans no weight of it was set by.

The weights of a derivation (`derive.rates`) were set so that the plans come out that transformers publishes for six
types. Here are others, with the marks of those six, the names of their modules put in, at the first attempt. What
counts is the dim in which each parameter without a mark is cut, over two ranks, where the type's own plan says one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig

from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.layout import Mesh
from tangram.models.building.named import named
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import Mark, matched

FIRST = ("q_proj", "qkv_proj", "query_key_value", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h")
"""The products that attention and the feed-forward begin with, whatever they are called."""
ENDS = "model.embed_tokens.weight,lm_head.weight,gpt_neox.embed_in.weight,embed_out.weight"
MARKS = (
    "{" + ",".join(f"*.{name}.weight" for name in FIRST) + f",{ENDS}" + "}: out/tp in",
    "{model,gpt_neox}.layers.*: b s/tp h",
    "*.experts.{gate_up_proj,down_proj}: experts/tp _ _",
)
TYPES = (
    "cohere", "gemma2", "glm4", "gpt_neox", "granite", "mistral", "mixtral", "nemotron", "olmo2", "phi", "phi3",
    "qwen2", "qwen2_moe", "starcoder2",
)  # fmt: skip
FIELDS = {"nemotron": {"num_key_value_heads": "8"}}
"""What a type cannot be built without."""
DIM = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1, "grouped_gemm": 0}
"""The dim of a weight that a style cuts."""


def rows(quick: bool) -> Iterable[Row]:
    """One for each type; `quick`: of three."""
    for kind in TYPES[-3:] if quick else TYPES:
        try:
            same, every, unlike = compared(kind)
        except UserError as error:
            yield Row(f"{kind}: not derived ({error})", "share", 0.0, target=1.0, better="higher")
            continue
        said = f", unlike: {', '.join(unlike)}" if unlike else ""
        yield Row(f"{kind}: {same} of {every} as published{said}", "share", same / every, target=1.0, better="higher")


def compared(kind: str) -> tuple[int, int, list[str]]:
    """Of the parameters without a mark: those that are cut as published, all, and the names of the others."""
    model, inputs = named(kind, {"num_hidden_layers": "2", **FIELDS.get(kind, {})}).make(4, 1024)
    graph = folded(capture(model, inputs), block_names(model))
    marks: list[Mark] = []
    marked: set[int] = set()
    for mark in map(Mark.parse, MARKS):
        try:
            marked.update(matched(graph, mark).values())
            marks.append(mark)
        except UserError:
            continue  # of experts, where there are none
    found = derive(graph, marks, Mesh.parse("tp=2"))
    plan = published(kind)
    same, unlike = 0, dict[str, None]()
    for v, value in graph.of_kind("parameter"):
        module = value.name.removesuffix(".weight")
        styles = [style for pattern, style in plan.items() if fnmatch.fnmatchcase(module, f"*.{pattern}")]
        if not styles or v in marked or found.folded.classes[v] != v:
            continue
        cut = [d for d, dim in enumerate(value_layout(found, v).dims) if dim.axes]
        if cut == [DIM[styles[-1]]]:
            same += 1
        else:
            unlike[module.split(".", 3)[-1]] = None
    return same, same + len(unlike), [*unlike]


def published(kind: str) -> dict[str, str]:
    """By pattern, the style: of experts that of the expert-parallel plan, for these are the marks."""
    config: Any = AutoConfig.for_model(kind)
    tensor: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    expert: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    return {name: style for name, style in {**tensor, **expert}.items() if style in DIM}
