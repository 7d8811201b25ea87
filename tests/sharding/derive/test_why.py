"""Explanations: the chain from a mark, what is made, used and needed, and what else a tensor could be."""

from __future__ import annotations

import pytest

from tangram.errors import UserError
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.explain.why import alternatives, lines, why
from tangram.sharding.derive.layouts import used
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.marking.nodes import value_of
from tangram.sharding.derive.problem.states import cut
from tests.sharding.derive.test_derive import MEGATRON, derived, language


def test_a_chain_carries_the_cut_from_the_mark() -> None:
    _, graph, _ = language("llama")
    told = why(derived(graph, "tp=2", MEGATRON), "model.layers.{0..1}.self_attn.k_proj.weight")
    assert (told.layout, told.times, told.shape) == ("_/tp _", 2, (16, 32))
    (chain,) = told.chains
    assert chain.tensor == "model.layers.{0..1}.self_attn.q_proj.weight"
    assert chain.mark == MEGATRON[0]
    rules = [(link.module.rpartition(".")[2], link.operator, link.rule) for link in chain.links]
    assert rules[1] == ("q_proj", "mm", "m k, k n/tp -> m n/tp")
    assert ("self_attn", "view", "a b (c/tp d) -> a b c/tp d") in rules
    assert rules[-2:] == [("k_proj", "mm", "m k, k n/tp -> m n/tp"), ("k_proj", "t", "a/tp b -> b a/tp")]
    assert all(link.source.startswith(("modeling_llama.py:", "sdpa_attention.py:")) for link in chain.links)
    assert chain_ends_meet(told.chains[0].links[1].rule)


def chain_ends_meet(rule: str) -> bool:
    """A rule in the notation: as many tensors as the operator has, and every factor that is given is taken."""
    taken, given = rule.split(" -> ")
    letters = {word.partition("/")[0].strip("()") for word in taken.replace(",", " ").split()}
    return all(word.partition("/")[0].strip("()") in letters for word in given.split())


def test_what_is_made_used_and_needed() -> None:
    _, graph, _ = language("llama")
    told = why(derived(graph, "tp=2", MEGATRON), "model.layers.0.self_attn.o_proj:mm")
    made, used_as, needed = told.uses
    assert (made[0], made[2], made[4]) == ("made", "_ _ sum:tp", "m k/tp, k/tp n -> m n sum:tp")
    assert (used_as[0], used_as[2]) == ("used", "_ _ sum:tp")
    assert (needed[0], needed[2], needed[3]) == ("needed", "_ _ sum:tp", "")  # it moves at the border of the module


def test_without_a_mark_is_what_is_derived_without_it() -> None:
    _, graph, _ = language("llama")
    found = derived(graph, "tp=2", MEGATRON)
    told = why(found, "model.layers.0.self_attn.o_proj.weight")
    assert told.layout == "_ _/tp"
    for i, one in enumerate(told.without):
        other = derived(graph, "tp=2", [text for n, text in enumerate(MEGATRON) if n != i])
        assert one.received == total(other)
        assert one.changes == (used(found, value_of(graph, told.tensor)) != used(other, value_of(graph, told.tensor)))
    assert told.without[0].changes


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2 tp=2"])
def test_an_alternative_costs_what_a_mark_for_it_does(mesh: str) -> None:
    """Another mark on an activation is the same problem: a free tensor that is forced, and one that a mark fixes."""
    _, graph, _ = language("llama")
    marks = (*MEGATRON[:2], "model.layers.*: b s/tp h")
    found = derived(graph, mesh, marks)
    v = found.folded.classes[value_of(graph, "model.layers.0.mlp")]
    others = {one.state: one for one in alternatives(found, v) if one.axis == "tp"}
    assert others[cut(1)].chosen
    assert others[cut(1)].more == 0 == others[cut(1)].received
    asked = others[cut(2)]
    again = derive(graph, [Mark.parse(m) for m in (*marks, "model.layers.*.mlp: b s h/tp")], found.mesh)
    assert used(again, v)["tp"] == cut(2)
    assert total(again) - total(found) == pytest.approx(asked.received)
    assert asked.more > 0


def test_a_marked_tensor_can_be_asked_what_its_mark_costs() -> None:
    _, graph, _ = language("llama")
    found = derived(graph, "tp=2", (*MEGATRON, "model.norm: b s h"))
    v = found.folded.classes[value_of(graph, "model.norm")]
    costs = {one.state: one.more for one in alternatives(found, v)}
    free = derived(graph, "tp=2", MEGATRON)
    assert costs[used(free, v)["tp"]] == min(costs.values())
    told = why(found, "model.norm")
    assert told.chains[0].links == ()
    assert any("the mark says so" in title for title, _, _ in lines(told))


def test_as_json_and_as_tables() -> None:
    _, graph, _ = language("llama")
    told = why(derived(graph, "tp=2", MEGATRON), "model.norm.weight")
    assert told.as_json()["alternatives"][0] == {
        "axis": "tp", "state": "_", "chosen": True, "more": 0.0, "received": 0.0,
    }  # fmt: skip
    headers = [len(headers) for _, headers, rows in lines(told) for _ in rows]
    assert headers == [len(row) for _, _, rows in lines(told) for row in rows]


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ("model.layers.0.self_attn.q_prj.weight", "no parameter, .*; the nearest is model.layers.0.self_attn.q_proj.w"),
        ("model.layers.0.mpl:mm", "no operator runs in a module .*; the nearest is model.layers.0.mlp"),
        ("model.layers.0.self_attn.q_proj:conv2d", r'runs no operator "conv2d", but _unsafe_view, mm'),
        ("model.layers.0.input_layernorm:mul", "runs mul 2 times: say which, mul#1 to #2"),
        ("model.layers.0.input_layernorm:mul#3", "2 times, so there is no mul#3"),
        ("modeling_llama.py:1", "no operator runs in the source line .*; the nearest is modeling_llama.py:"),
    ],
)
def test_a_name_that_is_none(node: str, sentence: str) -> None:
    _, graph, _ = language("llama")
    with pytest.raises(UserError, match=sentence):
        value_of(graph, node)


def test_a_line_of_one_module_or_of_several() -> None:
    _, graph, _ = language("llama")
    norms = next(n.source for n in graph.nodes if n.module == "model.norm" and n.operator.name() == "aten::rsqrt")
    line = norms.rpartition("/")[2]
    with pytest.raises(UserError, match=rf"modules run {line}: say which one, as in model.layers.0.input_layernorm:"):
        value_of(graph, line)
    v = value_of(graph, f"model.norm:{line}")
    assert graph.nodes[graph.maker[v]].module == "model.norm"
    own = value_of(graph, "model.norm:rsqrt")
    assert graph.nodes[graph.maker[own]].source == norms
