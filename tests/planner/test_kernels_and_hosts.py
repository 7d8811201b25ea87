"""What kernels and hosts of a framework do to a step: attention, quick matmuls, norms, casts and hooks of Python."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import JambaConfig, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from bench._planner import threads
from bench._planner.predict import known, runs
from bench._planner.rows import cases, read
from tangram.hardware.catalogue import curves
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Group, decoder
from tangram.models.outlines.outlined import outline_of, outlined
from tangram.planner.cost.block_time import Ways
from tangram.planner.cost.calibration import published
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.space.framework_profiles import Framework, framework, frameworks
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.recompute import BY_OPERATOR
from tangram.planner.space.setting import Documents, Setting, packed

SMALL = decoder(Dims(24, 2048, 16, 151936, ffn=5504, kv_heads=16), "dense")
SEVEN = decoder(Dims(32, 4096, 32, 103168, ffn=11008, kv_heads=32), "seven")
MIXED = decoder(Dims(8, 2048, 32, 32000, kv_heads=4, experts=128, per_token=8, expert_ffn=768), "mixed")


def one(**given: float) -> Grid:
    """A grid of one configuration."""
    return grid(**{"batch": 8, "sequence": 4096, **given})


def step(outline: object, of: Grid, name: str, by: Framework, precision: str = "bf16") -> float:
    """Seconds on a device."""
    return float(seconds(outline, of, Setting(device(name), by, precision)).step[0])  # type: ignore[arg-type]


def test_flash_2_on_hopper_is_what_was_measured_of_it() -> None:
    size = curves.AttentionSizes(1, 16384, 16384, 16, 16, 128)
    flops = 4 * 16 * 16384.0**2 * 128 / 2

    def rate(name: str, kernel: str, *, backward: bool) -> float:
        took = curves.attention_seconds(device(name), "bf16", size, backward=backward, kernel=kernel)
        return float(flops * (2.5 if backward else 1.0) / took / 1e12)

    assert rate("h100", "flash-2", backward=False) == pytest.approx(335, rel=0.1)
    assert rate("h100", "flash-2", backward=True) == pytest.approx(322, rel=0.15)
    assert rate("h100", curves.NEWEST, backward=False) > 500
    assert rate("a100", "flash-2", backward=False) == rate("a100", curves.NEWEST, backward=False)  # its newest


def test_frameworks_on_torchs_attention_are_slower_on_hopper_alone() -> None:
    fsdp, of = framework("fsdp"), one(sequence=32768)
    newest = replace(fsdp, attention_kernel=curves.NEWEST)
    assert step(SMALL, of, "h100", fsdp) > 1.2 * step(SMALL, of, "h100", newest)
    assert step(SMALL, of, "a100", fsdp) == step(SMALL, of, "a100", newest)


class _Started(TorchDispatchMode):
    """Counts operators that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_experts_that_are_modules_of_their_own_are_started_one_by_one() -> None:
    """As transformers had them until 2025; what each starts is counted in torch, by a loop written as theirs was."""
    tokens, experts, width = torch.randn(64, 16), 8, 24
    (up, gate), down = torch.randn(2, experts, width, 16), torch.randn(experts, 16, width)
    weights, chosen = torch.randn(64, experts).softmax(-1).topk(2)
    where, found = torch.nn.functional.one_hot(chosen, experts).permute(2, 1, 0), torch.zeros(64, 16)
    with _Started() as started:
        for at in range(experts):
            way, rows = torch.where(where[at])
            flow = tokens[None, rows].reshape(-1, 16)
            flow = (torch.nn.functional.silu(flow @ gate[at].T) * (flow @ up[at].T)) @ down[at].T
            found.index_add_(0, rows, flow * weights[rows, way, None])

    def kernels(name: str, of: Grid) -> float:
        ways = Ways(MIXED.runs[0][0], MIXED.hidden, of, Setting(device("h100"), framework(name)))
        return float(sum(np.sum(times) for _, times in ways.kernels()))

    for ranks in (1, 8):
        of = one(data=8, expert=ranks)
        more = kernels("transformers-4", of) - kernels("transformers", of)
        assert more / (128 / ranks - 1) == pytest.approx(started.count / experts, rel=0.25)
    assert kernels("transformers-4.57", one()) == kernels("deepspeed-transformers-4", one())
    of = one(data=16, batch=16, zero=3, recompute=31)
    waits = [step(MIXED, of, "a100", framework(name)) for name in ("deepspeed", "deepspeed-transformers-4")]
    assert waits[1] - waits[0] > 3 * 8 * 2 * 127 * framework("deepspeed").hooks * 0.9  # three passes of so many modules
    assert step(SMALL, of, "a100", framework("deepspeed")) == step(
        SMALL, of, "a100", framework("deepspeed-transformers-4")
    )


