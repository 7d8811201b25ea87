"""Published runs as the planner takes them: a model's outline, one configuration, a setting, and what was measured.

Reads any file with the columns of `data/published/runs.csv`. What a row does not say is filled by the tables below,
never by what was measured. Rows without dims, layout or batch cannot be predicted: `why_not` says what they lack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench._planner.tables import table
from tangram.errors import UserError
from tangram.models.lora.outline import ALL, adapted
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.planner.space.framework_profiles import Framework, framework
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.recompute import BY_OPERATOR
from tangram.planner.space.setting import Precision

Row = Mapping[str, str]

NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "n_gpus", "mbs", "gbs")
OTHERS = (
    "task", "model", "arch", "ffn", "kv_heads", "head_dim", "experts", "topk", "moe_ffn", "shared_ffn", "dense_layers",
    "gated_mlp", "tied_emb", "gpu_mem_gb", "gpus_per_node", "tp", "sp", "pp", "vpp", "cp", "ep", "etp", "zero",
    "recompute", "recompute_detail", "precision", "extra", "framework", "version", "date", "tok_s_gpu", "step_s",
    "mem_gib", "mem_kind", "mem_rank", "oom",
)  # fmt: skip
"""Columns that a file may lack: as if they were empty."""
PRECISIONS: tuple[tuple[Precision, tuple[str, ...]], ...] = (
    ("fp4", ("fp4",)),
    ("fp8", ("fp8", "float8")),
    ("fp32", ("fp32", "float32")),
    ("fp16", ("fp16", "float16", "amp")),
)
"""Types by the words in a row's precision; the first that is met, else bf16. "amp_bf16" is met by none but bf16."""
RECOMPUTED = {
    "layernorm": Group.NORM,
    "mla_up_proj": Group.LATENT,
    "moe_act": Group.ACTIVATION,
    "core_attn": Group.SCORES,
    "mlp": Group.MLP | Group.ACTIVATION,
    "moe": Group.MLP | Group.ACTIVATION,
}
"""Megatron-core's modules of selective recomputation."""
LARGEST = {
    "gpu_mem_gb": 1e5, "mem_gib": 1e5, "step_s": 1e7,
    "layers": 1e4, "hidden": 1e6, "ffn": 1e7, "heads": 1e4, "kv_heads": 1e4, "head_dim": 1e4, "vocab": 1e7, "seq": 1e8,
    "experts": 1e5, "topk": 1e3, "moe_ffn": 1e7, "shared_ffn": 1e7, "dense_layers": 1e4, "n_gpus": 1e7, "tp": 1e4,
    "pp": 1e4, "vpp": 1e4, "cp": 1e4, "ep": 1e5, "etp": 1e4, "mbs": 1e5, "gbs": 1e9, "gpus_per_node": 1e4,
}  # fmt: skip
"""Beyond these a figure is a mistake of the table."""
FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("attention-backend=unfused", "attention-backend=local", "transformer-impl=local"), {"fused_attention": False}),
    (("flash_attention=True",), {"fused_attention": True}),
    (("compile",), {"fused_streams": True, "kernels": "fused"}),
    (("use-mc2", "tp-comm-overlap"), {"overlap_tensor": 0.6}),
    (("grad-reduce-in-bf16",), {"gradient_bytes": 2.0, "reduce_bytes": 2.0}),
    # A micro-batch's tokens go to experts beside another's computation.
    (("moe_a2a_overlap=True",), {"overlap_expert": 0.9, "overlap_expert_blocks": 0.9}),
    # Transformer Engine writes the gradient over the logits, and they are copied once to be contiguous: 16 bits twice.
    (("TE fused cross-entropy",), {"loss": "fused"}),
    (("cross-entropy-loss-fusion",), {"loss": "parallel-fused"}),
)
"""What flags that a row names change of its framework."""
PARTS = {("H100", 96.0): "h100-96"}
"""Devices of the catalogue by what tables call them and GB of memory, where that tells a part of its own."""
VOCABULARIES = {"internlm": 103168, "mistral": 32000, "mixtral": 32000}


