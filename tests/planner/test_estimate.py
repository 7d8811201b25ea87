"""Estimates against numbers by hand, and the directions in which they must go."""

from typing import Any

import pytest

from tangram.hardware.measuring import overheads
from tangram.models.building.build import build_on_meta
from tangram.models.outlines.costs import ModelCosts, costs
from tangram.planner.local.estimate import SPLIT_BACKWARD, Estimate, estimate
from tangram.planner.local.peak_memory import is_plain_ddp, largest_parts
from tangram.schema.plan import Plan
from tests.models.tiny import tiny
from tests.planner.machine import rates

SEQUENCE = 16
JOB = {
    "model": {"preset": "qwen3-1m"},
    "data": {"sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": 8, "micro_batch": 2},
    "optimiser": {"lr": 1e-3},
    "run": {"steps": 10},
}


@pytest.fixture(scope="module")
def llama() -> ModelCosts:
    return costs(build_on_meta(tiny("llama")), SEQUENCE, 2)


def plan(mesh: str = "dp=2", layout: str = "_/dp ...", **changes: Any) -> Plan:
    tables = {key: {**value, **changes.get(key, {})} for key, value in JOB.items()}
    tables |= {key: value for key, value in changes.items() if key not in JOB}
    axes = [word.partition("=")[0] for word in mesh.split()]
    return Plan.model_validate(
        {"axes": {"data": axes}, **tables, "mesh": mesh, "layouts": {"parameters": {"*": layout}}}
    )


def found(costs: ModelCosts, one: Plan, **machine: object) -> Estimate:
    return estimate(one, costs, costs, rates(one.ranks, **machine))


def test_memory_by_hand(llama: ModelCosts) -> None:
    numbers = llama.parameter_count
    whole = found(llama, plan(layout="...")).memory
    assert (whole.parameters, whole.gradients, whole.optimiser) == (4 * numbers, 4 * numbers, 8 * numbers)
    assert whole.activations == llama.activation_bytes
    assert whole.logits == 2 * 4 * 2 * SEQUENCE * 65
    assert whole.gathered == 4 * numbers  # the sum of a micro-batch before, beside the gradients of this one
    assert whole.process == overheads.PROCESS_BYTES
    assert whole.total == sum((16 * numbers, whole.activations, whole.logits, whole.gathered, whole.process))


def test_of_one_micro_batch_gradients_come_when_activations_go(llama: ModelCosts) -> None:
    """The loss, each layer's backward and the update, by hand: no two of them at once."""
    one = {"global_batch": 4}
    *blocks, outside = llama.parts
    gradients = {part.name: 4 * llama.block_parameters(part.name) for part in llama.parts}
    embedding = 4 * 65 * 32  # whose gradient comes last
    logits = 2 * 4 * 2 * SEQUENCE * 65
    wide = max(max(one.shape) for one in llama.parameters if one.block and len(one.shape) > 1)
    for recompute in ([], ["model.layers.*"]):
        kept = [part.input_bytes if recompute else part.kept_bytes for part in blocks]
        at_loss = sum(kept) + outside.kept_bytes + logits
        in_layers = [
            sum(kept[:n]) + (gradients[""] - embedding) + sum(gradients[late.name] for late in blocks[n + 1 :]) + most
            for n, part in enumerate(blocks)
            for flowing in [2 * 4 * 2 * SEQUENCE * wide + part.input_bytes]  # of a product in the widest
            for most in (part.kept_bytes + flowing, gradients[part.name] + part.input_bytes)
        ]
        memory = found(llama, plan("dp=1", "...", data={**one, "micro_batch": 4}, run={"recompute": recompute})).memory
        flow = memory.gradients + memory.activations + memory.logits
        assert flow == pytest.approx(max(at_loss, *in_layers, sum(gradients.values())))
        several = found(llama, plan("dp=1", "...", data=one, run={"recompute": recompute})).memory
        assert several.gradients == sum(gradients.values())  # of the micro-batch before, beside all that this one keeps
        assert several.activations + several.logits >= at_loss


def test_what_fsdp_cuts(llama: ModelCosts) -> None:
    cut = found(llama, plan()).memory
    held = largest_parts(plan(), llama.parameters)
    assert held["model.embed_tokens.weight"] == 33 * 32  # 65 rows: the first rank has one more
    assert cut.parameters == 4 * sum(held.values())
    assert 0.5 <= cut.parameters / (4 * llama.parameter_count) < 0.52
    block = llama.block_parameters("model.layers.0")
    assert cut.gathered == pytest.approx(4 * (llama.parameter_count + block), rel=0.02)
    assert plan().shard_ranks == 2
    assert plan("dp=2 fsdp=4", "_/fsdp ...").shard_ranks == 4
    assert plan(layout="...").shard_ranks == 1


