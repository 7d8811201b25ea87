"""Ways to train in less memory: kinds of optimisers, frozen bases with adapters, what is offloaded to the host,
HSDP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import load
from tangram.hardware.catalogue.devices import device
from tangram.models.lora.outline import adapted, frozen_flops
from tangram.models.outlines.outline import Dims, Group, decoder
from tangram.planner.cost.block_time import Ways
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.search.strategy import Ask, setting_of
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.optimisers_and_offload import (
    BASES,
    OPTIMISERS,
    Offload,
    away_share_of,
    base_of,
    moved_of,
    offload_words,
    offloads_of,
    optimisers_of,
)
from tangram.planner.space.setting import Host, Setting

LLAMA_65B = decoder(Dims(80, 8192, 64, 32000, ffn=22016), "llama-65b")
CORE = Setting(device("h100"), framework("megatron-core"))
FSDP = Setting(device("h100"), framework("torchtitan"))
OFFLOADED = st.sampled_from(offloads_of("optimiser,parameters,activations"))


def drawn(data: st.DataObject) -> Grid:
    """A configuration of LLAMA_65B."""
    data_ranks = data.draw(st.sampled_from([1, 4, 8]))
    return grid(
        batch=64, sequence=2048, micro=data.draw(st.sampled_from([1, 2])), data=data_ranks,
        tensor=data.draw(st.sampled_from([1, 8])), pipeline=data.draw(st.sampled_from([1, 4])), zero=3,
        recompute=data.draw(st.sampled_from([0, 31])), sequence_parallel=1,
        optimiser=data.draw(st.integers(0, len(OPTIMISERS) - 1)),
    )  # fmt: skip


# ---------------------------------------------------------------- weights in fewer bits

KEPT: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4, "gptq"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8, "gptq-int8"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4, "nf4"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "int8"),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, 8, "int8"),
)
"""As published checkpoints say it, in how many bits that is, and the base that stands for it beside adapters."""


@pytest.mark.parametrize(("said", "bits", "base"), KEPT)
def test_what_a_configuration_says_of_its_weights_is_told_and_taken_beside_adapters(
    said: dict[str, Any], bits: int, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 1024, **sizes, "quantization_config": said}))
    usual = ("plan", str(path), "--cluster", "h100-8x8", "--gpus", "1", "--seq", "512", "--tokens-per-batch", "8192")

    def parameters(*further: str) -> float:
        assert main([*usual, "--json", "--top", "1", *further]) == 0
        found = json.loads(capsys.readouterr().out)
        told.append(found["assumed"][-1])
        return float(found["choices"][0]["held"]["parameters"])

    told: list[str] = []
    assert parameters("--lora", "8") == pytest.approx(parameters("--lora", "8", "--base", base))
    assert parameters("--lora", "8") < parameters("--lora", "8", "--base", "bf16")
    parameters()
    assert (
        told[0]
        == f"the configuration keeps weights in {bits} bits ({said['quant_method']}): planned with the base {base}"
    )
    assert "planned as trained in full" in told[-1]


@pytest.mark.parametrize(
    ("name", "base", "each"),
    [("transformers", "nf4", 4), ("transformers", "awq", 4), ("transformers", "gptq", 2), ("ms-swift", "nf4", 2)],
)
def test_embedding_and_head_beside_a_base_in_few_bits_are_as_those_who_prepare_it_leave_them(
    name: str, base: str, each: float
) -> None:
    """peft brings them to float32 unless they are GPTQ's; other trainers do not call it, or bring them back."""
    outline, kind, g = adapted(LLAMA_65B, 8), base_of(base), grid(batch=8, sequence=512)
    found = memory(outline, g, Setting(None, framework(name), base=kind)).first.parameters[0]
    ends = 2 * LLAMA_65B.vocab * LLAMA_65B.hidden
    trained = (outline.numbers - LLAMA_65B.numbers) * framework(name).parameter_bytes
    assert found - trained == pytest.approx((LLAMA_65B.numbers - ends) * kind.nbytes + ends * each, rel=1e-4)


