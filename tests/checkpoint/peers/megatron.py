"""A script that runs megatron-core itself on two processes of the CPU: load a torch_dist, compute, train, save it.

    python -m tests.checkpoint.peers.megatron FOLDER ROW...

Each row's checkpoint is FOLDER/ROW/core; FOLDER/ROW/trained is written and, where megatron-core can compute the model
without Transformer Engine, FOLDER/ROW/logits.pt. Tensors are cut over both processes, experts dealt out to them.

Stubs: the device, its synchronisation and its random numbers, which megatron-core asks for wherever it runs; for latent
attention the classes of Transformer Engine and the core of attention, which megatron-core has no version of without
that library; and for Gemma a product with a norm after it, which megatron-core has not at all, and the one that is
added to weights of norms. The layers, their shards and the checkpoints are megatron-core's own.
"""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tests.checkpoint.peers.models import CORE

warnings.filterwarnings("ignore")

RANKS = 2
VOCABULARY = 128


class Nothing(nn.Module):
    """In the place of what cannot be built without Transformer Engine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def build(name: str, tp: int, ep: int) -> nn.Module:
    """megatron-core's own model of a row; experts are dealt out where it has any."""
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    row = CORE[name]
    own = dict(row["core"])
    latent, experts, normed = "kv_lora_rank" in own, own.get("num_moe_experts"), own.get("qk_layernorm", False)
    fields: dict[str, Any] = {
        "gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6,
        "activation_func": {"quick_gelu": quick_gelu, "gelu": gelu}.get(row.get("activation", ""), nn.functional.silu),
        "use_cpu_initialization": True, "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep if experts else 1, "expert_tensor_parallel_size": 1,
        "params_dtype": torch.float32, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "apply_rope_fusion": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none", **own,
    }  # fmt: skip
    config: Any = (MLATransformerConfig if latent else TransformerConfig)(**fields)
    norm = fields["normalization"]
    if "moe_layer_freq" in fields:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
    else:
        spec = specs.get_gpt_layer_local_spec(experts, False, normed, latent, norm)
    if latent:
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.TELinear = Nothing
        multi_latent_attention.TEColumnParallelLinear = Nothing
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Nothing
    if row.get("post_norms"):
        spec.submodules.self_attention.submodules.linear_proj = normed_after()
        spec.submodules.mlp.submodules.linear_fc2 = normed_after()
    model = {"position_embedding_type": "rope", "rotary_base": 10000, **row.get("model", {})}
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=64, parallel_output=False, **model)


def gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def normed_after() -> type[nn.Module]:
    """A product over rows with a norm of what it gives, by the names that Megatron-Bridge's has."""
    from megatron.core.tensor_parallel import RowParallelLinear

    class Normed(RowParallelLinear):
        def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
            super().__init__(input_size, output_size, **options)
            self.post_layernorm = nn.RMSNorm(output_size, eps=1e-6)

        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(input_)
            return self.post_layernorm(output), bias

    return Normed


def run(rank: int, asked: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{asked.folder}/meet", rank=rank, world_size=RANKS)
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # which its router asks for even where Transformer Engine is absent
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # there is no dropout

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=RANKS, expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1
    )
    torch.manual_seed(100 + rank)
    for name in asked.rows:
        taken(name, asked.folder / name, rank)
    dist.destroy_process_group()


def taken(name: str, folder: Path, rank: int) -> None:
    """Load, compute, train and save one model."""
    from megatron.core import dist_checkpointing

    row, model = CORE[name], cast("Any", build(name, RANKS, RANKS).eval())
    state = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "core"))
    found = model.load_state_dict(state, strict=False)
    wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if "_extra_state" not in name]
    assert not wrong, wrong
    if row.get("computes", True):
        logits = computed(model, row.get("less_one", False))
        if rank == 0:
            torch.save(logits, folder / "logits.pt")
    train(model)
    if rank == 0:
        (folder / "trained").mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "trained"))
    dist.barrier()


def computed(model: Any, less_one: bool) -> Tensor:
    """Logits. `less_one`: as Gemma has it, one is added to the weights of norms, and embeddings are scaled."""
    ids, positions = torch.arange(24).reshape(2, 12) * 5 % 127, torch.arange(12).expand(2, 12)
    unseen = ~torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    with torch.no_grad():
        if not less_one:
            return model(ids, positions, unseen)
        for name, parameter in model.named_parameters():
            parameter.add_(float("norm" in name))
        words = model.embedding(ids, positions) * model.config.hidden_size**0.5
        logits = model(ids, positions, unseen, decoder_input=words)
        model.load_state_dict(kept, strict=False)
        return logits


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
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="+")
    given = parser.parse_args(sys.argv[1:])
    mp.spawn(run, args=(given,), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]
