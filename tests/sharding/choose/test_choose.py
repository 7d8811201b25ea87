"""Choice on graphs: beside every choice tried, beside Megatron's plan, and run."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.errors import UserError
from tangram.hardware.catalogue import cluster
from tangram.layout import Mesh
from tangram.models.building.named import named
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.costs import block_names
from tangram.sharding.choose.choose import ChosenMarks, choose, kept, priced
from tangram.sharding.choose.costs import Both, Training, costs
from tangram.sharding.choose.options import options
from tangram.sharding.choose.search import search
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import Mark, marks_of
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.derive.problem.rates import WorkRates
from tangram.sharding.derive.solve.solve import SolverCosts
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.derived import check

H100 = cluster.builtin("h100-8x8")


def product(rows: int, into: int, out: int, *, act: bool) -> Graph:
    layers = [nn.Linear(into, out, bias=False), *([nn.ReLU()] if act else [])]
    return capture(nn.Sequential(*layers).to("meta"), {"input": torch.empty(rows, into, device="meta")})


def every(both: Both) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of every choice of every variable, put together over all of them."""
    names = [name for name, n in both.seconds.sizes.items() if n > 1]

    def spread(costs: SolverCosts) -> np.ndarray:
        total = np.zeros([both.seconds.sizes[name] for name in names])
        for own, table in costs.tables.items():
            shape = [1] * len(names)
            kept = [name for name in own if name in names]
            order = sorted(range(len(kept)), key=lambda i: names.index(kept[i]))
            for name in kept:
                shape[names.index(name)] = both.seconds.sizes[name]
            total += (
                table.squeeze(tuple(i for i, n in enumerate(own) if n not in names)).transpose(order).reshape(shape)
            )
        return total

    return spread(both.seconds), spread(both.nbytes)


@pytest.mark.parametrize(
    ("mesh", "act", "rows", "into", "out"),
    [
        *(("tp=2", True, *shape) for shape in [(2, 2, 2), (2, 1 << 14, 1 << 13), (1 << 20, 3, 2), (1, 1 << 13, 2)]),
        *(("tp=8", False, *shape) for shape in [(1 << 20, 8, 16), (8, 1 << 14, 1 << 13)]),
        *(("dp=2 tp=2", False, *shape) for shape in [(4, 6, 3), (3, 1, 4), (1 << 22, 3, 2), (2, 3, 2)]),
        ("dp=8 tp=8", False, 1 << 16, 1 << 13, 1),
    ],
)
def test_the_best_of_every_choice_at_every_limit(mesh: str, act: bool, rows: int, into: int, out: int) -> None:
    graph = product(rows, into, out, act=act)
    some = options(fold(graph, builtin()), Mesh.parse(mesh), ())
    both = costs(some, H100, Training())
    assert 100 < math.prod(both.seconds.sizes.values()) < 4e6
    seconds, nbytes = every(both)
    can = np.isfinite(seconds)
    for limit in (None, *np.quantile(nbytes[can], [0.0, 0.1, 0.5])):
        fits = seconds if limit is None else seconds[nbytes <= limit]
        found = choose(graph, some.mesh, H100, memory_limit=None if limit is None else float(limit), gap=0.0)
        assert found.price.seconds == pytest.approx(fits.min(), rel=1e-9)
        assert found.gap <= 1e-9
        assert limit is None or found.price.nbytes <= limit
    few = float(nbytes[can].min())
    with pytest.raises(UserError, match="does not fit over"):
        choose(graph, some.mesh, H100, memory_limit=few * 0.9)


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@cache
def tiny(kind: str) -> tuple[Graph, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL)
    model: nn.Module = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    ids = torch.randint(64, (4, 16))
    graph = folded(capture(model, {"input_ids": ids, "use_cache": False}), block_names(model))
    return graph, {**dict(model.named_parameters()), **dict(model.named_buffers()), "input_ids": ids}


@cache
def large(kind: str) -> Graph:
    """Two layers of 8192, for a batch of 8 x 1024 tokens."""
    fields = {"num_hidden_layers": "2", "hidden_size": "8192", "num_attention_heads": "64", "num_key_value_heads": "8"}
    model, inputs = named(kind, {**fields, "intermediate_size": "28672", "vocab_size": "32768"}).make(8, 1024)
    return folded(capture(model, inputs), block_names(model))


def megatron(graph: Graph, kind: str, mesh: str) -> Derived:
    """From the marks that come with Tangram, the batch over all other axes."""
    marks = marks_of(kind) or []
    others = [axis for axis in Mesh.parse(mesh).axes if axis != "tp"]
    marks += [Mark.parse(f"input_ids: b/{'/'.join(others)} s")] if others else []
    return derive(graph, marks, Mesh.parse(mesh), rates=WorkRates(cluster=H100))


