"""A chosen plan as marks: what follows from them alone, how short they are, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.choose import export_marks as module
from tangram.sharding.choose.choose import ChosenMarks, Price, choose, priced
from tangram.sharding.choose.export_marks import Marked, as_marks, together
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import Mark, matched
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.derive.problem.states import cut
from tangram.sharding.ops.rule_table import builtin
from tangram.text import alternatives
from tests.sharding.choose.test_choose import H100, tiny

QUICK = replace(H100, links=tuple(replace(link, latency=0.0, hop=0.0) for link in H100.links))


@cache
def best() -> ChosenMarks:
    return choose(tiny("llama")[0], Mesh.parse("tp=2"), QUICK, gap=0.1)


@cache
def chosen() -> tuple[ChosenMarks, Marked]:
    return best(), as_marks(best().plan, QUICK)


def lies(plan: Derived) -> dict[str, object]:
    graph = plan.folded.graph
    return {value.name: value_layout(plan, v) for v, value in graph.of_kind("parameter") if plan.folded.classes[v] == v}


def as_chosen(plan: Derived) -> bool:
    found, _ = chosen()
    return lies(plan) == lies(found.plan) and priced(plan, QUICK).seconds <= found.price.seconds * (1 + 1e-6)


@pytest.mark.slow
def test_the_marks_alone_give_the_plan_again() -> None:
    found, marked = chosen()
    assert 0 < len(marked.marks) < 8
    again = derive(tiny("llama")[0], [Mark.parse(str(mark)) for mark in marked.marks], found.plan.mesh)
    assert as_chosen(again)
    assert 0 < total(again) <= total(found.plan) * (1 + 1e-6)


@pytest.mark.slow
def test_no_mark_could_be_left_out() -> None:
    found, marked = chosen()
    for mark in marked.marks:
        try:
            less = derive(tiny("llama")[0], [one for one in marked.marks if one is not mark], found.plan.mesh)
        except UserError:
            continue
        assert not as_chosen(less), mark


def test_what_no_marks_say_is_refused() -> None:
    graph, plan = tiny("llama")[0], best().plan
    (over,) = plan.axes
    v = next(v for v, value in graph.of_kind("parameter") if value.name.endswith("lm_head.weight"))
    other = replace(over, lying={**over.lying, v: cut(0)}, used={**over.used, v: cut(1)})
    with pytest.raises(UserError, match=r"cannot be written as marks: lm_head\.weight follows to lie otherwise"):
        as_marks(replace(plan, axes=(other,)), QUICK)


def test_equal_layers_are_one_pattern_and_no_other_tensor_is_named() -> None:
    graph, _ = tiny("llama")
    folded = fold(graph, builtin())
    names = {value.name: v for v, value in graph.of_kind("parameter") if folded.classes[v] == v}
    of = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qk"]
    marks = {names[name]: Mark.parse(f"{name}: o/tp i") for name in of}
    assert [str(mark) for mark in together(folded, marks)] == ["{*.q_proj.weight,*.k_proj.weight}: o/tp i"]
    (joined,) = together(folded, marks)
    assert len(matched(graph, joined)) == 4
    marks[names[of[1]]] = Mark.parse(f"{of[1]}: o i/tp")
    assert len(together(folded, marks)) == 2


def test_ranges_and_operators_can_be_named() -> None:
    graph, _ = tiny("llama")
    assert [*alternatives("a.{0..2,5}.{b,c}")] == [f"a.{i}.{x}" for i in (0, 1, 2, 5) for x in "bc"]
    range_of = matched(graph, Mark.parse("model.layers.{0..1}.mlp.up_proj.weight: o i"))
    assert [*range_of] == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    mark = Mark.parse("{*.input_layernorm:rsqrt,model.norm:rsqrt}: b/tp s h")
    assert [*matched(graph, mark)] == [
        *(f"model.layers.{i}.input_layernorm:rsqrt" for i in range(2)), "model.norm:rsqrt",
    ]  # fmt: skip
    assert str(mark) == "{*.input_layernorm:rsqrt,model.norm:rsqrt}: b/tp s h"
    (second,) = matched(graph, Mark.parse("model.norm:mul#2: b s h")).values()
    assert second == graph.results["model.norm"]
    with pytest.raises(UserError, match="names no tensor"):
        matched(graph, Mark.parse("model.norm:mull: b s h"))


@pytest.mark.parametrize(("longer", "taken"), [(1.03, True), (1.06, False)])
def test_what_follows_may_take_a_little_longer(monkeypatch: pytest.MonkeyPatch, longer: float, taken: bool) -> None:
    """As T5's choice for 4 samples of 32 words, whatever ranks receive; no mark is left out then: it would add up."""
    plan = best().plan

    def slower(other: Derived, *given: Any) -> Price:
        price = priced(other, *given)
        return price if other is plan else replace(price, work=price.work * longer, moving=price.moving * longer)

    monkeypatch.setattr(module, "priced", slower)
    monkeypatch.setattr(module, "_fewest", None)
    monkeypatch.setattr(module, "total", lambda other: total(other) + (other is not plan))
    if taken:
        marked = as_marks(plan, QUICK)
        assert marked.price.seconds == pytest.approx(priced(plan, QUICK).seconds * longer)
    else:
        with pytest.raises(UserError, match="cannot be written as marks: what follows takes"):
            as_marks(plan, QUICK)
