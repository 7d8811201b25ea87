"""The table of rules: its lines parse and print, variants are found, mistakes point at their place."""

from importlib import resources

import pytest
import torch

from tangram.errors import UserError
from tangram.kernels.attention import ATTEND
from tangram.kernels.flash.operator import FLASH
from tangram.layout.rule import Rule
from tangram.models.capturing import called as noted
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin, parse_lines
from tangram.sharding.proof.samples.extra_samples import FUSED

aten = torch.ops.aten


def test_every_rule_prints_as_it_parses() -> None:
    lines = {line for some in builtin().lines.values() for line in some}
    assert len(lines) > 80
    for line in lines:
        assert Rule.parse(str(line.rule)) == line.rule


def test_no_line_is_long() -> None:
    for file in (f for f in resources.files("tangram.sharding.rules").iterdir() if f.name.endswith(".rules")):
        assert all(len(line) <= 110 for line in file.read_text().splitlines()), file


def test_every_named_operator_is_there() -> None:
    """A name that torch does not have is a slip, but for those that only other releases have."""
    for name in builtin().lines:
        packet, _, overload = name.partition(".")
        known = getattr(aten, packet, None)
        if name == "pointwise" or packet == "torch_nn":
            continue
        if packet == "tangram":
            ours = [ATTEND.default, FLASH.default, *(operator for operator, _ in FUSED)]
            assert f"tangram::{overload}" in (noted.MARK, noted.RELAYOUT, *(one.name() for one in ours))
            continue
        assert known is not None, name
        assert not overload or overload in known.overloads(), name


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        (aten.mm.default, "mm "),
        (aten.mm.out, "mm "),
        (aten.add.Tensor, "add.Tensor "),
        (aten.add_.Tensor, "add.Tensor "),
        (aten.exp_.default, "pointwise "),
        (aten.addmm_.default, "addmm "),
        (aten.cumsum_.default, "cumsum "),
        (aten.max.dim, "std_mean.correction "),
        (aten.max.default, "max "),
    ],
)
def test_variants_have_the_rule_of_their_base(operator: torch._ops.OpOverload, line: str) -> None:
    (found,) = builtin().all_of(operator)
    assert found.text.startswith(line)


def test_operators_over_lists_do_not_have_the_rule_of_one_tensor() -> None:
    assert not builtin().all_of(aten._foreach_max.default)
    assert not builtin().all_of(aten._foreach_mul.List)


def test_conditions_choose_between_rules() -> None:
    x = torch.zeros(2, 3)
    for reduction, text in ((0, "... -> ..."), (2, "{all} -> sum:{all}")):
        found = builtin().find(OpCall.of(aten.mse_loss.default, (x, x, reduction), {}))
        assert found is not None
        assert text in found.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mm : m k, k n > m n", r"mine, line 1, column 15: '>' is not understood here"),
        ("mm : m/x k -> m", r"a rule has no cuts"),
        ("mm : m k sum:k -> m", r"only outputs have a pending reduction"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_lines(text, "mine")