def test_memory_of_types_by_hand(llama: ModelCosts) -> None:
    numbers = llama.parameter_count
    low = {"compute": "bfloat16", "parameters": "bfloat16"}
    memory = found(llama, plan(layout="...", precision=low)).memory
    assert (memory.parameters, memory.gradients, memory.optimiser) == (2 * numbers, 4 * numbers, 12 * numbers)
    memory = found(llama, plan(layout="...", precision={**low, "accumulate": "bfloat16"})).memory
    assert memory.gradients == 2 * numbers
    memory = found(llama, plan(layout="...", precision={**low, "masters": "bfloat16"})).memory
    assert memory.optimiser == 4 * numbers
    assert (
        found(llama, plan(precision={"compute": "float16"})).memory.gradients == found(llama, plan()).memory.gradients
    )


def test_what_is_kept_whole_by_hand(llama: ModelCosts) -> None:
    numbers, block = llama.parameter_count, llama.block_parameters("model.layers.0")
    for reshard in ("after backward", "after step"):
        kept = found(llama, plan(run={"reshard": reshard})).memory
        assert kept.gathered == pytest.approx(4 * numbers + 4 * block, rel=0.02)  # 65 rows over two: 66
    once = {"reshard": "after step", "reduce_every": "step"}
    assert found(llama, plan(run=once)).memory.gathered == pytest.approx(8 * numbers + 4 * block, rel=0.02)
    low = {"compute": "bfloat16", "reduce": "bfloat16"}
    assert found(llama, plan(layout="...", run=once, precision=low)).memory.gathered == 4 * numbers + 2 * block


def test_the_forwards_of_a_reference_take_time(llama: ModelCosts) -> None:
    alone = plan("dp=1", "...", data={"micro_batch": 1, "packing": "single"}).model_dump()
    forwards: dict[str, float] = {}
    for task, preference in (("dpo", {"loss_type": "simpo"}), ("dpo", {}), ("kto", {"loss_type": "kto"})):
        one = Plan.model_validate({**alone, "task": task, "preference": preference})
        forwards[preference.get("loss_type", task)] = found(llama, one).seconds.products
    one_forward = (forwards["dpo"] - forwards["simpo"]) * 1e9 / 8
    assert one_forward == pytest.approx(llama.forward.flops)
    assert forwards["kto"] - forwards["simpo"] == pytest.approx(3 * (forwards["dpo"] - forwards["simpo"]))


def test_of_whole_copies_nothing_is_gathered(llama: ModelCosts) -> None:
    once = found(llama, plan(layout="...", run={"reduce_every": "step"}))
    each = found(llama, plan(layout="..."))
    assert once.memory.gathered == 0
    assert each.memory.gathered == each.memory.gradients
    assert each.seconds.communication == pytest.approx(2 * once.seconds.communication - 1e-3)
    assert found(llama, plan("dp=1", "...")).memory.gathered == 0
    assert is_plain_ddp(plan("dp=2 one=1", "_/one ..."))
    for not_so in (plan(), plan(layout="...", precision={"compute": "bfloat16"})):
        assert not is_plain_ddp(not_so)


def test_what_is_gathered_and_reduced_less_often_takes_less_time(llama: ModelCosts) -> None:
    runs = (
        {},
        {"reshard": "after backward"},
        {"reshard": "after step"},
        {"reshard": "after step", "reduce_every": "step"},
    )
    seconds = [found(llama, plan(run=run)).seconds.communication for run in runs]
    assert seconds == sorted(seconds, reverse=True)
    assert len({*seconds}) == 4
    assert plan().micro_steps == 2
    *_, step, once = seconds
    every, forward, backward = seconds[0], seconds[0] - seconds[1], seconds[1] - seconds[2]
    assert once == pytest.approx(step - (every - 2 * forward / 2 - 2 * backward - 1e-3) / 2)


