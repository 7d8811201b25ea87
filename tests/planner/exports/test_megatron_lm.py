"""Megatron-LM's arguments: what is written its own parser takes, and what people's scripts say is read."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.exports.megatron import megatron
from tangram.planner.exports.numbers import Numbers
from tangram.planner.imports.files import strategy_of
from tangram.planner.imports.megatron import READ, TOLD
from tests.planner.exports.drawn import CLUSTER, DENSE, MIXED

LIST = Path(__file__).parent / "peers" / "megatron_lm.txt"
MIXTURE = Numbers(2, 2, "Interleaved1F1B", 2, True, 2, 4, 1, 2, 1, 2, 1, 32, 4096, "norms and activations", "fp8")
DENSE_FSDP = Numbers(1, 1, "", 2, True, 1, 1, 2, 8, 3, 4, 2, 64, 2048, "1 of 2 layers", "bf16")
NO_ARGUMENTS = {"use-custom-fsdp", "world-size", "nproc-per-node", "nnodes", "cpu-offloading", "fp8", "fp4"}
"""Older names, torchrun's, and those of files in YAML alone."""
TYPES = {"int": int, "float": float}


def rows() -> list[list[str]]:
    return [line.split() for line in LIST.read_text().splitlines() if not line.startswith("#")]


def parser() -> argparse.ArgumentParser:
    """Megatron-LM's, as far as names, types and choices go."""
    found = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind, count, *choices in rows():
        if name == "help":
            continue
        if kind == "-":
            found.add_argument(f"--{name}", action="store_true")
        else:
            found.add_argument(
                f"--{name}",
                type=TYPES.get(kind, str),
                nargs=count if count in "+*?" else None,
                choices=[TYPES.get(kind, str)(one) for one in choices[0].split("|")] if choices else None,
            )
    return found


@pytest.mark.parametrize(("one", "outline"), [(MIXTURE, MIXED), (DENSE_FSDP, DENSE)])
def test_the_parser_takes_what_is_written(one: Numbers, outline: object) -> None:
    text = megatron(one, outline, CLUSTER).text  # type: ignore[arg-type]
    words = shlex.split(text.split("PLAN_ARGS=(")[1].rstrip().removesuffix(")"))
    taken = parser().parse_args(words)
    assert (taken.tensor_model_parallel_size, taken.context_parallel_size) == (one.tensor, one.context)
    assert (taken.micro_batch_size, taken.global_batch_size, taken.seq_length) == (one.micro, one.batch, one.sequence)
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser().parse_args([*words, "--ckpt-format", "zip"])


def test_what_is_read_are_its_arguments() -> None:
    known = {row[0] for row in rows()}
    assert {*READ, *TOLD} - known == NO_ARGUMENTS


def test_the_text_is_as_it_was() -> None:
    assert megatron(MIXTURE, MIXED, CLUSTER).text == (Path(__file__).parent / "golden" / "megatron-lm.sh").read_text()


def words_of(one: Numbers, outline: Outline) -> str:
    return megatron(one, outline, CLUSTER).text


def test_exchanges_of_tp_ranks_overlap_as_the_prediction_has_it() -> None:
    assert "--tp-comm-overlap" in words_of(DENSE_FSDP, DENSE)
    assert "--tp-comm-overlap" not in words_of(replace(DENSE_FSDP, tensor=1, sequence_parallel=False), DENSE)


def test_8_bit_scales_are_not_of_earlier_steps() -> None:
    """With delayed scaling, the default, Megatron-LM recomputes neither norms nor activations."""
    assert "--fp8-recipe tensorwise" in words_of(MIXTURE, MIXED)
    assert "--fp8-recipe" not in words_of(replace(MIXTURE, precision="bf16"), MIXED)


def test_layers_that_predict_further_tokens_are_the_last_stages() -> None:
    further = decoder(Dims(13, 512, 8, 32000, ffn=2048, predictors=1), "further")
    one = replace(MIXTURE, expert=1, expert_tensor=2, again="none")
    assert "--pipeline-model-parallel-layout 'Et*4|t*3|t*3|t*3mL'" in words_of(one, further)
    even = words_of(one, decoder(Dims(12, 512, 8, 32000, ffn=2048, predictors=1), "further"))
    assert "layout" not in even


