"""A strategy that was chosen for a cluster becomes a plan that trains, or says in a sentence why it does not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.layout import Mesh
from tangram.models.building.build import read_source
from tangram.models.outlines.outline import Outline
from tangram.models.outlines.outlined import outline_of
from tangram.planner.cost.calibration import published
from tangram.planner.exports.numbers import strategy_request
from tangram.planner.imports.files import strategy_of
from tangram.planner.legality.engine import Rule, facts_of
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.legality.trainer_support import RULES, RUNS
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.peak_memory import BYTES, largest_parts
from tangram.planner.local.plan_from_cluster import plan_to_train, why_not
from tangram.planner.search.branch_and_bound import exhaustive, search
from tangram.planner.search.explain import laid_out
from tangram.planner.search.strategy import Ask, Choice, described, setting_of
from tangram.planner.space.grid import Grid, joined
from tangram.planner.space.recompute import Ladder, again_of, is_free, spread
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.schema.files import dumps, load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tests.training.small import small_tables, write_text
from tests.training.tuning_tasks import write_folder

H100 = builtin("h100-8x8")
ASK = Ask(8 * 32 * 2, 32, "fp32", devices=8)
STRATEGY = ("mesh", "axes", "layouts")


def job_of(folder: Path, **changes: Any) -> Job:
    tables = small_tables(folder, data={"global_batch": 16}, **changes)
    tables["model"]["change"] = {**tables["model"]["change"], "num_hidden_layers": 4}
    return Job.model_validate({key: value for key, value in tables.items() if key not in STRATEGY})


@cache
def model() -> tuple[Job, Outline, Counted]:
    job = job_of(Path("/nowhere"))
    config = read_source("qwen3-1m", None, {**job.model.change, "vocab_size": 258}).config
    return job, outline_of(config, "small"), Counted(job, config)


@cache
def every() -> Grid:
    """All configurations over eight devices."""
    request = Request(8, 16, 32, schedules=tuple(one.name for one in SCHEDULES))
    g, ladder = joined([of_mesh(model()[1], request, mesh) for mesh in meshes(model()[1], request)]), Ladder()
    return ladder.all_of(model()[1], g, is_free(g))


def choice(at: int) -> Choice:
    setting = setting_of(H100, ASK)
    return described(model()[1], every().take(slice(at, at + 1)), setting, ASK, 80e9, published())[0]


@given(st.floats(0, 0.999999))
@settings(deadline=None, max_examples=60)
def test_what_the_table_allows_is_a_legal_plan_of_the_same_numbers(share: float) -> None:
    one = choice(int(share * len(every())))
    job, outline, counted = model()
    if why := why_not(one, outline):
        with pytest.raises(UserError, match="tangram train does not run"):
            plan_to_train(one, job, outline, counted)
        assert why
        return
    plan = plan_to_train(one, job, outline, counted)
    at = {name: int(value) for name, value in one.at.items()}
    assert plan.ranks == 8
    assert (plan.data_ranks, plan.stage_ranks, plan.context_ranks) == (at["data"], at["pipeline"], at["context"])
    assert (plan.data.micro_batch, plan.micro_steps) == (one.micro, one.micros)
    assert (plan.pipeline.schedule if plan.pipeline else "") == one.schedule
    assert (len(plan.pipeline.stages) if plan.pipeline else 1) == at["pipeline"] * (
        at["virtual"] if one.schedule else 1
    )
    groups, of = again_of(one.again)
    assert len(plan.run.recompute) == len(spread(4, of if groups else 0.0))
    assert plan.run.steps == job.run.steps
    _same_division(plan, one, counted)
    _read_back(plan, one, outline)


def _read_back(plan: Plan, one: Choice, outline: Outline) -> None:
    """What `--explain` makes of the plan is the choice."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.toml")
        path.write_text(dumps(plan))
        found = strategy_of(path, outline, 0, 8)
    assert found.framework == "tangram"
    assert found.notes == ()
    assert found.numbers.precision == ASK.precision
    g = laid_out(H100, ASK, strategy_request(found.numbers))
    read, was = {name: float(values[0]) for name, values in g.columns().items()}, dict(one.at)
    if one.zero == 0 or one.at["shard"] == 1:  # nothing is divided, over however many
        read, was = ({**of, "shard": 0.0, "zero": 0.0} for of in (read, was))
    assert read == was


