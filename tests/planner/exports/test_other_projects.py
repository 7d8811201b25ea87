"""DeepSpeed, accelerate and PaddleFormers: texts as they were, keys that the projects know, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tangram.errors import UserError
from tangram.models.outlines.outline import Outline
from tangram.planner.exports.numbers import Numbers
from tangram.planner.exports.targets import EXPORTS
from tests.planner.exports.drawn import CLUSTER, DENSE, MIXED

HERE = Path(__file__).parent
FLAT = Numbers(1, 1, "", 1, False, 1, 1, 1, 16, 3, 16, 2, 64, 2048, "full", "bf16")
EXPERTS = replace(FLAT, data=8, expert=4, shard=8)
RINGS = replace(FLAT, data=4, context=2, shard=4, zero=2)
STAGES = Numbers(2, 2, "Interleaved1F1B", 2, True, 2, 8, 1, 4, 1, 8, 1, 32, 4096, "full", "bf16")
CASES = {
    "deepspeed.json": ("deepspeed", EXPERTS, MIXED),
    "accelerate.yaml": ("accelerate", RINGS, DENSE),
    "paddleformers.yaml": ("paddleformers", STAGES, MIXED),
}


@pytest.mark.parametrize("golden", CASES)
def test_the_text_is_as_it_was(golden: str) -> None:
    name, one, outline = CASES[golden]
    assert EXPORTS[name].write(one, outline, CLUSTER).text == (HERE / "golden" / golden).read_text()


def test_deepspeeds_numbers_are_a_product() -> None:
    written = EXPORTS["deepspeed"].write(EXPERTS, MIXED, CLUSTER)
    found = json.loads(written.text)
    micro, micros = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == micro * micros * EXPERTS.data
    assert any("gradient_checkpointing_enable" in one for one in written.notes)


@pytest.mark.parametrize("one", [RINGS, replace(FLAT, zero=0, again="none"), replace(FLAT, shard=8)])
def test_accelerate_loads_what_is_written(one: Numbers, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "accelerate.yaml"
    path.write_text(EXPORTS["accelerate"].write(one, DENSE, CLUSTER).text)
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (one.ranks, one.ranks // 8, "bf16")
    known = {action.dest for action in launch_command_parser()._actions}
    tables = {**config.fsdp_config, **config.parallelism_config}
    assert set(tables) <= known
    if one.zero:
        sizes = [tables[f"parallelism_config_{of}_size"] for of in ("dp_replicate", "dp_shard", "tp", "cp")]
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == one.ranks
    else:
        assert config.distributed_type.value == "MULTI_GPU"


def test_paddleformers_knows_the_keys() -> None:
    known = {line for line in (HERE / "peers" / "paddleformers.txt").read_text().splitlines() if line[0] != "#"}
    for one in (STAGES, replace(STAGES, schedule="DualPipeV"), replace(STAGES, virtual=1, schedule="1F1B")):
        found = yaml.safe_load(EXPORTS["paddleformers"].write(one, MIXED, CLUSTER).text)
        assert set(found) <= known
        assert one.data == found["sharding_parallel_size"] // found["context_parallel_size"]  # its own product


REFUSED: list[tuple[str, Outline, Numbers, str]] = [
    ("deepspeed", DENSE, replace(FLAT, pipeline=2, schedule="1F1B"), "says nothing of pipelines"),
    ("deepspeed", DENSE, replace(FLAT, context=2), "says nothing of CP ranks"),
    ("deepspeed", DENSE, replace(FLAT, tensor=2, sequence_parallel=True), "TP ranks do not divide tokens"),
    ("deepspeed", DENSE, replace(FLAT, shard=8), "divides states over all 16 DP ranks, the plan over 8"),
    ("deepspeed", DENSE, replace(FLAT, precision="fp8"), "has no fp8 matmuls"),
    ("deepspeed", DENSE, replace(FLAT, again="1 of 2 layers"), "recomputes all layers or none"),
    ("deepspeed", MIXED, replace(FLAT, expert_tensor=2), "does not cut experts over TP ranks"),
    ("accelerate", DENSE, replace(FLAT, pipeline=2, schedule="1F1B"), "has no pipelines beside FSDP"),
    ("accelerate", DENSE, replace(FLAT, zero=1), "divides gradients wherever it divides the optimiser's states"),
    ("accelerate", DENSE, replace(FLAT, zero=0), "recomputes layers where FSDP divides parameters"),
    ("accelerate", MIXED, EXPERTS, "accelerate has no EP ranks"),
    ("accelerate", DENSE, replace(FLAT, data=4, context=2, shard=2), "copies only what DP ranks divide"),
    ("paddleformers", DENSE, replace(FLAT, zero=0, context=2), "makes CP ranks of those that divide states"),
    ("paddleformers", MIXED, replace(STAGES, zero=2), "divides the optimiser's states alone in a pipeline"),
    ("paddleformers", MIXED, replace(STAGES, schedule="ZBVZeroBubble"), "runs 1F1B, Interleaved1F1B and DualPipeV"),
    ("paddleformers", MIXED, replace(STAGES, expert_tensor=2), "does not cut experts over TP ranks"),
    ("paddleformers", MIXED, replace(STAGES, shard=4), "takes 8 EP ranks beside states divided by all ranks"),
    ("paddleformers", DENSE, replace(FLAT, again="norms and activations"), "cannot be told to recompute"),
]


@pytest.mark.parametrize(("name", "outline", "one", "said"), REFUSED)
def test_what_a_project_cannot_run_is_refused(name: str, outline: Outline, one: Numbers, said: str) -> None:
    with pytest.raises(UserError) as refused:
        EXPORTS[name].write(one, outline, CLUSTER)
    assert said in str(refused.value)
