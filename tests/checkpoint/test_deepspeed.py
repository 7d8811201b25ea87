"""DeepSpeed's checkpoints: files that DeepSpeed wrote, drawn layouts of its kind, and everything that is refused."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tangram.errors import UserError
from tests.checkpoint.zero import MOMENTS, Run, compare, expected, same, save, values

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
UNBOUND = [HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize(("name", "compared"), [("zero1", 40), ("zero2", 42), ("zero3", 42)])
def test_what_deepspeed_wrote_is_what_it_says(name: str, compared: int) -> None:
    opened, n = compare(FIXTURES / name)
    assert n == compared
    assert opened.format == "deepspeed"
    assert opened.path.name == "global_step2"
    assert set(opened.states) == {*MOMENTS, "step"} | ({"master"} if name != "zero3" else set())
    assert opened.specs["embed.weight"].dtype == ("float32" if name == "zero3" else "bfloat16")
    assert opened.specs["frozen.weight"].dtype == "bfloat16"
    assert opened.specs["seen"].shape == ()
    assert torch.equal(values(opened)["head.weight"], values(opened)["embed.weight"])
    groups = opened.objects["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["params"] == ["embed.weight", "wide.weight", "back.weight"]
    assert groups[1]["params"] == ["scale", "wide.bias", "norm.weight", "norm.bias"]
    assert opened.objects["settings"] == {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}  # they agree on these alone
    assert opened.objects["step"] == 2


def test_the_folder_of_a_step_is_opened_by_itself() -> None:
    opened = open_any(FIXTURES / "zero3" / "saved" / "global_step2")
    assert opened.specs == open_any(FIXTURES / "zero3" / "saved").specs


def test_pieces_are_views_of_the_files() -> None:
    opened = open_any(FIXTURES / "zero2" / "saved")
    cut = [piece for piece in opened.pieces if piece.tensor == "wide.weight.exp_avg"]
    assert [piece.region.size for piece in cut] == [39, 16]  # the rest of rank 0's partition, then rank 1's
    for piece in opened.pieces:
        found = opened.read(piece.place, piece.tensor)
        assert found.numel() == piece.region.size
        assert not piece.region.local_shape or tuple(found.shape) == piece.region.local_shape


# ---------------------------------------------------------------- any layout

SIZES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def runs(draw: Any) -> Run:
    def tensors(start: str, least: int, some: Any = SIZES) -> dict[str, Tensor]:
        shapes: list[tuple[int, ...]] = draw(st.lists(some, min_size=least, max_size=4))
        return {f"{start}{i}.w": torch.randn(shape) for i, shape in enumerate(shapes)}

    full = SIZES.filter(lambda shape: 0 not in shape)
    groups = [tensors(f"g{i}.", 1, full) for i in range(draw(st.integers(1, 3)))]
    first = next(iter(groups[0]))
    return Run(
        stage=draw(st.integers(1, 3)), ranks=draw(st.integers(1, 5)), groups=groups, frozen=tensors("frozen", 0),
        buffers=tensors("buffer", 0), tied={"tied.w": first} if draw(st.booleans()) else {},
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        align=draw(st.sampled_from([1, 4])), lean=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=UNBOUND)
@given(runs())
def test_any_shapes_over_any_ranks_come_back(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    folder = tmp_path_factory.mktemp("zero")
    save(run, folder / "run")
    opened = open_any(folder / "run")
    found, wanted = values(opened), expected(run)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert same(found[name], value), name
    assert [group["params"] for group in opened.objects["param_groups"]] == [list(group) for group in run.groups]
    assert opened.objects["step"] == 5
    assert not opened.skipped


# ---------------------------------------------------------------- what is refused


def run_of(stage: int, ranks: int = 2) -> Run:
    groups = [{"a.w": torch.randn(3, 5), "b.w": torch.randn(7)}, {"c.w": torch.randn(4)}]
    return Run(stage, ranks, groups, frozen={"f.w": torch.randn(3)}, buffers={"seen": torch.tensor(1)})


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


def optim(change: Callable[[dict[str, Any]], object], rank: int = 1) -> Callable[[Path], None]:
    def act(step: Path) -> None:
        file = step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        edit(file, lambda tree: change(tree["optimizer_state_dict"]))

    return act


def model(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(step: Path) -> None:
        for file in step.glob("*model_states.pt"):
            edit(file, change)

    return act


def lost(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def cut(step: Path) -> None:
    file = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-400])


def another(name: str, like: str = "zero_pp_rank_1_mp_rank_00_optim_states.pt") -> Callable[[Path], None]:
    return lambda step: (shutil.copy(step / like, step / name), None)[1]


def shorten(tree: dict[str, Any]) -> None:
    tree["fp32_flat_groups"][0] = tree["fp32_flat_groups"][0][:-1]


OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FLAT = "single_partition_of_fp32_groups"
BAD: dict[str, tuple[int, Callable[[Path], None], str]] = {
    "a rank is missing": (2, lost(OPTIM.format(1)), "of 2 ranks, and has no file of rank 1"),
    "rank 0 is missing": (3, lost(OPTIM.format(0)), "of 2 ranks, and has no file of rank 0"),
    "a part of the model is missing": (3, lost("zero_pp_rank_1_mp_rank_00_model_states.pt"), "pt of rank 1"),
    "the model is missing": (1, lost("mp_rank_00_model_states.pt"), "its file mp_rank_00_model_states.pt is not there"),
    "one rank too many": (2, another(OPTIM.format(2)), "has files of 3 ranks"),
    "two runs": (2, another("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), "files of two runs"),
    "mixed sizes": (2, optim(lambda t: t.update(partition_count=[3, 3])), "is of several saves"),
    "mixed stages": (2, optim(lambda t: t.update(zero_stage=1)), "is of several saves"),
    "mixed steps": (1, optim(lambda t: t["base_optimizer_state"]["state"][1]["step"].add_(1)), "at different steps"),
    "cut off": (2, cut, "is damaged, or nothing that torch.save wrote"),
    "a stage of tomorrow": (2, optim(lambda t: t.update(zero_stage=4), 0), "is of ZeRO stage 4: 1, 2 and 3 are read"),
    "short": (1, optim(lambda t: t[FLAT].__setitem__(0, t[FLAT][0][:-1])), "elements, its parameters 22"),
    "short in stage 3": (3, optim(shorten), "rank 1 have 13 elements, its parameters 14"),
    "a short state": (
        2, optim(lambda t: t["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(3))),
        "exp_avg of rank 1, partition 0, is not as long",
    ),
    "a group too many": (2, model(lambda t: t["param_shapes"].append({"x": (2,)})), "a rank, but 3 groups"),
    "another shape": (2, model(lambda t: t["param_shapes"][0].update({"a.w": (5, 3)})), "a.w is [3, 5] in"),
    "no shapes": (2, model(lambda t: t["param_shapes"][0].update({"a.w": "3 5"})), "does not say the shapes"),
    "no table of shapes": (2, model(lambda t: t.update(param_shapes=None)), "has no list param_shapes"),
    "part of a frozen one": (
        3, model(lambda t: t["frozen_param_fragments"].update({"f.w": torch.ones(1)})), "f.w do not add up",
    ),
    "no frozen one": (3, model(lambda t: t["frozen_param_fragments"].clear()), "f.w is not in the file of rank 0"),
    "experts": (2, optim(lambda t: t.update(partition_count=[2, 1]), 0), "experts are not read"),
    "experts in files": (2, another("layer_0_expert_0_mp_rank_00_model_states.pt"), "pipelines, and experts"),
    "tensor parallelism": (2, another("mp_rank_01_model_states.pt"), "several tensor-parallel ranks are not read"),
    "tensor parallelism, said": (2, model(lambda t: t.update(mp_world_size=2)), "is of several tensor-parallel ranks"),
    "a stranger's model": (2, lambda step: torch.save([1], step / "mp_rank_00_model_states.pt"), "no file of a model"),
    "a stranger's optimiser": (
        2, lambda step: torch.save({}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), "no file of an optimiser",
    ),
    "only a model of ZeRO": (
        2, lambda step: [file.unlink() for file in step.glob("*optim_states.pt")] and None, "has no files of ranks",
    ),
    "latest is gone": (2, lambda step: (step.parent / "latest").write_text("../x") and None, "names '../x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, spoil, words = BAD[name]
    save(run_of(stage), tmp_path / "run")
    spoil(tmp_path / "run" / "global_step5")
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_without_zero_the_module_is_read_and_states_by_number_are_left_out(tmp_path: Path) -> None:
    weights = {"w": torch.randn(2, 3, dtype=torch.bfloat16)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"module": weights, "optimizer": optimizer}, tmp_path / "mp_rank_00_model_states.pt")
    opened = open_any(tmp_path)
    assert same(values(opened)["w"], weights["w"])
    assert opened.skipped == ("optimizer (its states are by number, and nothing says the parameters' names)",)


def test_an_optimiser_that_has_not_stepped_has_no_states(tmp_path: Path) -> None:
    save(run_of(2), tmp_path / "run")
    for rank in (0, 1):
        optim(lambda tree: tree["base_optimizer_state"]["state"].clear(), rank)(tmp_path / "run" / "global_step5")
    assert set(open_any(tmp_path / "run").states) == {"master"}


def test_a_state_that_is_not_known_is_named(tmp_path: Path) -> None:
    save(run_of(1), tmp_path / "run")
    for rank in (0, 1):
        change = optim(lambda tree: tree["base_optimizer_state"]["state"][0].update(sum=torch.ones(12)), rank)
        change(tmp_path / "run" / "global_step5")
    assert open_any(tmp_path / "run").skipped == ("optimizer.sum",)


@settings(max_examples=30, deadline=None, suppress_health_check=UNBOUND)
@given(st.sampled_from([1, 3]), st.integers(0, 9), st.binary(min_size=1, max_size=5), st.integers(0, 20_000))
def test_a_damaged_checkpoint_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, stage: int, which: int, noise: bytes, at: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(FIXTURES / f"zero{stage}" / "saved", folder)
    files = sorted(folder.rglob("*.pt"))
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    at %= len(data)
    data[at : at + len(noise)] = noise
    file.write_bytes(data)
    with contextlib.suppress(UserError):  # and nothing else is raised
        values(open_any(folder))