def test_torchs_own_attention_on_hopper_is_cudnns() -> None:
    """Since torch 2.11; huggingface/trl pull request 6846: a sample of 2^20 tokens of Qwen3-8B takes 8 H100 380 s, and
    606 s by FlashAttention-2."""
    newest = {one.name for one in frameworks() if one.attention_kernel == curves.NEWEST}
    assert newest >= {"transformers", "trl", "deepspeed"}
    assert not newest & {"llama-factory", "verl", "transformers-4", "deepspeed-transformers-4", "nemo-rl"}
    eight, of = outlined("Qwen/Qwen3-8B"), one(batch=1, sequence=2**20, context=8, zero=3, recompute=int(Group.BLOCK))
    took = [
        step(eight, of, "h100", by) for by in (framework("trl"), replace(framework("trl"), attention_kernel="flash-2"))
    ]
    assert took[0] == pytest.approx(380, rel=0.15)
    assert took[1] == pytest.approx(606, rel=0.15)


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x", "gaudi3", "gaudi2"])
def test_no_matmul_is_quicker_than_the_quickest_that_was_measured(name: str) -> None:
    took = curves.product_seconds(device(name), "bf16", 8192.0 * np.arange(1, 9), 8192, 8192)
    rates = 2 * 8192.0**3 * np.arange(1, 9) / took
    best = device(name).best_matmul or 0.0
    assert 0.9 * best < rates.max() <= best
    assert not curves.measured(name)  # one figure is no table: intervals stay wide


def test_every_framework_has_a_kernel_of_attention_that_there_is() -> None:
    assert {one.attention_kernel for one in frameworks()} == {*curves.KERNELS}


def test_modules_that_zero_gathers_one_by_one_take_the_host_as_long_at_any_length() -> None:
    by = framework("deepspeed")
    gathered, whole = one(zero=3, sequence=256, data=1), one(zero=2, sequence=256, data=1)
    short = step(SMALL, gathered, "a100", by)
    host = 24 * 6 * 2 * 8 * by.hooks  # layers, modules, forward and backward, micro-batches
    assert host < short < 1.25 * host  # it starts kernels, too, and the optimiser comes after
    assert step(SMALL, one(zero=3, sequence=512, data=1), "a100", by) < 1.1 * short
    assert step(SMALL, whole, "a100", by) < 0.5 * short
    assert framework("fsdp").hooks == 0


def test_recompute_by_operator_keeps_nothing_of_experts() -> None:
    by, tokens = framework("torchtitan"), 4096
    some = memory(MIXED, one(recompute=int(BY_OPERATOR), micro=1), Setting(None, by)).first.activations[0]
    none = memory(MIXED, one(micro=1), Setting(None, by)).first.activations[0]
    routed = 8 * tokens * 8 * 2 * (2048 + 2 * 768 + 768 + 2048)  # layers, tokens, experts, bytes: in, up, after, out
    assert none - some > routed
    whole = seconds(MIXED, one(recompute=int(BY_OPERATOR)), Setting(device("h100"), by))
    assert whole.products[0] > 1.25 * seconds(MIXED, one(), Setting(device("h100"), by)).products[0]


