"""torchtitan's configuration read as a strategy: TOML files of versions to 0.2, and options of 0.3 and later.

Defaults are those of `torchtitan/config/job_config.py` of torchtitan 0.2.2 and `torchtitan/config/configs.py` of 0.3.0.
Names that older files have (`training.batch_size`, `experimental.context_parallel_degree` ...) are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.models.outlines.outline import Group, Outline
from tangram.planner.exports.numbers import Numbers, experts_of
from tangram.planner.imports.words import ReadStrategy, Words, nearest
from tangram.planner.space.layers_per_stage import sizes
from tangram.planner.space.recompute import ALL_BLOCKS, BY_OPERATOR, NOTHING
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Precision

ALIASES: Mapping[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
}
"""What names were called before."""
READ = (
    *(f"training.{name}" for name in (
        "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param",
    )),
    *(f"parallelism.{name}" for name in (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage", "enable_sequence_parallel",
        "no_enable_sequence_parallel", "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers", "module_fqns_per_model_part", "expert_parallel_degree",
        "expert_tensor_parallel_degree",
    )),
    "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option", "activation-checkpoint",
    "model.converters", "training.disable_cuda_graphs", "compile.no_enable",
)  # fmt: skip
TOLD: Mapping[str, str] = {
    "training.enable_cpu_offload": "nothing is taken to be offloaded",
    "training.dtype": "parameters are taken in float32",
    "parallelism.pipeline_parallel_schedule_csv": "the schedule is the named one",
    "parallelism.enable_async_tensor_parallel": "what hides beside matmuls is the framework's usual share",
    "compile.enable_async_tensor_parallel": "what hides beside matmuls is the framework's usual share",
    "optimizer.early_step_in_backward": "the optimiser is taken to follow the backward",
    "optimizer.implementation": "the optimiser is taken as fused",
}
"""Of layout or time, and not in the model of them: what is taken in their place."""
WITHOUT_EFFECT = {("training.dtype", "float32"), ("optimizer.implementation", "fused")}
TABLES = ("parallelism", "training", "experimental")


@dataclass(frozen=True)
class _Degrees:
    replicate: int
    shard: int
    tensor: int
    context: int
    pipeline: int


def is_torchtitan(words: Words) -> bool:
    """Whether names are those of its tables."""
    return any(name.split(".")[0] in TABLES and "." in name for name in words.values)


def torchtitan(words: Words, outline: Outline, devices: int, most: int, *, toml: bool) -> ReadStrategy:
    """The strategy on `devices`, 0: as the degrees say, or `most`; `toml`: of 0.2, else of 0.3. Raises UserError."""
    named = {ALIASES.get(_named(name), _named(name)): value for name, value in words.values.items()}
    words = Words(words.path, named)
    told: list[str] = []
    at = _degrees(words, devices, most)
    data, together = at.replicate * at.shard, at.replicate * at.shard * at.context
    schedule, virtual, (ahead, behind) = _stages(words, outline, at.pipeline, told)
    local = words.count("training.local_batch_size", 8)
    micro = words.count("parallelism.pipeline_parallel_microbatch_size", 1) if at.pipeline > 1 else local
    said = str(words.values.get("training.global_batch_size", -1))
    batch = local * data if said == "-1" else words.count("training.global_batch_size", 1)
    if local % micro:
        raise UserError(f"{words.path}: micro-batches of {micro} samples do not divide local_batch_size {local}")
    if at.pipeline > 1 and batch > local * data:
        told.append(
            f"training.local_batch_size {local}: the pipeline is filled {batch / local / data:g} times a step, and is "
            "taken to be filled once"
        )
    expert, expert_tensor = _experts(words, outline, at.tensor)
    one = Numbers(
        pipeline=at.pipeline,
        virtual=virtual,
        schedule=schedule,
        tensor=at.tensor,
        sequence_parallel=at.tensor > 1 and _divides_tokens(words),
        context=at.context,
        expert=expert,
        expert_tensor=expert_tensor,
        data=data,
        zero=_zero(words, at),
        shard=at.shard * at.context if at.shard * at.context > 1 else together,
        micro=micro,
        batch=batch,
        sequence=words.count("training.seq_len", 2048),
        again=_again(words, toml, told),
        precision=_precision(words),
        ahead=ahead,
        behind=behind,
    )
    told += [
        f"{name}: {taken}"
        for name, taken in TOLD.items()
        if words.has(name) and (name, words.text(name)) not in WITHOUT_EFFECT
    ]
    return ReadStrategy(one, "torchtitan", tuple(told), words.others((*READ, *TOLD)))


def _named(name: str) -> str:
    """As the TOML file has it: options may have dashes for underscores."""
    return name if "." not in name else name.replace("-", "_")


def _degrees(words: Words, devices: int, most: int) -> _Degrees:
    replicate, tensor, context, pipeline = (
        words.count(f"parallelism.{name}_degree", 1)
        for name in ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel")
    )
    fixed = replicate * tensor * context * pipeline
    said = str(words.values.get("parallelism.data_parallel_shard_degree", -1))
    if said == "-1":
        devices = devices or most
    shard = devices // fixed if said == "-1" else words.count("parallelism.data_parallel_shard_degree", 1)
    if devices and fixed * shard != devices:
        raise UserError(
            f"{words.path}: {replicate} x {shard} data, {context} context, {tensor} tensor, {pipeline} PP ranks "
            f"are {fixed * shard} and not {devices} devices; give as many with --gpus as it is for"
        )
    return _Degrees(replicate, shard, tensor, context, pipeline)


def _stages(words: Words, outline: Outline, pipeline: int, told: list[str]) -> tuple[str, int, tuple[int, int]]:
    if pipeline == 1:
        return "", 1, (0, 0)
    said = words.text("parallelism.pipeline_parallel_schedule", "1F1B")
    row = next((one for one in SCHEDULES if one.name.lower() == said.lower()), None)
    if row is None:
        raise UserError(
            f"{words.path}: the planner knows no schedule {said!r}: it knows {', '.join(one.name for one in SCHEDULES)}"
        )
    parts = words.values.get("parallelism.module_fqns_per_model_part")
    first, last = (
        words.count(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, 0) for end in ("first", "last")
    )
    each = words.count("parallelism.pipeline_parallel_layers_per_stage", 0, 0)
    chunks = pipeline * (1 if row.name == "1F1B" else 2)
    if isinstance(parts, list):
        chunks = len(parts)  # pyright: ignore[reportUnknownArgumentType]
        told.append("parallelism.module_fqns_per_model_part: stages are taken as even")
    elif each:
        chunks = -(-(outline.layers + first + last) // each)
    if chunks % pipeline:
        raise UserError(
            f"{words.path}: {chunks} virtual stages of the model are not as many for each of {pipeline} ranks"
        )
    if isinstance(parts, list):
        return row.name, chunks // pipeline, (0, 0)
    if (first or last) and min(sizes(outline.layers, chunks, first, last)) < 1:
        told.append("parallelism.pipeline_parallel_first_stage_less_layers: stages are taken as even")
        first = last = 0
    return row.name, chunks // pipeline, (first, last)


def _divides_tokens(words: Words) -> bool:
    on = str(words.values.get("parallelism.enable_sequence_parallel", "true")).lower()
    return on != "false" and not words.has("parallelism.no_enable_sequence_parallel")


def _experts(words: Words, outline: Outline, tensor: int) -> tuple[int, int]:
    if experts_of(outline) < 2:
        return 1, tensor
    expert = words.count("parallelism.expert_parallel_degree", 1)
    return expert, words.count("parallelism.expert_tensor_parallel_degree", 1) if expert > 1 else tensor


def _zero(words: Words, at: _Degrees) -> int:
    if at.shard * at.context == 1:
        return 0
    said = words.text("parallelism.fsdp_reshard_after_forward", "default")
    kept = {"always": 3, "never": 2, "default": 3 if at.pipeline == 1 else 2}
    if said not in kept:
        raise UserError(f"{words.path}: fsdp_reshard_after_forward is {said!r}; write one of {', '.join(kept)}")
    return kept[said]


def _again(words: Words, toml: bool, told: list[str]) -> str:
    """Of a file without a policy the default: every second block (0.2), by operator (configurations of 0.3)."""
    name = "activation_checkpoint.mode" if toml else "activation-checkpoint"
    mode = str(words.values.get(name, "selective"))
    option = words.text("activation_checkpoint.selective_ac_option", "2") if toml else "op"
    if name not in words.values:
        told.append(f"{name} is not said: taken as selective, which is the default")
    whole = {"none": NOTHING, "full": ALL_BLOCKS}
    if mode in whole:
        return whole[mode]
    if mode != "selective":
        told.append(f"{name} {mode}: taken as nothing, recomputed")
        return NOTHING
    if option == "op":
        return nearest(BY_OPERATOR, 1.0, told, "selective")
    if not option.isdigit() or int(option) < 1:
        raise UserError(f"{words.path}: selective_ac_option is {option!r}; write op or a whole number from 1")
    return nearest(Group.BLOCK, 1 / int(option), told, f"one of {option} layers")


def _precision(words: Words) -> Precision:
    converters = words.text("model.converters")
    if "float8" in converters or "mx" in converters:
        return "fp8"
    said = words.text("training.mixed_precision_param", "bfloat16")
    if said not in ("bfloat16", "float32"):
        raise UserError(f"{words.path}: mixed_precision_param is {said!r}; write bfloat16 or float32")
    return "bf16" if said == "bfloat16" else "fp32"
