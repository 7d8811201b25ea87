"""What a resume may change: every key of a plan is classed, as the page says, and each class does what it says."""

import re
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel

from tangram.checkpoint.saving.save import save
from tangram.errors import UserError
from tangram.planner.local.own_rules import code_digest
from tangram.schema.files import dumps
from tangram.schema.job import Job
from tangram.schema.parallelism import PipelinePlan
from tangram.schema.plan import Plan
from tangram.schema.tuning import DistillPlan, LoraPlan, PreferencePlan
from tangram.training.observe.events import Note
from tangram.training.run.resume import (
    ON_RESUME,
    ResumeRule,
    Unlike,
    checkpoint_to_resume,
    compared,
    leaves,
    other_micro_batch,
    other_rate,
    refuse_unknown,
)
from tangram.training.start import TrainRequest, resumed
from tangram.training.step.optimiser_step import lr_at
from tests.training.small import small_plan, small_tables

PAGE = Path(__file__).parents[2] / "docs" / "training-resume.md"
ALL: Unlike = {
    "learning rate": "another rate",
    "text": "another text",
    "configuration": "another configuration",
    "code": "another code",
    "global micro-batch": "another micro-batch",
}
WORDS = {
    "learning rate": "learning rate",
    "text": "tokens of the text",
    "configuration": "configuration",
    "code": "code",
    "global micro-batch": "global micro-batch",
    "unreadable": "cannot be read",
}


