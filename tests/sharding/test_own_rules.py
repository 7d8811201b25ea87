"""Files of op rules of one's own: what is taken, and one sentence with the line for what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.errors import UserError
from tangram.sharding.discover import discover
from tangram.sharding.discover.own_rules import own_rules
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import table_of
from tangram.sharding.proof.prove import prove_operator
from tests.training import own_operator

RIGHT = "tangram_gate.gated : a _, _ b, _ b -> a b ; each(2)"


def _file(folder: Path, text: str) -> Path:
    path = folder / "own.rules"
    path.write_text(text)
    return path


def test_a_rule_is_proved_with_the_calls_that_are_given(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    rules = own_rules(_file(tmp_path, f"# mine\n{RIGHT}\n"), own_operator.calls)
    assert rules.text == RIGHT
    assert "tangram_gate.gated" in table_of(rules.text).lines
    assert not torch.equal(torch.get_rng_state(), state)  # the calls of the author draw
    state = torch.get_rng_state()
    own_rules(_file(tmp_path, "tangram_gate.act : ... -> ..."))  # with drawn calls
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_of_several_operators(tmp_path: Path) -> None:
    file = _file(tmp_path, f"{RIGHT}\ntangram_gate.act : ... -> ...")
    samples = {"tangram_gate::gated": [*own_operator.calls()], "tangram_gate::act": [(torch.randn(3, 4),)]}
    assert own_rules(file, lambda: samples).text.count("\n") == 1
    with pytest.raises(UserError, match="rules of tangram_gate::gated, tangram_gate::act: let the samples be a dict"):
        own_rules(file, own_operator.calls)
    with pytest.raises(UserError, match=r"the samples of .* cannot be made: ZeroDivisionError"):
        own_rules(file, lambda: [1 // 0])


def test_blocks_of_a_dim_are_a_number_in_a_product(tmp_path: Path) -> None:
    rules = own_rules(_file(tmp_path, "tangram_gate.packed : ... (2 f) -> ... f"), lambda: [(torch.randn(3, 8),)])
    call = OpCall.of(torch.ops.tangram_gate.packed.default, (torch.empty(5, 8, device="meta"),), {})
    found = rule_table.bound(table_of(rules.text), call)
    assert found.cuttable == [".1", "f"]
    assert found.sizes["f"] == 4
    with pytest.raises(UserError, match=r"rule of tangram_gate::packed is wrong"):  # the blocks lie the other way round
        own_rules(_file(tmp_path, "tangram_gate.packed : ... (f 2) -> ... f"), lambda: [(torch.randn(3, 8),)])
    with pytest.raises(UserError, match=r"a rule has \(_ f\), and of _ in it nobody knows the size: name it, or write"):
        own_rules(_file(tmp_path, "tangram_gate.packed : ... (_ f) -> ... f"), lambda: [(torch.randn(3, 8),)])


def test_calls_that_a_rule_is_not_for_say_nothing_against_it(tmp_path: Path) -> None:
    def calls() -> list[Any]:
        return [(torch.randn(2, 3, 4),), (torch.randn(3, 4),)]

    assert own_rules(_file(tmp_path, "tangram_gate.act : a b -> a b"), calls).text
    with pytest.raises(UserError, match=r"the rule of tangram_gate\.act has `a` for x, which has 3 dims"):
        own_rules(_file(tmp_path, "tangram_gate.act : a -> a"), calls)
    with pytest.raises(UserError, match=r"the rule of tangram_gate::act is wrong: .*float32.3, 4"):
        own_rules(_file(tmp_path, "tangram_gate.act : a b -> a"), calls)


def _random(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


SAMPLES = {
    "rope": [_random((2, 4, 3, 8), (3, 4), (3, 4)), _random((3, 2, 5, 4), (5, 2), (5, 2))],
    "biased": [_random((4, 6), (4,)), _random((3, 5), (3,))],
    "attend": [_random(*[(2, 4, 6, 8)] * 3), _random(*[(3, 2, 5, 4)] * 3)],
}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rope", "a b c _, c _, c _ -> a b c _ ; each(0)"),
        ("biased", "a^ _, a^ -> a^ _ ; linear"),  # of squares it is refuted
        ("attend", "a b c _, a b _ _, a b _ d -> a b c d ; each(2)"),
    ],
)
def test_what_is_proposed_is_taken(name: str, line: str, tmp_path: Path) -> None:
    """By the same proof: a user who got a line from `discover` is never sent back to it."""
    (found,) = discover(f"tangram_gate::{name}", lambda: SAMPLES[name])
    assert found.lines == (f"tangram_gate.{name} : {line}",)
    file = _file(tmp_path, found.lines[0])
    assert own_rules(file, lambda: SAMPLES[name]).text == found.lines[0]
    if name == "attend":
        with pytest.raises(UserError, match=r"is wrong: .*v=float64.* It was drawn; where calls have"):
            own_rules(file)


def test_dims_by_position_are_equal_or_of_one_element(tmp_path: Path) -> None:
    """8 beside 4 are neither, and 2 beside 1 are it by chance: each rank would turn halves of its own half."""
    file = _file(tmp_path, "tangram_gate.rope : ..., ..., ... -> ...")
    with pytest.raises(UserError, match=r"has `\.\.\.` for dims that have 8 elements in x and 4 in cos, and of"):
        own_rules(file, lambda: SAMPLES["rope"])
    table = table_of("tangram_gate.gated : ..., ..., ... -> ...")
    some = [torch.empty(5, n, device="meta") for n in (6, 1, 6)]
    call = OpCall.of(torch.ops.tangram_gate.gated.default, (*some,), {})
    assert rule_table.bound(table, call).cuttable == [".2", ".1"]


def test_a_line_that_a_built_in_rule_says_too_is_left_out(tmp_path: Path) -> None:
    assert own_rules(_file(tmp_path, "mm : m k, k n -> m n ; each(0 1)")).text == ""


def test_a_rule_is_for_the_numbers_of_dims_that_it_was_proved_with() -> None:
    x = torch.empty(3, 6, device="meta")
    call = OpCall.of(torch.ops.tangram_gate.gated.default, (x, x[0], x[0]), {})
    with pytest.raises(UserError, match=r"the rule of tangram_gate.gated has `_ b` for w, which has 1 dims"):
        rule_table.bound(table_of(RIGHT), call)


def test_samples_that_cannot_show_a_mistake_are_not_all_that_is_tried(tmp_path: Path) -> None:
    file = _file(tmp_path, "tangram_gate.gated : a _, a b, _ b -> a b")
    with pytest.raises(UserError, match=r"is wrong: .* with a/x over x=2"):
        own_rules(file, own_operator.calls)  # in which no two dims are equal that need not be


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tangram_gate.gated : a _, _ b => a b", r"own.rules, line 1, column 31: '=' is not understood here"),
        (f"{RIGHT[:28]}\n\n    _ b, ! b -> a b", r"own.rules, line 3, column 10: '!' is not understood here"),
        ("tangram_gate.gatd : a -> a", "line 1: torch has no operator tangram_gate::gatd: import what defines it"),
        ("softmx : a -> a", r'torch has no operator softmx: import .*; did you mean "aten::softmax"'),
        ("# one\nmm : a b, b c -> a c", r"line 2: mm has a built-in rule, `mm : m k, .*matmul.rules, line \d+\)"),
        ("repeat : a -> a", "repeat has a built-in rule, by its arguments and strides, which this one contradicts"),
        (f"{RIGHT} ecah(1)", r'line 1: rules have no note ecah; did you mean "each"'),
        (f"{RIGHT}\n{RIGHT}", "line 2: tangram_gate.gated has the rule of line 1 for all its calls"),
        ("tangram_gate.gated : a c, c b, c b -> a b ; each(2)", "line 1: the rule of tangram_gate::gated is wrong: "),
        ("tangram_gate.joined : a b -> a b", "line 1: nothing shows that the rule of tangram_gate::joined is right"),
        ("tangram_gate.act : a b -> a", "line 1: the rule of tangram_gate::act is wrong: .* by the rule 1"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        own_rules(_file(tmp_path, text))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the rules .*no\.rules cannot be read: No such file"):
        own_rules(tmp_path / "no.rules")


def test_a_line_is_proved_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []

    def prove(table: object, name: str, calls: object) -> Any:
        proved.append(name)
        return prove_operator(table, name, calls)  # pyright: ignore

    monkeypatch.setattr("tangram.sharding.proof.prove.prove_operator", prove)
    right, wrong = _file(tmp_path, "tangram_gate.act : a b -> a b"), tmp_path / "wrong.rules"
    wrong.write_text("tangram_gate.act : a b -> a")
    assert own_rules(right).text == own_rules(right).text
    assert proved == ["tangram_gate.act"]
    for _ in range(2):  # however often it is given
        with pytest.raises(UserError, match="the rule of tangram_gate::act is wrong"):
            own_rules(wrong)
    own_rules(right)
    assert len(proved) == 3
