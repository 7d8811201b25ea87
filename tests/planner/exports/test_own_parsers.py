"""The projects' own parsers take what is written, where they are installed (extra `peers`; torchtitan needs Triton).

Each in a process of its own: they set up process groups, loggers and warnings of theirs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.models.outlines.catalogue import catalogue, in_catalogue
from tangram.planner.exports.numbers import Numbers, chunk_blocks, experts_of
from tangram.planner.exports.targets import written
from tests.planner.exports.drawn import CLUSTER

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
CASES: dict[str, tuple[str, str, str, list[Any]]] = {
    "deepspeed": ("deepspeed", DEEPSPEED, "deepspeed.json", [64, 4, 3, True, True, 4]),
    "torchtitan to 0.2": (
        "torchtitan.config.job_config", TORCHTITAN, "torchtitan.toml", [1, "selective", 64, "tensorwise"]
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
    assert said_by(module, script, GOLDEN / file) == expected


def said_by(module: str, script: str, file: Path) -> Any:
    """What a project says of a file, or of a folder of them; skips the test where the project is not installed."""
    if not installed(module):
        pytest.skip(f"there is no {module}")
    if module.startswith("torchtitan") and not installed("triton"):
        pytest.skip("torchtitan needs Triton")
    source = f"import json, os, sys\nFILE = {str(file)!r}\n{script}\nprint('said ' + json.dumps(said))\n"
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **one_rank, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("said ")[2])


SHAPES = {
    "fsdp": Numbers(1, 1, "", 1, False, 1, 1, 1, 16, 3, 16, 1, 64, 4096, "full", "bf16"),
    "replicas": Numbers(1, 1, "", 1, False, 1, 1, 1, 16, 3, 8, 2, 64, 4096, "none", "bf16"),
    "tensor": Numbers(1, 1, "", 2, True, 1, 1, 2, 8, 3, 8, 1, 64, 4096, "none", "bf16"),
    "states": Numbers(1, 1, "", 2, True, 1, 1, 2, 8, 1, 8, 1, 64, 4096, "norms and activations", "fp8"),
    "stages": Numbers(4, 1, "1F1B", 2, True, 1, 1, 2, 2, 2, 2, 1, 64, 4096, "full", "bf16"),
    "interleaved": Numbers(2, 2, "Interleaved1F1B", 1, False, 1, 1, 1, 8, 1, 8, 1, 64, 4096, "none", "bf16"),
    "folded": Numbers(2, 2, "ZBVZeroBubble", 1, False, 1, 1, 1, 8, 2, 8, 1, 64, 4096, "none", "bf16", behind=1),
    "rings": Numbers(1, 1, "", 2, True, 2, 1, 2, 4, 3, 8, 1, 64, 8192, "full", "bf16"),
    "experts": Numbers(1, 1, "", 1, False, 1, 4, 1, 16, 3, 16, 1, 64, 4096, "full", "bf16"),
    "staged experts": Numbers(2, 2, "Interleaved1F1B", 1, False, 1, 4, 1, 8, 1, 8, 1, 64, 4096, "none", "bf16"),
}
MODELS = {
    "meta-llama/Meta-Llama-3-8B": "llama3 llama3_8b",
    "meta-llama/Meta-Llama-3-70B": "llama3 llama3_70b",
    "Qwen/Qwen3-30B-A3B": "qwen3 qwen3_30b_a3b",
    "openai/gpt-oss-20b": "gpt_oss gpt_oss_20b",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3 deepseek_v3_671b",
}
"""By their names on the hub, torchtitan's module and configuration."""
TITAN = """
import logging, shlex
logging.disable(logging.CRITICAL)
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import pipeline_parallel as pp
said = []
for plan in sorted(os.listdir(FILE)):
    one = json.load(open(os.path.join(FILE, plan)))
    words = shlex.split(one["text"].split("PLAN_ARGS=(")[1].rstrip().removesuffix(")"))
    module, config = one["titan"].split()
    found = ConfigManager().parse_args(["--module", module, "--config", config, *words])
    at, model = ParallelDims.from_config(found.parallelism, 16), found.model_spec.model
    model.update_from_config(config=found)
    found._validate_cuda_graphs()
    local = found.training.local_batch_size * at.dp_replicate * at.dp_shard
    cut = [model.layers]
    if at.pp > 1:
        parts = pp._generate_llm_fqn_per_model_part(*pp._get_pipeline_metadata(at, found.parallelism, model))
        cut = [[name for name in part if name.startswith("layers.")] for part in parts]
    said.append([plan, found.training.global_batch_size % local, found.compile.enable, [len(part) for part in cut]])
"""
MEGATRON = """
import dataclasses, shlex, torch, warnings
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer import transformer_config
transformer_config.is_te_min_version = lambda *_, **__: True  # as where Transformer Engine is
said = []
for plan in sorted(os.listdir(FILE)):
    one = json.load(open(os.path.join(FILE, plan)))
    words, given = shlex.split(one["text"].split("PLAN_ARGS=(")[1].rstrip().removesuffix(")")), {}
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = []
        else:
            given[name].append(int(word) if word.isdigit() else word)
    lists = ("recompute_modules", "hierarchical_context_parallel_sizes")
    given = {name: values if name in lists else (values or [True])[0] for name, values in given.items()}
    given["fp8"] = given.pop("fp8_format", None)
    given["virtual_pipeline_model_parallel_size"] = given.pop("num_virtual_stages_per_pipeline_rank", None)
    row, low = one["row"], torch.bfloat16
    kind = MLATransformerConfig if "kv_rank" in row else TransformerConfig
    model = {"num_layers": row["layers"], "hidden_size": row["hidden"], "num_attention_heads": row["heads"],
             "num_query_groups": row.get("kv_heads"), "mtp_num_layers": row.get("predictors"), "add_bias_linear": False,
             "bias_activation_fusion": False, "pipeline_dtype": low, "params_dtype": low}
    if row.get("experts"):
        model |= {"num_moe_experts": row["experts"], "moe_router_topk": row["per_token"],
                  "moe_ffn_hidden_size": row["expert_ffn"]}
    fields = {field.name for field in dataclasses.fields(kind)}
    kind(**model, **{name: value for name, value in given.items() if name in fields})
    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    DistributedDataParallelConfig(**{name: value for name, value in given.items() if name in fields})
    assert not given.get("tp_comm_overlap") or given.get("sequence_parallel")
    said.append(plan)
"""
ZERO = """
import deepspeed.comm
from deepspeed.runtime.config import DeepSpeedConfig
deepspeed.comm.init_distributed("gloo")
said = []
for plan in sorted(os.listdir(FILE)):
    one = json.load(open(os.path.join(FILE, plan)))
    class Ranks:
        def get_data_parallel_world_size(self):
            return one["numbers"]["data"]
    with open(os.path.join(os.path.dirname(FILE), "zero.json"), "w") as file:
        file.write(one["text"])
    found = DeepSpeedConfig(file.name, mpu=Ranks())
    ep = found.expert_parallel_config
    said.append([plan, found.train_batch_size, found.gradient_accumulation_steps, found.zero_config.stage,
                 found.bfloat16_config.enabled, ep.autoep_size if ep.enabled else 1])
"""
LAUNCH = """
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
said, before = [], dict(os.environ)
for plan in sorted(os.listdir(FILE)):
    one = json.load(open(os.path.join(FILE, plan)))
    path = os.path.join(os.path.dirname(FILE), "accelerate.yaml")
    with open(path, "w") as file:
        file.write(one["text"])
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args = _validate_launch_command(args)[0]
    os.environ.clear()
    os.environ.update(before | {name: str(value) for name, value in prepare_multi_gpu_env(args).items()})
    plugin, over = FullyShardedDataParallelPlugin(), ParallelismConfig()
    said.append([plan, plugin.reshard_after_forward, plugin.activation_checkpointing, over.total_size])
"""


