"""What is learned from runs: planted effects are found, single bad rows do not count, places are told apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench._planner import ranking
from bench._planner.predict import HeldOut, predictable
from bench._planner.predict import runs as runs_of
from bench._planner.rows import as_flagged, cases, precision, read, recompute, why_not
from bench._planner.teach import LEARNED, RUNS
from bench._planner.threads import THREADS, verdict
from bench._planner.times import errors
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Group
from tangram.planner.cost.calibration import PARTS, Learned, Misses, Run, learn, left_out, load, published, save
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.setting import Setting

ROOT = Path(__file__).parents[2]


def made(places: int, each: int, seed: int, *, slow: float = 1.3) -> list[Run]:
    """Runs in which products are slower than predicted everywhere, and each place has a factor of its own."""
    chance = np.random.default_rng(seed)
    found: list[Run] = []
    for place in range(places):
        own = np.exp(chance.normal(0, 0.1))
        for _ in range(each):
            share = chance.dirichlet(np.ones(len(PARTS)) * 0.5)
            parts = dict(zip(PARTS, (10 * share).tolist(), strict=True))
            measured = own * (10 + (slow - 1) * parts["products"]) * np.exp(chance.normal(0, 0.02))
            found.append(Run(parts, "h100", "megatron-core", "bf16", f"place {place}", float(measured)))
    return found


def off(one: Learned, runs: list[Run]) -> float:
    """The median error."""
    said, _ = one.correct(runs)
    return float(np.median([abs(step / run.measured - 1) for step, run in zip(said, runs, strict=True)]))


def test_a_planted_effect_is_found_and_carries_over_to_other_places() -> None:
    taught, unseen = learn(made(8, 30, 0)), made(9, 30, 1)[-30:]
    unseen = [Run(run.parts, run.device, run.framework, run.precision, "new", run.measured) for run in unseen]
    assert taught.scales("h100", Setting(None, framework("megatron-core")))["products"] > 1.12
    plain = float(np.median([abs(run.predicted / run.measured - 1) for run in unseen]))
    assert off(taught, unseen) < plain
    assert off(taught.after(unseen[:5]), unseen[5:]) < min(0.05, off(taught, unseen))


def test_bad_rows_do_not_count() -> None:
    runs = made(4, 30, 0)
    wrong = [Run(r.parts, r.device, r.framework, r.precision, r.place, 5 * r.measured) for r in runs[::15]]
    assert off(learn([*runs, *wrong]), runs) < off(learn(runs), runs) + 0.02


def test_a_machine_that_is_slow_as_a_whole_is_not_taken_for_its_device() -> None:
    """Three of a place's machines are as predicted, the only one with a B200 takes twice as long."""
    others = [replace(run, place="one", device=of) for of in ("h100", "h200", "gb200") for run in made(1, 30, 4)]
    slow = [replace(run, place="one", device="b200", measured=2 * run.measured) for run in made(1, 30, 6)]
    taught = learn([*others, *slow]).elsewhere()
    of_b200 = taught.scales("b200", Setting(None, framework("megatron-core")))["streams"]
    assert 1 < of_b200 / taught.scales("h100", Setting(None, framework("megatron-core")))["streams"] < 1.25


def test_swapped_rows_are_seen() -> None:
    """A planted mistake: who learns from runs with the seconds of others predicts worse."""
    runs = made(4, 40, 0, slow=2.0)
    order = np.random.default_rng(3).permutation(len(runs))
    swapped = [
        Run(run.parts, run.device, run.framework, run.precision, run.place, runs[other].measured)
        for run, other in zip(runs, order.tolist(), strict=True)
    ]
    assert off(learn(swapped), runs) > 1.5 * off(learn(runs), runs)


def test_what_was_never_seen_is_less_sure() -> None:
    taught = learn(made(6, 30, 0))
    (run,) = made(1, 1, 7)
    known = Run(run.parts, "h100", "megatron-core", "bf16", "place 0")
    other = Run(run.parts, "mi300x", "fsdp", "fp8", "elsewhere")
    sure, unsure = taught.spread([known, other])
    assert sure < unsure / 2
    assert learn([]).correct([known])[0] == pytest.approx([run.predicted])