def _same_division(plan: Plan, one: Choice, counted: Counted) -> None:
    """Parameters lie as `zero` says, in the trainer's own way: kept in parts, gathered until the end of the step."""
    parameters = counted.costs(1).parameters
    held = BYTES[plan.precision.parameters] * sum(largest_parts(plan, parameters).values())
    whole = BYTES[plan.precision.parameters] * sum(item.size for item in parameters)
    over = int(one.at["shard"]) if one.zero else 1
    tensor = int(one.at["tensor"])
    assert held >= whole / over / tensor * 0.999
    if tensor == 1:
        assert held == pytest.approx(whole / over, rel=0.05)
    kept = (plan.run.reshard, plan.run.reduce_every)
    if one.zero == 3:
        assert kept == ("after forward", "micro-batch")
    if one.zero in (1, 2) and plan.pipeline is None:
        assert kept == ("after step", "step" if one.zero == 1 else "micro-batch")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_refuses_some_and_not_all(rule: Rule) -> None:
    from dataclasses import replace

    g = every()
    if rule.name == "EP ranks":  # of a dense model there are none
        g = replace(g, expert=np.where(np.arange(len(g)) % 2, 2.0, 1.0))
    if rule.name == "optimisers":
        g = replace(g, optimiser=np.arange(len(g)) % 2)
    if rule.name == "on devices":
        g = replace(g, offload=np.arange(len(g)) % 2)
    if rule.name == "stages cut by work":  # of even cuts there are none
        g = replace(g, ahead=np.where(np.arange(len(g)) % 2, 1.0, 0.0))
    keeps = rule.holds(facts_of(model()[1]), g)
    assert 0 < keeps.sum() < len(g)


def test_a_search_of_what_runs_equals_trying_everything() -> None:
    _, outline, _ = model()
    setting = setting_of(H100, ASK)
    names = tuple(one.name for one in SCHEDULES)
    request = Request(8, 16, 32, schedules=names, able=RUNS)
    found, tried = (way(outline, request, setting, 80e9, 20) for way in (search, exhaustive))
    np.testing.assert_allclose(found.step, tried.step, rtol=1e-12)
    chosen = described(outline, found.grid, setting, ASK, 80e9, published())
    assert not any(why_not(one, outline) for one in chosen)


# ---------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    tables = job_of(write_text(tmp_path / "text")).model_dump(mode="json", exclude_defaults=True)
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps({"version": 3, **tables}))
    return path


