"""Mistakes that one could make in Tangram, planted one by one: each must turn the comparison with one process red.

A mistake is a context: within it Tangram's own functions are exchanged for wrong ones, or the setting of the run is
changed. Its docstring says what is wrong. Most show at the first step.
"""

# ruff: noqa: N803  a tensor carries its dims in its name

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from tangram.training.data import Batch, RankBatches
from tangram.training.parallel import fsdp
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.checkpointer import JobState
from tangram.training.step import loop, optimiser_step
from tangram.training.step.backward import BackwardSums
from tangram.training.step.objectives import LossSum
from tangram.training.step.optimiser_step import LocalGradient
from tests.training.oracle.cases import FEW
from tests.training.oracle.mistakes_of_axes import AXES_MISTAKES, not_summed
from tests.training.oracle.mistakes_of_draws import DRAWN_MISTAKES
from tests.training.oracle.mistakes_of_losses import CONTEXT_MISTAKES, LOSS_MISTAKES, VOCABULARY_MISTAKES
from tests.training.oracle.mistakes_of_shards import SHARDED_MISTAKES
from tests.training.oracle.mistakes_of_stages import STAGED_MISTAKES
from tests.training.oracle.planting import counted_in, other_batches, other_values, with_plan, without_labels
from tests.training.oracle.ranks import Mistake, Setting, swapped

Planted = Iterator[None]


# ------------------------------------------------------------ tensor parallelism


@contextlib.contextmanager
def norms_of_heads_not_summed(setting: Setting) -> Planted:
    """Each TP rank has the gradients of q_norm and k_norm of its own heads; nobody compares."""
    with not_summed("_norm."):
        yield


@contextlib.contextmanager
def norms_of_heads_not_summed_but_compared(setting: Setting) -> Planted:
    """The same; Tangram's own check of the first step is left in place."""
    compare = loop.refuse_unlike_gradients
    with not_summed("_norm."), swapped(loop, "refuse_unlike_gradients", compare):
        yield


