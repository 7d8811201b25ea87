"""`tangram plan MODEL --cluster C` as a person uses it: the ranking, why, what if, and what it says of mistakes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.hardware.catalogue.cluster import Link, builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outlined import outlined
from tangram.planner.search.query import plan
from tangram.planner.search.strategy import Ask, probability, safe
from tangram.planner.space.setting import precisions_of
from tests.planner.commands import refused

pytestmark = pytest.mark.usefixtures("one_search_each")

LIMIT = device("h100").usable or 0.0
"""What programs get of its 80 GB."""
SPINE = ("llama-3-70b", "--cluster", "h100-8x8", "--tokens-per-batch", "4M", "--seq", "8192")
SMALL = ("llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--tokens-per-batch", "4M", "--seq", "8192")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_llama_70b_on_64_h100(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *SPINE, "--framework", "megatron-core")
    assert found["parameters"] == 70_553_706_496
    choices = found["choices"]
    assert len(choices) == 8
    assert [one["step"] for one in choices] == sorted(one["step"] for one in choices)
    for one in choices:
        assert one["memory"] <= found["memory_limit"]
        assert one["fits"] >= 0.9
        assert one["memory_low"] < one["memory"] < one["memory_high"]
        # Of 90 of 100 within, five of 100 are above: so likely is it that a limit there is enough.
        assert probability(one["memory"], one["memory_high"]) == pytest.approx(0.95, abs=1e-3)
        assert probability(one["memory"], one["memory_low"]) == pytest.approx(0.05, abs=1e-3)
        assert one["low"] < one["step"] < one["high"]
        assert 0.3 < one["utilisation"] < 0.6
        assert sum(one["parts"].values()) == pytest.approx(one["step"])
        assert sum(one["held"].values()) == pytest.approx(one["memory"])
    instead = found["instead"]
    assert instead["with 5 GB more memory"] <= choices[0]["step"] * 1.0001
    assert instead["with 5 GB less memory"] >= choices[0]["step"] * 0.9999
    assert instead["with half of the network"] >= choices[0]["step"] * 0.9999


def test_the_tables_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--top", "3"]) == 0
    said = capsys.readouterr().out
    for title in (
        "llama-3-8b on h100-8x8, predicted",
        "Why the first: its step",
        f"Its memory, of {LIMIT / 1e9:.0f} GB; 90 % interval ",
        "What the others lose",
        "If it were otherwise",
    ):
        assert title in said
    assert "matmuls" in said


def test_a_model_that_cannot_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("llama-3-70b", "--cluster", "h100-8x8", "--gpus", "8")
    found = asked(capsys, *said, code=1)
    assert found["choices"] == []
    assert found["smallest"]["memory"] > LIMIT
    enough = found["enough_devices"]
    assert enough in (16, 24, 32, 64)
    ask = Ask(2**22, 8192, most=1)
    assert plan(outlined("llama-3-70b"), builtin("h100-8x8"), replace(ask, devices=enough), what_if=False).choices
    less = replace(ask, devices=enough - 8)
    assert not plan(outlined("llama-3-70b"), builtin("h100-8x8"), less, what_if=False).choices
    changes = {one["kind"]: one["to"] for one in found["would_fit"]}
    assert changes == {"devices": enough, "optimiser": "adamw-pure-bf16", "offload": "optimiser"}
    assert main(["plan", *said]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    instead = "the optimiser adamw-pure-bf16, or the optimiser on the host would do"
    assert f"or {enough} of these devices, or {instead}" in " ".join(out.split())


def test_a_configuration_file_and_a_cluster_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps({
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 512, "intermediate_size": 2048, "vocab_size": 32000,
    }))  # fmt: skip
    cluster = tmp_path / "mine.toml"
    cluster.write_text(
        (Path(__file__).parents[2] / "src/tangram/hardware/clusters/h100-8x8.toml").read_text()
        .replace("ranks = 64", "ranks = 16")
    )  # fmt: skip
    found = asked(capsys, str(config), "--cluster", str(cluster), "--tokens-per-batch", "256K", "--seq", "2048")
    assert {one["mesh"].count("=") for one in found["choices"]} == {4}
    fewer = asked(
        capsys, str(config), "--cluster", str(cluster), "--tokens-per-batch", "256K", "--seq", "2048", "--gpus", "4"
    )
    assert fewer["choices"][0]["step"] > found["choices"][0]["step"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seq", "8192", "--tokens-per-batch", "1000"), "a step of 1000 tokens has no sample of 8192"),
        (("--seq", "8192", "--tokens-per-batch", "10000"), "the nearest batches are 8192 and 16384"),
        (("--tokens-per-batch", "many"), '"many" is no number of tokens: write 4194304, or 4M'),
        (("--precision", "int3"), 'there is no precision "int3": give one of bf16'),
        (("--framework", "megatronn"), "there is no framework 'megatronn'"),
        (("--gpus", "65"), "h100-8x8 has 64 devices, and 65 are asked for"),
        (("--gpus", "-1"), '"-1" is no number of devices: write --gpus 64, or a range as in --gpus 8-64'),
        (("--gpus", "eight"), '"eight" is no number of devices'),
        (("--gpus", "16-8"), "--gpus 16-8 is no range of devices: give the fewest first, from 1, as in 8-64"),
        (("--gpus", "0-8"), "--gpus 0-8 is no range of devices"),
        (("--gpus", "8-128"), "h100-8x8 has 64 devices, and 128 are asked for"),
        (("--gpus", "8-64", "--explain", "dp=8"), "give --gpus a number, and no range"),
        (("--memory", "-1"), "write GB from 0, which is all that a device has"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "llama-3-70b", "--cluster", "h100-8x8", *arguments)


def test_a_price_and_watts_are_always_used(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *SMALL, "--top", "1", "--price", "2", "--watts", "1000", "--kwh", "0.5")
    step, day = found["spent"]["a step"], found["spent"]["a day"]
    hours = 8 * found["choices"][0]["step"] / 3600
    assert (step["cost"], step["kwh"]) == (pytest.approx(2.5 * hours), pytest.approx(hours))
    assert (day["cost"], day["kwh"]) == (pytest.approx(2.5 * 8 * 24), pytest.approx(8 * 24))
    assert found["spent"]["1M tokens"]["cost"] == pytest.approx(step["cost"] * 1e6 / 2**22)
    given = asked(capsys, *SMALL, "--top", "1", "--explain", "dp=8", "--zero", "3", "--watts", "700")
    assert given["spent"]["a step"]["cost"] is None
    assert given["spent"]["a step"]["kwh"] == pytest.approx(0.7 * 8 * given["given"]["step"] / 3600)
    assert asked(capsys, *SMALL, "--top", "1")["spent"] is None
    assert main(["plan", *SMALL, "--top", "1", "--price", "2"]) == 0
    assert "What 8 devices take" in capsys.readouterr().out


def test_more_memory_than_a_device_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = "96 GB of memory, as --memory says: more than the 84.9 GB of"
    assert any(said in one for one in asked(capsys, *SMALL, "--top", "1", "--memory", "96")["assumed"])
    assert not any("--memory says" in one for one in asked(capsys, *SMALL, "--top", "1", "--memory", "80")["assumed"])


def test_a_range_of_devices_is_one_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8-24", "--tokens-per-batch", "1536K", "--top", "3")
    found = asked(capsys, *said)
    assert (found["ask"]["fewest"], found["ask"]["devices"]) == (8, 24)
    assert found["objective"]["devices"][0] == 24
    assert found["choices"][0]["step"] == min(one["step"] for one in found["choices"])
    assert main(["plan", *said, "--objective", "per-device"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if "mesh" in line)
    assert header.split()[0] == "devices"


def test_devices_that_no_layout_divides(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "llama-3-8b", "--cluster", "h100-8x8", "--gpus", "37")
    assert "37 devices and 512 samples of 8192 tokens have no legal layout for llama-3-8b" in said


def test_unknown_names_and_contradictory_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 'there is no model "lama"' in refused(capsys, "lama", "--cluster", "h100-8x8")
    assert 'h10-8x8: the catalogue has no device "h10": did you mean h100' in refused(
        capsys, "llama-3-8b", "--cluster", "h10-8x8"
    )
    text = (Path(__file__).parents[2] / "src/tangram/hardware/clusters/h100-8x8.toml").read_text()
    for change, said in (
        (("rate = 50e9", "rate = 0"), "links.1.rate is 0; write a number above 0"),
        (('name = "h100"', 'name = "h1000"'), "there is no device 'h1000' (did you mean 'h100'"),
        (("ranks = 64\n\n[device]", "ranks = 60\n\n[device]"), "there are 60 ranks, and the last link joins 64"),
    ):
        path = tmp_path / "wrong.toml"
        path.write_text(text.replace(*change))
        assert said in refused(capsys, "llama-3-8b", "--cluster", str(path))


def test_what_the_file_says_of_links_counts_and_not_the_catalogue() -> None:
    whole = builtin("h100-8x8")
    near, far = whole.links
    ask = Ask(2**20, 8192, framework="megatron-core", most=1)
    model = outlined("llama-3-8b")

    def step(*links: Link) -> float:
        return plan(model, replace(whole, links=links), ask, what_if=False).choices[0].step

    usual = step(near, far)
    assert step(replace(near, ranks=2), far) > usual
    assert step(replace(near, rate=near.rate / 20), far) > usual
    assert step(near, replace(far, rate=far.rate / 20)) > usual
    small = replace(whole, device=replace(whole.device, memory_bytes=20e9))
    assert plan(model, small, ask, what_if=False).limit == 20e9


def test_as_a_library() -> None:
    answer = plan(outlined("llama-3-8b"), builtin("h100-8x8"), Ask(2**22, 8192, devices=8, most=3))
    assert len(answer.choices) == 3
    assert answer.choices[0].tokens_per_device > 5000
    assert probability(safe(80e9), 80e9) == pytest.approx(0.9, abs=0.001)
    assert probability(80e9, 80e9) == pytest.approx(0.5)


def test_one_strategy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--explain", "pp=4 dp=2 tp=8", "--recompute", "full")
    found = asked(capsys, *SPINE, "--framework", "megatron-core", *mesh)
    given, best = found["given"], found["best"]
    assert found["refused"] == []
    assert given["mesh"] == "pp=4 dp=2 cp=1 tp=8"
    assert best["step"] <= given["step"]
    assert 0.2 < given["utilisation"] < best["utilisation"]
    less = asked(capsys, *SPINE, "--framework", "megatron-core", "--explain", "pp=4 dp=2 tp=8", code=0)["given"]
    assert less["step"] < given["step"]
    assert less["memory"] > given["memory"]


def test_sequence_parallelism_is_as_typed_or_as_the_framework_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The case of NVIDIA-NeMo/RL issue 366, whose padded micro-batches of 4 ran out of 80 GB and those of 2 did not."""

    def of(framework: str, mesh: str, micro: str, code: int = 0) -> dict[str, Any]:
        said = (
            "--cluster",
            "h100x8",
            "--zero",
            "3",
            "--loss",
            "eager",
            "--framework",
            framework,
            "--micro-batch",
            micro,
        )
        said += ("--seq", "4096", "--tokens-per-batch", "2M", "--explain", mesh)
        return asked(capsys, "llama-3-8b", *said, code=code)["given"]

    assert of("nemo-rl", "dp=2 tp=4", "2")["fits"] > 0.9
    assert of("nemo-rl", "dp=2 tp=4", "4", code=1)["fits"] < 0.1 < 0.9 < of("nemo-rl", "dp=2 tp=4 sp=4", "4")["fits"]
    assert of("megatron-core", "dp=2 tp=4 sp=1", "2")["memory"] > 1.15 * of("megatron-core", "dp=2 tp=4", "2")["memory"]


