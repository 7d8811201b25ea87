"""Discovery writes the table's lines from nothing, and says what it cannot."""

from typing import Any, cast

import pytest

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.layout.rule import Rule
from tangram.sharding.discover import calls_from, drawn_calls, operator_of
from tangram.sharding.discover.propose import without_factor
from tangram.sharding.ops.bind import bind
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable, builtin, parse_lines
from tests.sharding import discovered

LAYER_NORM = (
    "native_layer_norm : ... {#normalized_shape}^, {#normalized_shape}^, {#normalized_shape}^ -> "
    "... {#normalized_shape}^, ... {#normalized_shape:kept}, ... {#normalized_shape:kept}"
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (outcome,) = workers.run(
        [workers.Job("tests.sharding.discovered:job")], 300.0, {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    )
    assert outcome.ok, f"{outcome.error}\n{outcome.log}"
    return cast("dict[str, Any]", outcome.value)


def cuts(table: RuleTable, call: OpCall) -> set[Any]:
    """What a table allows of a call, whatever its letters: the dims that are cut together, and what comes of them.

    Not what parts need each other for: discovery runs each by itself.
    """
    line = table.find(call)
    assert line is not None
    bound = bind(line.rule, call)
    return {
        (
            frozenset((i, d) for i, dims in enumerate(bound.inputs) for d, fs in enumerate(dims or ()) if factor in fs),
            tuple(bound.after(factor, o) for o in range(len(bound.outputs))),
        )
        for factor in bound.cuttable
        if factor not in bound.linked
    }


@pytest.mark.parametrize("name", discovered.ATEN)
def test_a_line_from_nothing_allows_what_the_table_does(found: dict[str, Any], name: str) -> None:
    one = found[name]
    assert one["cases"] > 30
    table = RuleTable().with_lines(parse_lines("\n".join(one["lines"])))
    some = [(cuts(table, call), cuts(builtin(), call)) for call in discovered.ATEN[name]()]
    assert any(known for _, known in some)
    for own, known in some:
        assert own >= known


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mm", "mm : a b, b c -> a c sum:b ; each(0 1)"),
        ("cumsum", "cumsum : ... {dim}^ ... -> ... {dim}^ ... ; linear"),
        ("native_layer_norm", LAYER_NORM),
        ("embedding", "embedding : v a, ... -> ... a sum:v ; offset(1 v) offset(padding_idx v) linear(0)"),
        ("addmm", "addmm : ... a, ... b, b a -> ... a sum:b ; once(0)"),
        ("given", "tangram_tests.scaled : a b, b c -> a c sum:b ; each(0 1)"),
    ],
)
def test_a_line_is_as_one_would_write_it(found: dict[str, Any], name: str, line: str) -> None:
    assert [str(Rule.parse(text)) for text in found[name]["lines"]] == [line]


def test_an_operator_of_ones_own_is_drawn_from_its_schema(found: dict[str, Any]) -> None:
    (line,) = found["lookup"]["lines"]
    assert "offset(1 v)" in line
    assert found["lookup"]["remarks"][0].startswith("only of calls with tensors of these numbers of dims")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noise", "its results are random or undefined: two runs with the same values differ"),
        ("positive", "the shape of its results depends on the values of its inputs"),
        ("whole", "no way of cutting its inputs was right in every call"),
        ("aborts", "its process ends in the proof"),
    ],
)
def test_what_cannot_be_cut_is_said(found: dict[str, Any], name: str, why: str) -> None:
    assert found[name]["lines"] == []
    assert why in found[name]["why"]


def test_a_factor_is_taken_back_with_all_that_speaks_of_it() -> None:
    rule = Rule.parse("mean.dim : ... {dim} ... -> ... sum:{dim} ; scale({dim}) linear")
    assert str(without_factor(rule, "{dim}0")) == "mean.dim : ... {dim}^ ... -> ... ; linear"
    assert str(without_factor(Rule.parse("x : v d, ... -> ... d sum:v ; offset(1 v)"), "v")) == "x : v^ d, ... -> ... d"
    assert str(without_factor(Rule.parse("x : ... -> ..."), ".2")) == "x : ...^ -> ...^"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tangram_tests::absent", "torch has no operator tangram_tests::absent: import what defines it with --import"),
        ("aten::sum.dimm", "aten::sum has no overload dimm, but dim_IntList, default, "),
    ],
)
def test_a_name_that_is_no_operator_is_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        operator_of(name)


def test_samples_that_do_not_run_are_refused() -> None:
    operator = operator_of("tangram_tests::scaled")
    with pytest.raises(UserError, match=r"the sample tangram_tests\.scaled"):
        calls_from(operator, lambda: [(discovered.some(2), discovered.some(3, 4), 1.0)])
    with pytest.raises(UserError, match="there is no sample of tangram_tests::scaled"):
        calls_from(operator, list[Any])


def test_lists_of_tensors_want_samples() -> None:
    with pytest.raises(UserError, match="aten::stack takes a list of tensors: give its calls with --samples"):
        drawn_calls(operator_of("aten::stack"))