def test_recompute_by_operator_keeps_what_ranks_of_experts_exchanged() -> None:
    """pytorch/torchtitan issue 1789: DeepSeek-V3 16B, 8 H100, EP 8, samples of 4,096. Four a rank reserve 73.3 GiB;
    eight run out, and without EP take 75.9. 50.8 and 77.6 were said of the first two."""
    by, outline = framework("torchtitan"), outlined("deepseek-ai/DeepSeek-V2-Lite")

    def reserved(micro: int, ranks: int, kept: Framework = by) -> float:
        g = grid(batch=8 * micro, sequence=4096, data=8, zero=3, micro=micro, expert=ranks, recompute=int(BY_OPERATOR))
        return float(memory(outline, g, Setting(None, kept, loss="compiled")).reserved[0]) / 2**30

    assert reserved(4, 8) == pytest.approx(73.3, rel=0.05)
    assert reserved(8, 8) > 100 > reserved(8, 1)
    more = reserved(4, 8) - reserved(4, 8, replace(by, keeps_exchanged=False))
    both = 26 * 2 * 4 * 4096 * 6 * 2048 * 2 / 2**30  # layers, there and back, tokens, experts of each, bytes
    assert more == pytest.approx(both * (1 + by.reserve), rel=1e-6)
    whole = grid(batch=32, sequence=4096, data=8, zero=3, micro=4, expert=8, recompute=int(Group.BLOCK))
    left = [memory(outline, whole, Setting(None, one)).allocated[0] for one in (by, replace(by, keeps_exchanged=False))]
    assert left[0] == left[1], "a layer that is made again sends its tokens again"


def test_experts_that_are_called_with_all_rows_compute_them() -> None:
    """Llama 4's of transformers and of those who run its models; counted of its own code."""
    config = Llama4TextConfig(
        hidden_size=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=1, num_hidden_layers=1
    )
    with FlopCounterMode(display=False) as counted:
        Llama4TextMoe(config)(torch.randn(1, 16, 32))
    each = 2 * 16 * 3 * 32 * 64  # of one expert, which the shared one is like
    assert counted.get_total_flops() == pytest.approx(9 * each + 2 * 16 * 32 * 8)

    scout, g = outlined("meta-llama/Llama-4-Scout-17B-16E"), one(sequence=4096, recompute=int(Group.BLOCK))
    mixture = next(block for block, _ in scout.runs if block.experts)
    names = ("transformers", "llama-factory", "deepspeed", "megatron-core", "torchtitan")
    assert [Setting(None, framework(name)).per_token(mixture) for name in names] == [16, 16, 16, 1, 1]
    took = [seconds(scout, g, Setting(device("h100"), framework(name))).products[0] for name in names[2:4]]
    assert took[0] > 4 * took[1]
    assert Setting(None, framework("transformers")).per_token(MIXED.runs[0][0]) == 8


def test_a_graph_shows_whether_experts_take_all_rows() -> None:
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}  # fmt: skip
    whole = outline_of(Llama4TextConfig(**sizes, head_dim=16, num_local_experts=4, intermediate_size_mlp=64), "scout")
    chosen = outline_of(JambaConfig(**sizes, num_experts=4, attn_layer_period=2, attn_layer_offset=1), "jamba")
    for outline, every in ((whole, True), (chosen, False)):
        mixed = [block for block, _ in outline.runs if block.experts]
        assert mixed
        assert {(block.per_token, block.all_rows) for block in mixed} == {(2, every)}