def test_an_entry_that_is_like_another_differs_in_what_it_says() -> None:
    usual = vars(framework("transformers"))
    for name, says in (("ms-swift", {"frozen_end_bytes"}), ("transformers-4", {"loops_experts"}), ("verl", set[str]())):
        other = vars(framework(name))
        assert {key for key in usual if usual[key] != other[key]} == {"name", "names", "attention_kernel", *says}


def test_autograd_keeps_what_torchs_own_operators_unpack() -> None:
    """The 16 bits of a frozen weight, of every micro-batch of which the inputs are kept; with the layers recomputed of
    one layer. bitsandbytes has a function of its own for the product, which keeps the 4 bits."""
    flow, codes = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True), torch.randint(16, (64, 32))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.numel() * 2) or one, lambda one: one):
        torch.matmul(flow, codes * torch.ones(32, dtype=torch.bfloat16))
    assert saved == [2 * 64 * 32]

    outline, g = adapted(LLAMA_65B, 8), grid(batch=16, sequence=512, micro=[1, 1], recompute=[0, int(Group.BLOCK)])
    kept, remade = (memory(outline, g, Setting(None, framework("llama-factory"), base=base_of(one))).first
                    for one in ("gptq", "nf4"))  # fmt: skip
    one = 2 * sum(part.inputs * part.outputs for part in LLAMA_65B.runs[0][0].products)
    more = [kept.activations - remade.activations, kept.passing - remade.passing]
    assert more[0].tolist() == pytest.approx([80 * one, 0.0])
    assert more[1].tolist() == pytest.approx([0.0, one], rel=0.02)


# ---------------------------------------------------------------- optimisers


@pytest.mark.parametrize("code", range(len(OPTIMISERS)))
def test_states_take_what_a_kind_says(code: int) -> None:
    one = grid(batch=8, sequence=2048, optimiser=code)
    rank = memory(LLAMA_65B, one, CORE).first
    kind = OPTIMISERS[code]
    parameter, gradient, master = kind.own or (2.0, CORE.framework.gradient_bytes, 4.0)
    numbers, ends = LLAMA_65B.numbers, 2 * LLAMA_65B.vocab * LLAMA_65B.hidden
    assert rank.parameters[0] == pytest.approx(numbers * parameter, rel=1e-6)
    assert rank.gradients[0] == pytest.approx(numbers * gradient, rel=1e-6)
    assert rank.optimiser[0] == pytest.approx(numbers * (master + kind.nbytes) + ends * kind.ends, rel=1e-6)
    host = CORE.framework.step_seconds  # what its own code does once a step
    took = seconds(LLAMA_65B, one, CORE).optimiser[0] - host
    usual = seconds(LLAMA_65B, grid(batch=8, sequence=2048), CORE).optimiser[0] - host
    assert took / usual == pytest.approx(moved_of(np.array(code)) / moved_of(np.array(0)), rel=0.02)
    assert moved_of(np.array(0)) == 34  # gradient twice, master, two moments both ways, parameter


# ---------------------------------------------------------------- adapters


def test_adapters_have_the_parameters_that_their_ranks_say() -> None:
    """Of Llama 2 7B, counted by hand: fused products have one adapter each."""
    whole = decoder(Dims(32, 4096, 32, 32000, ffn=11008))
    block = adapted(whole, 8).runs[0][0]
    assert block.trained.total == 8 * ((4096 + 12288) + (4096 + 4096) + (4096 + 22016) + (11008 + 4096))
    assert block.numbers.total - block.trained.total == whole.runs[0][0].numbers.total