def test_seconds_by_hand(llama: ModelCosts) -> None:
    one = found(llama, plan(layout="..."))
    assert plan().micro_steps == 2
    assert one.seconds.products == pytest.approx(2 * (llama.forward.flops + llama.backward.flops) / 1e9)
    added = (
        3 * 4 * llama.parameter_count
    )  # the second micro-batch's gradients to the first's: two are read, one written
    moved = 2 * (llama.forward.bytes_moved + llama.backward.bytes_moved)
    assert one.seconds.moves == pytest.approx((moved + added) / 1e9)
    assert one.seconds.optimiser == pytest.approx(overheads.OPTIMISER_PASSES * 12 * llama.parameter_count / 1e9)
    # Copies: an all-reduce sends each number twice, but for a rank's own half; plus the copy into one bucket.
    numbers = llama.parameter_count
    sent = 2 * 4 * numbers / 2 / 1e8 + 1e-3
    copied = 2 * 4 * numbers / 1e9
    assert one.seconds.communication == pytest.approx(2 * (sent + copied) + 1e-3)
    assert one.tokens == 8 * SEQUENCE
    assert one.tokens_per_second == pytest.approx(8 * SEQUENCE / one.seconds.total)


def test_ranks_that_share_a_core_wait_for_nothing(llama: ModelCosts) -> None:
    """Of two stages on one core one works while the other waits, as long as one of them can."""
    stages = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]
    one = plan(
        "pp=2 dp=1", "...", axes={"data": ["dp"], "pipeline": ["pp"]},
        pipeline={"schedule": "1F1B", "stages": stages}, data={"micro_batch": 1, "global_batch": 4},
    )  # fmt: skip
    apart = found(llama, one).seconds.products
    assert found(llama, one, crowd=1.1).seconds.products == pytest.approx(apart / 1.1)
    shared = [found(llama, one, crowd=crowd).seconds.products for crowd in (2.0, 4.0)]
    assert shared[0] == shared[1] < apart / 1.1  # at most all of the waits


def test_a_backward_in_two_parts_costs_more(llama: ModelCosts) -> None:
    """Of one micro-batch after the other, where no schedule has waits to fill."""
    stages = [["model.embed_tokens"], ["model.layers.0"], ["model.layers.1"], ["model.norm", "lm_head"]]
    tables: dict[str, Any] = {"axes": {"data": ["dp"], "pipeline": ["pp"]},
                              "data": {"micro_batch": 1, "global_batch": 8}}  # fmt: skip
    whole, split = (
        found(llama, plan("pp=2 dp=1", "...", pipeline={"schedule": name, "stages": stages}, **tables), crowd=9.0)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    )
    assert split.seconds.products == pytest.approx((1 + SPLIT_BACKWARD) * whole.seconds.products)


def test_no_call_is_quicker_than_a_call(llama: ModelCosts) -> None:
    slow = found(llama, plan(), call_seconds=1.0).seconds
    assert slow.products == pytest.approx(
        2 * overheads.MODULE_CALLS * (len(llama.forward.products) + len(llama.backward.products))
    )


def test_directions(llama: ModelCosts) -> None:
    usual = found(llama, plan())
    again = found(llama, plan(run={"recompute": ["model.layers.*"]}))
    assert again.memory.activations < usual.memory.activations
    assert again.seconds.products > usual.seconds.products
    low = found(llama, plan(precision={"compute": "bfloat16"}))
    assert low.seconds.products < usual.seconds.products
    assert low.memory.gathered < usual.memory.gathered
    frozen = found(_frozen(), plan())
    assert frozen.memory.optimiser == 0
    assert frozen.memory.parameters == usual.memory.parameters
    smaller = found(llama, plan(data={"micro_batch": 1}))  # of costs that were counted for two
    assert smaller.seconds.products == 2 * usual.seconds.products
    hybrid, copies = found(llama, plan("dp=2 fsdp=2", "_/fsdp ...")), found(llama, plan("dp=4", "..."))
    assert hybrid.memory.parameters < copies.memory.parameters


def _frozen() -> ModelCosts:
    model = build_on_meta(tiny("llama"))
    counted = costs(model, SEQUENCE, 2)
    model.requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    again = costs(model, SEQUENCE, 2)
    assert again.backward.flops < counted.backward.flops
    model.requires_grad_(False)
    from dataclasses import replace

    return replace(again, parameters=tuple(replace(one, trained=False) for one in again.parameters))


def test_in_words_and_numbers(llama: ModelCosts) -> None:
    one = found(llama, plan())
    said = dict(one.in_words())
    assert "process 360.0 MB" in said["memory of a rank"]
    assert said["step"].startswith(f"{1e3 * one.seconds.total:.0f} ms (matmuls ")
    numbers = one.as_json()
    assert numbers["tokens_per_s"] == one.tokens_per_second
    assert numbers["memory_mb"] == one.memory.total / 1e6
