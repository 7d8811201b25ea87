"""Low-rank adapters put into a model, as peft makes them: frozen weights, and beside them what is trained.

The modules are peft's own, so that what is computed and what is saved is what peft computes and saves. Here is what it
does not do: targets that name nothing are refused, values begin alike at any layout, and where they came from is known.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError

__all__ = ["ALL", "add_adapters", "initial_adapters", "merge_adapters", "save_adapters"]

ALL = "all-linear"
PREFIX = "base_model.model."
"""Before the names of tensors in peft's files."""
_ADAPTED = (nn.Linear, nn.Embedding, Conv1D)


def add_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str | Sequence[str] = ALL,
    rslora: bool = False,
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
) -> None:
    """Put adapters without values beside the layers that `targets` names, in place, and freeze all else.

    A model that has some already stays as it is. Raises UserError for targets that name no layer, and without peft.
    """
    if getattr(model, "peft_config", None) is not None:
        return
    peft = _peft()
    names = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    some = (targets,) if isinstance(targets, str) else tuple(targets)
    adapted = [] if some == (ALL,) else [name for target in some for name in _named(target, "targets", names)]
    if unfit := [name for name in adapted if not isinstance(names[name], _ADAPTED)]:
        kind = type(names[unfit[0]]).__name__
        raise UserError(
            f"lora.targets names {unfit[0]}, a {kind}: adapters stand beside linear layers and embeddings; a module of "
            "another kind can be trained whole by lora.modules_to_save"
        )
    saved = [name for one in modules_to_save for name in _named(one, "modules_to_save", names)]
    if both := set(adapted) & set(saved):
        raise UserError(f"{min(both)} is in lora.targets and in lora.modules_to_save: give it in one of them")
    _refuse_tied(model, {*adapted, *saved}, names)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, use_rslora=rslora, use_dora=dora, task_type="CAUSAL_LM",
        target_modules=ALL if some == (ALL,) else sorted(set(adapted)), modules_to_save=sorted(set(saved)) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in names.values()),
    )  # fmt: skip
    try:
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"peft puts no adapters into a {type(model).__name__}: {' '.join(str(error).split())}"
        ) from None


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The values with which adapters begin, whole and by name: the model gives with them what it gave before.

    As in peft one of two factors is drawn, each by the seed and its own name, and the other is 0. Magnitudes of DoRA
    are not among them: they are lengths of weights.
    """
    for name, parameter in model.named_parameters():
        shape, generator = tuple(parameter.shape), torch.Generator().manual_seed(_stream(seed, name))
        if ".lora_A." in name:
            bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_embedding_B." in name:
            yield name, torch.empty(shape).normal_(generator=generator)
        elif ".lora_B." in name or ".lora_embedding_A." in name:
            yield name, torch.zeros(shape)


def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters of a model that is whole in this process to its weights, in place; it is without them then."""
    peft = _peft()
    for name, module in list(cast("Iterator[tuple[str, Any]]", model.named_modules())):
        if isinstance(module, peft.utils.other.ModulesToSaveWrapper):
            model.set_submodule(name, cast(nn.Module, module.modules_to_save["default"]))
        elif isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, cast(nn.Module, module.get_base_layer()))
    del cast(Any, model).peft_config
    model.requires_grad_(True)


def save_adapters(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write the adapters of a model that is whole in this process as peft does; `base`: the directory beside."""
    peft, config = _peft(), cast(Any, model).peft_config["default"]
    state = cast("dict[str, Tensor]", peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    config.inference_mode = False


def _named(pattern: str, key: str, names: dict[str, nn.Module]) -> list[str]:
    """The modules of a name's end or a pattern. Raises UserError for none."""
    found = [n for n in names if n and (n == pattern or n.endswith(f".{pattern}") or fnmatchcase(n, pattern))]
    if not found:
        ends = sorted({name.rpartition(".")[2] for name, one in names.items() if isinstance(one, _ADAPTED)})
        near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(ends)}"
        raise UserError(f'lora.{key} names "{pattern}", which fits no module of the model: {hint}')
    return found


def _refuse_tied(model: nn.Module, some: set[str], names: dict[str, nn.Module]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in names.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for tied in owners.values():
        if len(tied) > 1 and (own := some & {*tied}):
            raise UserError(
                f"{min(own)} has its weights together with {min({*tied} - own or own)}, and adapters of one would "
                "part them: leave it out of lora.targets and lora.modules_to_save"
            )


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(
            'adapters are made by peft, which is not installed: pip install "tangram-train[tune]"'
        ) from None
    return peft
