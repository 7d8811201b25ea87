"""Which runs there are: a setting, a recipe of attention, tokens of a step, a seed; and the plan that each trains.

plain      a Qwen3-like decoder: queries and keys are normed, so nothing stands out
outliers   a Qwen2-like one without norms, whose queries and keys begin with channels far from zero (`initial`)
mild       the same, as far from zero as the laboratory's law `channels` has them
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tangram.kernels.flash.modes import MODES, cannot
from tangram.schema.plan import Plan

Setting = Literal["plain", "outliers", "mild"]
RECIPES: Mapping[Setting, tuple[str, ...]] = {
    "plain": ("bf16", "fp8-fwd", "fp8", "fp8-e5m2-emulated", "nvfp4-emulated", "nvfp4-dropin-emulated"),
    "outliers": ("bf16", "fp8-fwd", "fp8", "nvfp4-emulated", "nvfp4-dropin-emulated"),
    "mild": ("bf16", "nvfp4-emulated", "nvfp4-dropin-emulated"),
}
BIASES: Mapping[Setting, tuple[float, float]] = {"outliers": (4.0, 24.0), "mild": (3.0, 6.0)}
"""How far from zero some channels of queries and of keys begin; of other settings none does."""
PLAIN = "bf16"
"""What the others are compared with."""
FORMAT = 1
"""To be raised where what a run measures, or how, changes: no older result is then taken for a new one."""


@dataclass(frozen=True)
class Size:
    """Of the models and the text that they see."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    sequence: int
    tokens: int
    """That a run sees."""
    steps_of: tuple[int, ...]
    """Tokens of a step, of which a run has one."""
    micro_batch: int
    lr: float
    held_out: int
    """Samples."""
    device: Literal["auto", "cpu"] = "cpu"
    compute: Literal["float32", "bfloat16"] = "float32"


SMALL = Size("small", 128, 256, 2, 2, 1, 128, 393_216, (512, 2048), 16, 2e-3, 256)
"""For one core."""
MILLION = Size("million", 192, 768, 2, 3, 1, 128, 2**20, (512, 2048), 16, 2e-3, 256)
"""For one core, a million parameters and tokens: plain models alone, so that all runs take some 40 minutes by two."""
LARGE = Size(
    "large", 512, 1408, 8, 8, 4, 1024, 30 * 2**20, (32_768, 131_072), 16, 1e-3, 256, "auto", "bfloat16"
)  # fmt: skip
"""For a GPU: 24 million parameters. It has been run on none."""
QUICK = Size("quick", 32, 64, 1, 1, 1, 64, 1024, (256,), 4, 2e-3, 4)
"""To see that it works."""


@dataclass(frozen=True)
class Run:
    """One of the queue."""

    size: Size
    setting: Setting
    recipe: str
    step_tokens: int
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.size.name}-{self.setting}-{self.step_tokens}-{self.recipe}-seed{self.seed}"

    @property
    def steps(self) -> int:
        """That it trains."""
        return self.size.tokens // self.step_tokens


def recipes_of(size: Size) -> Mapping[Setting, tuple[str, ...]]:
    """By setting, what is trained of a size."""
    return {"plain": ("bf16", "fp8-fwd", "fp8", "nvfp4-emulated")} if size is MILLION else RECIPES


def queue(size: Size, seeds: int, kernels_only: bool = False) -> Iterator[Run]:
    """All runs, those of one table's row group together. `kernels_only`: without what is studied on the CPU only."""
    for tokens in size.steps_of:
        for setting, recipes in recipes_of(size).items():
            for seed in range(1, seeds + 1):
                for recipe in recipes:
                    if not (kernels_only and cannot(MODES[recipe])):
                        yield Run(size, setting, recipe, tokens, seed)


def plan_of(run: Run, folder: Path) -> Plan:
    """What it trains; tokens and first weights lie in `folder`, the same for all runs."""
    size = run.size
    return Plan.model_validate({
        "version": 3,
        "seed": run.seed,
        "model": _model(run, folder),
        "data": {
            "sources": [{"path": "stdlib", "pattern": "**/*.py" if size.device == "auto" else "*.py"}],
            "tokenizer": "bytes",
            "cache": str(folder / "tokens"),
            "held_out": 0.05,
            "held_out_samples": size.held_out,
            "sequence": size.sequence,
            "global_batch": run.step_tokens // size.sequence,
            "micro_batch": min(size.micro_batch, run.step_tokens // size.sequence),
        },
        "optimiser": {"lr": size.lr, "warmup_steps": max(1, run.steps // 20), "weight_decay": 0.1},
        "precision": {"compute": size.compute},
        "checkpoint": {"every_steps": 0, "asynchronous": False},
        "run": {
            "steps": run.steps,
            "device": size.device,
            "attention": run.recipe,
            "on_nonfinite": "skip",
        },
        "mesh": "dp=1",
        "axes": {"data": ["dp"]},
        "layouts": {"parameters": {"*": "..."}},
    })  # fmt: skip


def _model(run: Run, folder: Path) -> dict[str, Any]:
    if run.setting in BIASES:
        return {"path": str(initial_folder(run, folder))}
    return {"preset": "qwen3-2m", "change": fields_of(run.size)}


def fields_of(size: Size) -> dict[str, Any]:
    """Of the configuration of both models; heads are as wide as is left for them."""
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": size.sequence,
    }


def initial_folder(run: Run, folder: Path) -> Path:
    """Where the first weights of a run with outliers lie; all recipes begin with the same."""
    return folder / "initial" / f"{run.size.name}-{run.setting}-seed{run.seed}"


def settings_of(run: Run) -> dict[str, Any]:
    """What a result depends on, as JSON has it: another value of any of it is another run."""
    plan = plan_of(run, Path())
    return json.loads(json.dumps({
        "format": FORMAT,
        "run": asdict(run),
        "biases": BIASES.get(run.setting),
        "plan": plan.model_dump(mode="json"),
        "recipe": repr(MODES[run.recipe]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }))  # fmt: skip


def digest_of(settings: Mapping[str, Any]) -> str:
    """Of all of them."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
