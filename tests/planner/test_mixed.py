"""Parts of a cluster that are not alike: as one cluster where they are, and never longer with a quicker part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster, builtin
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.report.heterogeneous_tables import runs_of
from tangram.planner.search import heterogeneous
from tangram.planner.search.heterogeneous import Part, alone, enough, over_parts, parts_of
from tangram.planner.search.strategy import Ask, setting_of
from tangram.planner.space.grid import grid
from tests.planner.commands import refused

WHOLE = builtin("h100-8x8")
MODEL = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "small")
MIXTURE = decoder(Dims(6, 512, 8, 32000, ffn=2048, experts=8, expert_ffn=512, per_token=2, dense_layers=2), "mixture")
ASK = Ask(16 * 1024, 1024, most=4)
NIC = WHOLE.links[-1].rate
EVERYTHING = 10**6


def sized(ranks: int, *, name: str = "h100", flops: float = 1.0, room: float = 1.0) -> Cluster:
    """So many of the devices, in nodes of eight; other ones are so much quicker and have so much memory."""
    near, far = WHOLE.links
    links = (replace(near, ranks=ranks),) if ranks <= 8 else (near, replace(far, ranks=ranks))
    rates = {kind: rate * flops for kind, rate in WHOLE.device.flops.items()}
    own = replace(WHOLE.device, flops=rates, memory_bytes=WHOLE.device.memory_bytes * room)
    return replace(WHOLE, name=name, ranks=ranks, device=own, links=links)


def test_alike_parts_are_one_cluster() -> None:
    """Two stages, of one node each: what the models say of the whole cluster, where the best cut is the even one."""
    parts = parts_of([sized(8), sized(8)], replace(ASK, most=EVERYTHING))
    found = [one for one in over_parts(MODEL, parts, replace(ASK, most=EVERYTHING), NIC) if len(one.blocks[0]) == 1]
    setting, even = setting_of(sized(16), ASK), 0
    for one in found:
        pp, dp, cp, *rest = (int(axis.split("=")[1]) for axis in one.mesh.split())
        heads, tp = rest if len(rest) == 2 else (1, rest[0])
        if one.again not in ("none", "full"):
            continue
        g = grid(
            batch=16, sequence=1024, pipeline=pp, data=dp, context=cp * heads, ulysses=heads, tensor=tp,
            sequence_parallel=float(tp > 1), micro=one.micro, zero=one.zero, shard=dp * cp * heads, expert_tensor=tp,
            recompute=0 if one.again == "none" else int(Group.BLOCK),
        )  # fmt: skip
        whole = float(seconds(MODEL, g, setting).step[0])
        assert one.step <= whole * (1 + 1e-9)
        if one.blocks == ((6,), (6,)):
            even += 1
            assert one.step == pytest.approx(whole)
            assert max(one.memory) == pytest.approx(float(memory(MODEL, g, setting).device[0]))
    assert len(found) > 50
    assert even > 10


@pytest.mark.parametrize("outline", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_the_first_are_those_of_trying_everything(outline: Outline) -> None:
    parts = parts_of([sized(4), sized(2, name="slow", flops=0.4, room=0.5)], ASK)
    everything = over_parts(outline, parts, replace(ASK, most=EVERYTHING), NIC)
    assert len(everything) > 40
    for most in (1, 4, 16):
        few = over_parts(outline, parts, replace(ASK, most=most), NIC)
        assert [one.step for one in few] == [one.step for one in everything[:most]]


def test_a_slower_part_has_fewer_blocks_and_all_blocks_are_somewhere() -> None:
    parts = parts_of([sized(8), sized(8, name="slow", flops=0.3)], ASK)
    found = over_parts(MODEL, parts, ASK, NIC)
    for one in found:
        blocks = dict(zip(one.parts, map(sum, one.blocks), strict=True))
        assert blocks[0] > blocks[1] > 0
        assert blocks[0] + blocks[1] == 12


def test_a_part_with_little_memory_has_as_many_blocks_as_fit() -> None:
    ask = replace(ASK, most=1)
    roomy = parts_of([sized(8), sized(8, name="other")], ask)
    (free,) = over_parts(MODEL, roomy, ask, NIC)
    most = free.memory[free.parts.index(1)]
    first, second = roomy
    tight = [first, replace(second, limit=most * 0.9)]
    (found,) = over_parts(MODEL, tight, ask, NIC)
    assert found.step >= free.step
    assert found.memory[found.parts.index(1)] <= most * 0.9
    assert over_parts(MODEL, [first, replace(second, limit=1e6)], ask, NIC) == ()
    assert enough(MODEL, [first, replace(second, limit=most / 3)], ask, NIC) in (2, 4)


def test_memory_that_is_never_enough() -> None:
    parts = [replace(part, limit=1e6) for part in parts_of([sized(2), sized(2, name="other")], ASK)]
    assert enough(MODEL, parts, ASK, NIC) == 0


def test_what_is_left_out_for_its_memory_fits_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = replace(ASK, most=EVERYTHING)
    whole = parts_of([sized(4), sized(2, name="other")], ask)
    free = over_parts(MIXTURE, whole, ask, NIC)
    middle = float(np.median([max(one.memory) for one in free]))
    tight = [replace(part, limit=middle) for part in whole]
    found = over_parts(MIXTURE, tight, ask, NIC)
    assert 0 < len(found) < len(free)
    monkeypatch.setattr(heterogeneous, "_roomy", lambda outline, parts, g: np.arange(len(g)))
    assert over_parts(MIXTURE, tight, ask, NIC) == found


def test_a_quicker_part_or_link_never_makes_the_best_longer() -> None:
    ask = replace(ASK, most=1)
    steps = [
        over_parts(MODEL, parts_of([sized(8), sized(8, name="other", flops=flops)], ask), ask, rate)[0].step
        for flops, rate in ((0.3, NIC / 8), (0.6, NIC / 8), (0.6, NIC), (1.0, NIC))
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.2 * steps[-1]


def test_within_a_part_a_hop_is_as_far_as_between_its_own_stages() -> None:
    """A part of one stage has nothing to hand on within it, however many stages the others have."""
    ask = replace(ASK, most=1)
    single, several = sized(8, name="single"), sized(24, name="several")
    near, far = single.links[0], WHOLE.links[-1]
    slow = replace(single, links=(replace(near, ranks=4), replace(far, ranks=8, rate=far.rate / 1e4)))
    for order in ([single, several], [slow, several]):
        parts = parts_of(order, ask)
        g = grid(batch=16, sequence=1024, pipeline=4, data=1, tensor=8, sequence_parallel=1.0)
        hop = heterogeneous._prices(MODEL, g, parts[0], NIC).hop  # pyright: ignore[reportPrivateUsage]
        assert hop == pytest.approx(heterogeneous._prices(MODEL, g, parts[1], NIC).hop)  # pyright: ignore[reportPrivateUsage]


def test_a_part_alone_is_planned_over_the_whole_space() -> None:
    quick, odd = parts_of([sized(8), sized(7, name="odd")], ASK)
    one = alone(MODEL, quick, ASK)
    assert one is not None
    assert one.devices == 8
    assert alone(decoder(Dims(2, 64, 2, 512, ffn=128)), odd, ASK) is None  # 16 samples have no seven DP ranks


def test_what_cannot_be_is_said() -> None:
    one, ask = sized(8), ASK
    for parts in ([one], [one] * 5):
        with pytest.raises(UserError, match="2 to 4 parts"):
            parts_of(parts, ask)
    with pytest.raises(UserError, match="leave --gpus out"):
        parts_of([one, one], replace(ask, devices=8))
    with pytest.raises(UserError, match="one precision, AdamW"):
        parts_of([one, one], replace(ask, others=("fp8",)))
    with pytest.raises(UserError, match="one precision, AdamW"):
        parts_of([one, one], replace(ask, optimisers=(0, 1)))
    parts: tuple[Part, ...] = parts_of([one, sized(7)], ask)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="above 0: give --between"):
            over_parts(MODEL, parts, ask, rate)
    with pytest.raises(UserError, match=r"no mesh of 8 \+ 7 devices has whole stages in each part"):
        over_parts(MODEL, parts, ask, NIC)
    with pytest.raises(UserError, match="no samples of 1024"):
        over_parts(MODEL, parts, replace(ask, tokens=1500), NIC)


def test_stages_in_words() -> None:
    assert runs_of((1, 2, 3, 3)) == "1, 2, 2 x 3"
    assert runs_of((9,)) == "9"


def written(path: Path, name: str, ranks: int) -> Path:
    """Another cluster of one node, as a file."""
    path.write_text(
        f"""version = 1