def plans(name: str, to: Path) -> dict[str, tuple[Numbers, list[int]]]:
    """Writes what a project can run of all shapes of all models, and gives the strategies with their layers by file."""
    found = dict[str, tuple[Numbers, list[int]]]()
    to.mkdir()
    for model, titan in MODELS.items():
        outline = in_catalogue(model)
        assert outline is not None
        for shape, one in SHAPES.items():
            if not experts_of(outline) and "experts" in shape:
                continue
            if name == "megatron-lm" and one.pipeline > 1:  # it divides the optimiser's states alone there
                one = replace(one, zero=1)
            elif one.pipeline > 1:
                one = replace(one, zero=2)
            try:
                text = written(name, one, outline, CLUSTER).text
            except UserError:
                continue
            file = f"{model.rpartition('/')[2]}, {shape}.json"
            about = {"text": text, "titan": titan, "row": dict(catalogue()[model]), "numbers": asdict(one)}
            (to / file).write_text(json.dumps(about))
            found[file] = one, chunk_blocks(one, outline)
    return found


def test_torchtitans_configuration_takes_every_shape(tmp_path: Path) -> None:
    found = plans("torchtitan-options", tmp_path / "plans")
    said = said_by("torchtitan.config.configs", TITAN, tmp_path / "plans")
    assert [[plan, 0, False, chunks] for plan, (_, chunks) in sorted(found.items())] == said
    assert {plan.rpartition(", ")[2] for plan, *_ in said} >= {f"{shape}.json" for shape in SHAPES} - {"states.json"}


def test_megatron_core_takes_every_shape(tmp_path: Path) -> None:
    found = plans("megatron-lm", tmp_path / "plans")
    assert said_by("megatron.core.package_info", MEGATRON, tmp_path / "plans") == sorted(found)
    assert len(found) > 30


def test_deepspeeds_configuration_takes_every_shape(tmp_path: Path) -> None:
    found = plans("deepspeed", tmp_path / "plans")
    said = said_by("deepspeed", ZERO, tmp_path / "plans")
    assert said == [
        [plan, one.batch, one.micros, one.zero, one.precision == "bf16", one.expert]
        for plan, (one, _) in sorted(found.items())
    ]
    assert len(found) >= 8


def test_accelerate_launches_every_shape(tmp_path: Path) -> None:
    found = plans("accelerate", tmp_path / "plans")
    said = said_by("accelerate", LAUNCH, tmp_path / "plans")
    assert [[plan, one.zero == 3, one.again == "full", one.ranks] for plan, (one, _) in sorted(found.items())] == said
    assert len(found) >= 10