def test_adapters_are_beside_what_targets_name() -> None:
    """They were beside all linear layers, whatever was named."""
    dims = Dims(2, 4096, 32, 32000, ffn=11008, kv_heads=8)

    def trained(targets: tuple[str, ...], of: Dims = dims) -> int:
        return adapted(decoder(of), 8, targets).runs[-1][0].trained.total // 8

    query, value, mlp = 4096 + 4096, 4096 + 1024, 4096 + 11008
    assert trained(("q_proj", "v_proj")) == query + value
    assert trained(("model.layers.*.self_attn.[kv]_proj",)) == 2 * value
    assert trained(("layers.1.mlp.down_proj",)) == mlp
    assert trained(("gate_up_proj",)) == 4096 + 2 * 11008
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert trained(every) == 2 * query + 2 * value + 3 * mlp == trained(("*_proj",))  # as peft counts all linear layers
    latent = replace(dims, kv_heads=0, q_rank=1536, kv_rank=512, head_dim=128, rope_dim=64)
    assert trained(("q_b_proj", "kv_a_proj_with_mqa"), latent) == 1536 + 32 * 192 + 4096 + 576
    fused = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")  # Megatron-core's names
    assert trained(fused) == (4096 + 6144) + query + (4096 + 2 * 11008) + mlp
    assert trained(("linear_q_up_proj", "linear_kv_down_proj"), latent) == 1536 + 32 * 192 + 4096 + 576
    mixed = replace(dims, experts=8, per_token=2, expert_ffn=1024)
    assert trained(("experts.gate_up_proj", "q_proj"), mixed) == query + 8 * (4096 + 2 * 1024)
    assert trained(("down_proj",), mixed) == 8 * (4096 + 1024)
    with pytest.raises(UserError, match='of "embed_tokens" the planner of clusters knows no linear layer of'):
        trained(("q_proj", "embed_tokens"))


def test_a_large_model_on_one_small_device() -> None:
    """QLoRA (Dettmers et al. 2023) trains 65 billion parameters on one device of 48 GB; LoRA of 16 bits does not."""
    one = grid(batch=16, sequence=512, recompute=31)
    lean = adapted(LLAMA_65B, 16)
    setting = replace(CORE, base=BASES[2])
    assert memory(lean, one, setting).device[0] < 48e9
    assert memory(lean, one, CORE).device[0] > 120e9
    assert memory(LLAMA_65B, one, CORE).device[0] > 1000e9


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_adapters_take_less_of_everything_that_is_trained(data: st.DataObject) -> None:
    one = drawn(data)
    lean, rank = adapted(LLAMA_65B, 16), 16
    whole, few = (memory(outline, one, FSDP).first for outline in (LLAMA_65B, lean))
    assert few.gradients[0] < 0.05 * whole.gradients[0]
    assert few.optimiser[0] <= 0.05 * whole.optimiser[0]
    if OPTIMISERS[one.optimiser[0]].own is None:
        assert few.parameters[0] < whole.parameters[0]  # 16 bits and no float32
    assert (few.activations[0] > whole.activations[0]) == (one.recompute[0] == 0)  # what adapters keep beside
    took, usual = seconds(lean, one, FSDP), seconds(LLAMA_65B, one, FSDP)
    assert took.data[0] <= usual.data[0] * 1.001
    assert frozen_flops(lean) > 0.9 * 2 * LLAMA_65B.numbers
    assert lean.numbers - LLAMA_65B.numbers < rank * 1.1e7


def test_a_base_in_fewer_bits_costs_unpacking() -> None:
    lean, one = adapted(LLAMA_65B, 16), grid(batch=16, sequence=512)
    plain = seconds(lean, one, CORE)
    packed = seconds(lean, one, replace(CORE, base=BASES[2]))
    assert packed.streams[0] > plain.streams[0]
    assert packed.products[0] == plain.products[0]


def test_adapters_stay_in_16_bits_beside_products_of_8() -> None:
    """Of 8 bits the thin products took three times as long, so that LoRA was hardly quicker than training the whole of
    Llama 2 7B: NeMo's page of figures of 24.12 has 24,824 tokens a second and device beside 16,891 (FP8, 8 H100)."""
    whole = decoder(Dims(32, 4096, 32, 32000, ffn=11008), "llama-2-7b")
    one, fp8 = grid(batch=32, sequence=4096, data=8, zero=1), Setting(device("h100"), framework("nemo"), "fp8")
    lean = adapted(whole, 16)
    ways = Ways(lean.runs[0][0], lean.hidden, one, fp8)
    assert {ways.kind(product) for product in ways.block.products if product.frozen} == {"fp8"}
    assert {ways.kind(product) for product in ways.block.products if not product.frozen} == {"bf16"}
    assert 1.1 < (seconds(whole, one, fp8).step / seconds(lean, one, fp8).step)[0] < 1.5