SCRIPT = """#!/bin/bash
# runs on 2 nodes
TP_SIZE=2
PP=${1:-2}
export CUDA_DEVICE_MAX_CONNECTIONS=1
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes 2 --master_addr localhost)
GPT_MODEL_ARGS=(
    --num-layers 12 --hidden-size 1024 # of the model
    --seq-length 2048
    --attention-backend auto
)
MODEL_PARALLEL_ARGS="\\
    --tensor-model-parallel-size $TP_SIZE \\
    --pipeline-model-parallel-size ${PP} --sequence-parallel"
TRAINING_ARGS=(
    --micro-batch-size=1
    --global-batch-size 64
    --bf16
    --use-distributed-optimizer
    --tp-comm-overlap
    --recompute-granularity full --recompute-method block --recompute-num-layers 2)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${GPT_MODEL_ARGS[@]}" --load $CHECKPOINT
"""


def test_a_launch_script_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    found = strategy_of(path, DENSE, 0, 64)
    one = found.numbers
    assert (one.ranks, one.tensor, one.pipeline, one.data, one.zero) == (16, 2, 2, 4, 1)
    assert (one.micro, one.batch, one.sequence, one.again) == (1, 64, 2048, "1 of 3 layers")
    assert one.sequence_parallel
    assert found.notes == ()
    path.write_text(SCRIPT.replace("    --tp-comm-overlap\n", ""))
    assert "without tp-comm-overlap" in strategy_of(path, DENSE, 0, 64).notes[0]
    assert {"hidden-size", "attention-backend", "load"} <= set(found.ignored)


def test_a_file_of_arguments_in_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n  --tensor-model-parallel-size: 2\n"
        "  --micro-batch-size: 2\n  --global-batch-size: 32\n  --seq-length: 4096\n  --bf16: true\n"
        "  --use-distributed-optimizer: false\n  --recompute-granularity: selective\n"
        "  --num-layers-per-virtual-pipeline-stage: 3\n  --pipeline-model-parallel-size: 2\n"
    )
    one = strategy_of(path, DENSE, 8, 64).numbers
    assert (one.tensor, one.pipeline, one.virtual, one.data, one.zero) == (2, 2, 2, 2, 0)
    assert (one.schedule, one.again, one.sequence_parallel) == ("Interleaved1F1B", "selective", False)


USUAL = "--micro-batch-size 1 --seq-length 2048 --bf16 "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (USUAL + "--tensor-model-parallel-size 3", "3 tensor x 1 pipeline x 1 CP ranks do not divide 8 devices"),
        (USUAL + "--tensor-model-parallel-size $TP", "tensor-model-parallel-size is '$TP', which only a shell can"),
        (USUAL + "--tensor-model-parallel-size two", "is 'two'; write a whole number from 1"),
        (USUAL + "--context-parallel-size 0", "context-parallel-size is 0; write a whole number from 1"),
        (USUAL + "--num-layers 32", "is for a model of 32 layers, and dense has 12"),
        (USUAL + "--fp16", "says both bf16 and fp16"),
        (USUAL + "--recompute-granularity some", "recompute-granularity is 'some'; write full or selective"),
        (USUAL + "--recompute-granularity selective --recompute-modules gate", "nothing is known of the module 'gate'"),
        (USUAL + "--num-distributed-optimizer-instances 3", "8 DP and CP ranks are no 3 instances"),
        (
            USUAL + "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
            "says both num-virtual-stages-per-pipeline-rank and num-layers-per-virtual-pipeline-stage",
        ),
        (
            USUAL + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5",
            "virtual stages of 5 layers on 2 PP ranks are not 12 layers",
        ),
        (USUAL + "--pipeline-model-parallel-layout 'E1|L'", "'E1|L' is no layout of a pipeline"),
        (
            USUAL + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 't|t|t'",
            "has 3 virtual stages for 2",
        ),
        (USUAL + "--use-megatron-fsdp --data-parallel-sharding-strategy all", "write one of no_shard, optim"),
        ("--seq-length 2048", "says no micro-batch-size, so it is not Megatron-LM's arguments or not all"),
        ("--load 'open", "is damaged: No closing quotation"),
        ("nothing of use", "has no arguments of Megatron-LM or torchtitan in it"),
    ],
)
def test_contradictions_are_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "args.sh"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        strategy_of(path, DENSE, 8, 64)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.yaml", b"a: [1", "is damaged"),
        ("a.yaml", b"- 1\n- 2", "has no names with values in it"),
        ("a.json", b'{"a": ', "is damaged"),
        ("a.toml", b"[training", "is damaged"),
        ("a.toml", b"[model]\nname = 'x'", "has none of torchtitan's tables [training], [parallelism]"),
        ("a.sh", b"\xff\xfe\x00", "cannot be read: it is no text in UTF-8"),
    ],
)
def test_damaged_files_are_one_sentence(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as refused:
        strategy_of(path, DENSE, 8, 64)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
