"""Megatron-LM's arguments read as a strategy: command lines, launch scripts, and files of arguments in YAML.

Defaults are those of `megatron/training/arguments.py` (NVIDIA/Megatron-LM@d98e8a6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.megatron import STRATEGIES
from tangram.planner.exports.numbers import Numbers, experts_of
from tangram.planner.imports.words import ReadStrategy, Words, nearest
from tangram.planner.space.layers_per_stage import fewer, sizes
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, again_name
from tangram.planner.space.setting import Precision

READ = (
    "tensor-model-parallel-size", "sequence-parallel", "context-parallel-size", "pipeline-model-parallel-size",
    "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage", "pipeline-model-parallel-layout",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "use-distributed-optimizer", "use-megatron-fsdp",
    "use-custom-fsdp", "use-torch-fsdp2", "torch-fsdp2-no-reshard-after-forward", "data-parallel-sharding-strategy",
    "num-distributed-optimizer-instances", "micro-batch-size", "global-batch-size", "seq-length", "bf16", "fp16",
    "fp8", "fp8-format", "fp4", "fp4-format", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "recompute-modules", "recompute-activations", "num-layers", "world-size", "nnodes", "nproc-per-node",
    "init-model-with-meta-device",
    "cp-comm-type", "hierarchical-context-parallel-sizes", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "use-tp-pp-dp-mapping", "tp-comm-overlap", "fp8-recipe",
)  # fmt: skip
TOLD: Mapping[str, str] = {
    "cpu-offloading": "nothing is taken to be offloaded",
    "optimizer-cpu-offload": "nothing is taken to be offloaded",
    "fine-grained-activation-offloading": "nothing is taken to be offloaded",
    "use-precision-aware-optimizer": "the optimiser's states are taken in float32",
    "rampup-batch-size": "all steps are taken with the whole batch",
    "step-batch-size-schedule": "all steps are taken with the whole batch",
    "delay-wgrad-compute": "the backward of matmuls is taken as one",
    "overlap-moe-expert-parallel-comm": "nothing is taken to hide beside experts",
    "moe-expert-capacity-factor": "no tokens are taken to be dropped",
    "distribute-saved-activations": "what is kept is taken whole on each rank",
    "grad-reduce-in-bf16": "gradients are taken as the framework usually sums them",
}
"""Of layout or time, and not in the model of them: what is taken in their place."""
MODULES = {
    "core_attn": Group.SCORES,
    "layernorm": Group.NORM,
    "moe_act": Group.ACTIVATION,
    "mlp": Group.MLP,
    "moe": Group.MLP,
    "shared_experts": Group.MLP,
    "mla_up_proj": Group.LATENT,
}


def megatron(words: Words, outline: Outline, devices: int, most: int) -> ReadStrategy:
    """The strategy on `devices`, 0: as the file starts, or `most`. Raises UserError for contradictions."""
    told: list[str] = []
    tensor, pipeline, context = (
        words.count(name, 1)
        for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    )
    _same_model(words, outline)
    ranks = devices or _started(words) or most
    data, left = divmod(ranks, tensor * pipeline * context)
    if left or not data:
        raise UserError(
            f"{words.path}: {tensor} tensor x {pipeline} pipeline x {context} CP ranks do not divide {ranks} "
            "devices; give as many with --gpus as it is for"
        )
    virtual = _virtual(words, outline, pipeline)
    ahead, behind = _fewer(words, outline, pipeline, virtual, told)
    instances = words.count("num-distributed-optimizer-instances", 1)
    if data * context % instances:
        raise UserError(
            f"{words.path}: {data * context} DP and CP ranks are no {instances} instances of a divided optimiser"
        )
    if not words.has("micro-batch-size"):
        raise UserError(f"{words.path} says no micro-batch-size, so it is not Megatron-LM's arguments or not all")
    micro = words.count("micro-batch-size", 1)
    mixture = experts_of(outline) > 1
    one = Numbers(
        pipeline=pipeline,
        virtual=virtual,
        schedule="" if pipeline == 1 else "1F1B" if virtual == 1 else "Interleaved1F1B",
        tensor=tensor,
        sequence_parallel=words.has("sequence-parallel") and tensor > 1,
        context=context,
        expert=words.count("expert-model-parallel-size", 1),
        expert_tensor=words.count("expert-tensor-parallel-size", tensor) if mixture else tensor,
        data=data,
        zero=_zero(words) if data * context > 1 else 0,
        shard=data * context // instances,
        micro=micro,
        batch=words.count("global-batch-size", micro * data),
        sequence=words.count("seq-length", 0, 0),
        again=_again(words, max(1, *sizes(outline.layers, pipeline * virtual, ahead, behind)), told),
        precision=_precision(words),
        ulysses=_ulysses(words, context, told),
        ahead=ahead,
        behind=behind,
        inner=words.has("use-tp-pp-dp-mapping"),
    )
    told += [f"{name}: {taken}" for name, taken in TOLD.items() if words.has(name)]
    if one.sequence_parallel and not words.has("tp-comm-overlap"):
        told.append(
            "without tp-comm-overlap: what hides beside matmuls is the framework's usual share, which is with it"
        )
    graphs = tuple(name for name in words.values if "-graph" in name)
    told += [f"{name}: kernels are taken to be started one by one" for name in graphs]
    return ReadStrategy(one, "megatron-core", tuple(told), words.others((*READ, *TOLD, *graphs)))


def _ulysses(words: Words, context: int, told: list[str]) -> int:
    """CP ranks that exchange heads. Raises UserError for sizes that do not make the CP ranks."""
    ways = set(re.findall(r"[\w+]+", words.text("cp-comm-type", "p2p")))
    if ways == {"a2a"}:
        return context
    if ways == {"a2a+p2p"}:
        sizes = [int(size) for size in re.findall(r"\d+", words.text("hierarchical-context-parallel-sizes"))]
        if len(sizes) != 2 or sizes[0] * sizes[1] != context:
            raise UserError(
                f"{words.path}: hierarchical-context-parallel-sizes {sizes} are no two sizes that make {context} "
                "CP ranks"
            )
        return sizes[0]
    if ways != {"p2p"}:
        told.append("cp-comm-type: CP ranks are taken as one ring")
    return 1


def _same_model(words: Words, outline: Outline) -> None:
    layers = words.count("num-layers", outline.layers)
    if layers != outline.layers:
        raise UserError(f"{words.path} is for a model of {layers} layers, and {outline.name} has {outline.layers}")


def _started(words: Words) -> int:
    """Devices that the file starts ranks on; 0 where it does not say."""
    nodes, each = (int(words.text(name)) if words.text(name).isdigit() else 0 for name in ("nnodes", "nproc-per-node"))
    return words.count("world-size", nodes * each, 0)


def chunks_of(layout: str) -> list[int]:
    """Blocks of each virtual stage of a layout of a pipeline. Raises ValueError for one that cannot be read."""
    text = re.sub(r"[\s,]", "", layout)
    while inner := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text[: inner.start()] + inner[1] * int(inner[2]) + text[inner.end() :]
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda found: found[1] * int(found[2]), text)
    if re.search(r"[^A-Za-z|]", text):
        raise ValueError(layout)
    return [part.count("t") for part in text.split("|")]


ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
ACCOUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def _fewer(words: Words, outline: Outline, pipeline: int, virtual: int, told: list[str]) -> tuple[int, int]:
    """How many layers fewer the first virtual stage and the last one have; what no such numbers say is told."""
    chunks, layout = pipeline * virtual, "pipeline-model-parallel-layout"
    ends = [name for name in ENDS if words.has(name)]
    accounted = [int(words.has(name)) for name in ACCOUNTED]
    if pipeline == 1 or not (words.has(layout) or ends or any(accounted)):
        return 0, 0
    found: tuple[int, int] | None = None
    if words.has(layout):
        blocks, named = chunks_of(words.text(layout)), layout
        found = fewer(blocks) if sum(blocks) == outline.layers else None
    elif ends:
        said, named = [words.count(name, 0) for name in ENDS], ends[0]
        inner, left = divmod(outline.layers - sum(said), max(chunks - len(ends), 1))
        if virtual == 1 and not left:
            found = fewer([said[0] or inner, *[inner] * (chunks - 2), said[1] or inner])
    else:
        found, named = (accounted[0], accounted[1]), next(name for name in ACCOUNTED if words.has(name))
    if found is None or not _filled(sizes(outline.layers, chunks, *found)):
        told.append(f"{named}: stages are taken as even")
        return 0, 0
    return found


def _filled(blocks: list[int]) -> bool:
    """Whether all virtual stages have layers, but the first and the last, which have the embedding and the loss."""
    return min(blocks) >= 0 and 0 not in blocks[1:-1]


def _virtual(words: Words, outline: Outline, pipeline: int) -> int:
    ways = [name for name in READ[4:7] if words.has(name)]
    if len(ways) > 1:
        raise UserError(f"{words.path} says both {ways[0]} and {ways[1]}: one of them is enough")
    if words.has("pipeline-model-parallel-layout"):
        layout = words.text("pipeline-model-parallel-layout")
        try:
            virtual, left = divmod(len(chunks_of(layout)), pipeline)
        except ValueError:
            raise UserError(f"{words.path}: {layout!r} is no layout of a pipeline") from None
        if left:
            raise UserError(
                f"{words.path}: {layout!r} has {len(chunks_of(layout))} virtual stages for {pipeline} PP ranks"
            )
        return virtual
    if words.has("num-layers-per-virtual-pipeline-stage"):
        each = words.count("num-layers-per-virtual-pipeline-stage", 1)
        virtual, left = divmod(outline.layers, pipeline * each)
        if left or not virtual:
            raise UserError(
                f"{words.path}: virtual stages of {each} layers on {pipeline} PP ranks are not {outline.layers} layers"
            )
        return virtual
    return words.count("num-virtual-stages-per-pipeline-rank", 1)


def _zero(words: Words) -> int:
    if words.has("use-torch-fsdp2"):
        return 2 if words.has("torch-fsdp2-no-reshard-after-forward") else 3
    if words.has("use-megatron-fsdp") or words.has("use-custom-fsdp"):
        said = words.text("data-parallel-sharding-strategy", STRATEGIES[3])
        if said not in STRATEGIES.values():
            raise UserError(
                f"{words.path}: data-parallel-sharding-strategy is {said!r}; write one of "
                f"{', '.join(STRATEGIES.values())}"
            )
        return next(level for level, name in STRATEGIES.items() if name == said)
    return int(words.has("use-distributed-optimizer"))


def _again(words: Words, each: int, told: list[str]) -> str:
    """`each`: layers of the largest virtual stage."""
    granularity = words.text("recompute-granularity", "selective" if words.has("recompute-activations") else "")
    if not granularity:
        return NOTHING
    if granularity not in ("full", "selective"):
        raise UserError(f"{words.path}: recompute-granularity is {granularity!r}; write full or selective")
    if granularity == "full":
        count = words.count("recompute-num-layers", 1)
        if words.text("recompute-method", "uniform") == "uniform":
            if count > 1:
                told.append(f"recompute-num-layers {count}: layers are taken to be kept one by one")
            return ALL_BLOCKS
        if count >= each:
            return ALL_BLOCKS
        return again_name(int(Group.BLOCK), count / each)
    names = words.text("recompute-modules", "core_attn").replace(",", " ").strip("[]").split()
    groups = Group.NONE
    for name in (one.strip("'\"") for one in names):
        if name not in MODULES:
            raise UserError(f"{words.path}: nothing is known of the module {name!r} to recompute")
        groups |= MODULES[name]
    return nearest(groups, 1.0, told, f"recompute-modules {' '.join(names)}")


def _precision(words: Words) -> Precision:
    if words.has("fp4") or words.has("fp4-format"):
        return "fp4"
    if words.has("fp8") or words.has("fp8-format"):
        return "fp8"
    if words.has("bf16") and words.has("fp16"):
        raise UserError(f"{words.path} says both bf16 and fp16")
    return "bf16" if words.has("bf16") else "fp16" if words.has("fp16") else "fp32"
