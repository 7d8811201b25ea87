"""For every strategy of the matrix a mistake that one could make in it, and a cell where it has to turn red."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

from bench._matrix.cells import Name
from bench._matrix.ranks import Plant
from tests.training.oracle.mistakes import (
    clipped_by_the_local_norm,
    copies_not_summed,
    kv_heads_of_the_wrong_queries,
    mean_of_means,
    one_block_averaged,
)
from tests.training.oracle.mistakes_of_axes import (
    experts_of_the_wrong_rank,
    keys_of_one_rank_only,
    keys_that_stay,
    labels_left_in_order,
    norms_not_summed_over_context,
    not_summed,
    positions_of_the_first_part,
    routers_not_summed_over_experts,
)
from tests.training.oracle.mistakes_of_stages import (
    labels_of_another_micro_batch,
    stages_of_a_rank_exchanged,
    weights_of_a_micro_batch_passed_over,
)
from tests.training.oracle.ranks import Setting

FAILS = "this rank was to fail"


@contextlib.contextmanager
def norms_of_heads_not_summed(setting: Setting) -> Iterator[None]:
    """Each TP rank has the gradient of its own heads of the weights that norm queries."""
    with not_summed("q_norm"):
        yield


@contextlib.contextmanager
def the_first_rank_fails(setting: Setting) -> Iterator[None]:
    """In its first forward, while others wait for what comes of it."""

    def fail(*given: object) -> None:
        raise RuntimeError(FAILS)

    def watch(model: nn.Module) -> None:
        for module in model.modules():
            module.register_forward_pre_hook(fail)

    if setting.world.index == 0:
        setting.built.append(watch)
    yield


_PLANTED: Mapping[Name, tuple[Plant, ...]] = {
    ("Llama", "dp=2"): (mean_of_means,),
    ("Qwen3", "fsdp=2"): (one_block_averaged, clipped_by_the_local_norm),
    ("Qwen3", "dp=2 fsdp=2"): (copies_not_summed,),
    ("Qwen3", "tp=2"): (kv_heads_of_the_wrong_queries, norms_of_heads_not_summed),
    ("Qwen3", "sp=2"): (norms_not_summed_over_context,),
    ("Qwen3", "cp=2"): (keys_of_one_rank_only,),
    ("Qwen3", "ring=2"): (keys_that_stay, labels_left_in_order),
    ("Qwen3", "heads=2"): (positions_of_the_first_part,),
    ("Qwen3-MoE", "ep=2"): (routers_not_summed_over_experts, experts_of_the_wrong_rank),
    ("Qwen3", "pp=2:1F1B"): (labels_of_another_micro_batch,),
    ("Qwen3", "pp=2:ZBVZeroBubble fsdp=2"): (weights_of_a_micro_batch_passed_over, stages_of_a_rank_exchanged),
}
MISTAKES: Mapping[str, tuple[Name, Plant]] = {
    f"{plant.__name__.replace('_', ' ')}": (name, plant) for name, plants in _PLANTED.items() for plant in plants
}
FAILURES: Mapping[str, tuple[Name, Plant]] = {
    "a stage": (("Qwen3", "pp=2:1F1B"), the_first_rank_fails),
    "a part of the parameters": (("Qwen3", "fsdp=2"), the_first_rank_fails),
}
"""Cells of which a rank fails, while another one waits for it."""
