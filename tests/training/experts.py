"""A mixture of experts whose experts lie one by one in its directory, and what two ranks do with it."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tangram.checkpoint.formats.huggingface import mapped_reader
from tangram.relayout import execute
from tangram.training.mesh.world import make_world
from tangram.training.parallel.apply import apply
from tangram.training.run.launch import Rank
from tangram.training.state.checkpointer import Checkpointer, JobState, Progress, load
from tangram.training.state.load_weights import load_pretrained, plan_pretrained
from tests.training.saving import Values, plan_of, values_of

MOE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LARGE = {**MOE, "num_hidden_layers": 1, "hidden_size": 512, "num_experts": 8, "moe_intermediate_size": 512}
"""Experts of 3 MiB each."""
NEOX = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(kind: str, fields: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A model of random values, also where its class would begin with ones or zeros."""
    torch.manual_seed(seed)
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(-1, 1)
    return model


def export(model: nn.Module, folder: Path, **options: Any) -> Path:
    """The model as transformers writes it."""
    logging.disable_progress_bar()
    cast(Any, model).save_pretrained(folder, **options)
    logging.enable_progress_bar()
    return folder


def files(folder: Path) -> dict[str, Tensor]:
    """The tensors in all files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def resident(folder: Path) -> int:
    """How many bytes of the mapped files of a folder this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f"{folder}/" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@dataclass
class Found:
    """What a rank saw."""

    loaded: Values
    """Of the directory, put together from both ranks."""
    again: Values
    """Of the checkpoint, into a model of other values."""
    moments: bool
    """Whether the optimiser's states came back too."""
    local: tuple[int, ...]
    """The shape of this rank's part of the experts."""
    renamed: Values
    """Of a model whose class, not its type, has other names in its directory."""
    touched: int
    """Bytes of the large directory."""
    read: set[str]
    """The tensors of the large directory that it opened."""


def two_ranks(rank: Rank, folder: Path) -> Found:
    """Load cut over both ranks, save, load that again; count what is read of the large directory."""
    small, large, checkpoint = (folder / name for name in ("small", "large", "checkpoint"))
    plan = plan_of(ranks=2, freeze=())
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    model = apply(build("qwen3_moe", MOE, 1), plan, world).module
    load_pretrained(small, model, plan, world)
    loaded = values_of(dict(model.named_parameters()))
    experts = cast(Any, model.get_parameter("model.layers.1.mlp.experts.gate_up_proj"))
    local = tuple(experts.to_local().shape)

    state = JobState(model, AdamW(model.parameters(), lr=0.01), Progress(1, 4, 32, 0.5))
    checkpointer = Checkpointer(checkpoint, plan, world)
    moments = _moments(state)
    checkpointer.save(state, wait=True)
    checkpointer.close()
    second = apply(build("qwen3_moe", MOE, 2), plan, world).module
    other = JobState(second, AdamW(second.parameters(), lr=0.01), Progress())
    load(checkpoint / "step-00000001", other, plan, world)
    again = values_of(dict(second.named_parameters()))
    states = cast("dict[str, dict[Any, Tensor]]", {"a": moments, "b": _states(other)})
    same = states["a"].keys() == states["b"].keys() and all(
        torch.equal(states["a"][k], states["b"][k]) for k in moments
    )

    neox = apply(build("gpt_neox", NEOX, 1), plan, world).module
    load_pretrained(folder / "neox", neox, plan, world)

    wide = apply(build("qwen3_moe", LARGE, 1), plan, world).module
    copies, memory = plan_pretrained(large, wide, plan, world)
    reader = mapped_reader(large)
    read: set[str] = set()

    def noted(place: Hashable, name: str) -> Tensor:
        read.add(name)
        return reader(place, name)

    execute(copies, noted, memory)
    touched = resident(large)
    return Found(loaded, again, same, local, values_of(dict(neox.named_parameters())), touched, read)


def _moments(state: JobState) -> dict[str, Tensor]:
    """Give every parameter states of its own."""
    assert state.optimiser is not None
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.1
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    state.optimiser.step()
    with torch.no_grad():
        for parameter, value in zip(state.model.parameters(), before, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return _states(state)


def _states(state: JobState) -> dict[str, Tensor]:
    assert state.optimiser is not None
    found: dict[str, Tensor] = {}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimiser.state[parameter].items():
            found[f"{name}.{key}"] = value.to_local().clone() if hasattr(value, "to_local") else value.clone()
    return found
