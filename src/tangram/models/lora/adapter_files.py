"""Adapters in files, as peft has them: read, written, and added to the weights that they stand beside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import UserError
from tangram.models.lora import expert_adapters
from tangram.models.lora.adapters import peft_module

LIKE: Mapping[str, str] = MappingProxyType(
    {
        "rank": "r", "alpha": "lora_alpha", "ranks": "rank_pattern", "alphas": "alpha_pattern", "rslora": "use_rslora",
        "dora": "use_dora", "lora_bias": "lora_bias", "bias": "bias",
        "trainable_token_indices": "trainable_token_indices",
    }
)  # fmt: skip
"""What adapters that others begin with have to be like, by key and by peft's field."""
PREFIX = "base_model.model."
"""Before the names of tensors in peft's files."""
NO_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType({})
_ADDED = re.compile(r"\.(lora_\w+|modules_to_save|token_adapter\.trainable_tokens_delta)\.")
"""In the names of what adapters have, trained or not."""


def stored_adapters(
    model: nn.Module, folder: Path, *, all_of_it: bool, shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES
) -> Iterator[tuple[str, Tensor]]:
    """The values of adapters in a directory that peft has written, whole and by the names that they have in a model.

    Its configuration has been read before (`checkpoint.conversion.adapter_config`), which refuses what is no LoRA.
    `all_of_it`: the model has all of its modules, and no stage; `shapes`: as of `initial_adapters`. Raises UserError
    for adapters that do not fit it.
    """
    said = cast("dict[str, Any]", json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))
    config = cast(Any, model).peft_config["default"]
    usual = peft_module().LoraConfig()
    for key, name in LIKE.items():
        own, its = getattr(config, name), said.get(name) or getattr(usual, name)
        if own != its:
            raise UserError(f'the adapters in "{folder}" have {key} {its}, and lora.{key} is {own}: take theirs')
    of_experts = {factor.name: factor for factor in expert_adapters.factors_of(model)}
    added = (n for n, p in model.named_parameters() if p.requires_grad or n in of_experts or _ADDED.search(n))
    names = {_stored_name(name, of_experts): name for name in added}
    tables = {PREFIX + name: name for name in frozen_tables(model)}
    file = folder / "adapter_model.safetensors"
    try:
        with cast(Any, safe_open(file, framework="pt")) as stored:
            there = {str(name) for name in stored.keys()}  # noqa: SIM118  it is no mapping
            names |= {key: name for key, name in tables.items() if key in there}
            missing, surplus = sorted(names.keys() - there), sorted(there - names.keys()) if all_of_it else []
            if missing or surplus:
                what = f"lack {missing[0]}" if missing else f"have {surplus[0]}, which these have not"
                raise UserError(
                    f'the adapters in "{folder}" {what}: give the targets and modules_to_save in [lora] that they have'
                )
            for name, own in names.items():
                value = cast(Tensor, stored.get_tensor(name))
                full, factor = shapes.get(own, tuple(model.get_parameter(own).shape)), of_experts.get(own)
                if tuple(value.shape) != (shape := full if factor is None else factor.matrix_shape(full)):
                    raise UserError(
                        f'{name} in "{folder}" has the shape {list(value.shape)}, not {list(shape)}: they are '
                        "adapters of another model"
                    )
                yield own, value if factor is None else factor.value(value, full[0])
    except (OSError, SafetensorError) as error:
        raise UserError(f'"{file}" cannot be read: {error}') from None


def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters of a model that is whole in this process to its weights, in place; it is without them then."""
    peft = peft_module()
    for name, module in list(cast("Iterator[tuple[str, Any]]", model.named_modules())):
        if isinstance(module, peft.utils.other.TrainableTokensWrapper):
            module.token_adapter.merge(safe_merge=True)
            model.set_submodule(name, cast(nn.Module, module.token_adapter.get_base_layer()))
        elif isinstance(module, peft.utils.other.ModulesToSaveWrapper):
            model.set_submodule(name, cast(nn.Module, module.modules_to_save["default"]))
        elif isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) and not name.endswith(".token_adapter"):
            module.merge(safe_merge=True)
            model.set_submodule(name, cast(nn.Module, module.get_base_layer()))
    expert_adapters.merge(model)
    del cast(Any, model).peft_config
    model.requires_grad_(True)


def frozen_tables(model: nn.Module) -> list[str]:
    """The weights of the input embeddings and of the head that are not trained; none of modules that are, in full."""
    gets = (getattr(model, get, lambda: None) for get in ("get_input_embeddings", "get_output_embeddings"))
    modules = [one for one in (cast(Any, get)() for get in gets) if isinstance(one, nn.Module)]
    own = {id(p) for one in modules for p in one.parameters() if not p.requires_grad}
    named = (name for name, p in model.named_parameters() if id(p) in own)
    return [name for name in named if ".original_module." not in name and not _ADDED.search(name)]


def save_adapters(model: PreTrainedModel, folder: Path, base: str, *, tables: bool = False) -> None:
    """Write the adapters of a model that is whole in this process as peft does; `base`: the directory beside.

    `tables`: with embeddings and head, as peft does where they have rows that the directory has not.
    """
    peft, config = peft_module(), cast(Any, model).peft_config["default"]
    own = model.state_dict()  # of one that peft asks for itself it takes biases for parts that were not gathered
    found: Any = peft.get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    state = cast("dict[str, Tensor]", found)
    for factor in expert_adapters.factors_of(model):
        state[f"{factor.stored}.weight"] = factor.matrix(model.get_parameter(factor.name))
    if tables:
        state |= {name: own[name] for name in frozen_tables(model)}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    config.inference_mode = False


def _stored_name(name: str, of_experts: Mapping[str, expert_adapters.Factor]) -> str:
    """The name in peft's files of a parameter that is trained beside others."""
    if name in of_experts:
        return f"{PREFIX}{of_experts[name].stored}.weight"
    if name.endswith(".lora_B.default.bias"):
        return f"{PREFIX}{name.replace('.default.', '.')}"
    plain = name.replace(".modules_to_save.default.", ".").replace(".default.weight", ".default")
    bare = plain.removesuffix(".default")
    weight = "" if bare == plain or ".lora_embedding_" in bare or bare.endswith(("_vector", "_delta")) else ".weight"
    return f"{PREFIX}{bare}{weight}"
