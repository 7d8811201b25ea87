"""Public reports about models made parallel by other libraries, rebuilt small and made parallel by this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tangram
from tangram.errors import UserError
from tangram.training.mesh.world import World
from tangram.training.parallel.fsdp import shard
from tangram.training.run.launch import run_ranks
from tests.public.parallelize_tasks import Ran, Residual, images, run_all, sees_images
from tests.training.oracle.warm import once
from tests.training.small import small_plan

BOUND = 1e-5
Ranks = list[dict[str, Ran]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    def run(_: Path) -> Ranks:
        return [*run_ranks(run_all, None, world=2, on_event=lambda _: None, device="cpu")]

    return once(tmp_path_factory, "public-parallelize", run)


def _right(ranks: Ranks, name: str, *, stepped: float = BOUND) -> list[Ran]:
    """What the ranks found of a model, which is that of one process, also after a step."""
    found = [own[name] for own in ranks]
    assert [one for one in found if one.refused or max(one.value, one.gradient) > BOUND or one.stepped > stepped] == []
    return found


def test_sequences_that_ranks_do_not_divide(ranks: Ranks) -> None:
    """pytorch/torchtitan#1306: of a sequence of odd length ranks made sizes that no rank has, and nothing said so."""
    _right(ranks, "odd")


def test_layers_that_share_an_activation_and_make_constants(ranks: Ranks) -> None:
    """huggingface/transformers shares activations so (openai-gpt): equal layers are folded, and each is run."""
    assert {one.parts["1.2.up.weight"] for one in _right(ranks, "alike") if one.parts} == {(8, 8)}


def test_results_in_an_object_are_seen_or_refused(ranks: Ranks) -> None:
    """pytorch/pytorch#124666: DDP did not see what a dataclass has; here each rank had its part."""
    for own in ranks:
        assert own["hidden"].refused.startswith("the model gives a Hidden, whose tensors are not seen")
        assert own["hidden in a dict"].refused.startswith("the model gives a Hidden, whose tensors are not seen")
    _right(ranks, "seen")


@pytest.mark.parametrize("name", ["reentrant", "reentrant of transformers"])
def test_layers_that_run_without_gradients_at_first(ranks: Ranks, name: str) -> None:
    """huggingface/transformers#34928 is got round by use_reentrant=True: gradients over ranks were not summed."""
    _right(ranks, name, stepped=1e-4)  # of a gradient of nearly zero AdamW makes a step of full size


@pytest.mark.parametrize("name", ["hooked", "hooked, compiled"])
def test_hooks_that_change_what_modules_take_and_give(ranks: Ranks, name: str) -> None:
    """pytorch/pytorch#160083: compiled, a hook before a layer in parts raised an error; here hooks behind one did."""
    _right(ranks, name)


def test_hooks_behind_backwards_of_layers(ranks: Ranks) -> None:
    """As facebookresearch/fairscale#1101's: torch makes views for them, which were taken for the model's own."""
    _right(ranks, "hooked behind")


def test_a_parameter_with_a_hook_is_refused(ranks: Ranks) -> None:
    """mindspore-ai/hyper-parallel#521: the parameter that took its place had none, and gradients were others."""
    for own in ranks:
        assert own["hook of a parameter"].refused.startswith("up.weight has a hook for its gradient")


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_parameter_with_a_hook_is_refused_by_fsdp_too(tmp_path: Path, accumulated: bool) -> None:
    """Before anything is sent, so one process sees it."""
    model, world = Residual(), cast(World, SimpleNamespace(data_size=2))
    hooked: Any = model.up.weight
    hooked.register_post_accumulate_grad_hook(print) if accumulated else hooked.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError, match=r"up\.weight has a hook for its gradient"):
        shard(model, [], small_plan(tmp_path), {}, world)


def test_what_all_heads_share_gets_the_gradients_of_all(ranks: Ranks) -> None:
    """pytorch/torchtitan#1373: a key that all heads share got the gradient of this rank's heads alone."""
    assert all(one.alike for one in _right(ranks, "shared"))


def test_convolutions_of_channels_and_norms_of_groups(ranks: Ranks) -> None:
    """pytorch/pytorch#133221: both are apart for each head, and neither could be cut."""
    for one in _right(ranks, "recurrent"):
        assert one.parts is not None
        assert one.parts["mix.weight"] == (8, 1, 4)
        assert one.parts["norm.weight"] == (8,)


def test_a_norm_that_all_heads_share_gets_the_gradients_of_all(ranks: Ranks) -> None:
    """NVIDIA/Megatron-LM#7452: without sequence parallelism each rank had the gradient of its own heads alone."""
    for one in _right(ranks, "heads"):
        assert one.alike
        assert one.parts is not None
        assert one.parts["up.weight"] == (16, 8)


