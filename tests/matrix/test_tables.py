"""The matrix without any rank: its strategies, what the planner makes of them, how cells are chosen and judged."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench import matrix
from bench._matrix import measure
from bench._matrix.cells import Planned, every_name, layers_of, micro_batch_of, planned, rotated
from bench._matrix.models import MODELS
from bench._matrix.ranks import Found, Run, Todo
from bench._matrix.results import Kept, Result, beside, read, slower, wrong_of
from bench._matrix.strategies import STRATEGIES, combined, strategy
from tangram.errors import UserError
from tangram.schema.schedules import MAKERS
from tests.training.small import write_text


def test_every_strategy_is_there_alone_and_at_least_thirty_together() -> None:
    alone = {line.partition("=")[0] for line in STRATEGIES if combined(line) == 1 and " " not in line}
    assert alone == {"dp", "fsdp", "tp", "cp", "heads", "ring", "ep", "pp"}
    assert {line.partition(":")[2] for line in STRATEGIES if line.startswith("pp=2:") and " " not in line} == {*MAKERS}
    assert "dp=2 fsdp=2" in STRATEGIES
    assert "sp=2" in STRATEGIES
    together = [line for line in STRATEGIES if 2 <= combined(line) <= 4]
    assert len(together) >= 30
    assert {combined(line) for line in together} == {2, 3, 4}
    assert all(one.ranks in (2, 4, 8) for one in STRATEGIES.values())


def test_a_line_says_what_each_axis_is_for() -> None:
    one = strategy("pp=2:ZBVZeroBubble dp=2 fsdp=2 sp=4")
    assert (one.mesh, one.data, one.shard) == ("pp=2 dp=2 fsdp=2 tp=4", ("dp", "fsdp"), "fsdp")
    assert [(axis.name, axis.role, axis.way) for axis in one.model] == [("tp", "tensor", "")]
    assert (one.stages, one.schedule, one.ranks) == (4, "ZBVZeroBubble", 32)
    assert (layers_of(one), layers_of(strategy("fsdp=8"))) == (4, 2)


@pytest.mark.parametrize(("line", "size"), [("fsdp=8", 1), ("tp=2", 6), ("dp=2 sp=2", 3), ("pp=2:1F1B fsdp=2", 1)])
def test_a_step_has_several_micro_batches(line: str, size: int) -> None:
    assert micro_batch_of(STRATEGIES[line], 12) == size


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("cells")
    lines = ("dp=2 fsdp=2", "tp=2", "sp=2", "cp=2", "ep=2", "pp=2:1F1B fsdp=2")
    names = [("Qwen3", line) for line in lines] + [("Gemma 3", "pp=2:ZBVZeroBubble")]
    return planned(folder, write_text(folder / "text"), names, 3)


def test_the_planner_makes_the_plans(some: Planned) -> None:
    plans = {line: cell.plan for (model, line), cell in some.cells.items() if model == "Qwen3"}
    hsdp, weights, sequence, context, staged = (plans[x] for x in plans if x != "ep=2")
    assert hsdp is not None
    assert (hsdp.axes.data, hsdp.layouts.parameters) == (("dp", "fsdp"), {"*": "_/fsdp ..."})
    assert weights is not None
    assert sequence is not None
    assert "model.layers.*" in sequence.layouts.marks
    assert {*sequence.layouts.marks} - {*weights.layouts.marks} == {"model.layers.*"}
    assert weights.layouts.parameters == sequence.layouts.parameters
    assert context is not None
    assert context.axes.context == ("cp",)
    assert staged is not None
    assert staged.pipeline is not None
    assert (len(staged.pipeline.stages), staged.micro_steps) == (2, 6)


def test_what_makes_no_sense_is_refused_in_a_sentence(some: Planned) -> None:
    dense, tied = some.cells["Qwen3", "ep=2"], some.cells["Gemma 3", "pp=2:ZBVZeroBubble"]
    assert dense.plan is None
    assert dense.why_not == "no marks are known for a qwen3 model over expert axes"
    assert tied.plan is None
    assert tied.why_not


def test_other_cells_come_with_every_commit_and_all_in_time() -> None:
    names = every_name()
    one, two = rotated(names, 70, "one"), rotated(names, 70, "two")
    assert one == rotated(names, 70, "one") != two
    assert len(set(one)) == 70
    assert {sum(name[0] == model for name in one) for model in MODELS} == {10}
    seen = {name for turn in range(60) for name in rotated(names, 70, f"{turn}")}
    assert seen == set(names)
    assert rotated(names[:2], 60, "one").sort() == names[:2].sort()


RIGHT = Found(gradients=frozenset({"a", "b"}), losses=(3.0, 2.0), apart=1e-7)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([RIGHT, RIGHT], []),
        ([replace(RIGHT, gradients=frozenset({"a"})), replace(RIGHT, gradients=frozenset({"b"}))], []),
        ([replace(RIGHT, gradients=frozenset({"a"}))] * 2, ["no rank has a gradient of b"]),
        ([RIGHT, replace(RIGHT, wrong=("the loss of step 1 is 4, not 3",))], ["the loss of step 1 is 4, not 3"]),
        ([RIGHT, Found(wrong=("it ended",), failed=True)], ["it ended"]),
        ([], ["no rank has a gradient of a"]),
    ],
)
def test_a_cell_is_right_where_all_of_its_ranks_are(found: list[Found], wrong: list[str]) -> None:
    assert wrong_of(found, ["a", "b"]) == wrong


GREEN = Result("Llama", "tp=2", 2, "same", tokens_per_s=100.0)


@pytest.mark.parametrize(
    ("first", "again", "state", "speed"),
    [
        (80.0, None, "same", 80.0),
        (70.0, 90.0, "same", 90.0),
        (70.0, 74.0, "slower", 74.0),
        (200.0, None, "same", 200.0),
    ],
)
def test_amber_is_what_is_slower_twice(first: float, again: float | None, state: str, speed: float) -> None:
    now = replace(GREEN, tokens_per_s=first)
    second = None if again is None else replace(GREEN, tokens_per_s=again)
    assert slower(now, GREEN) == (second is not None)
    found = beside(now, second, GREEN)
    assert (found.state, found.tokens_per_s, found.before_tokens_per_s) == (state, speed, 100.0)


def test_what_broke_is_not_measured_again_and_nothing_is_slower_than_nothing() -> None:
    assert not slower(replace(GREEN, state="broken", tokens_per_s=1.0), GREEN)
    assert not slower(replace(GREEN, tokens_per_s=1.0), None)
    assert beside(GREEN, None, None) == GREEN


def test_results_are_kept_and_newer_ones_take_their_place(tmp_path: Path) -> None:
    red = replace(GREEN, strategy="sp=2", state="broken", why='a "quoted" reason')
    kept = Kept("a machine", {"torch": "2.13"}, {}).with_results([GREEN, red])
    kept.write(tmp_path / "matrix.json")
    assert read(tmp_path / "matrix.json") == kept
    assert read(tmp_path / "none.json") is None
    newer = kept.with_results([replace(red, state="same")])
    assert [one.state for one in newer.results.values()] == ["same", "same"]


def test_cells_are_chosen_by_model_and_strategy() -> None:
    assert matrix.chosen(["Llama", "tp=2"]) == [("Llama", "tp=2")]
    assert len(matrix.chosen(["Llama"])) == len(STRATEGIES)
    assert [model for model, _ in matrix.chosen(["tp=2"])] == [*MODELS]
    with pytest.raises(UserError, match="there is no such model or strategy"):
        matrix.chosen(["Lama"])


def test_a_broken_cell_misses_its_target_in_the_bench() -> None:
    rows: Mapping[str, object] = {
        state: matrix.row(replace(GREEN, state=state, before_tokens_per_s=200.0 if state == "slower" else 0.0)).met
        for state in ("same", "slower", "broken")
    }
    assert rows == {"same": True, "slower": False, "broken": False}


def test_ranks_that_are_started_again_meet_in_a_place_of_their_own(
    some: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def started(task: object, todo: Todo, **told: object) -> list[dict[int, Found]]:
        places.append(todo.folder)
        assert [*todo.folder.iterdir()] == []
        return [{0: RIGHT}]

    monkeypatch.setattr(measure, "run_ranks", started)
    cell = some.cells["Qwen3", "tp=2"]
    assert cell.plan is not None
    runs = [Run(cell.name, cell.plan, measure.oracle_of(cell), 3)]
    assert [measure.train(some, runs, print) for _ in range(2)] == [[[RIGHT]], [[RIGHT]]]
    assert len({*places}) == 2
