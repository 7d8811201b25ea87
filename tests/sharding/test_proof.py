"""The proof of op rules: what is right passes, and each kind of mistake is found."""

import pytest
import torch
from torch import Tensor

from tangram.sharding.ops import rule_table
from tangram.sharding.ops.bind import RuleError
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable, parse_lines
from tangram.sharding.proof.execute import Failure, check, run_reference, ways
from tangram.sharding.proof.prove import check_pending

aten = torch.ops.aten


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def tried(rules: RuleTable, call: OpCall) -> tuple[int, Failure | None]:
    """How many ways of cutting were tried until one was wrong."""
    bound, expected, n = rule_table.bound(rules, call), run_reference(call), 0
    for cuts, mesh in ways(bound, (2, 3, 5)):
        n += 1
        if failure := check(call, bound, cuts, mesh, expected):
            return n, failure
    for failure in check_pending(call, bound, expected):
        n += 1
        if failure:
            return n, failure
    return n, None


RIGHT = {
    "mm": lambda: OpCall.of(aten.mm.default, (some(4, 6), some(6, 5)), {}),
    "bias added once": lambda: OpCall.of(aten.addmm.default, (some(5), some(4, 6), some(6, 5)), {}),
    "broadcast": lambda: OpCall.of(aten.add.Tensor, (some(4, 1, 5), some(3, 5)), {"alpha": 2}),
    "in place": lambda: OpCall.of(aten.mul_.Tensor, (some(4, 5), some(5)), {}),
    "some dims": lambda: OpCall.of(aten.sum.dim_IntList, (some(4, 6, 3), [-1, 0]), {}),
    "mean of uneven parts": lambda: OpCall.of(aten.mean.dim, (some(4, 5, 3), [1], True), {}),
    "largest of nothing": lambda: OpCall.of(aten.amax.default, (some(4, 6), [-1]), {}),
    "scan": lambda: OpCall.of(aten.cumsum.default, (some(4, 5), -1), {}),
    "loss": lambda: OpCall.of(aten.mse_loss.default, (some(5, 3), some(5, 3)), {}),
    "words": lambda: OpCall.of(aten.embedding.default, (some(7, 3), torch.tensor([[6, 0], [3, 2]]), 2), {}),
    "merged dims": lambda: OpCall.of(aten.view.default, (some(4, 6, 5), [4, 30]), {}),
    "split dims": lambda: OpCall.of(aten.view.default, (some(6, 4), [2, 3, -1]), {}),
    "a dim that is one in a part": lambda: OpCall.of(aten.squeeze.default, (some(3, 1, 2),), {}),
    "windows": lambda: OpCall.of(aten.unfold.default, (some(3, 10), 1, 2, 2), {}),
    "channels": lambda: OpCall.of(
        aten.convolution.default,
        (some(2, 6, 5), some(4, 3, 3), some(4), [1], [1], [1], False, [0], 2),
        {},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_proved(name: str) -> None:
    n, failure = tried(rule_table.builtin(), RIGHT[name]())
    assert failure is None
    assert n > 1


WRONG = {
    "a scan that is cut": ("cumsum : ... {dim} ... -> ... {dim} ...", "scan", "output 0 differs"),
    "a sum said to be a maximum": ("sum.dim_IntList : ... {dim} ... -> ... max:{dim}", "some dims", "output 0 differs"),
    "a mean that forgets its share": (
        "mean.dim : ... {dim} ... -> ... {dim:keepdim} ... sum:{dim}",
        "mean of uneven parts",
        "output 0",
    ),
    "a loss that forgets its share": ("mse_loss : {all} -> sum:{all}", "loss", "output 0 differs"),
    "a bias that is added by all": ("addmm : m n, m k, k n -> m n", "bias added once", "output 0 differs"),
    "words not counted from the part's first": ("embedding : v d, ... -> ... d sum:v", "words", "rank"),
    "a product said to be linear in both at once": ("mm : m k, k n -> m n ; linear", "mm", "pending sum"),
    "a sum that waits on both sides of a product": (
        "mul_.Tensor : ... -> ... ; linear(0 1)",
        "in place",
        "pending sum",
    ),
    "a sum said to wait while one side is added twice": (
        "add.Tensor : ... -> ... ; each(0 1)",
        "broadcast",
        "pending sum",
    ),
    "values said not to be read": ("mul_.Tensor : ... -> ... ; unread(0)", "in place", "other values"),
    "a result of too few dims": ("mm : m k, k n -> m", "mm", "dims"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refuted(name: str) -> None:
    line, sample, words = WRONG[name]
    _, failure = tried(rule_table.builtin().with_lines(parse_lines(line)), RIGHT[sample]())
    assert failure is not None
    assert words in str(failure)


def test_a_view_that_is_cut_within_a_window_is_whole() -> None:
    call = RIGHT["windows"]()
    assert rule_table.bound(rule_table.builtin(), call).cuttable == ["v10", "v2"]


def test_a_histogram_is_cut_unless_its_values_say_the_range() -> None:
    """Of equal ends they do, as of zero and zero; experts that are only one have one bin from zero to zero."""
    table, x = rule_table.builtin(), some(5, 4)
    for bins, least, most in ((3, 0, 2), (1, 0, 0), (2, -1, 0)):
        call = OpCall.of(aten.histc.default, (x, bins, least, most), {})
        n, failure = tried(table, call)
        assert (n > 1, failure) == (True, None)
    for ends in ((0, 0), (2, 2)):
        assert not rule_table.bound(table, OpCall.of(aten.histc.default, (x, 3, *ends), {})).cuttable
    wrong = table.with_lines(parse_lines("histc : {all} -> _ sum:{all}"))
    _, failure = tried(wrong, OpCall.of(aten.histc.default, (x, 3, 2, 2), {}))
    assert "output 0 differs" in str(failure)


def test_a_dim_that_the_operator_lacks_is_named() -> None:
    rules = rule_table.builtin().with_lines(parse_lines("mm : ... {axis} ... -> ..."))
    with pytest.raises(RuleError, match=r"the rule of mm speaks of \{axis\}, which is no argument of aten::mm"):
        rule_table.bound(rules, RIGHT["mm"]())


def test_an_operator_without_a_rule_is_named_with_the_command() -> None:
    with pytest.raises(rule_table.NoRuleError, match=r"no rule for mm: `tangram shard discover aten::mm`"):
        rule_table.bound(RuleTable(), RIGHT["mm"]())