@pytest.mark.parametrize("name", ["words", "words, gathered"])
def test_log_probabilities_of_words_that_ranks_share(ranks: Ranks, name: str) -> None:
    """pytorch/pytorch#190746: of what no cross-entropy takes, the gradient was one of the identity; and
    NVIDIA/Megatron-LM#7452: of logits that were gathered before, the loss was off by the logarithm of the ranks."""
    _right(ranks, name)


def test_a_tied_weight_that_code_reads_outside_of_its_module(ranks: Ranks) -> None:
    """MobileBERT's head, which reads the embeddings by their second name: a DTensor was met beside plain tensors."""
    for one in _right(ranks, "outside"):
        assert one.parts is not None
        assert one.parts["words.weight"] == (12, 8)


def test_what_a_module_gives_back_is_not_cut_for_what_works_inside_of_it(ranks: Ranks) -> None:
    """FLAVA's hidden states: what its encoder took was cut at its border for its first layer, and collected so."""
    _right(ranks, "collected")


@pytest.mark.parametrize("name", ["bare", "states"])
def test_who_sets_no_marks_gets_results_whole(ranks: Ranks, name: str) -> None:
    """What a layer gives is cut by the marks of its type: as a result of the model it came in parts, half as long."""
    for one in _right(ranks, name, stepped=1e-3):
        assert one.parts is not None
        assert any(part[0] == 12 for part in one.parts.values()), "the words are cut"


def test_adapters_are_cut_clipped_stepped_and_saved_as_those_of_one_process(ranks: Ranks) -> None:
    """huggingface/peft#2394: beside adapters layers had other names than a plan of the model, which failed;
    pytorch/pytorch#171523: what was frozen was trained once it was cut; NVIDIA-NeMo/RL#3788: norms of gradients counted
    what each rank has in full once for each; NVIDIA-NeMo/Megatron-Bridge#2240: of adapters one rank's part was saved;
    huggingface/transformers#48792: adapters that came afterwards went apart from rank to rank, unsaid."""
    layer = "base_model.model.model.layers.1.self_attn"
    for one in (own["adapted"] for own in ranks):
        assert max(one.value, one.stepped) < BOUND
        assert one.parts is not None
        assert one.parts[f"{layer}.q_proj.base_layer.weight"] == (8, 16)
        assert one.parts[f"{layer}.q_proj.lora_B.default.weight"] == (8, 2)
        assert one.refused.startswith("base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.late is not")


def test_an_axis_of_one_rank(ranks: Ranks) -> None:
    """pytorch/pytorch#113761: a mesh whose tensor axis is one rank wide ended in an index out of range."""
    _right(ranks, "one way")


def test_results_that_nothing_uses(ranks: Ranks) -> None:
    """pytorch/pytorch#173123: compiled, the gradient of a result that nothing used had another type."""
    _right(ranks, "unused")


def test_compiled_once_it_is_parallel(ranks: Ranks) -> None:
    """pytorch/pytorch#108840: a compiled model had all of every weight on each rank."""
    for one in _right(ranks, "compiled"):
        assert one.parts is not None
        assert one.parts["up.weight"] == (8, 8)


def test_a_model_of_which_one_layer_is_cut_is_clipped_and_stepped(ranks: Ranks) -> None:
    """karpathy/build-nanogpt#17: clipping and fused AdamW failed on a mixture of plain and sharded parameters."""
    _right(ranks, "partly")


def test_code_that_asks_whether_there_is_anything_to_mask(ranks: Ranks) -> None:
    """MadryLab/trak#78: SDPA code of transformers asks the values of a mask whether it is needed."""
    for one in _right(ranks, "masked"):
        assert one.programs == 2, "of each answer one, whatever the mask"
        assert one.then < BOUND


def test_tokens_that_a_mask_picks(ranks: Ranks) -> None:
    """pytorch/torchtitan#3099: indexing by a mask, as of Qwen3-VL, was taken out of a model: none could be cut."""
    for one in _right(ranks, "picked"):
        assert one.programs == 3, "of each number of tokens one, wherever they stand"
        assert one.then < BOUND


def test_a_model_that_reads_how_large_its_images_are(ranks: Ranks) -> None:
    """huggingface/transformers#39399: the vision tower of Qwen2.5-VL failed inside of a convolution that was cut.

    Images of another size, as many patches as before, have a program of their own.
    """
    loose = 1e-3  # the gradient of a key's bias is nothing but rounding, which AdamW steps by as by any other
    for one in _right(ranks, "images", stepped=loose):
        assert one.parts is not None
        assert one.parts["model.language_model.layers.0.mlp.up_proj.weight"] == (24, 32)
    _right(ranks, "images of other sides", stepped=loose)


def test_sizes_of_images_without_values_are_refused_by_the_line() -> None:
    """The same, of inputs on meta, which say nothing of the patches."""
    inputs = {**images(), "image_grid_thw": torch.empty(2, 3, dtype=torch.long, device="meta")}
    with pytest.raises(UserError, match=r"transformers/vision_utils\.py:\d+: what runs depends on the values"):
        tangram.derive(sees_images(), "tp=2", inputs=inputs)