def test_kept_and_read_again(tmp_path: Path) -> None:
    taught = learn(made(3, 20, 0)).elsewhere()
    save(taught, tmp_path / "learned.npz")
    again = load(tmp_path / "learned.npz")
    runs = made(1, 10, 5)
    assert again.correct(runs)[0] == pytest.approx(taught.correct(runs)[0], rel=1e-4)
    assert again.spread(runs) == pytest.approx(taught.spread(runs), rel=0.05)
    assert not any(family.startswith("place") for family, _, _ in again.names)


def test_what_comes_with_tangram_is_of_the_devices_that_runs_were_published_of() -> None:
    known = {of for family, of, _ in published().names if family == "device"}
    assert {"h100", "a100", "gb200", "b200", "ascend-910b", "v100"} <= known
    scales = published().scales("h100", Setting(device("h100"), framework("megatron-core")))
    assert set(scales) == set(PARTS)
    assert all(0.4 < one < 3 for one in scales.values())
    assert LEARNED.exists()
    assert RUNS.exists()


# ---------------------------------------------------------------- published rows


def test_words_of_published_rows() -> None:
    assert [precision(text) for text in ("BF16", "amp_bf16", "fp16 (assumed)", "MXFP8", "bf16+fp8", "NVFP4", "")] == [
        "bf16", "bf16", "fp16", "fp8", "fp8", "fp4", "bf16",
    ]  # fmt: skip
    row = {"recompute": "", "recompute_detail": "", "framework": "x", "layers": "8"}
    assert recompute({**row, "recompute": "full"}) == (Group.BLOCK, 1.0)
    assert recompute({**row, "recompute": "selective"}) == (Group.SCORES, 1.0)
    detail = "modules=moe_act+layernorm"
    assert recompute({**row, "recompute": "selective", "recompute_detail": detail})[0] == Group.NORM | Group.ACTIVATION
    mixture = {**row, "recompute": "selective", "recompute_detail": "modules=mla_up_proj+mlp", "layers": "61"}
    assert recompute({**mixture, "experts": "256", "dense_layers": "3"})[0] == Group.LATENT  # "mlp" is dense layers'
    assert recompute({**mixture, "experts": "", "dense_layers": ""})[0] == Group.LATENT | Group.MLP | Group.ACTIVATION
    said = "layers recomputed per stage=[2, 0] of layer_partitions=[7, 9]"
    assert recompute({**row, "recompute": "full on some layers", "recompute_detail": said}) == (Group.BLOCK, 2 / 16)


def test_flags_of_published_rows() -> None:
    row = {"framework": "NeMo", "version": "", "extra": "", "gated_mlp": "1"}
    nemo, titan = framework("nemo"), framework("torchtitan")
    before, overlapped = replace(nemo, overlap_expert_blocks=0.3), replace(nemo, overlap_expert=0.9)
    assert as_flagged(nemo, row) == before
    assert as_flagged(nemo, {**row, "extra": "moe_flex_dispatcher_backend=deepep;moe_a2a_overlap=True"}) == overlapped
    assert as_flagged(nemo, {**row, "version": "NeMo 26.08"}) == overlapped
    assert as_flagged(nemo, {**row, "version": "NeMo 26.04.01"}) == before
    assert as_flagged(titan, {**row, "extra": "compile"}).loss == "compiled"
    assert as_flagged(titan, {**row, "extra": "compile;8 loss chunks"}).loss == "chunked"


def test_parameters_of_published_rows_are_as_published() -> None:
    rows = read(RUNS)
    known = [one for one in cases(rows) if one.row["params_b"]]
    wrong = [one for one in known if abs(one.outline.numbers / 1e9 / float(one.row["params_b"]) - 1) > 0.02]
    assert len(known) > 200
    assert len(wrong) <= 1
    assert {why_not(row) for row in rows} >= {"", "no layers", "lora", "no mbs"}