@pytest.mark.parametrize(("typed", "same"), [("fsdp=8", "dp=8"), ("dp=2 fsdp=4", "dp=8"), ("fsdp=4 tp=2", "dp=4 tp=2")])
def test_fsdp_is_an_axis_as_well(typed: str, same: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of `dp=2 fsdp=4`, which is HSDP, four ranks divide the states, and it may not fit."""
    hybrid = typed == "dp=2 fsdp=4"
    given = asked(capsys, *SMALL, "--explain", typed, "--zero", "3", code=int(hybrid))["given"]
    plain = asked(capsys, *SMALL, "--explain", same, "--zero", "3")["given"]
    assert given["mesh"] == plain["mesh"]
    assert (given["memory"] > plain["memory"]) == hybrid


@pytest.mark.parametrize("typed", ["dp=4 tp=2 sp=1", "dp=4 tp=2", "dp=8"])
def test_the_mesh_of_the_answer_has_sp_where_it_is_off(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--explain", typed, "--zero", "3"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("given"))
    assert ("sp=1" in row) == ("sp=1" in typed)


def test_precisions_have_the_names_of_their_scales_too() -> None:
    assert precisions_of("MXFP8,fp8,nvfp4") == ("fp8", "fp4")


def test_a_strategy_that_cannot_run_is_told_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *SMALL, "--explain", "pp=2 dp=4", "--micro-batch", "7", "--experts", "4 x 1", code=1)
    assert found["given"] is None
    assert found["refused"] == [
        "there are 4 EP ranks, and the model has no experts",
        "4 DP ranks of micro-batches of 7 do not divide 512 samples",
    ]
    assert main(["plan", *SMALL, "--explain", "pp=2 dp=4", "--micro-batch", "7"]) == 1
    assert "It cannot run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--explain", "pp=4 dp=2 tp=6"), 'the mesh "pp=4 dp=2 tp=6" has 48 ranks, and there are 64 devices'),
        (("--explain", "pp=4 zp=16"), "has the axis zp: axes are named pp, dp, cp, heads, tp, ep, etp, sp, fsdp"),
        (("--explain", "dp=16 tp=4 sp=2"), "sequence parallelism is over the TP ranks, 4, or 1"),
        (("--explain", "pp=4 dp"), '"pp=4 dp" is no mesh'),
        (("--explain", "dp=64", "--recompute", "some"), 'nothing is known of "some": what is recomputed is one of'),
        (("--explain", "dp=64", "--experts", "many"), '"many" are no EP ranks: write 8 x 1'),
        (("--train-tokens", "1M"), "1000000 tokens are less than a step of 4194304"),
        (("--train-tokens", "1B", "--hours", "0"), "--hours is a number above 0"),
        (("--train-tokens", "x"), '"x" is no number of tokens'),
        (("--train-tokens", "1B", "--framework", "megatronn"), "there is no framework 'megatronn'"),
        (("--train-tokens", "1B", "--gpus", "65"), "h100-8x8 has 64 devices, and 65 are asked for"),
    ],
)
def test_mistakes_of_explanations_and_budgets(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "llama-3-70b", "--cluster", "h100-8x8", *arguments)


def test_how_long_a_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("llama-3-8b", "--cluster", "h100-8x8", "--tokens-per-batch", "1M", "--train-tokens", "20B", "--price", "2")
    found = asked(capsys, *said, "--hours", "72")
    sizes = {one["devices"]: one for one in found["sizes"]}
    assert list(sizes) == [64, 32, 16, 8, 4, 2, 1]
    hours = [one["hours"] for one in found["sizes"] if one["hours"] is not None]
    assert hours == sorted(hours)
    steps = -(-20 * 10**9 // 2**20)
    assert sizes[64]["hours"] == pytest.approx(steps * sizes[64]["choice"]["step"] / 3600)
    assert sizes[64]["cost"] == pytest.approx(2 * 64 * sizes[64]["hours"])
    least = found["fewest_devices"]
    assert sizes[least]["hours"] <= 72
    assert sizes[least // 2]["hours"] is None or sizes[least // 2]["hours"] > 72
    assert sizes[1]["choice"] is None
    assert main(["plan", *said, "--hours", "1"]) == 1
    assert "in 1 hours: no part of this cluster does" in capsys.readouterr().out


def test_a_budget_says_what_does_not_fit_into_which(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ("--cluster", "h100-8x8", "--gpus", "8", "--tokens-per-batch", "1M", "--tokens", "20B")
    found = asked(capsys, "llama-3-8b", *budget, "--hours", "72", code=1)
    whole, one = found["sizes"][0], found["sizes"][-1]
    assert (whole["devices"], one["devices"]) == (8, 1)
    assert whole["hours_too_long"] == pytest.approx(whole["hours"] - 72)
    steps = int(72 * 3600 / whole["choice"]["step"])
    assert whole["tokens_in_time"] == steps * 2**20
    assert whole["bytes_too_many"] == 0
    assert one["hours_too_long"] is None
    less = one["bytes_too_many"]
    assert less > 0
    # So many bytes more are enough, and a few less are not.
    outline, ask = outlined("llama-3-8b"), Ask(2**20, 8192, devices=1, most=1)
    need = safe(LIMIT) + less
    for memory, fits in ((need, True), (need - 1e8, False)):
        asks = replace(ask, memory=memory * LIMIT / safe(LIMIT))
        assert bool(plan(outline, builtin("h100-8x8"), asks, what_if=False).choices) == fits
    assert main(["plan", "llama-3-8b", *budget, "--hours", "72"]) == 1
    said = capsys.readouterr().out
    assert f"hours: {whole['hours_too_long']:,.1f} too long, for {whole['tokens_in_time'] / 1e9:,.2f}B tokens" in said
    assert f"memory: {less / 1e9:,.1f} GB too little" in said
    assert main(["plan", "llama-3-8b", *budget, "--hours", "1000"]) == 0
    assert "too long" not in capsys.readouterr().out


def test_what_binds_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, *SPINE, "--framework", "megatron-core")
    binds = found["binds"]
    first = found["choices"][0]
    assert sum(binds["step"].values()) == pytest.approx(first["step"])
    assert max(binds["step"], key=binds["step"].get) == "computation"
    assert binds["memory_left"] == pytest.approx(safe(found["memory_limit"]) - first["memory"])
    assert main(["plan", *SMALL, "--top", "1"]) == 0
    assert "Bottlenecks" in capsys.readouterr().out


def test_nothing_fits_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-70b", "--cluster", "h100-8x8", "--gpus", "2"]) == 1
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("Nothing fits: a rank needs ")
    assert " GB more than is safe of 84.9; devices of " in said
    assert said.endswith(", or 16 of these devices, or the parameters on the host would do")


def test_explain_says_how_much_memory_is_lacking(capsys: pytest.CaptureFixture[str]) -> None:
    said = (*SMALL, "--explain", "dp=8")
    given = asked(capsys, *said, code=1)["given"]
    assert main(["plan", *said]) == 1
    lacking = (given["memory"] - safe(LIMIT)) / 1e9
    assert f"of such runs, {lacking:.1f} GB beyond what is safe" in capsys.readouterr().out


def test_there_are_no_tables_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--top", "1"), ("--explain", "dp=8", "--zero", "3")):
        assert main(["plan", *SMALL, *more]) == 0
        parts = capsys.readouterr().out.strip().split("\n\n")
        assert all(len(part.splitlines()) > 2 for part in parts)