def test_mixtures_in_blocks_of_8_bits_overlap_by_the_recipes_of_today() -> None:
    """NVIDIA-NeMo/Megatron-Bridge pull 5720: Qwen3-30B-A3B on 8 GB300 takes 5.85 s in MXFP8, 8.3 s in 26.04."""

    def expert(name: str, precision: str, by: str = "megatron-bridge") -> float:
        g = one(batch=64, data=8, expert=8, micro=8)
        return float(seconds(MIXED, g, Setting(device(name), framework(by), precision)).expert[0])  # type: ignore[arg-type]

    assert expert("gb300", "fp8") < 0.2 * expert("gb300", "bf16")
    assert expert("b200", "fp4") < 0.2 * expert("b200", "bf16")
    assert expert("h100", "fp8") == expert("h100", "bf16"), "which scales whole tensors"
    assert expert("gb300", "fp8", "megatron-core") == expert("gb300", "bf16", "megatron-core"), "unless it is asked to"


def test_norms_of_single_operators_move_float32() -> None:
    eager = framework("transformers")
    fused = replace(eager, fused_streams=True, kernels="fused")
    left = seconds(SMALL, one(), Setting(device("a100"), eager)).streams[0]
    assert left > 2 * seconds(SMALL, one(), Setting(device("a100"), fused)).streams[0]


def test_casts_that_norms_and_activations_write_themselves_cost_nothing() -> None:
    own = framework("megatron-core")
    apart = replace(own, keeps_low_inputs=False)

    def casts(by: Framework) -> float:
        of = [float(seconds(SMALL, one(), Setting(device("h100"), by, kind)).streams[0]) for kind in ("fp8", "bf16")]
        return of[0] - of[1]

    assert 0.4 * casts(apart) < casts(own) < 0.8 * casts(apart)
    assert casts(framework("torchtitan")) == pytest.approx(
        2 * casts(replace(framework("torchtitan"), cast_bytes=4.0)), rel=0.05
    )


def test_parts_that_are_broadcast_one_by_one_take_longer_the_more_ranks_have_them() -> None:
    """InternEvo's own table (7B, 2,048 tokens, doc of its training performance): ZeRO-1 within 8 devices takes 4.0 s on
    8 and 4.5 s on 1,024; over all of them 4.0 and 7.2 s."""
    own = framework("internevo")
    setting = Setting(device("a100"), own, "bf16", 8)

    def took(by: Setting, ranks: int, shard: int) -> float:
        g = grid(batch=8 * ranks, sequence=2048, data=ranks, zero=1, shard=shard, micro=2)
        return float(seconds(SEVEN, g, by).step[0])

    gathered = replace(setting, framework=replace(own, broadcasts=0, overlap_gather=0.8))
    assert took(setting, 8, 8) < 1.05 * took(gathered, 8, 8)
    for ranks in (256, 1024):
        assert took(setting, ranks, ranks) > took(setting, ranks, 8)
    assert 1.2 < took(setting, 1024, 1024) / took(setting, 1024, 8) < 1.8
    assert took(gathered, 1024, 1024) < took(gathered, 1024, 8), "which is what was said"


def test_steps_of_tiny_models_are_the_hosts() -> None:
    """Megatron-LM's functional tests on H100: layers a thousand wide, whose kernels take no time to speak of."""
    found: dict[bool, list[float]] = {False: [], True: []}
    golden = [case for case in cases(read(threads.THREADS.with_name("runs.csv"))) if case.source == "mcore_golden"]
    tiny = [case for case in golden if case.gpu == "H100"]
    for case, run in zip(tiny, runs(tiny), strict=True):
        found[case.kind == "moe"].append(run.predicted / case.step)
    assert {mixed: len(ratios) > 20 for mixed, ratios in found.items()} == {False: True, True: True}
    assert all(0.6 < np.median(ratios) < 1.6 for ratios in found.values()), found


