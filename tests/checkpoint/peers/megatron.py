"""A script that runs megatron-core itself on a few processes of the CPU: load a torch_dist, compute or train, save it.

    python -m tests.checkpoint.peers.megatron FAMILY --tp N --ep N [--load DIR] [--save DIR] [--logits FILE] [--train]

Stubs: the device, its synchronisation and its random numbers, which megatron-core asks for wherever it runs, and for
latent attention the classes of Transformer Engine and the core of attention, which megatron-core has no version of
without that library. The layers, their shards and the checkpoints are megatron-core's own.
"""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tests.checkpoint.peers.models import CORE

warnings.filterwarnings("ignore")


class Nothing(nn.Module):
    """In the place of what cannot be built without Transformer Engine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def build(name: str, tp: int, ep: int) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = dict(CORE[name])
    latent, vocabulary, predictors = "kv_lora_rank" in fields, fields.pop("vocabulary"), fields.get("mtp_num_layers")
    config: Any = (MLATransformerConfig if latent else TransformerConfig)(
        **fields, gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", layernorm_epsilon=1e-6, use_cpu_initialization=True, qk_layernorm=True,
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
        params_dtype=torch.float32, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
        attention_dropout=0.0, hidden_dropout=0.0, moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
    )  # fmt: skip
    if "moe_layer_freq" in fields:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = specs.get_gpt_layer_local_spec(fields.get("num_moe_experts"), False, True, latent, "RMSNorm")
    if latent:
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.TELinear = Nothing
        multi_latent_attention.TEColumnParallelLinear = Nothing
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.submodules.core_attention = Nothing
    block = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predictors else None
    return GPTModel(
        config, spec, vocab_size=vocabulary, max_sequence_length=64, share_embeddings_and_output_weights=False,
        position_embedding_type="rope", rotary_base=10000, mtp_block_spec=block, parallel_output=False,
    )  # fmt: skip


def run(rank: int, asked: argparse.Namespace, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{asked.meet}", rank=rank, world_size=world)
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # which its router asks for even where Transformer Engine is absent
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # there is no dropout

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=asked.tp, expert_model_parallel_size=asked.ep, expert_tensor_parallel_size=1
    )
    torch.manual_seed(100 + rank)
    model: Any = build(asked.family, asked.tp, asked.ep).eval()
    if asked.load:
        state = dist_checkpointing.load(model.sharded_state_dict(), asked.load)
        found = model.load_state_dict(state, strict=False)
        wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if "_extra_state" not in name]
        assert not wrong, wrong
    if asked.logits:
        ids = torch.arange(24).reshape(2, 12) * 5 % 127
        positions = torch.arange(12).expand(2, 12)
        unseen = ~torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            logits: Tensor = model(ids, positions, unseen)
        if rank == 0:
            torch.save(logits, asked.logits)
    if asked.train:
        train(model)
    if asked.save:
        if rank == 0:
            Path(asked.save).mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), asked.save)
    dist.barrier()
    dist.destroy_process_group()


def train(model: nn.Module) -> None:
    """A step of AdamW on the projections that lead out of attention and on the experts; all others stay.

    The gradient is the weight's own sign, so that what a tensor becomes is known without running the model.
    """
    moved = [p for name, p in model.named_parameters() if name.endswith("linear_proj.weight") or ".experts." in name]
    optimiser = torch.optim.AdamW(moved, lr=0.125, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    for parameter in moved:
        parameter.grad = parameter.detach().sign()
    optimiser.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--meet", required=True)
    for option in ("--load", "--save", "--logits"):
        parser.add_argument(option)
    parser.add_argument("--train", action="store_true")
    given = parser.parse_args(sys.argv[1:])
    ranks = max(given.tp, given.ep)
    mp.spawn(run, args=(given, ranks), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
