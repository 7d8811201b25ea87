"""torchtitan's configuration: what is written are its keys with values of their types, and people's files are read."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.exports.numbers import Numbers
from tangram.planner.exports.torchtitan import options, torchtitan
from tangram.planner.imports.files import strategy_of
from tangram.planner.imports.torchtitan import READ
from tests.planner.exports.drawn import CLUSTER, DENSE, MIXED

HERE = Path(__file__).parent
STAGED = Numbers(4, 3, "Interleaved1F1B", 2, True, 2, 1, 2, 4, 3, 4, 2, 64, 8192, "1 of 2 layers", "fp8")
EXPERTS = Numbers(2, 2, "DualPipeV", 2, True, 1, 4, 1, 4, 2, 4, 1, 32, 4096, "full", "bf16")


def keys(version: str) -> dict[str, str]:
    """Keys of a version, and their types."""
    lines = (HERE / "peers" / "torchtitan.txt").read_text().splitlines()
    return {key: kind for one, key, kind in (line.split(" ", 2) for line in lines if line[0] != "#") if one == version}


def leaves(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= leaves(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def suits(value: Any, kind: str) -> bool:
    if kind.startswith("Literal"):
        return repr(value) in kind
    return {"int": int, "bool": bool, "str": str, "int|None": int, "list[str]": list}.get(
        kind.split("|")[0], object
    ) is type(value)


@pytest.mark.parametrize(("one", "outline"), [(STAGED, DENSE), (EXPERTS, MIXED)])
def test_a_file_has_known_keys_of_their_types(one: Numbers, outline: Outline) -> None:
    known = keys("0.2")
    written = leaves(tomllib.loads(torchtitan(one, outline, CLUSTER).text))
    for key, value in written.items():
        if key == "quantize.linear.float8.recipe_name":
            assert value in known[key]
        else:
            assert suits(value, known[key]), (key, value, known[key])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torchtitan.toml", torchtitan(STAGED, DENSE, CLUSTER).text),
        ("torchtitan-options.sh", options(EXPERTS, MIXED, CLUSTER).text),
    ],
)
def test_the_text_is_as_it_was(name: str, text: str) -> None:
    assert text == (HERE / "golden" / name).read_text()


def test_options_are_known_keys() -> None:
    known = keys("0.3")
    text = options(EXPERTS, MIXED, CLUSTER).text
    names = [line.split()[0][2:].replace(".no_", ".") for line in text.splitlines() if line.startswith("  --")]
    assert len(names) > 12
    assert set(names) <= set(known)


def test_options_say_what_torchtitan_takes_no_graphs_of() -> None:
    """It captures CUDA graphs unless told not to, and refuses to with stages or EP ranks."""
    alone = replace(EXPERTS, pipeline=1, virtual=1, schedule="", expert=1, expert_tensor=2)
    for one, graphs in ((EXPERTS, False), (replace(alone, expert=4, expert_tensor=1), False), (alone, True)):
        assert ("--training.disable_cuda_graphs" not in options(one, MIXED, CLUSTER).text) == graphs


def test_the_loss_is_compiled_where_it_was_planned_so() -> None:
    assert (
        "--compile.enable\n  --compile.components loss\n"
        in options(replace(EXPERTS, loss="compiled"), MIXED, CLUSTER).text
    )
    assert tomllib.loads(torchtitan(replace(STAGED, loss="compiled"), DENSE, CLUSTER).text)["compile"]["enable"]
    with pytest.raises(UserError, match="in its Python configuration where it is fused"):
        options(replace(EXPERTS, loss="fused"), MIXED, CLUSTER)


def test_stages_of_a_usual_number_need_no_number_of_layers(tmp_path: Path) -> None:
    """13 layers in 8 virtual stages: no number of layers makes them, and two of each rank are what torchtitan makes."""
    path, outline = tmp_path / "args.sh", decoder(Dims(13, 1024, 16, 32000, ffn=4096), "odd")
    one = replace(EXPERTS, pipeline=4, expert=1, expert_tensor=2)
    path.write_text(options(one, outline, CLUSTER).text)
    assert "layers_per_stage" not in path.read_text()
    assert strategy_of(path, outline, one.ranks, 64).numbers == one
    with pytest.raises(UserError, match="which never makes 12 of them"):
        options(replace(one, virtual=3, schedule="Interleaved1F1B"), outline, CLUSTER)


def test_what_is_read_are_its_keys() -> None:
    known = {**keys("0.2"), **keys("0.3")}
    missing = {name for name in READ if name not in known}
    written = {"parallelism.no_enable_sequence_parallel", "compile.no_enable", "activation-checkpoint"}
    assert missing == written  # ways to write options


LLAMA = """# an older file
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
batch_size = 2
seq_len = 4096
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
compile = true
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved1f1b"
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[parallelism]
fsdp_reshard_after_forward = "default"
"""


def test_an_older_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "llama3.toml"
    path.write_text(LLAMA)
    found = strategy_of(path, DENSE, 16, 64)
    one = found.numbers
    assert (one.pipeline, one.virtual, one.schedule, one.tensor, one.data) == (2, 2, "Interleaved1F1B", 2, 4)
    assert (one.micro, one.batch, one.sequence, one.zero) == (1, 8, 4096, 2)
    assert (one.precision, one.again) == ("fp8", "every second matmul")
    assert (one.ahead, one.behind) == (1, 1)  # the defaults
    assert {"model.name", "model.flavor", "training.compile"} <= set(found.ignored)


def test_what_is_not_said_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nseq_len = 1024\n")
    found = strategy_of(path, DENSE, 0, 64)
    one = found.numbers
    assert (one.data, one.zero, one.micro, one.batch) == (64, 3, 8, 512)
    assert one.again == "1 of 2 layers"
    assert found.notes == ("activation_checkpoint.mode is not said: taken as selective, which is the default",)


USUAL = "[activation_checkpoint]\nmode = 'none'\n[parallelism]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (USUAL + "data_parallel_shard_degree = 3", "1 x 3 data, 1 context, 1 tensor, 1 PP ranks are 3 and not 8"),
        (USUAL + "tensor_parallel_degree = 3", "ranks are 6 and not 8 devices; give as many with --gpus as it is for"),
        (USUAL + "tensor_parallel_degree = 'two'", "tensor_parallel_degree is 'two'; write a whole number from 1"),
        (USUAL + "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Mine'", "knows no schedule 'Mine'"),
        (
            USUAL + "pipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = 5",
            "3 virtual stages of the model are not",
        ),
        (USUAL + "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3", "of 3 samples do not divide"),
        (USUAL + "fsdp_reshard_after_forward = 'later'", "is 'later'; write one of always, never, default"),
        (USUAL + "[training]\nmixed_precision_param = 'int8'", "is 'int8'; write bfloat16 or float32"),
        (
            "[training]\nseq_len = 1\n[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'some'",
            "selective_ac_option is 'some'; write op or a whole number from 1",
        ),
    ],
)
def test_contradictions_are_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        strategy_of(path, DENSE, 8, 64)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_pipeline_that_is_filled_several_times_a_step_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(USUAL + "pipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 8\nglobal_batch_size = 128\n")
    told = strategy_of(path, DENSE, 8, 64).notes
    assert "training.local_batch_size 8: the pipeline is filled 4 times a step, and is taken to be filled once" in told