def test_every_run_of_a_public_thread_is_predicted_and_none_is_learned_from() -> None:
    rows = read(THREADS)
    assert not [row["row"] for row in rows if why_not(row)]
    assert all(row["source"] for row in rows)
    assert not {row["source"] for row in rows} & {row["source"] for row in read(RUNS)}
    some = [one for one in cases(rows) if one.row["oom"] == "1"]
    taught = published()
    for case, run in zip(some, runs_of(some), strict=True):
        said = verdict(case, run, taught)
        assert said.ran_out
        assert said.inside  # no step was told
        assert replace(said, fits=0.95).right != replace(said, fits=0.01).right
        assert not replace(said, measured=said.step * said.far * 1.01).inside


def test_held_out_means_neither_the_source_nor_the_model() -> None:
    some = [one for one in predictable(list(cases(read(RUNS)))) if one.source in ("torchtitan", "nemo_docs", "mbridge")]
    known = HeldOut(some)
    left = [some[i] for i in known.places("torchtitan", "llama3-8b")]
    assert left
    assert all(one.source != "torchtitan" and one.row["model"] != "llama3-8b" for one in left)
    timed = [one for one in some if one.source == "torchtitan"]
    found = errors(timed, [known.runs[some.index(one)] for one in timed], known, draws=2)
    assert {one.group[3] for one in found} == {"torchtitan"}
    assert all(0 <= one.zero < 1 and one.constant > 0 for one in found)


