"""Public reports about sharded models, rebuilt small: values and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from transformers import AutoConfig

from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Cut
from tangram.planner.legality.check_plan import refused_heads
from tangram.sharding.derive.layouts import local_shape, used
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import builtin
from tangram.sharding.proof.derived import check as proved
from tangram.sharding.proof.execute import check, run_reference
from tangram.sharding.propagation.propagate import propagate
from tangram.training.run.launch import run_ranks
from tests.training.code_models import PUBLIC, Off, Small, model_of, run_all
from tests.training.oracle.warm import once as run_once

BOUND = 1e-5
Ran = Callable[[str], list[Off]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What two ranks made of the model of a report."""

    def run() -> Mapping[str, list[Off]]:
        ranks = run_ranks(run_all, "public", world=2, on_event=lambda _: None, device="cpu")
        return {name: [own[name] for own in ranks] for name in PUBLIC}

    return lambda name: run_once(tmp_path_factory, "public-derive", lambda _: run())[name]


def _is_right(found: list[Off]) -> None:
    assert [off for off in found if off.refused or max(off.values, off.gradients) > BOUND] == []


def test_a_scan_over_the_cut_dim(ran: Ran) -> None:
    """jax-ml/jax#21403: cumsum over a dim that is cut began anew on every device."""
    _is_right(ran("jax#21403"))


def test_a_roll_with_one_element_a_rank(ran: Ran) -> None:
    """jax-ml/jax#39301: the backward of a roll over a dim of which each device has one element."""
    _is_right(ran("jax#39301"))


def test_a_concatenation_of_parts(ran: Ran) -> None:
    """jax-ml/jax#24576: concatenated parts were summed over an axis that had copies of them."""
    _is_right(ran("jax#24576"))


def test_the_backward_of_a_scatter_add(ran: Ran) -> None:
    """openxla/xla#42481: the sum of a scatter-add's gradients was taken in the wrong place."""
    _is_right(ran("xla#42481"))


def test_a_log_softmax_over_a_cut_vocabulary_that_no_cross_entropy_takes(ran: Ran) -> None:
    """pytorch/pytorch#190746: its gradient was that of the loss which it was taken to be a part of."""
    _is_right(ran("pytorch#190746"))


@pytest.mark.parametrize("over", ["heads", "samples"])
def test_a_frozen_layer_below_one_that_is_trained(ran: Ran, over: str) -> None:
    """pytorch/pytorch#134050: how the first attention is cut, which is frozen, was kept for the next, which is not."""
    _is_right(ran(f"pytorch#134050, {over}"))


@pytest.mark.parametrize("sizes", ["", ", all sizes"])
def test_a_product_with_what_all_ranks_have(ran: Ran, sizes: str) -> None:
    """NVIDIA/physicsnemo#1944: the gradient of a replicated operand of `cross` was that of one rank's part."""
    _is_right(ran(f"physicsnemo#1944{sizes}"))


def test_a_tied_vocabulary_that_ranks_do_not_divide(ran: Ran) -> None:
    """NVIDIA/Megatron-LM#1754: the loss of a vocabulary of an odd size went another way over two ranks."""
    _is_right(ran("Megatron-LM#1754"))


def test_a_gradient_within_a_forward(ran: Ran) -> None:
    """pytorch/pytorch#159959: a penalty on gradients through a convolution ended within DTensor."""
    (refused,) = {off.refused for off in ran("pytorch#159959")}
    assert "torch.autograd.grad goes back through layers that lie in parts" in refused


@pytest.mark.parametrize("what", ["smoothed labels", "one norm of all heads"])
def test_what_parallel_parts_share(ran: Ran, what: str) -> None:
    """NVIDIA/Megatron-LM#7452: labels smoothed over a part of the vocabulary; a shared norm without all heads' sum."""
    _is_right(ran(f"Megatron-LM#7452, {what}"))


@pytest.mark.parametrize("report", ["pytorch#160285", "torchtitan#1805"])
def test_experts_by_expert_and_in_their_hidden_dim(ran: Ran, report: str) -> None:
    """pytorch/pytorch#160285, pytorch/torchtitan#1805: gradients were twice what they are, or a part of it."""
    _is_right(ran(report))


def test_the_largest_of_a_cut_dim(ran: Ran) -> None:
    """tenstorrent/tt-mlir#8623: argmax over a cut dim gave the sum of each part's place."""
    _is_right(ran("tt-mlir#8623"))


def test_a_convolution_cut_over_its_width(ran: Ran) -> None:
    """pytorch/pytorch#191926: the gradient of an image that is cut over its width was said to be cut over samples."""
    _is_right(ran("pytorch#191926"))


def test_the_bias_of_a_row_cut_product(ran: Ran) -> None:
    """pytorch/torchtitan#4332: a bias divided by the ranks before a sum had a gradient divided by them, too."""
    _is_right(ran("torchtitan#4332"))


def test_a_column_cut_layer_before_a_row_cut_one(ran: Ran) -> None:
    """pytorch/pytorch#144359: two layers with biases, cut over columns and then rows, gave other outputs."""
    _is_right(ran("pytorch#144359"))


