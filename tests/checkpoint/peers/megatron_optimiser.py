"""A script that runs megatron-core's distributed optimiser on processes of the CPU: load, take steps, save.

    python -m tests.checkpoint.peers.megatron_optimiser FAMILY --tp N --meet FILE --save DIR [--load DIR ...]

The gradient is half the weight's sign, so that what an optimiser of anybody else makes of the same weights is the same
numbers. Beside the stubs of `megatron`: what asks for memory of a GPU gets it of the CPU, and a tensor's type is said
to be a GPU's, which the distributed optimiser insists on; and torch's AdamW, which it takes without Transformer Engine,
has its step where megatron-core 0.16.1 expects a tensor to load, of which it has saved none.
"""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

from tests.checkpoint.peers.megatron import build

warnings.filterwarnings("ignore")
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
}  # fmt: skip
"""As `--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable` has it, gathered by gloo."""


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def run(rank: int, asked: argparse.Namespace, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{asked.meet}", rank=rank, world_size=world)
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        put(self, parameter, {**tensors, **({"step": own["step"]} if "step" in own else {})})

    DistributedOptimizer._set_main_param_and_optimizer_states = put_with_step
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=asked.tp, expert_model_parallel_size=asked.ep, expert_tensor_parallel_size=1
    )
    torch.manual_seed(100)
    with OnCpu():
        model: Any = build(asked.family, asked.tp, asked.ep)
        if asked.dtype == "bfloat16":
            model = model.bfloat16()
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        beta1, beta2 = SETTINGS["betas"]
        config = OptimizerConfig(
            optimizer="adam", lr=SETTINGS["lr"], min_lr=0.0, weight_decay=SETTINGS["weight_decay"], adam_beta1=beta1,
            adam_beta2=beta2, adam_eps=SETTINGS["eps"], clip_grad=0.0, use_distributed_optimizer=True,
            params_dtype=getattr(torch, asked.dtype), bf16=asked.dtype == "bfloat16",
        )  # fmt: skip
        optimiser = get_megatron_optimizer(config, [wrapped])
        if asked.load:
            wanted = model.sharded_state_dict()
            if asked.states:
                step(model, optimiser)  # without Transformer Engine it has no states to load into before one
                states = optimiser.sharded_state_dict(wanted, is_loading=True, metadata=METADATA)
                found = dist_checkpointing.load({**wanted, "optimizer": states}, asked.load)
                optimiser.load_state_dict(found.pop("optimizer"))
            else:
                found = dist_checkpointing.load(wanted, asked.load)
            missing = model.load_state_dict(found, strict=False)
            assert not [name for name in missing.missing_keys if "_extra_state" not in name]
            if not asked.states:
                optimiser.reload_model_params()
        for _ in range(asked.steps):
            step(model, optimiser)
        if rank == 0:
            Path(asked.save).mkdir()
        dist.barrier()
        state = model.sharded_state_dict()
        dist_checkpointing.save(
            {**state, "optimizer": optimiser.sharded_state_dict(state, metadata=METADATA)}, asked.save
        )
    dist.barrier()
    dist.destroy_process_group()


def step(model: Any, optimiser: Any) -> None:
    for parameter in model.parameters():
        parameter.main_grad.copy_(0.5 * parameter.detach().sign())
    optimiser.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--meet", required=True)
    parser.add_argument("--save", required=True)
    parser.add_argument("--load")
    parser.add_argument("--states", action="store_true", help="load the optimiser's, too")
    given = parser.parse_args(sys.argv[1:])
    ranks = max(given.tp, given.ep)
    mp.spawn(run, args=(given, ranks), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