@dataclass(frozen=True)
class Case:
    """One row."""

    row: Row
    outline: Outline
    grid: Grid
    """Of one configuration."""
    framework: Framework
    gpu: str
    precision: Precision
    node: int
    graphs: bool
    step: float
    """Seconds; nan where it was not measured."""

    @property
    def source(self) -> str:
        """Where it is from."""
        return self.row["source_id"]

    @property
    def kind(self) -> str:
        """Of the model: "dense", "moe", ..."""
        kind = "moe" if number(self.row, "experts", 0) > 1 else "dense"
        return f"{kind} adapted" if self.outline.adapted else kind

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What errors are told by: gpu, precision, kind of model, source."""
        sixteen = "bf16/fp16" if self.precision in ("bf16", "fp16") else self.precision
        return (self.row["gpu"], sixteen, self.kind, self.source)


def read(path: Path) -> list[Row]:
    """The rows of a file of runs. Raises UserError for what is none."""
    return table(path, ("row", "source_id", "gpu", *NEEDED), OTHERS)


def cases(rows: list[Row]) -> Iterator[Case]:
    """Those that can be predicted."""
    for row in rows:
        if not why_not(row):
            yield case(row)


def why_not(row: Row) -> str:
    """What a row lacks, "" where it can be predicted."""
    for name in NEEDED:
        if not number(row, name, 0) >= 1 and not (name == "vocab" and _vocabulary(row)):
            return f"no {name}"
    for name, most in LARGEST.items():
        if 0 < number(row, name, 0) < 1 and name not in ("step_s", "mem_gib"):
            return f"{name} of {row[name]}"
        if not 0 <= number(row, name, 0) <= most:
            return f"{name} of {row[name]}"
    if number(row, "head_dim", 0) == 0 and number(row, "hidden", 1) < number(row, "heads", 1):
        return "heads of no numbers"
    if not (number(row, "ffn", 0) >= 1 or number(row, "moe_ffn", 0) >= 1):
        return "no ffn"
    if row["arch"] in ("hybrid", "t5", "bert", "multimodal-llava", "mimo"):
        return f"{row['arch']} is no decoder of one kind of block"
    if row["task"] not in ("pretrain", "sft", "") and not (row["task"] == "lora" and "lora=" in row["extra"]):
        return row["task"]
    if "power-limited" in row.get("note", ""):
        return "the power of its devices is limited, to what is not known"
    if row["recompute"].strip() == "?":
        return "what is recomputed is not known"
    ranks = [number(row, name, 1) for name in ("tp", "pp", "cp")]
    return "" if number(row, "n_gpus", 1) >= math.prod(ranks) else "a layout of more devices than there are"


def case(row: Row) -> Case:
    """A row that lacks nothing."""
    date = row["date"][:7].replace("/", "-")
    return Case(
        row,
        outline(row),
        configuration(row),
        as_flagged(_framework(row["framework"], date if re.match(r"\d{4}", date) else ""), row),
        PARTS.get((row["gpu"], number(row, "gpu_mem_gb", 0)), row["gpu"]),
        precision(row["precision"]),
        int(number(row, "gpus_per_node", 8)) or 8,
        "full_iteration" in row["extra"],
        _step(row),
    )


def _step(row: Row) -> float:
    """Seconds, or what tokens a second and device make of them; nan where neither was measured."""
    rate = number(row, "tok_s_gpu", 0)
    tokens = number(row, "gbs", 0) * number(row, "seq", 0) / number(row, "n_gpus", 1)
    return number(row, "step_s", tokens / rate if 0 < rate < math.inf else math.nan)


def as_flagged(one: Framework, row: Row) -> Framework:
    """A framework with what a row's own flags change of it."""
    release = re.match(r"NeMo (\d+\.\d+)", row["version"])
    recent = release is not None and release.group(1) >= "26.06"
    # Recipes of mixtures overlap since then, of every precision as published; before them, what the rest do.
    usual = 0.9 if recent else one.overlap_expert
    found = replace(one, overlap_expert=usual, overlap_expert_blocks=usual)
    for flags, changes in FLAGS:
        if any(flag in row["extra"] for flag in flags):
            found = replace(found, **changes)
    if found.name == "torchtitan" and "compile" in row["extra"]:
        found = replace(found, loss="chunked" if "loss chunks" in row["extra"] else "compiled")
    # GPT's own recipes drop out; models with gated MLPs do not.
    plain = number(row, "gated_mlp", 1) == 0 and "mega" in row["framework"].lower()
    return replace(found, dropout=True) if plain else found


def _framework(name: str, date: str) -> Framework:
    try:
        return framework(name, date)
    except UserError:
        return framework("default")


def number(row: Row, name: str, otherwise: float) -> float:
    """A column as a number."""
    try:
        found = float(row[name])
    except ValueError:
        return otherwise
    return otherwise if math.isnan(found) else found


def precision(text: str) -> Precision:
    """What products are computed in."""
    said = text.lower()
    if "bf16" in said and "fp8" not in said:
        return "bf16"
    found: list[Precision] = [kind for kind, words in PRECISIONS if any(word in said for word in words)]
    return found[0] if found else "bf16"