def test_ranking_of_a_set() -> None:
    sets = {"a": {"1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0}, "b": {"1": 1.0}}
    right = ranking.scores(sets, {"a": "x"}, {"1": 10.0, "2": 20.0, "3": 30.0, "4": 40.0})
    assert [(one.name, one.spearman, one.first, one.third) for one in right] == [("a", pytest.approx(1), 0, 0)]
    (wrong,) = ranking.scores(sets, {"a": "x"}, {"1": 40.0, "2": 30.0, "3": 20.0, "4": 10.0})
    assert (wrong.spearman, wrong.first, wrong.third) == (pytest.approx(-1), 3.0, 1.0)
    assert ranking.ranks(np.array([3.0, 1.0, 1.0])).tolist() == [2.0, 0.5, 0.5]


def test_damaged_rows_are_left_out_or_predicted_and_never_break() -> None:
    rows = read(RUNS)
    chance = np.random.default_rng(11)
    names = [name for name in rows[0] if name not in ("row", "source_id")]
    damage = ("", "0", "nan", "-1", "1e9", "x", "0.5")
    damaged = [
        {**rows[i], **{name: str(chance.choice(damage)) for name in chance.choice(names, 4).tolist()}}
        for i in chance.integers(len(rows), size=300).tolist()
    ]
    some = predictable(list(cases(damaged)))
    assert min(case.node for case in some) >= 1
    assert 30 < len(some) < 250
    assert all(np.isfinite(run.predicted) and run.predicted > 0 for run in HeldOut(some).runs)


def test_a_device_that_nobody_measured_is_less_sure() -> None:
    """By its name in the catalogue alone: of a card without curves or runs less is known than of one with curves."""
    taught = learn(made(4, 10, 0))
    parts = {"products": 8.0, "tensor": 2.0}
    kernels, none = (Run(parts, name, "megatron-core", "bf16", "") for name in ("l40s", "t4"))
    measured, unmeasured = taught.spread([kernels, none])
    assert unmeasured > measured + 0.1
    assert not measured_runs_are_less_sure(taught, parts)


def measured_runs_are_less_sure(taught: Learned, parts: dict[str, float]) -> bool:
    """Whether some runs of a device leave as much open as none."""
    after = taught.after([Run(parts, "t4", "megatron-core", "bf16", f"place {i}", 15.0) for i in range(5)])
    one = [Run(parts, "t4", "megatron-core", "bf16", "")]
    return bool(after.spread(one)[0] > 0.8 * taught.spread(one)[0])


def test_what_two_runs_have_in_common_does_not_tell_them_apart() -> None:
    taught = published()
    near = [Run({"products": 8.0, "tensor": other}, "t4", "tangram", "bf16", "") for other in (2.0, 2.1)]
    far = Run({"expert": 9.0, "idle": 1.0}, "t4", "tangram", "bf16", "")
    assert taught.apart(*near) < 0.5 * taught.spread(near)[0]
    assert taught.apart(near[0], near[0]) == pytest.approx(2**0.5 * taught.noise)
    assert taught.apart(near[0], far) > 2 * taught.apart(*near)


# ---------------------------------------------------------------- intervals


def test_what_is_left_out_is_as_if_it_had_never_been_learned() -> None:
    """In closed form, of a place: errors and spreads are those of learning anew without it, but for how wide effects of
    machines are, which is of all."""
    runs = made(6, 30, 0)
    taught = learn(runs)
    ((off, spread),) = left_out(taught, runs, [range(30)])
    steps, sure = learn(runs[30:], taught.noise).correct(runs[:30])
    assert off == pytest.approx(np.log([run.measured for run in runs[:30]]) - np.log(steps), abs=2e-3)
    assert spread == pytest.approx(sure, rel=0.03)
    kept = np.log([run.measured for run in runs[:30]]) - np.log(taught.correct(runs[:30])[0])
    assert np.abs(off).mean() > 1.5 * np.abs(kept).mean()  # who scores rows that were learned from sees less


def sides(scale: dict[str, float], seed: int, count: int = 400) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Runs of some devices, whose errors are as large as each device's."""
    chance = np.random.default_rng(seed)
    facts = [(name, "16 bits", "dense", "nemo") for name in scale for _ in range(count)]
    return facts, np.array([chance.normal(0, scale[one[0]]) for one in facts])


def test_intervals_hold_nine_of_ten_of_each_device_and_are_narrow_where_errors_are() -> None:
    scale = {"h100": 0.04, "a100": 0.2}
    facts, left = sides(scale, 0)
    misses = Misses.of(facts, left, np.full(len(left), 0.25))
    for name in scale:
        new, off = sides({name: scale[name]}, 1)
        half = misses.half(new, np.full(len(off), 0.25))
        assert float((np.abs(off) <= half).mean()) >= 0.85
    near, far = misses.half([facts[0], facts[-1]], np.full(2, 0.25))
    assert near < 0.8 * far
    unknown = misses.half([("mi300x", "fp8", "moe", "other")], np.full(1, 0.25))[0]
    assert near < unknown  # of what nobody ran all count alike
    wide, usual = misses.half([facts[0]] * 2, np.array([1.0, 0.25]))
    assert wide == pytest.approx(4 * usual)


def test_few_runs_alike_leave_the_largest_error() -> None:
    facts = [("h100", "16 bits", "dense", "nemo")] * 3
    misses = Misses.of(facts, np.array([0.1, -0.3, 0.2]), np.ones(3))
    assert misses.half(facts[:1], np.ones(1)) == pytest.approx([0.3])


def test_of_a_device_without_curve_intervals_are_no_narrower_than_the_posterior_says() -> None:
    runs = made(4, 30, 0)
    taught = learn(runs)
    ((off, spread),) = left_out(taught, runs, [range(len(runs))])
    sure = replace(taught, misses=Misses.of([one.facts for one in runs], off / 9, spread))
    known, unknown = (Run(runs[0].parts, name, "megatron-core", "bf16", "") for name in ("h100", "t4"))
    assert sure.half([known])[0] < taught.half([known])[0]
    assert sure.half([unknown])[0] > 1.05 * taught.half([unknown])[0], "nor is its curve known to be the median one"
    facts = [*(one.facts for one in runs), unknown.facts]
    tried = replace(taught, misses=Misses.of(facts, np.append(off / 9, 1e-3), np.append(spread, 1.0)))
    assert tried.half([unknown])[0] == pytest.approx(taught.half([unknown])[0])
    eight = replace(unknown, precision="fp8")
    assert tried.half([eight])[0] > 1.05 * taught.half([eight])[0], "a run in 16 bits says nothing of it"
    assert sure.after(runs[:5]).misses is None  # with runs of its own the posterior counts