def test_a_job_is_planned_for_a_cluster_and_dry_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.parent / "plan.toml"
    words = ["plan", str(file), "--cluster", "h100-8x8", "--gpus", "8", "--runs", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert told["not_run"] == []
    plan = load(out)
    assert isinstance(plan, Plan)
    assert (plan.ranks, plan.data.sequence, plan.data.global_batch) == (8, 32, 16)
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    explained = ["plan", str(file), "--cluster", "h100-8x8", "--explain", str(out), "--json"]
    assert main(explained) == 0
    again: Any = json.loads(capsys.readouterr().out)
    assert again["given"]["mesh"] == told["choices"][0]["mesh"]
    assert again["given"]["step"] == pytest.approx(told["choices"][0]["step"], rel=0.01)
    assert main([*explained, "--gpus", "4"]) == 2
    assert "is for 8 ranks" in capsys.readouterr().err
    explained[explained.index(str(out))] = str(file)
    assert main(explained) == 2
    assert "a job without a strategy" in capsys.readouterr().err

    assert main(["plan", str(file), "--cluster", "h100-8x8", "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "Not run by tangram train" in said


def test_mistakes_of_a_job_and_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["plan", *words]) == 2
        return capsys.readouterr().err

    cluster = ["--cluster", "cpu-2"]
    assert "says batch, sequence and precision itself" in refused(str(file), *cluster, "--seq", "64")
    assert "a folder that is there" in refused(str(file), *cluster, "--out", str(file.parent))
    assert "are for a job" in refused("qwen3-1m", *cluster, "--out", "plan.toml")
    assert "a model has none" in refused("qwen3-1m", *cluster, "--set", "data.sequence=64")
    assert "data.sequences" in refused(str(file), *cluster, "--set", "data.sequences=64")
    for word in (["--measure", "2"], ["--processes", "4"], ["--stages", "0"], ["--anew"], ["--show"]):
        assert f"{word[0]} is of a job on this machine" in refused(str(file), *cluster, *word)
    for word in (["--explain", "dp=2"], ["--timeline", "t.json"], ["--runs"], ["--seq", "64"], ["--gpus", "4"]):
        assert f"{word[0]} is of what is planned for a cluster" in refused(str(file), *word)
    assert "nothing that is allowed" in refused(str(file), *cluster, "--runs", "--optimiser", "lion")
    assert "adapters stand beside weights that were trained" in refused(str(file), *cluster, "--lora", "4")
    plan = file.parent / "made.toml"
    assert "rows of the ranking are" in refused(str(file), *cluster, "--out", str(plan), "--pick", "99")
    assert main(["plan", str(file), *cluster, "--runs", "--out", str(plan)]) == 0
    capsys.readouterr()
    assert "is a plan already" in refused(str(plan), *cluster)
    assert Mesh.parse(load(plan).model_dump()["mesh"]).size == 2


def test_moments_of_8_bits_are_planned_for_and_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an option and of the job's own key; what is written runs, and has states as predicted."""
    out = file.parent / "plan.toml"
    skip = ["--set", 'optimiser.moments_skip=["*embed_tokens*", "lm_head*"]']  # 257 rows in two parts
    skip += ["--set", "model.change.hidden_size=128", "--set", "model.change.intermediate_size=256"]
    command = ["plan", "cluster", str(file), "--cluster", "cpu-2", "--runs", "--json", "--out", str(out)]

    def planned(*words: str) -> dict[str, Any]:
        assert main([*command, *skip, *words]) == 0
        return json.loads(capsys.readouterr().out)["choices"][0]

    typed = planned("--optimiser", "adamw-8bit")
    assert load(out).optimiser.moments == "8-bit"
    assert planned("--set", 'optimiser.moments="8-bit"') == typed
    assert load(out).optimiser.moments == "8-bit"
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["needs"][0]["memory_bytes"]
    assert memory["optimiser"] < memory["parameters"]  # and not twice as much
    assert main(["plan", "explain", "qwen3-1m", str(out), "--cluster", "cpu-2"]) == 0
    assert "--optimiser adamw-8bit" in capsys.readouterr().out
    assert main([*command, "--optimiser", "adamw-8bit"]) == 2
    assert "rows that can be are" in capsys.readouterr().err


def test_a_rate_is_not_handed_on_to_an_optimiser_that_it_is_not_for(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that an AdamW step is well with moves nothing by plain SGD, and nothing is there that says so."""
    out = file.parent / "sgd.toml"
    command = ["plan", "cluster", str(file), "--cluster", "cpu-2", "--runs", "--out", str(out)]
    for kind, name in (("sgd", "SGD"), ("adafactor", "Adafactor")):
        assert main([*command, "--optimiser", kind]) == 2
        said = capsys.readouterr().err
        assert f"it is updated by {name}, and the job's optimiser.lr is that of AdamW" in said
        assert "--set optimiser.lr=RATE" in said
        assert not out.exists()
    assert main([*command, "--set", 'optimiser.name="sgd"', "--set", "optimiser.lr=0.1"]) == 0
    assert (load(out).optimiser.name, load(out).optimiser.lr) == ("sgd", 0.1)
    assert main([*command, "--optimiser", "muon"]) == 0  # whose updates are as large as AdamW's


def test_adapters_of_a_job_are_planned_for_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of the same model without adapters needs more, and gets the same ones from --lora."""
    file, full, out = write_folder(tmp_path) / "sft.toml", tmp_path / "full.toml", tmp_path / "plan.toml"
    full.write_text(file.read_text().replace("lora.rank = 4\n", ""))

    def planned(job: Path, *words: str) -> dict[str, Any]:
        assert main(["plan", "cluster", str(job), "--cluster", "cpu-2", "--runs", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["choices"][0]

    own = planned(file, "--out", str(out))
    plan, whole = load(out), planned(full)
    assert isinstance(plan, Plan)
    assert plan.lora is not None
    assert plan.lora.rank == 4
    assert own["held"]["optimiser"] < 0.5 * whole["held"]["optimiser"]
    typed = planned(full, "--lora", "4", "--out", str(out))
    assert typed["held"] == own["held"]
    assert load(out) == plan
    assert main(["plan", "show", str(out)]) == 0
    capsys.readouterr()

    def refused(*words: str) -> str:
        assert main(["plan", "cluster", str(file), "--cluster", "cpu-2", *words]) == 2
        return capsys.readouterr().err

    assert "has adapters of rank 4 itself" in refused("--lora", "8")
    assert "keeps frozen weights as precision.parameters says" in refused("--base", "nf4", "--runs")