@contextlib.contextmanager
def bias_added_by_every_rank(setting: Setting) -> Planted:
    """After the sum over ranks the bias of o_proj is there once for each of them."""
    ranks = setting.world.model_size

    def add(module: nn.Module, _: object, out_BSH: Tensor) -> Tensor:
        bias = cast(Tensor, module.bias)
        return out_BSH + (ranks - 1) * (bias.to_local() if isinstance(bias, DTensor) else bias)

    def build(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith("o_proj"):
                module.register_forward_hook(add)

    setting.built.append(build)
    yield


@contextlib.contextmanager
def heads_in_the_wrong_order(setting: Setting) -> Planted:
    """The heads of the queries are dealt out like cards: ranks get 0, 2 and 1, 3 instead of 0, 1 and 2, 3."""

    def deal(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, whole in tensors.items():
            if name.endswith("q_proj.weight"):
                whole.copy_(whole.unflatten(0, (4, -1))[[0, 2, 1, 3]].flatten(0, 1))
        return tensors

    with other_values(deal):
        yield


@contextlib.contextmanager
def kv_heads_of_the_wrong_queries(setting: Setting) -> Planted:
    """Each TP rank has the key and value heads of the other rank's queries."""

    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, whole in tensors.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                whole.copy_(whole.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
        return tensors

    with other_values(swap):
        yield


@contextlib.contextmanager
def tied_weights_untied(setting: Setting) -> Planted:
    """The head begins with the values of the embeddings, and goes its own way."""
    with_plan(setting, "model", change={**setting.plan.model.change, "tie_word_embeddings": False})

    def alike(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        return tensors

    with other_values(alike):
        yield


# ------------------------------------------------------------ the mean over the global batch


@contextlib.contextmanager
def mean_of_means(setting: Setting) -> Planted:
    """Each rank divides by its own tokens, and the ranks' means are averaged."""
    with other_batches(lambda batches, told: replace(batches, counted=counted_in(batches) * told["size"])):
        yield


@contextlib.contextmanager
def padding_counted(setting: Setting) -> Planted:
    """The loss is divided by all positions, those without a label too."""
    with other_batches(
        lambda batches, told: replace(batches, counted=told["data"].global_batch * told["data"].sequence)
    ):
        yield


@contextlib.contextmanager
def averaged_over_ranks(setting: Setting) -> Planted:
    """FSDP2's own scaling: the sum over ranks is divided by their number."""

    def build(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(setting.world.data_size))

    setting.built.append(build)
    yield


@contextlib.contextmanager
def one_block_averaged(setting: Setting) -> Planted:
    """The same for a single block, as when the scaling is set on the others only: most gradients stay right."""

    def build(model: nn.Module) -> None:
        block = next(module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
        block.set_gradient_divide_factor(float(setting.world.data_size))

    setting.built.append(build)
    yield


@contextlib.contextmanager
def copies_not_summed(setting: Setting) -> Planted:
    """HSDP sums gradients over the ranks that share the parameters, and not over the copies."""
    real = fsdp.fully_shard

    def one_copy(module: nn.Module, **told: Any) -> Any:
        return real(module, **{**told, "mesh": setting.world.devices["shard"]})

    with swapped(fsdp, "fully_shard", one_copy):
        yield


# ------------------------------------------------------------ batches


@contextlib.contextmanager
def last_micro_batch_lost(setting: Setting) -> Planted:
    """On the last rank accumulation stops one short."""

    def lose(batches: RankBatches, told: dict[str, Any]) -> RankBatches:
        if told["index"] != told["size"] - 1:
            return batches
        return replace(batches, micro=(*batches.micro[:-1], without_labels(batches.micro[-1], slice(None))))

    with other_batches(lose):
        yield


@contextlib.contextmanager
def micro_batches_overwritten(setting: Setting) -> Planted:
    """The gradient of a micro-batch takes the place of those before it."""
    real = loop.backward

    def each(model: ParallelModel, batches: RankBatches, loss_sum: LossSum | None, scale: float) -> BackwardSums:
        total = torch.zeros((), dtype=torch.float64)
        for batch, first in zip(batches.micro, batches.firsts, strict=True):
            model.module.zero_grad()
            total += real(model, replace(batches, micro=(batch,), firsts=(first,)), loss_sum, scale).loss
        return BackwardSums(total, torch.zeros(0, dtype=torch.float64))

    with swapped(loop, "backward", each):
        yield


@contextlib.contextmanager
def tail_dropped(setting: Setting) -> Planted:
    """Every rank takes as many rows as all can have; what is left of the batch is not trained on."""

    def drop(batches: RankBatches, told: dict[str, Any]) -> RankBatches:
        rows = told["data"].global_batch // told["size"]
        return replace(batches, micro=tuple(without_labels(batch, slice(rows, None)) for batch in batches.micro))

    with other_batches(drop):
        yield


@contextlib.contextmanager
def same_samples_on_every_rank(setting: Setting) -> Planted:
    """Every rank takes the first one's share."""
    real = loop.step_batches
    with swapped(loop, "step_batches", lambda *given, **told: real(*given, **{**told, "index": 0})):
        yield


@contextlib.contextmanager
def documents_see_each_other(setting: Setting) -> Planted:
    """Positions run on over the ends of documents, and so does attention."""

    def run_on(batches: RankBatches, told: dict[str, Any]) -> RankBatches:
        def one(batch: Batch) -> Batch:
            return replace(batch, positions_BS=torch.arange(batch.inputs_BS.shape[1]).expand_as(batch.inputs_BS))

        return replace(batches, micro=tuple(map(one, batches.micro)))

    with other_batches(run_on):
        yield


# ------------------------------------------------------------ the update


@contextlib.contextmanager
def stale_shard(setting: Setting) -> Planted:
    """One rank does not update its part of one weight."""
    old: list[Tensor] = []

    def part(model: nn.Module) -> Tensor:
        weight = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(weight, DTensor)
        return weight.to_local().detach()

    setting.built.append(lambda model: old.append(part(model).clone()))

    def put_back(model: nn.Module) -> None:
        part(model).copy_(old[0])

    if setting.world.index == 1:
        setting.stepped.append(put_back)
    yield


@contextlib.contextmanager
def not_cut_again_after_an_evaluation(setting: Setting) -> Planted:
    """An evaluation leaves parameters whole: the update changes the shards, the next forward takes what is whole."""
    models: list[nn.Module] = []
    real = loop.round_for

    def after_a_forward(optimiser: Optimizer, seed: int, first_row: int) -> None:
        with torch.no_grad():
            models[0](input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
        real(optimiser, seed, first_row)

    setting.built.append(models.append)
    with swapped(loop, "round_for", after_a_forward):
        yield


@contextlib.contextmanager
def norms_decay(setting: Setting) -> Planted:
    """Weight decay on every parameter."""
    real = optimiser_step.make_adamw

    def decaying(model: nn.Module, plan: Any, *more: Any) -> AdamW:
        made = real(model, plan, *more)
        for group in made.param_groups:
            group["weight_decay"] = plan.weight_decay
        return made

    with swapped(optimiser_step, "make_adamw", decaying):
        yield


@contextlib.contextmanager
def frozen_is_trained(setting: Setting) -> Planted:
    """Nothing is frozen."""
    with_plan(setting, "model", freeze=())
    yield


@contextlib.contextmanager
def clipped_by_the_local_norm(setting: Setting) -> Planted:
    """Each rank clips by the norm of what it holds."""

    def local(gradients: Sequence[LocalGradient], norm: float, limit: float, scale: float) -> None:
        own = float(torch.stack([one.part.double().square().sum() for one in gradients]).sum().sqrt())
        optimiser_step.clip(gradients, own, limit)

    with swapped(loop, "clip", local):
        yield


@contextlib.contextmanager
def computed_in_bfloat16(setting: Setting) -> Planted:
    """Lower precision than the plan says."""
    with_plan(setting, "precision", compute="bfloat16")
    yield


# ------------------------------------------------------------ going on


@contextlib.contextmanager
def learning_rate_late_by_one(setting: Setting) -> Planted:
    """After a resume the schedule is one step behind."""
    late: list[int] = []
    real = loop.lr_at
    setting.resumed.append(lambda state: late.append(1))
    with swapped(loop, "lr_at", lambda step, steps, plan: real(step - len(late), steps, plan)):
        yield


@contextlib.contextmanager
def samples_repeated(setting: Setting) -> Planted:
    """After a resume the text begins anew."""

    def again(state: JobState) -> None:
        state.progress = replace(state.progress, samples=0)

    setting.resumed.append(again)
    yield


@contextlib.contextmanager
def optimiser_states_lost(setting: Setting) -> Planted:
    """After a resume the optimiser begins anew."""

    def forget(state: JobState) -> None:
        assert state.optimiser is not None
        state.optimiser.state.clear()

    setting.resumed.append(forget)
    yield


_CASES: Mapping[str, tuple[Any, ...]] = {
    "tensor inside fsdp": (
        norms_of_heads_not_summed,
        heads_in_the_wrong_order,
        kv_heads_of_the_wrong_queries,
    ),
    "biases: tensor inside fsdp": (bias_added_by_every_rank,),
    "tied: tensor inside fsdp": (tied_weights_untied,),
    "fsdp": (
        mean_of_means,
        padding_counted,
        averaged_over_ranks,
        one_block_averaged,
        tail_dropped,
        same_samples_on_every_rank,
        documents_see_each_other,
        stale_shard,
        not_cut_again_after_an_evaluation,
        norms_decay,
        computed_in_bfloat16,
        *LOSS_MISTAKES,
    ),
    "hsdp": (copies_not_summed,),
    "one by one: fsdp": (last_micro_batch_lost, micro_batches_overwritten),
    **DRAWN_MISTAKES,
    "frozen: fsdp": (frozen_is_trained,),
    "clipped: hsdp": (clipped_by_the_local_norm,),
    "resumed: fsdp": (learning_rate_late_by_one, samples_repeated, optimiser_states_lost),
    **STAGED_MISTAKES,
    **SHARDED_MISTAKES,
    **AXES_MISTAKES,
    "gemma3: tied vocabulary inside fsdp": VOCABULARY_MISTAKES,
    "context and fsdp": (*AXES_MISTAKES["context and fsdp"], *CONTEXT_MISTAKES),
}
_RESUMED = ("resumed", "whole", "by default")
MISTAKES: Mapping[str, Mistake] = {
    plant.__name__.replace("_", " "): Mistake(case, plant, FEW if case.startswith(_RESUMED) else 1)
    for case, plants in _CASES.items()
    for plant in plants
}
COMPARED = Mistake("tensor inside fsdp", norms_of_heads_not_summed_but_compared)
