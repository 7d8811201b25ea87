"""Megatron's plan of a decoder as one writes it in torch's parallel styles: the peer of more than one bench."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tangram.training.mesh.layout_to_torch import named_modules


def megatron(model: nn.Module, devices: DeviceMesh) -> None:
    """Cut a decoder as Llama's or Qwen3's in place: products by columns and rows, norms on a part of the sequence."""
    part, whole = Shard(1), Replicate()
    into = {"input_kwarg_layouts": {"hidden_states": part}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    parallelize_module(
        model,
        devices,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
        },
    )
    for layer in cast("Iterable[nn.Module]", model.get_submodule("model.layers")):
        names = {name for name, _ in named_modules(layer)}
        heads = [name for name in ("self_attn.q_norm", "self_attn.k_norm") if name in names]  # of each head, in Qwen3
        parallelize_module(
            layer,
            devices,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(**cast(Any, into)),
                **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
                **{name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in heads},
                "self_attn.o_proj": RowwiseParallel(output_layouts=part),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=part),
            },
        )
