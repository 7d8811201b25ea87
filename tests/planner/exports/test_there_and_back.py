"""What is written for Megatron-LM and torchtitan is read back as the same strategy, or is refused in one sentence."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.models.outlines.outline import Outline
from tangram.models.outlines.outlined import outlined
from tangram.planner.exports.megatron import layout_text
from tangram.planner.exports.numbers import Numbers, chunk_blocks, numbers_of, strategy_request
from tangram.planner.exports.targets import EXPORTS
from tangram.planner.imports.files import strategy_of
from tangram.planner.imports.megatron import chunks_of
from tangram.planner.search.explain import laid_out
from tangram.planner.search.query import plan
from tangram.planner.search.strategy import Ask
from tangram.planner.space.layers_per_stage import fewer, sizes
from tangram.planner.space.recompute import SOME
from tests.planner.exports.drawn import CLUSTER, DENSE, MIXED, drawn

FILES = {"megatron-lm": "args.sh", "torchtitan": "job.toml", "torchtitan-options": "options.sh"}


def _least(one: Numbers, outline: Outline) -> Numbers:
    """The same stages as the smallest numbers say them: of 12 layers on 8 ranks, 2 and 2 fewer are 2 and 1 fewer."""
    ends = fewer(sizes(outline.layers, one.pipeline * one.virtual, one.ahead, one.behind))
    return replace(one, ahead=ends[0], behind=ends[1]) if ends else one


@pytest.mark.parametrize("name", FILES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_strategy_comes_back(name: str, tmp_path: Path, data: st.DataObject) -> None:
    outline, one = data.draw(drawn(name))
    try:
        written = EXPORTS[name].write(one, outline, CLUSTER)
    except UserError:
        return
    path = tmp_path / FILES[name]
    path.write_text(written.text)
    found = strategy_of(path, outline, one.ranks, 64)
    expected = replace(one, shard=one.data * one.context) if one.zero == 0 else one  # nothing is divided over any
    assert _least(found.numbers, outline) == _least(expected, outline)
    assert found.framework == EXPORTS[name].framework
    assert found.notes == ()


@pytest.mark.parametrize("name", EXPORTS)
def test_what_is_drawn_is_written_often_enough(name: str) -> None:
    """So that the test above is not one of refusals, which are a sentence each."""
    counts: Counter[bool] = Counter()

    @settings(deadline=None, max_examples=40, database=None, derandomize=True)
    @given(drawn(name))
    def count(case: tuple[Outline, Numbers]) -> None:
        counts[_written(name, *case)] += 1

    count()
    assert counts[True] >= 5


def _written(name: str, outline: Outline, one: Numbers) -> bool:
    refused = ""
    try:
        EXPORTS[name].write(one, outline, CLUSTER)
    except UserError as reason:
        refused = str(reason)
    assert "\n" not in refused
    return not refused


@pytest.mark.parametrize("name", FILES)
def test_what_is_planned_for_a_project_comes_back_to_the_same_grid(name: str, tmp_path: Path) -> None:
    model = outlined("llama-3-8b")
    ask = Ask(2**20, 8192, framework=EXPORTS[name].framework, able=EXPORTS[name].able(model), devices=32, most=6)
    choices = plan(model, CLUSTER, ask, what_if=False).choices
    written = 0
    for choice in choices:
        one = numbers_of(choice, ask)
        try:
            text = EXPORTS[name].write(one, model, CLUSTER).text
        except UserError:
            continue
        path = tmp_path / FILES[name]
        path.write_text(text)
        read = strategy_of(path, model, 32, 64).numbers
        g = laid_out(CLUSTER, ask, strategy_request(read))
        assert {key: float(values[0]) for key, values in g.columns().items()} == dict(choice.at)
        written += 1
    assert written >= len(choices) / 2


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_layout_of_a_pipeline_has_its_chunks(chunks: int, blocks: int) -> None:
    if chunks <= blocks:
        even, more = divmod(blocks, chunks)
        sizes = [even + (place < more) for place in range(chunks)]
        assert chunks_of(layout_text(sizes)) == sizes
        assert layout_text(sizes).count("|") == chunks - 1
    assert chunks_of("Et*3|(tt|)*14,m|L") == [3, *[2] * 14, 0, 0]  # one of Megatron-Bridge's for DeepSeek-V3


ONE_EACH = {"pipeline": 6, "virtual": 2, "schedule": "Interleaved1F1B"}
REFUSED: list[tuple[str, Outline, dict[str, object], str]] = [
    ("megatron-lm", DENSE, {"zero": 1, "again": "norms and activations"}, "activations of dense MLPs again only with"),
    ("megatron-lm", DENSE, {"schedule": "ZBVZeroBubble", "virtual": 2}, "runs 1F1B and Interleaved1F1B, and no ZBV"),
    ("megatron-lm", DENSE, {"zero": 3}, "whose pages name no pipelines beside it"),
    ("megatron-lm", DENSE, {**ONE_EACH, "zero": 1, "again": "1 of 2 layers"},
     "virtual stages of 1 have no 1 of 2 layers"),
    ("torchtitan", DENSE, {"zero": 1}, "divides gradients wherever it divides the optimiser's states"),
    ("torchtitan", DENSE, {"zero": 0}, "has full replicas of parameters with DP ranks alone"),
    ("torchtitan", DENSE, {"precision": "fp4"}, "and not in fp4"),
    ("torchtitan", DENSE, {"sequence_parallel": False}, "TP ranks divide tokens, too, which this plan's do not"),
    ("torchtitan", DENSE, {"again": "norms and activations"}, "has no key for recomputing: norms and activations"),
    ("torchtitan", DENSE, {"pipeline": 4, "schedule": "InterleavedZeroBubble"},
     "runs InterleavedZeroBubble with two virtual stages of each rank or more, and the plan has one"),
    ("torchtitan", DENSE, {"virtual": 4, "schedule": "Interleaved1F1B"},
     "by how many a virtual stage has, which never makes 8 of them"),
    ("torchtitan", MIXED, {"expert": 1, "expert_tensor": 1}, "cuts experts over the TP ranks where there are no"),
    ("torchtitan-options", MIXED, {"expert": 2, "expert_tensor": 2}, "has no TP ranks of experts"),
    ("torchtitan-options", DENSE, {"again": "1 of 2 layers"}, "has no option for recomputing: 1 of 2"),
    ("torchtitan-options", DENSE, {"precision": "fp8"}, "has 8-bit matmuls in Python configurations only"),
]  # fmt: skip
USUAL = Numbers(2, 1, "1F1B", 2, True, 1, 1, 2, 4, 3, 4, 1, 32, 2048, "none", "bf16")


@pytest.mark.parametrize(("name", "outline", "changed", "said"), REFUSED)
def test_what_a_project_cannot_run_is_refused(
    name: str, outline: Outline, changed: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        EXPORTS[name].write(replace(USUAL, **changed), outline, CLUSTER)  # type: ignore[arg-type]


@pytest.mark.parametrize(("blocks", "written"), [((3, 3, 3, 3), None), ((3, 3, 2), "'Et*3|t*3|t*2L'")])
def test_uneven_stages_are_written_and_told(blocks: tuple[int, ...], written: str | None) -> None:
    outline = replace(DENSE, runs=((DENSE.runs[0][0], sum(blocks)),))
    one = replace(USUAL, pipeline=len(blocks), zero=1)
    assert chunk_blocks(one, outline) == list(blocks)
    found = EXPORTS["megatron-lm"].write(one, outline, CLUSTER)
    if written is None:
        assert "pipeline-model-parallel-layout" not in found.text
        assert found.notes == ()
    else:
        assert f"--pipeline-model-parallel-layout {written}\n" in found.text
        assert found.notes == ("the 8 layers are uneven over 3 virtual stages: the first ones have one more",)


FEWER: list[tuple[dict[str, int | str], tuple[str, ...]]] = [
    ({"pipeline": 7, "ahead": 1, "behind": 1}, ("account-for-embedding-in", "account-for-loss-in")),
    ({"pipeline": 2, "behind": 1}, ("pipeline-model-parallel-layout 'Et*7|t*5L'",)),
    ({"pipeline": 4, "ahead": 1, "behind": 2}, ("pipeline-model-parallel-layout 'Et*3|t*4|t*4|tL'",)),
    ({"pipeline": 4, "behind": 3}, ("pipeline-model-parallel-layout 'Et*4|t*4|t*4|L'",)),
    (
        {"pipeline": 4, "virtual": 2, "schedule": "Interleaved1F1B", "ahead": 2, "behind": 1},
        ("pipeline-model-parallel-layout 'E|t*2|t*2|t*2|t*2|t*2|t*2|L'",),
    ),
    ({"pipeline": 14, "ahead": 1, "behind": 1}, ("account-for-embedding-in", "account-for-loss-in")),
]


@pytest.mark.parametrize(("changed", "written"), FEWER)
def test_fewer_blocks_at_the_ends_are_written_and_come_back(
    changed: dict[str, int | str], written: tuple[str, ...], tmp_path: Path
) -> None:
    one = replace(USUAL, zero=1, **changed)  # type: ignore[arg-type]
    text = EXPORTS["megatron-lm"].write(one, DENSE, CLUSTER).text
    assert all(part in text for part in written)
    (path := tmp_path / "args.sh").write_text(text)
    assert strategy_of(path, DENSE, one.ranks, 64).numbers == one


@pytest.mark.parametrize(
    ("said", "found", "told"),
    [
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1", (1, 2), ()),
        ("--decoder-last-pipeline-num-layers 3", (0, 0), ()),
        ("--decoder-last-pipeline-num-layers 2", (0, 0), ("num-layers: stages are taken as even",)),
        ("--pipeline-model-parallel-layout 'Et*2|t*5|t*3|t*2L'", (0, 0), ("-layout: stages are taken as even",)),
        ("--pipeline-model-parallel-layout 'Et*2|t*4|t*4|t*2L'", (2, 1), ()),
    ],
)  # fmt: skip
def test_ends_of_a_pipeline_are_read(said: str, found: tuple[int, int], told: tuple[str, ...], tmp_path: Path) -> None:
    (path := tmp_path / "args.sh").write_text(
        f"--micro-batch-size 1 --global-batch-size 16 --seq-length 2048 --pipeline-model-parallel-size 4 --bf16 {said}"
    )
    read = strategy_of(path, DENSE, 8, 64)
    assert (read.numbers.ahead, read.numbers.behind) == found
    assert len(read.notes) == len(told)
    assert all(part in one for part, one in zip(told, read.notes, strict=True))


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("outline", [DENSE, MIXED], ids=["dense", "mixed"])
def test_what_a_project_is_able_to_is_written(name: str, outline: Outline) -> None:
    """Whatever is searched for it is written for DP ranks alone, in some combination."""
    able, written = EXPORTS[name].able(outline), set[object]()
    flat = replace(USUAL, pipeline=1, schedule="", tensor=1, sequence_parallel=False, expert_tensor=1)
    for again, zero in product(able.again, able.zero):
        if _written(name, outline, replace(flat, again="1 of 2 layers" if again == SOME else again, zero=zero)):
            written |= {again, zero}
    assert written == {*able.again, *able.zero}