ranks = {ranks}
[device]
name = "{name}"
reaches = 0.8
memory_reaches = 0.9
[[links]]
name = "nvlink"
ranks = {ranks}
rate = 300e9
reaches = 0.7
latency = 5e-6
hop = 1e-6
""",
        encoding="utf-8",
    )
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = written(tmp_path / "a100.toml", "a100", 4)
    third = written(tmp_path / "slow.toml", "l40s", 4)
    typed = ["plan", "llama-3-8b", "--cluster", f"{other},{third}", "--tokens-per-batch", "64K", "--seq", "4096"]
    assert main([*typed, "--between", "25", "--top", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [part["devices"] for part in said["parts"]] == [4, 4]
    assert len(said["strategies"]) == 2
    best = said["strategies"][0]
    assert sum(map(sum, best["blocks"])) == 32
    assert best["step"] < said["alone"][0]["step"]
    assert said["alone"][1] is None or said["alone"][1]["step"] > best["step"]
    assert main([*typed, "--between", "25"]) == 0
    shown = capsys.readouterr().out
    for word in ("over 2 parts, 25 GB/s between their devices", "Stages of the first", "each part alone", "a100.toml"):
        assert word in shown
    assert main([*typed, "--between", "25", "--memory", "4"]) == 1
    assert "times the memory of every part something fits" in capsys.readouterr().out


def test_a_job_over_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch, sequence and precision are the job's, with its changed keys."""
    parts = ",".join(str(written(tmp_path / f"{name}.toml", name, 2)) for name in ("a100", "l40s"))
    typed = ["plan", "examples/quickstart/job.toml", "--cluster", parts, "--between", "25", "--json"]
    steps: list[float] = []
    for batch in ("64", "128"):
        assert main([*typed, "--set", f"data.global_batch={batch}"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["strategies"][0]["step"])
    assert steps[0] < steps[1]
    assert "says batch, sequence and precision itself" in refused(capsys, *typed[1:], "--seq", "64")


def test_a_name_with_a_comma_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "a,b.toml", "a100", 8)
    assert main(["plan", "llama-3-8b", "--cluster", str(file), "--json", "--top", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ("llama-3-8b", "--cluster", f"h100-8x8,{written(tmp_path / 'a100.toml', 'a100', 8)}")
    assert "give --between in GB/s" in refused(capsys, *two)
    assert "give --between" in refused(capsys, *two, "--between", "0")
    assert "--report is of a cluster of one part" in refused(capsys, *two, "--between", "25", "--report", "x.html")
    assert "--explain is of" in refused(capsys, *two, "--between", "25", "--explain", "pp=8 dp=2 tp=4")
    assert "there is no cluster 'nothing'" in refused(capsys, "llama-3-8b", "--cluster", "h100-8x8,nothing")
    assert "a part between the commas has no name" in refused(capsys, "llama-3-8b", "--cluster", "h100-8x8, ")
    assert "--set changes keys of a job" in refused(capsys, *two, "--between", "25", "--set", "run.steps=3")
    assert "--between is of" in refused(capsys, "llama-3-8b", "--cluster", "h100-8x8", "--between", "25")
