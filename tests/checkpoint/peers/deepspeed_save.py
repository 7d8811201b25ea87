"""A script that runs DeepSpeed itself on some processes of the CPU: train a few steps, save, and say what it holds.

    DS_ACCELERATOR=cpu python -m tests.checkpoint.peers.deepspeed_save OUT --stage N --dtype NAME [--ranks N]
        [--model tiny|llama] [--sub-group N] [--accumulate fp32]

OUT/saved is what `save_checkpoint` writes, OUT/expected.safetensors what the engine says by DeepSpeed's own functions:

    weight.NAME    of `zero_to_fp32`, in float32
    module.NAME    of the module, gathered, in the type that it computes with
    state.NAME.exp_avg    the whole optimiser state; `state.NAME.master` the float32 copy

The fixtures in tests/checkpoint/fixtures/deepspeed are made by it: its README.md says with which arguments.
"""

import argparse
import faulthandler
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

warnings.filterwarnings("ignore")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 2
PATIENCE = 240
"""Seconds after which a rank says where it hangs, and ends."""


class Tiny(nn.Module):
    """Sizes that nothing divides, a tied parameter, a frozen one, an empty one, buffers, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.back = nn.Linear(11, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids)) + self.mean.to(self.scale.dtype)
        x = x + self.back(torch.tanh(self.norm(self.wide(x)))) * self.scale
        return self.head(x)


def build(name: str) -> tuple[nn.Module, int]:
    torch.manual_seed(1)
    if name == "tiny":
        return Tiny(), 7
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.norm.weight.requires_grad_(False)
    return model, 61


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    kinds = {"bfloat16": {"bf16": {"enabled": True}}}
    zero: dict[str, Any] = {"stage": args.stage, "stage3_param_persistence_threshold": 0}
    if args.sub_group:
        zero["sub_group_size"] = args.sub_group
    more = {"data_types": {"grad_accum_dtype": args.accumulate}} if args.accumulate else {}
    return {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, **kinds.get(args.dtype, {}), **more,
    }  # fmt: skip


def train(args: argparse.Namespace, out: Path) -> None:

    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    import deepspeed

    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))  # none is compiled
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    model, words = build(args.model)
    optimiser = torch.optim.AdamW(groups_of(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimiser, config=config_of(args))
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, words, (2, 6))
        found = engine(ids) if args.model == "tiny" else engine(input_ids=ids).logits
        engine.backward(nn.functional.cross_entropy(found.float().flatten(0, 1), ids.flatten()))
        engine.step()
    engine.save_checkpoint(str(out / "saved"))

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed 0.19.8 links the states when the first group has stepped, and the others' are not there yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    known: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        whole = deepspeed.zero.GatheredParameters([param], enabled=args.stage == 3)
        with whole:
            known[f"module.{name}"] = param.detach().clone()
        if param.requires_grad:
            known[f"state.{name}.master"] = safe_get_full_fp32_param(param).detach().clone()
            for moment in MOMENTS:
                value = safe_get_full_optimizer_state(param, moment)
                known[f"state.{name}.{moment}"] = value.detach().clone().view_as(known[f"module.{name}"])
    if dist.get_rank() == 0:
        if not args.accumulate:  # of the optimiser for that, DeepSpeed's own script says that it is no ZeRO
            weights = get_fp32_state_dict_from_zero_checkpoint(str(out / "saved"))
            known.update({f"weight.{name}": value.detach().clone() for name, value in weights.items()})
        save_file({name: value.contiguous() for name, value in known.items()}, out / "expected.safetensors")
    dist.barrier()


def rank(number: int, args: argparse.Namespace, meet: str) -> None:
    more = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({key: str(value) for key, value in {**more, "MASTER_PORT": 0}.items()})
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=number, world_size=args.ranks)
    train(args, Path(args.out))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="tiny", choices=("tiny", "llama"))
    parser.add_argument("--sub-group", type=int, default=0)
    parser.add_argument("--accumulate", default="")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    Path(args.out).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (args, f"{folder}/meet"), args.ranks)
    for script in Path(args.out).rglob("*.py"):
        script.unlink()
    sys.stdout.write(f"{args.out}\n")


if __name__ == "__main__":
    main()
