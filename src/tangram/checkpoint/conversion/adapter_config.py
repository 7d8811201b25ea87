"""What the configuration of a peft adapter says: kinds, ranks and scales. All that is not known is refused."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.formats.common.side_files import LARGEST_SMALL
from tangram.checkpoint.store.commits import read_bounded
from tangram.errors import UserError

CONFIG = "adapter_config.json"
READ = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_bias", "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "alpha_pattern", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
})  # fmt: skip
"""Keys of a configuration that are read, or that change nothing in a merge; all others have to say nothing."""
NOTHING: tuple[Any, ...] = (None, False, "", "none", 0, [], {})
BESIDE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Ways to begin A and B that leave the weights as they were; others (PiSSA, OLoRA, CorDA, LoftQ) change them."""


@dataclass(frozen=True)
class Config:
    """What a configuration says of scales."""

    rank: float
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    root: bool
    """By the root of the rank (rsLoRA)."""
    parameters: tuple[str, ...]
    """Ends of names of parameters that are adapted by themselves, as fused experts are."""
    magnitudes: bool = False
    """DoRA."""
    biases: bool = False
    """What B gives has a bias."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """By the end of a module's name, the rows of it that were trained; by "" those of the embeddings."""
    transposed: bool = False
    """Weights of linear layers are [in, out], as GPT-2's are."""
    base: str = ""
    """The model that they were trained beside: a directory, or a name on the hub."""


def read_config(folder: Path) -> Config:
    """The configuration. Raises UserError for one that says more than LoRA or DoRA."""
    file = folder / CONFIG
    if not file.is_file():
        inner = sorted(one.parent for one in folder.glob(f"*/{CONFIG}"))
        some = " or ".join(f'"{one}"' for one in inner)
        what = f"one of those that it has, {some}" if inner else "a directory that peft has written"
        raise UserError(f'the adapter "{folder}" has no {CONFIG}: give {what}')
    try:
        raw: Any = json.loads(read_bounded(file.resolve(), LARGEST_SMALL))
    except ValueError as error:
        raise UserError(f'"{file}" cannot be read: {error}') from None
    if not isinstance(raw, dict):
        raise UserError(f'"{file}" is no table')
    fields = cast("dict[str, Any]", raw)
    if fields.get("peft_type") != "LORA":
        raise UserError(f'the adapter "{folder}" is of the type {fields.get("peft_type")!r}: only LORA is merged')
    for key, value in fields.items():
        if key not in READ and value not in NOTHING:
            raise UserError(
                f'the adapter "{folder}" has {key} = {json.dumps(value)[:60]}, and only LoRA and DoRA are merged: '
                "merge it with peft's merge_and_unload"
            )
    if (begun := fields.get("init_lora_weights")) not in BESIDE:
        raise UserError(
            f'the adapter "{folder}" began with init_lora_weights = {json.dumps(begun)[:60]}, which may have '
            "changed the weights beside it: save it with peft's path_initial_model_for_weight_conversion"
        )
    named = cast("list[Any]", fields.get("target_parameters") or [])
    ranks, alphas = (_numbers(fields.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    usual = _numbers({key: fields.get(key) for key in ("r", "lora_alpha")})
    if usual is None or ranks is None or alphas is None or not all(isinstance(one, str) for one in named):
        raise UserError(f'"{file}" does not say ranks and alphas as numbers: r, lora_alpha and their patterns')
    if not usual["lora_alpha"] and not alphas:  # a program that saves adapters may write 0 where it does not know it
        raise UserError(
            f'"{file}" has lora_alpha = 0, by which its adapters would add nothing: write what they were trained with'
        )
    rows: Any = fields.get("trainable_token_indices") or {}
    tokens = cast("dict[str, Any]", rows if isinstance(rows, dict) else {"": rows})
    numbered = (isinstance(some, list) and {*map(type, cast("list[Any]", some))} <= {int} for some in tokens.values())
    if not all(numbered):
        raise UserError(f'"{file}" does not say trainable_token_indices as numbers')
    root, dora, biases, transposed = (
        bool(fields.get(key)) for key in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")
    )
    return Config(
        usual["r"], usual["lora_alpha"], ranks, alphas, root, tuple(named), dora, biases,
        {name: tuple(some) for name, some in tokens.items()}, transposed,
        str(fields.get("base_model_name_or_path") or ""),
    )  # fmt: skip


def made_beside(folder: Path, model: Path) -> str | None:
    """What to say of adapters that were trained beside a model of another name, as far as they say. Raises UserError.

    Shapes do not tell a model from one that was trained further, and adapters are of one of the two.
    """
    base = read_config(folder).base
    if not base or Path(base).name == model.resolve().name:
        return None
    return f'the adapters in "{folder}" were trained beside "{base}": beside other weights they give something else'


def _numbers(table: Any) -> dict[str, float] | None:
    """A table of numbers, None for anything else."""
    if not isinstance(table, dict):
        return None
    found = cast("dict[str, Any]", table)
    good = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in found.values())
    return found if good else None


def scale_of(config: Config, name: str, rank: int, folder: Path) -> float:
    """By what a product is multiplied. Raises UserError where A and B have another rank than the configuration says."""

    def per_pattern(patterns: Mapping[str, float], usual: float) -> float:
        try:
            key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None)
        except re.error as error:
            raise UserError(f'"{folder / CONFIG}" has a pattern that is none: {error}') from None
        return usual if key is None else patterns[key]

    expected = per_pattern(config.ranks, config.rank)
    if expected != rank or not rank:
        raise UserError(f'the adapter "{folder}" has rank {rank} for {name}, and its {CONFIG} says {expected}')
    return per_pattern(config.alphas, config.alpha) / (math.sqrt(rank) if config.root else rank)