@pytest.mark.parametrize("mesh", ["tp=8", "dp=2 tp=4", "dp=8 tp=8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_never_worse_than_the_plan_of_the_marks(kind: str, mesh: str) -> None:
    graph = large(kind)
    theirs = priced(megatron(graph, kind, mesh), H100)
    found = choose(graph, Mesh.parse(mesh), H100, memory_limit=theirs.nbytes)
    assert found.gap <= 1e-4
    assert found.price.seconds <= theirs.seconds
    assert found.price.nbytes <= theirs.nbytes


def test_the_plan_costs_what_was_said() -> None:
    found = choose(large("llama"), Mesh.parse("dp=2 tp=4"), H100, memory_limit=60e9)
    again = priced(found.plan, H100)
    assert (again.work, again.moving) == pytest.approx((found.price.work, found.price.moving))
    assert (again.states, again.saved) == pytest.approx((found.price.states, found.price.saved))


def least_bytes(graph: Graph, mesh: str) -> float:
    some = costs(options(fold(graph, builtin()), Mesh.parse(mesh), ()), H100, Training())
    found = search(some, 1.0, 10.0)
    assert found.best is None
    return found.smallest


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2 tp=2"])
@pytest.mark.parametrize("tight", [False, True])
def test_what_is_chosen_is_right(mesh: str, tight: bool) -> None:
    graph, tensors = tiny("llama")
    limit = 1.05 * least_bytes(graph, mesh) if tight else None
    found = choose(graph, Mesh.parse(mesh), H100, memory_limit=limit, gap=0.1)
    ran = check(found.plan, tensors)
    assert not ran.wrong
    assert tight == bool(kept(found.plan))
    assert ran.gradients > 10


def names_cut(found: ChosenMarks) -> dict[str, str]:
    graph = found.plan.folded.graph
    return {v.name: str(value_layout(found.plan, i)) for i, v in graph.of_kind("parameter")}


def test_marks_bind_what_they_name_and_nothing_else() -> None:
    mark = Mark.parse("*.q_proj.weight: o i/tp")
    found = choose(large("llama"), Mesh.parse("dp=2 tp=4"), H100, marks=[mark])
    assert names_cut(found)["model.layers.0.self_attn.q_proj.weight"].endswith("/tp")
    free = choose(large("llama"), Mesh.parse("dp=2 tp=4"), H100)
    assert free.price.seconds <= found.price.seconds


def test_less_memory_takes_longer() -> None:
    graph = large("llama")
    free, tight = (choose(graph, Mesh.parse("dp=8 tp=8"), H100, memory_limit=gb, gap=0.05).price for gb in (8e9, 1.5e9))
    assert tight.nbytes <= 1.5e9 < free.nbytes
    assert free.seconds < tight.seconds


def test_optimiser_states_and_micro_batches_count() -> None:
    graph = large("llama")
    plan = megatron(graph, "llama", "dp=2 tp=4")
    one, more = (priced(plan, H100, Training(optimiser=n)) for n in (0.0, 12.0))
    held = sum(
        math.prod(v.shape) / (4 if "/tp" in str(value_layout(plan, i)) else 1) for i, v in graph.of_kind("parameter")
    )
    assert more.states - one.states == pytest.approx(12 * held)
    assert one.states == pytest.approx(4 * held)  # bf16, and gradients of it
    once, often = (priced(plan, H100, Training(micro_batches=n)) for n in (1, 8))
    assert often.moving < once.moving
    assert often.work == once.work


def test_partial_results_say_how_far_they_may_be() -> None:
    graph = large("llama")
    hasty = choose(graph, Mesh.parse("dp=8 tp=8"), H100, memory_limit=1e9, seconds=0.0)
    better = choose(graph, Mesh.parse("dp=8 tp=8"), H100, memory_limit=1e9, gap=0.02)
    assert better.gap <= 0.02 < hasty.gap
    assert hasty.bound <= better.price.seconds <= hasty.price.seconds
    assert better.bound <= hasty.price.seconds
    assert hasty.price.nbytes <= 1e9


@pytest.mark.slow
def test_three_axes_have_a_plan_and_a_bound() -> None:
    graph, tensors = tiny("llama")
    theirs = megatron(graph, "llama", "dp=2 cp=2 tp=2")
    found = choose(graph, theirs.mesh, H100, seconds=4.0)
    assert 0 < found.bound <= found.price.seconds
    assert found.price.seconds <= priced(theirs, H100).seconds
    assert not check(found.plan, tensors).wrong


def test_a_known_plan_is_where_it_begins() -> None:
    graph = large("llama")
    theirs = megatron(graph, "llama", "dp=2 tp=4")
    own = priced(theirs, H100)
    some = options(theirs.folded, theirs.mesh, ())
    choice = some.choice(theirs)
    assert choice is not None
    again = priced(some.derived(choice, ()), H100)
    assert (again.seconds, again.nbytes) == pytest.approx((own.seconds, own.nbytes))
    found = choose(graph, theirs.mesh, H100, memory_limit=own.nbytes, known=[theirs], seconds=0.0)
    assert found.price.seconds <= own.seconds


@pytest.mark.parametrize(
    ("mesh", "words", "said"),
    [
        ("dp=16 tp=8", {}, "has 128 ranks and the cluster h100-8x8 64: take a smaller mesh"),
        ("tp=2", {"memory_limit": 1e3}, r"into 1e-06 GB a rank: the least it takes is .* GB more: take more ranks"),
        ("tp=2", {"memory_limit": 0.0}, "leaves room for nothing"),
        ("tp=2", {"marks": [Mark.parse("q_prj: o/tp")]}, "names no tensor"),
        (
            "tp=2",
            {"marks": [Mark.parse("*.q_proj.weight: o/tp i"), Mark.parse("*.0.*.q_proj.weight: o i/tp")]},
            "contradict each other on model.layers.0.self_attn.q_proj.weight over tp",
        ),
        ("dp=2 | x=2", {}, "dp and x"),
    ],
)
def test_bad_input_is_one_sentence(mesh: str, words: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(tiny("llama")[0], Mesh.parse(mesh), H100, **words)