def tables_of(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a key may hold: itself, one that may be left out, or the items of an array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (tuple, Union, UnionType):
        return [table for kind in get_args(annotation) for table in tables_of(kind)]
    return []


def schema_keys(table: type[BaseModel], above: str = "") -> set[str]:
    """Every key below which there is no table."""
    found: set[str] = set()
    for name, field in table.model_fields.items():
        below = tables_of(field.annotation)
        found |= {f"{above}{name}"} if not below else set()
        for one in below:
            found |= schema_keys(one, f"{above}{name}.")
    return found


class WithNewKeys(Plan):
    """A plan of a later version."""

    temperature: float = 1.0


def test_every_key_of_a_plan_has_a_class() -> None:
    assert schema_keys(Plan) == ON_RESUME.keys()
    assert schema_keys(WithNewKeys) - ON_RESUME.keys() == {"temperature"}  # a new key is missed


def rows_of_the_page() -> dict[str, ResumeRule]:
    """The table of the page."""
    found: dict[str, ResumeRule] = {}
    for head, keys in re.findall(r"^\| ((?:free|reported|refused)[^|]*) \| (`[^|]*) \|$", PAGE.read_text(), re.M):
        condition = next((kind for kind, words in WORDS.items() if " if " in head and words in head), "")
        rule = ResumeRule(head.split()[0].rstrip(":"), condition)  # pyright: ignore[reportArgumentType]
        for pattern in re.findall(r"`([^`]*)`", keys):
            named = [key for key in ON_RESUME if key == pattern or key.startswith(pattern.removesuffix("*"))]
            assert named, pattern
            found |= dict.fromkeys(named if pattern.endswith("*") else [pattern], rule)
    return found


def test_the_page_says_the_same() -> None:
    assert rows_of_the_page() == dict(ON_RESUME)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    whole = small_plan(tmp_path_factory.mktemp("text"), data={"evaluation": [{"path": "apart", "pattern": "*.txt"}]})
    more = {
        "pipeline": PipelinePlan(stages=(("a",), ("b",)), tied=("a",)),
        "lora": LoraPlan(),
        "preference": PreferencePlan(),
        "distill": DistillPlan(teacher="teacher", cache="cache"),
    }
    return whole.model_copy(update=more)


def with_key(table: BaseModel, key: str, value: object) -> Any:
    """The same with another value of one key; nothing is checked. Of each item, where there are several."""
    name, _, below = key.partition(".")
    if not below:
        return table.model_copy(update={name: value})
    inner: Any = getattr(table, name)
    if not isinstance(inner, tuple):
        return table.model_copy(update={name: with_key(inner, below, value)})
    items = cast("tuple[BaseModel, ...]", inner)
    return table.model_copy(update={name: tuple(with_key(item, below, value) for item in items)})


@pytest.mark.parametrize("key", ON_RESUME)
def test_each_class_does_what_it_says(key: str, plan: Plan) -> None:
    rule, other = ON_RESUME[key], with_key(plan, key, "another")
    none: Unlike = {}
    for unlike in (none, ALL):
        found = [change for change in compared(plan, other, unlike) if change.new != "changed in its place"]
        if rule.kind == "free":
            assert found == []
            continue
        (change,) = found
        assert re.sub(r"\.\d+", "", change.key) == key
        assert change.new == '"another"'
        assert change.refused == (rule.kind == "refused" and (not rule.condition or rule.condition in unlike))


def test_what_no_key_says_is_seen_all_the_same(plan: Plan) -> None:
    assert compared(plan, plan, {}) == []
    found = compared(plan, plan, {"text": "others", "configuration": "rope_theta", "code": "edited"})
    assert [(change.key, change.refused, change.why) for change in found] == [
        ("data.sources", True, "others"),
        ("model.path", True, "rope_theta"),
        ("model.code", True, "edited"),
    ]


def test_code_is_told_by_what_is_in_its_file(tmp_path: Path, plan: Plan) -> None:
    """Under another name it is the same; edited in its place it is another."""
    file, moved = tmp_path / "ops.py", tmp_path / "moved.py"
    file.write_text("WIDTH = 1")
    moved.write_text("WIDTH = 1")
    digest = code_digest(with_key(plan, "model.code", str(file)))
    assert digest
    assert code_digest(with_key(plan, "model.code", f"{moved}:samples")) == digest
    file.write_text("WIDTH = 2")
    assert code_digest(with_key(plan, "model.code", f"{file}:samples")) not in ("", digest)
    assert code_digest(plan) == ""


def test_of_tables_what_is_not_alike_is_shown(plan: Plan) -> None:
    other = with_key(plan, "model.change", {**plan.model.change, "head_dim": 16, "rms_norm_eps": 1e-5})
    (change,) = compared(plan, other, {})
    assert (change.old, change.new) == ('{"head_dim": 8}', '{"head_dim": 16, "rms_norm_eps": 1e-05}')


def test_leaves_are_the_keys_of_the_schema(plan: Plan) -> None:
    whole = {re.sub(r"\.\d+", "", key) for key in leaves(plan)}
    assert whole <= schema_keys(Plan)
    unset = {"model.path", "model.code", "model.rules", "lora.start", "precision.accumulate", "pipeline.table"}
    unset |= {"optimiser.momentum", "data.date"}
    assert schema_keys(Plan) - whole == unset


def test_what_may_change_is_a_key(plan: Plan) -> None:
    refuse_unknown(["run.steps", "optimiser", "data.sources.0.path", "run.diverged", "data.sources"])
    with pytest.raises(UserError, match=r'--allow run\.step: this is no key of a plan; did you mean "run\.steps"\?'):
        refuse_unknown(["run.step"])


@pytest.mark.parametrize("step", [1, 7, 15])
@pytest.mark.parametrize(
    ("schedule", "more"), [("cosine", {}), ("wsd", {"decay_steps": 5}), ("wsd", {"decay_steps": 12}), ("constant", {})]
)
def test_the_rate_that_is_refused_is_the_one_that_the_loop_would_use_and_the_advice_keeps_it(
    step: int, schedule: str, more: dict[str, int], tmp_path: Path
) -> None:
    optimiser = {"schedule": schedule, "warmup_steps": 2, **more}
    before = small_plan(tmp_path, run={"steps": 15}, optimiser=optimiser)
    now = small_plan(tmp_path, run={"steps": 30}, optimiser=optimiser)
    said = other_rate(before, now, step)
    old, new = lr_at(step, 15, before.optimiser), lr_at(step, 30, now.optimiser)
    assert bool(said) == (abs(new - old) > 1e-9)
    if not said:
        return
    assert f"of step {step + 1} becomes {new:.3g}" in said
    advice = dict(re.findall(r"--set optimiser\.(\w+)=(\S+)", said))
    kept = {key: value if key == "schedule" else float(value) for key, value in advice.items()}
    kept = {key: int(value) if key.endswith("steps") else value for key, value in kept.items()}
    steady = small_plan(tmp_path, run={"steps": 30}, optimiser={**optimiser, **kept})
    assert other_rate(before, steady, step) == ""
    assert [lr_at(at, 30, steady.optimiser) for at in (step, 29)] == pytest.approx([old, old], rel=1e-6)


@pytest.mark.parametrize("table", [{"router_loss": 0.1}, {"expert_capacity": 1.5}, {}])
def test_another_global_micro_batch_matters_to_what_is_of_all_its_tokens(
    table: dict[str, float], tmp_path: Path
) -> None:
    two = small_plan(tmp_path, run={"steps": 3, **table})
    one = Plan.model_validate(small_tables(tmp_path, run={"steps": 3, **table}, mesh="dp=1"))
    same = one.model_copy(update={"data": one.data.model_copy(update={"micro_batch": 4})})
    assert other_micro_batch(two, same) == ""
    assert ("over 2 samples at a time, and were over 4" in other_micro_batch(two, one)) == bool(table)
    changed = compared(two, one, {"global micro-batch": other_micro_batch(two, one)})
    assert [(change.key, change.refused) for change in changed] == [("mesh", bool(table))]


def test_a_run_that_has_saved_nothing_begins_anew(tmp_path: Path, plan: Plan) -> None:
    told: list[object] = []
    nothing: Any = None  # is asked for nothing
    assert checkpoint_to_resume(tmp_path, plan, nothing, nothing, (), told.append) is None
    assert told == [Note(f'"{tmp_path}" has no checkpoint yet: training starts with step 1')]
    (tmp_path / "summary.json").touch()
    with pytest.raises(UserError, match="no good checkpoint"):  # a run that is done, and whose checkpoints are gone
        checkpoint_to_resume(tmp_path, plan, nothing, nothing, (), told.append)


def test_a_checkpoint_that_has_lost_a_file_is_told_of(tmp_path: Path, plan: Plan) -> None:
    """As one that somebody has tidied: what goes on from an older one, or from none, does not do so in silence."""
    told: list[object] = []
    nothing: Any = None
    path = tmp_path / "checkpoint" / "step-00000002"
    save({"w": torch.ones(3)}, path)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="no good checkpoint"):
        checkpoint_to_resume(tmp_path, plan, nothing, nothing, (), told.append)
    assert re.fullmatch(r".*step-00000002. is not whole: its file .* is not there; it is passed over.*", str(told[0]))


def test_a_job_goes_on_by_the_strategy_of_its_run(tmp_path: Path) -> None:
    """A new ranking may choose another, as times of this machine vary."""
    plan = small_plan(tmp_path)
    (tmp_path / "plan.toml").write_text(dumps(plan))
    tables: dict[str, Any] = {name: getattr(plan, name) for name in Job.model_fields} | {"seed": 4}
    job = Job(**tables)
    asked = TrainRequest(job, "name", None, None, tmp_path, False)
    found = resumed(asked, 2)
    assert isinstance(found, Plan)
    assert (found.mesh, found.layouts, found.data.micro_batch, found.seed) == (plan.mesh, plan.layouts, 2, 4)
    assert resumed(asked, 1) is job
    assert resumed(replace(asked, resume=None), 2) is job
