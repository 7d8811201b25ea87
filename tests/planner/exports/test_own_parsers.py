"""The projects' own parsers take what is written, where they are installed (extra `peers`; torchtitan needs Triton).

Each in a process of its own: they set up process groups, loggers and warnings of theirs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parent / "golden"

DEEPSPEED = """
import deepspeed.comm
from deepspeed.runtime.config import DeepSpeedConfig
class Ranks:
    def get_data_parallel_world_size(self):
        return 8
deepspeed.comm.init_distributed("gloo")
found = DeepSpeedConfig(FILE, mpu=Ranks())
said = [found.train_batch_size, found.gradient_accumulation_steps, found.zero_config.stage,
        found.bfloat16_config.enabled, found.expert_parallel_config.enabled, found.expert_parallel_config.autoep_size]
"""
TORCHTITAN = """
sys.argv = ["train.py"]
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
found = ConfigManager().parse_args(["--job.config_file", FILE])
p = found.parallelism
ParallelDims(dp_shard=p.data_parallel_shard_degree, dp_replicate=p.data_parallel_replicate_degree,
             cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
             ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=64)
said = [p.pipeline_parallel_layers_per_stage, found.activation_checkpoint.mode, found.training.global_batch_size,
        found.quantize.linear.float8.recipe_name]
"""
OPTIONS = """
import dataclasses, shlex, tyro
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
@dataclasses.dataclass
class Config:
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = dataclasses.field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointingConfig = None
words = shlex.split(open(FILE).read().split("PLAN_ARGS=(")[1].rstrip().removesuffix(")"))
found = tyro.cli(Config, args=words)
said = [found.parallelism.pipeline_parallel_schedule, found.parallelism.expert_parallel_degree,
        type(found.activation_checkpoint).__qualname__, found.training.local_batch_size]
"""
CASES: dict[str, tuple[str, str, str, list[Any]]] = {
    "deepspeed": ("deepspeed", DEEPSPEED, "deepspeed.json", [64, 4, 3, True, True, 4]),
    "torchtitan to 0.2": (
        "torchtitan.config.job_config", TORCHTITAN, "torchtitan.toml", [1, "selective", 64, "tensorwise"]
    ),
    "torchtitan 0.3": (
        "torchtitan.config.configs", OPTIONS, "torchtitan-options.sh", ["DualPipeV", 4, "FullAC.Config", 8]
    ),
}  # fmt: skip


def installed(name: str) -> bool:
    """Whether there is such a module, without loading it."""
    parts = name.split(".")
    if importlib.util.find_spec(parts[0]) is None:
        return False
    found = importlib.util.find_spec(parts[0])
    places = list(found.submodule_search_locations or ()) if found else []
    return len(parts) == 1 or any(Path(place, *parts[1:]).with_suffix(".py").exists() for place in places)


@pytest.mark.parametrize("case", CASES)
def test_a_parser_of_its_own_takes_the_file(case: str) -> None:
    module, script, file, expected = CASES[case]
    if not installed(module):
        pytest.skip(f"there is no {module}")
    if module.startswith("torchtitan") and not installed("triton"):
        pytest.skip("torchtitan needs Triton")
    source = f"import json, sys\nFILE = {str(GOLDEN / file)!r}\n{script}\nprint('said ' + json.dumps(said))\n"
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **one_rank, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.rpartition("said ")[2]) == expected