def test_mistakes_of_adapters() -> None:
    with pytest.raises(UserError, match="-1 is no rank of adapters"):
        adapted(LLAMA_65B, -1)
    assert adapted(LLAMA_65B, 0) is LLAMA_65B


# ---------------------------------------------------------------- the host


@given(st.data(), OFFLOADED)
@settings(deadline=None, max_examples=80)
def test_what_leaves_the_device_is_on_the_host(data: st.DataObject, bits: int) -> None:
    here = drawn(data)
    away = replace(here, offload=np.array([bits]))
    whole, left = memory(LLAMA_65B, here, FSDP), memory(LLAMA_65B, away, FSDP)
    assert whole.host[0] == 0
    for before, after in ((whole.first, left.first), (whole.last, left.last)):
        assert after.allocated[0] + after.host[0] == pytest.approx(before.allocated[0])
        assert after.allocated[0] <= before.allocated[0]
        assert (after.host[0] > 0) == (bits > 0) or before.optimiser[0] == 0
    took, usual = seconds(LLAMA_65B, away, FSDP).parts(), seconds(LLAMA_65B, here, FSDP).parts()
    for name in took.keys() - {"host", "optimiser"}:
        assert took[name][0] == usual[name][0]
    assert usual["host"][0] == 0
    assert took["optimiser"][0] == (0 if bits & Offload.OPTIMISER else usual["optimiser"][0])


@given(st.data(), OFFLOADED.filter(bool), st.floats(1.1, 10))
@settings(deadline=None, max_examples=60)
def test_a_quicker_host_is_waited_for_less(data: st.DataObject, bits: int, times: float) -> None:
    one = replace(drawn(data), offload=np.array([bits]))
    slow = seconds(LLAMA_65B, one, FSDP).host[0]
    quick = replace(FSDP, host=Host(rate=25e9 * times, bandwidth=40e9 * times))
    assert seconds(LLAMA_65B, one, quick).host[0] <= slow / (times if slow == 0 else 1)
    if bits == Offload.OPTIMISER:
        mine = memory(LLAMA_65B, one, FSDP).first
        assert slow >= mine.host[0] / 12 * 34 / 40e9 * 0.3  # at least what the host's memory takes
    endless = replace(FSDP, host=Host(rate=1e30, bandwidth=1e30))
    assert seconds(LLAMA_65B, one, endless).host[0] < 1e-9


def test_words_and_what_may_wait() -> None:
    assert offloads_of("") == (0,)
    assert offloads_of("optimiser") == (0, 1)
    assert offloads_of("activations,optimiser") == (0, 1, 4, 5)
    assert offloads_of("optimiser:0.5") == (0, 1)
    assert [away_share_of(one) for one in ("", "activations", "optimiser", "activations,optimiser:0.25")] == [
        1.0, 1.0, 1.0, 0.25,
    ]  # fmt: skip
    for wrong in ("optimiser:0", "optimiser:1.5", "optimiser:", "optimiser:half", "activations:0.5"):
        with pytest.raises(UserError, match="of the optimiser alone there is a share"):
            offloads_of(wrong)
    assert offload_words(7) == "parameters, optimiser and activations"
    assert [offload_words(bits) for bits in (0, 1, 4, 5)] == [
        "", "optimiser", "activations", "optimiser and activations",
    ]  # fmt: skip
    assert optimisers_of("adamw-8bit, adamw") == (0, 2)


# ---------------------------------------------------------------- HSDP


def test_states_divided_near_are_gathered_quicker_and_are_larger() -> None:
    over = grid(batch=64, sequence=2048, data=64, zero=3, shard=[64, 8])
    lean = replace(FSDP.framework, reduce_bytes=2.0)
    took = seconds(LLAMA_65B, over, replace(FSDP, framework=lean, nic=5e9)).data
    assert took[1] < took[0]  # gathered twice near, and summed far once: of a slow network that is less
    held = memory(LLAMA_65B, over, FSDP).first
    assert held.optimiser[1] == pytest.approx(8 * held.optimiser[0])
    slow = replace(FSDP, nic=1e9)
    far = grid(batch=64, sequence=2048, data=64, zero=1, shard=[64, 8])
    step = seconds(LLAMA_65B, far, slow).data
    assert step[1] > 0.3 * step[0]  # gradients are still summed over all


