"""Types of numbers that make no sense together are refused in a sentence; what old files mean stays."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tangram.errors import UserError
from tangram.schema.files import dumps, load
from tangram.schema.plan import Plan
from tests.planner.small import PLAN
from tests.training.small import small_tables

TWO_STAGES: dict[str, Any] = {
    "mesh": "pp=2 dp=2",
    "axes": {"data": ["dp"], "pipeline": ["pp"]},
    "pipeline": {"stages": [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]},
}


def of_tables(strategy: dict[str, Any], changes: dict[str, Any]) -> Plan:
    """A plan of four micro-batches a rank, with changes of its tables."""
    tables = small_tables(Path("text"))
    for given in (strategy, changes):
        for name, keys in given.items():
            tables[name] = {**tables.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return Plan.model_validate(tables)


def planned(folder: Path, precision: str, more: str = "") -> Plan:
    path = folder / "plan.toml"
    path.write_text(f"{PLAN}\n[precision]\n{precision}\n{more}")
    found = load(path)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ('reduce = "bfloat16"', "precision.reduce: gradients of a float32 computation are summed in float32"),
        ('compute = "bfloat16"\nreduce = "float16"', "precision.reduce: gradients of a computation in bfloat16 leave"),
        ('parameters = "float16"', "precision.parameters: parameters that are kept in float16 are computed with as"),
        ('compute = "float16"\nparameters = "bfloat16"', 'precision.compute is float16: make it "bfloat16", too'),
        (
            'compute = "float16"\nparameters = "float16"\nmasters = "bfloat16"',
            "precision.masters: float16 parameters need float32 masters",
        ),
        ('masters = "bfloat16"', "precision.masters: float32 parameters need float32 masters"),
        ('masters = "float16"', "precision.masters = 'float16': did you mean"),
        ('accumulate = "float16"', "precision.accumulate = 'float16': did you mean"),
        ('compute = "bfloat16"\naccumulate = "bfloat16"', "gradients of float32 parameters add up in float32"),
        ('compute = "float8"', "precision.compute = 'float8': did you mean"),
    ],
)
def test_what_makes_no_sense_is_refused(precision: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, precision)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"precision": {"compute": "float16", "reduce": "float16"}}, "sums leave the range of float16"),
        ({"precision": {"compute": "bfloat16", "accumulate": "bfloat16"}}, 'which is "float32": leave precision.acc'),
    ],
)
def test_what_is_added_before_it_is_reduced_is_so_in_one_type(tables: dict[str, Any], message: str) -> None:
    for strategy in ({"run": {"reduce_every": "step"}}, TWO_STAGES):
        with pytest.raises(ValidationError, match=message):
            of_tables(strategy, tables)
        assert (
            of_tables(strategy, {"precision": {"compute": "bfloat16", "reduce": "bfloat16"}}).accumulates == "bfloat16"
        )


@pytest.mark.parametrize("run", [{"reshard": "after step"}, {"reduce_every": "step"}])
def test_a_pipeline_says_itself_when_it_gathers(run: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"leave run.{next(iter(run))} out"):
        of_tables(TWO_STAGES, {"run": run})


def test_a_plan_that_says_nothing_is_of_float32(tmp_path: Path) -> None:
    plan = planned(tmp_path, "")
    kinds = plan.precision
    assert {kinds.compute, kinds.parameters, kinds.masters, kinds.reduce, plan.accumulates, plan.gradients} == {
        "float32"
    }


def test_plans_of_before_mean_the_same(tmp_path: Path) -> None:
    plan = planned(tmp_path, 'compute = "bfloat16"\nreduce = "bfloat16"')
    assert (plan.precision.parameters, plan.precision.masters, plan.gradients) == ("float32",) * 3
    assert plan.accumulates == "float32"


def test_a_plan_reads_back_equal(tmp_path: Path) -> None:
    plan = planned(tmp_path, 'compute = "bfloat16"\nparameters = "bfloat16"\naccumulate = "bfloat16"')
    again = tmp_path / "again.toml"
    again.write_text(dumps(plan))
    assert load(again) == plan
    assert plan.gradients == "bfloat16"
