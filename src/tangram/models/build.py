"""Build a Hugging Face model from a configuration, first without memory, then with weights that depend on names only.

`build_on_meta` makes the modules with no storage, so a model of any size is cut before it exists. `initial_tensors`
then yields its parameters and buffers whole, one module at a time, made by the model class's own initialisation from a
random stream seeded with (seed, module name). So the weights are the same on any number of ranks and in any layout.

Trade-off: every rank makes every whole tensor once, which costs time in proportion to the model but memory of only one
module; and one module's parameters share a stream.
"""

import copy
import difflib
import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tangram.errors import UserError

# Fields of a configuration that say how it was made, or what the training decides: all is float32.
FIXED = frozenset({"_name_or_path", "architectures", "dtype", "model_type", "transformers_version"})


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """The named model sizes of `presets.toml`."""
    return tomllib.loads(resources.files("tangram.models").joinpath("presets.toml").read_text(encoding="utf-8"))


def make_config(preset: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a preset with some fields changed; a field that the class does not know is refused.

    (The Hugging Face classes take any keyword in silence, so a misspelt field would train another model.)
    """
    known = presets()
    if preset not in known:
        raise UserError(f'there is no model preset "{preset}"{did_you_mean(preset, known)}')
    fields = dict(known[preset])
    model_type: str = fields.pop("model_type")
    refuse_unknown_fields(model_type, AutoConfig.for_model(model_type), changes)
    return _made(model_type, {**fields, **changes})


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration with some fields changed; a field that its class does not know is refused."""
    kind = str(config.model_type)
    refuse_unknown_fields(kind, config, changes)
    return _made(kind, {**config.to_dict(), **changes}) if changes else config


def refuse_unknown_fields(model_type: str, config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Raise UserError for a field that a class of configuration does not have."""
    known_fields = config.to_dict().keys() - FIXED
    for name in changes:
        if name not in known_fields:
            raise UserError(f'a {model_type} model has no field "{name}" to change{did_you_mean(name, known_fields)}')


def _made(model_type: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(model_type, **{key: fields[key] for key in fields if key != "model_type"})
    except Exception as error:
        raise UserError(f"a {model_type} model cannot have these fields: {error.__cause__ or error}") from error


def did_you_mean(word: str, known: Any, *, listed: bool = True) -> str:
    """A hint at the nearest known word; when none is near, the list of all or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    others = f"; known are {', '.join(sorted(known))}" if listed else ""
    return f'; did you mean "{near[0]}"?' if near else others


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model with shapes but no storage; UserError where its class can make none of this configuration."""
    try:
        with torch.device("meta"):
            return cast(PreTrainedModel, AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32))
    except Exception as error:
        raise UserError(
            f"a {config.model_type} model cannot be built with these fields: {type(error).__name__}: {error}"
        ) from error


def initial_tensors(
    config: PreTrainedConfig, seed: int, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, whole, on the CPU; tied parameters once, under their first name.

    `only`: of these names; modules without any are not made.
    """
    model = build_on_meta(config)
    names_in_it = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    wanted = {name for name in names_in_it if only(name)}
    for path, module in cast(Iterator[tuple[str, nn.Module]], model.named_modules()):
        names = _own_tensors(module)
        if not any(_join(path, name) in wanted for name in names):
            continue
        _initialise_alone(model, module, _stream_seed(seed, path))
        for name in names:
            full_name = _join(path, name)
            tensor: Tensor = getattr(module, name)
            if tensor.is_floating_point() and tensor.isnan().any():
                raise RuntimeError(f"{type(model).__name__} leaves {full_name} without an initial value")
            if full_name in wanted:
                yield full_name, tensor.detach()
        module.to_empty(device="meta", recurse=False)


def _initialise_alone(model: PreTrainedModel, module: nn.Module, seed: int) -> None:
    """Give one module storage and its class's initial values, and leave the process's random state as it was."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name in _own_tensors(module):
            tensor: Tensor = getattr(module, name)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # so that a tensor which nothing initialises is seen
        torch.random.default_generator.manual_seed(seed)
        model._init_weights(module)  # pyright: ignore[reportPrivateUsage]  the documented override point of HF models


def _own_tensors(module: nn.Module) -> list[str]:
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    return parameters + [name for name, _ in module.named_buffers(recurse=False)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _stream_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=7).digest())