def dims(row: Row) -> Dims:
    """Of the model, with what its kind has by custom."""
    gated = number(row, "gated_mlp", 1) > 0
    hidden, heads = int(number(row, "hidden", 0)), int(number(row, "heads", 0))
    latent = row["arch"].startswith("mla")
    width = int(number(row, "head_dim", 0)) or hidden // heads
    said = dict(one.split("=", 1) for one in row["extra"].split(";") if "=" in one)
    whole = int(number(row, "layers", 0))
    return Dims(
        layers=whole,
        hidden=hidden,
        heads=heads,
        vocab=padded(row),
        ffn=int(number(row, "ffn", 0)),
        kv_heads=int(number(row, "kv_heads", 0)),
        head_dim=int(said.get("qk-head-dim", width)) if latent else width,
        value_dim=int(said.get("v-head-dim", 0)) if latent else 0,
        experts=int(number(row, "experts", 0)),
        per_token=int(number(row, "topk", 1)),
        expert_ffn=int(number(row, "moe_ffn", 0)),
        shared_ffn=int(number(row, "shared_ffn", 0)),
        dense_layers=min(int(number(row, "dense_layers", 0)), whole),
        gated=gated,
        tied=number(row, "tied_emb", 0) > 0,
        bias=not gated and "disable-bias-linear" not in row["extra"],
        positions=int(number(row, "seq", 0)) if not gated and "rope" not in row["extra"] else 0,
        q_rank=int(said.get("q-lora-rank", 1536 if hidden > 2048 else 0)) if latent else 0,
        kv_rank=int(said.get("kv-lora-rank", 512)) if latent else 0,
        rope_dim=int(said.get("qk-pos-emb-head-dim", 64)) if latent else 0,
        predictors=int(said.get("mtp-num-layers", 0)),
    )


def padded(row: Row) -> int:
    """The vocabulary as Megatron pads it, for TP ranks to divide it."""
    vocabulary = int(number(row, "vocab", 0)) or _vocabulary(row)
    if "mega" not in row["framework"].lower():
        return vocabulary
    multiple = 128 * max(int(number(row, "tp", 1)), 1)
    return -(-vocabulary // multiple) * multiple


def _vocabulary(row: Row) -> int:
    return next((size for name, size in VOCABULARIES.items() if name in row["model"].lower()), 0)


@lru_cache(maxsize=4096)
def _decoder(found: Dims, name: str) -> Outline:
    return decoder(found, name)


def outline(row: Row) -> Outline:
    """Of the model, with its adapters: "lora=32 of q_proj+v_proj"."""
    found = _decoder(dims(row), row["model"])
    lora = re.search(r"\blora=(\d+)(?: of ([\w+-]+))?", row["extra"])
    return found if lora is None else adapted(found, int(lora[1]), (lora[2] or ALL).split("+"))


def recompute(row: Row) -> tuple[Group, float]:
    """What is recomputed, and in which share of the layers."""
    text, detail = row["recompute"].lower(), row["recompute_detail"]
    if text.startswith("full on some") and " of " in detail:
        again, layers = (_numbers(part) for part in detail.split(" of "))
        return Group.BLOCK, min(1.0, sum(again) / max(sum(layers), 1.0))
    if text.startswith("full"):
        return Group.BLOCK, 1.0
    if text.startswith("per-op"):
        shares = _numbers(detail)
        return Group.BLOCK, min(1.0, sum(shares) / max(len(shares), 1))
    if text.startswith(("selective: [", "partial: [")):
        return Group.BLOCK, min(1.0, sum(_numbers(text)) * 1.0 / max(number(row, "layers", 1), 1))
    if not text.startswith("selective"):
        return Group.NONE, 1.0
    if "every other" in detail:
        return Group.BLOCK, 0.5
    if detail == "layer":
        return Group.BLOCK, 1.0
    named = [name for name in RECOMPUTED if re.search(rf"\b{name}\b", detail)]
    if named:
        found = Group.NONE
        for name in named:
            found |= Group.NONE if name == "mlp" and _mostly_experts(row) else RECOMPUTED[name]
        return found, 1.0
    if "SAC" in detail or "op-level" in detail or row["framework"] == "torchtitan":
        return BY_OPERATOR, 1.0
    return Group.SCORES, 1.0


def _mostly_experts(row: Row) -> bool:
    """Whether dense layers are few: the module "mlp" is theirs alone."""
    return number(row, "experts", 0) > 1 and number(row, "dense_layers", 0) < number(row, "layers", 1) / 2


def _numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text.partition("=")[2] or text)]


def configuration(row: Row) -> Grid:
    """The layout, as a grid of one."""
    devices = number(row, "n_gpus", 1)
    tensor, stages, context = (max(number(row, name, 1), 1) for name in ("tp", "pp", "cp"))
    data = max(devices // (tensor * stages * context), 1)
    zero = re.match(r"\d", row["zero"])
    group = re.search(r"within (\d+) GPUs", row["zero"]) or re.search(r"FSDP=(\d+)", row["extra"])
    shard = data * context
    if group:
        shard = max(1.0, min(shard, float(group.group(1)) / (1 if "FSDP" in group.group(0) else tensor)))
    again, share = recompute(row)
    expert = max(number(row, "ep", 1), 1)
    given_experts = number(row, "etp", math.nan)
    return grid(
        batch=number(row, "gbs", 1),
        sequence=number(row, "seq", 1),
        tensor=tensor,
        sequence_parallel=number(row, "sp", 0),
        pipeline=stages,
        virtual=max(number(row, "vpp", 1), 1),
        context=context,
        expert=expert,
        expert_tensor=tensor if math.isnan(given_experts) else max(given_experts, 1),
        data=data,
        zero=float(zero.group(0)) if zero else 0.0,
        shard=shard,
        micro=number(row, "mbs", 1),
        recompute=int(again),
        recomputed=share,
    )