def test_hosts_of_megatron_take_longer_for_mixtures_and_nothing_in_captured_graphs() -> None:
    """NVIDIA-NeMo/Megatron-Bridge's verification cards: 12 to 18 ms a layer and micro-batch of mixtures on H100."""

    def took(name: str, precision: str, by: Framework, *, graphs: bool = False, micro: int = 1) -> float:
        g = one(micro=micro, batch=8, sequence=256, data=1)
        setting = Setting(device(name), by, precision, graphs=graphs)  # type: ignore[arg-type]
        return float(seconds(MIXED, g, setting).step[0])

    own = framework("megatron-core")
    assert 8e-3 < (took("h100", "bf16", own) - own.step_seconds) / 8 / 8 < 18e-3
    assert took("h100", "bf16", own, graphs=True) < 0.3 * took("h100", "bf16", own)
    without = replace(own, step_seconds=0.0)
    for micro in (1, 4):
        once = took("h100", "bf16", own, micro=micro) - took("h100", "bf16", without, micro=micro)
        assert once == pytest.approx(0.05), "of a step, however many micro-batches it has"
    bridge = framework("megatron-bridge")
    plain = replace(bridge, captures_blocks=False)
    assert took("gb300", "fp8", bridge) < 0.3 * took("gb300", "fp8", plain), "whose recipes are captured"
    for name, precision in (("gb300", "bf16"), ("h100", "fp8")):
        assert took(name, precision, bridge) == took(name, precision, plain)


def _rotated(flow: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """In single kernels, by angles in float32; what is beyond them stays."""
    cos, sin = ((way(angles) * 1.0).to(flow.dtype) for way in (torch.cos, torch.sin))
    turned, rest = flow[..., : angles.shape[-1]], flow[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def _started_for(documents: int) -> tuple[int, int]:
    """Kernels of queries and keys that are rotated document by document, forward and backward."""
    flow = torch.randn(64, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    angles, found, at = torch.randn(64, 1, 8), torch.empty(64, 2, 8, dtype=torch.bfloat16), 0
    with _Started() as ahead:
        for part in (flow * 1).chunk(documents):
            found.narrow(0, at, len(part)).copy_(_rotated(part, angles[: len(part)]))
            at += len(part)
    with _Started() as behind:
        found.backward(torch.randn_like(found))
    return 2 * ahead.count, 2 * behind.count


def test_each_document_of_a_packed_row_is_rotated_for_itself_where_one_kernel_does_not() -> None:
    """NVIDIA-NeMo/Megatron-Bridge, verification card of Qwen3-8B: rows of 2,048 tokens of Tulu 3, of which that of
    gpt-oss-20b says 83.3 documents to 32,768; as one document each it was 3.97 s."""
    by, of = framework("megatron-bridge"), one(batch=32, sequence=2048, tensor=4)
    few, many = _started_for(4), _started_for(8)
    each = [(more - less) / 4 for less, more in zip(few, many, strict=True)]
    assert by.document_kernels == pytest.approx(tuple(each), abs=2.5)  # one that allocates is among them
    rows, eight = Documents(390, 2048, 2048), outlined("Qwen/Qwen3-8B")

    def took(model: str, name: str = "megatron-bridge", **more: Any) -> float:
        documents = replace(rows, model=model, **more)
        return float(seconds(packed(eight, documents), of, Setting(device("h100"), framework(name),
                                                                   documents=documents)).step[0])  # fmt: skip

    assert took("qwen3-8b") == pytest.approx(7.42, rel=0.25)
    added = 32 * 36 * 2048 / rows.lengths.mean() * by.launch * sum(by.document_kernels)
    assert took("qwen3-8b") - took("llama-3.1-8b") == pytest.approx(added, rel=0.05)
    assert took("qwen3-8b", "megatron-core") == took("llama-3.1-8b", "megatron-core")


def test_runs_of_public_threads_are_mostly_right() -> None:
    told = [case for case in cases(read(threads.THREADS)) if known(case.gpu)]
    found = [threads.verdict(case, run, published()) for case, run in zip(told, runs(told), strict=True)]
    assert sum(said.inside and said.right for said in found) >= 34
    assert len(found) == 36
    assert sum(said.right for said in found) >= 35