# ---------------------------------------------------------------- the command


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["plan", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_what_does_not_fit_does_by_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--cluster", "h100-8x8", "--gpus", "1", "--seq", "2048", "--tokens-per-batch", "16K"]
    planned(capsys, *words, code=1)
    lean = planned(capsys, *words, "--lora", "16", "--base", "nf4")
    assert lean["choices"][0]["step"] < 3
    assert lean["smallest"]["memory"] < 16e9
    both = planned(capsys, *words, "--optimiser", "adamw,adamw-8bit", "--offload", "optimiser,parameters,activations")
    assert all(one["offload"] or one["optimiser"] == "adamw-8bit" for one in both["choices"])
    assert both["choices"][0]["host"] > 0
    assert any("to the host was never compared" in said for said in both["assumed"])


def test_the_ranking_says_by_what_way(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--seq", "2048", "--memory", "20"]
    assert main([*words, "--optimiser", "adamw-8bit", "--offload", "optimiser"]) == 0
    said = capsys.readouterr().out
    assert "adamw-8bit" in said
    assert "in the host's memory" in said or "on the host" not in said
    assert main([*words[:-2], "--explain", "dp=8", "--zero", "3", "--offload", "parameters", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["given"]
    assert one["offload"] == "parameters and optimiser"


MISTAKES = {
    "an optimiser": (["--optimiser", "adam"], 'there is no optimiser "adam"'),
    "a base": (["--lora", "8", "--base", "nf3"], 'there is no base "nf3"'),
    "a base of nothing": (["--base", "nf4"], "give --lora"),
    "what is offloaded": (["--offload", "weights"], '"weights" is not offloaded'),
    "a rank": (["--lora", "-2"], "-2 is no rank of adapters"),
    "two of one": (["--explain", "dp=64", "--optimiser", "adamw,lion"], "give one --optimiser"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_a_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = MISTAKES[name]
    assert main(["plan", "llama-3-8b", "--cluster", "h100-8x8", *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["plan", "job.toml", "--optimiser", "lion"]) == 2
    assert "--optimiser is of what is planned for a cluster" in capsys.readouterr().err


def test_what_no_other_project_is_told_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--to", "megatron-lm"]
    assert main([*words, "--optimiser", "lion"]) == 2
    assert "does not say the optimiser lion" in capsys.readouterr().err


def test_parameters_wait_only_where_they_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--cluster", "h100-8x8", "--explain", "dp=64", "--offload", "parameters"]
    assert main([*words, "--zero", "1"]) == 1
    assert "parameters are offloaded to the host only where DP ranks divide them" in capsys.readouterr().out


def test_a_clusters_file_says_its_hosts(tmp_path: Path) -> None:
    given = Path("src/tangram/hardware/clusters/h100-8x8.toml").read_text()
    path = tmp_path / "c.toml"
    path.write_text(given + "[host]\nrate = 5e10\nmemory_bytes = 1e11\n")
    host = setting_of(load(path), Ask(8192, 8192)).host
    assert (host.rate, host.memory_bytes, host.bandwidth) == (5e10, 1e11, Host().bandwidth)
    path.write_text(given + "[host]\nrat = 5e10\n")
    with pytest.raises(UserError, match=r'"host\.rat" is not known'):
        load(path)
    path.write_text(given + "[host]\nrate = 0\n")
    with pytest.raises(UserError, match="a number above 0"):
        load(path)


def test_a_small_host_holds_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = Path("src/tangram/hardware/clusters/h100-8x8.toml").read_text()
    path = tmp_path / "c.toml"
    path.write_text(given + "[host]\nmemory_bytes = 1e9\n")
    words = ["llama-3-8b", "--cluster", str(path), "--gpus", "1", "--seq", "2048", "--tokens-per-batch", "16K"]
    planned(capsys, *words, "--offload", "optimiser,parameters", code=1)