def test_a_view_that_takes_elements_of_a_cut_dim_apart(ran: Ran) -> None:
    """pytorch/pytorch#179502: a view of what is cut over columns was taken of each part by itself."""
    _is_right(ran("pytorch#179502"))


def test_numbers_of_places_in_a_cut_dim(ran: Ran) -> None:
    """pytorch/pytorch#170934: index_put wrote at places of the whole tensor into one rank's part."""
    _is_right(ran("pytorch#170934"))


def test_a_norm_of_a_sum_that_is_pending(ran: Ran) -> None:
    """pytorch/pytorch#159856: the norms of partial sums were added up instead of the norm of the sum."""
    _is_right(ran("pytorch#159856"))


def test_a_layer_norm_without_a_bias(ran: Ran) -> None:
    """pytorch/pytorch#133499: the backward of a layer norm expected gradients of all of its arguments."""
    _is_right(ran("pytorch#133499"))


@pytest.mark.parametrize("padded", ["torchtitan#4637", "torchtitan#4637, the other rank"])
def test_a_padding_row_of_embeddings_that_are_cut_over_the_vocabulary(ran: Ran, padded: str) -> None:
    """pytorch/torchtitan#4637: the number of the padding row in the whole table was used in a rank's part of it."""
    _is_right(ran(padded))


def test_a_bias_after_a_sum_over_ranks(ran: Ran) -> None:
    """GeeeekExplorer/nano-vllm#99: (and text-generation-inference#1036) a bias is added once for every rank."""
    _is_right(ran("nano-vllm#99"))


@pytest.mark.parametrize("report", ["pytorch#141335", "pytorch#143372"])
def test_parts_that_are_not_even(ran: Ran, report: str) -> None:
    """pytorch/pytorch#141335, #143372: of uneven parts a product and a view took all parts for as long as the first.

    Right, or refused in a sentence before anything is computed, on every rank.
    """
    found = ran(report)
    if any(off.refused for off in found):
        assert all("not even" in off.refused for off in found)
    else:
        _is_right(found)


@pytest.mark.parametrize(("kv", "ranks"), [(4, 8), (2, 4)])
def test_fewer_heads_of_keys_than_ranks(kv: int, ranks: int) -> None:
    """huggingface/transformers#48307, pytorch/torchtitan#2574, Automodel#799: it failed in the middle of a forward."""
    config = AutoConfig.for_model("qwen3", num_attention_heads=40, num_key_value_heads=kv, hidden_size=40, head_dim=8)
    found = refused_heads(config, tensor=[("tp", ranks)])
    assert found
    assert "heads" in found[0].reason
    assert not refused_heads(config, tensor=[("tp", 2)])


def test_heads_of_keys_that_ranks_do_not_divide() -> None:
    """Of the same reports: 10 over 4 ranks are 3, 3, 2 and 2, with their queries."""
    config = AutoConfig.for_model("qwen3", num_attention_heads=40, num_key_value_heads=10, hidden_size=40, head_dim=8)
    assert not refused_heads(config, tensor=[("tp", 4)])


def test_a_mean_of_uneven_parts() -> None:
    """pytorch/pytorch#162692: the mean of 3 rows cut over 2 ranks counted both parts alike; of 1 row it was NaN."""
    for rows in (3, 1):
        call = OpCall.of(torch.ops.aten.mean.dim, (torch.arange(4.0 * rows).view(rows, 4).requires_grad_(), [0]), {})
        bound = rule_table.bound(builtin(), call)
        dims = bound.inputs[0]
        assert dims is not None
        factor = dims[0][0]
        assert check(call, bound, {factor: (Cut("x"),)}, Mesh.parse("x=2"), run_reference(call)) is None


def test_a_product_of_what_is_cut_in_another_order() -> None:
    """pytorch/pytorch#166598: a contracted dim cut by x then y met one that is cut by y then x, and nothing moved."""
    x = torch.empty(4, 4, device="meta")
    call = OpCall.of(torch.ops.aten.mm.default, (x, x), {})
    mesh = Mesh.parse("x=2 y=2")
    alike = propagate(builtin(), call, [Layout.parse("m k/x/y"), Layout.parse("k/x/y n")], mesh)
    other = propagate(builtin(), call, [Layout.parse("m k/x/y"), Layout.parse("k/y/x n")], mesh)
    assert not alike.moved
    assert other.moved


def test_an_uneven_cut_is_that_of_one_process() -> None:
    """pytorch/pytorch#150336: of a width of 5 over 2 ranks the next product was given 6 or 4, by rank."""
    work = Small(lambda m, x: torch.tanh(x @ m.w.T) @ m.v.T, (), {"w": (5, 8), "v": (8, 5)})
    model, x = model_of(work)
    graph = graph_of(model, {"x": x}, torch.float32)
    found = derive_model(graph, [Mark.parse("w: o/tp i")], Mesh.parse("tp=2"))
    w = next(v for v, value in graph.of_kind("parameter") if value.name == "w")
    assert [local_shape(found, (5, 8), used(found, found.folded.classes[w]), rank) for rank in (0, 1)] == [
        (3, 8),
        (2, 8),
    ]
    given = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    assert proved(found, given).wrong == ""
