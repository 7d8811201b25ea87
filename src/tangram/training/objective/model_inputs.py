"""What a model is told of its tokens, and in which order it is given them.

    position ids    where rows hold several documents
    numbers         document and place of each token, where attention is by tokens (`models.capturing.attention`)

Then tokens need not lie in order. Of a causal sequence that ranks of a context axis cut into equal parts the last has
nearly all of the work: with `context.order = "balanced"` each has one piece from the front and one from the back, as
many pairs of query and key as any other. A loss is summed over tokens, so nothing else notices; logits that are to be
in order are put back (`in_order`).
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.models.capturing.attention import mask_of, mode_of, numbers_of
from tangram.schema.plan import Plan
from tangram.training.data import Batch


@dataclass(frozen=True)
class TokenOrder:
    """Of a model that attends by tokens: into how many balanced `parts` the sequence is ordered; 1: as it is."""

    parts: int = 1


class ModelInputs(NamedTuple):
    """What a model is given of a batch."""

    batch: Batch
    keywords: dict[str, Tensor]
    """Keyword arguments beside the tokens."""
    order: Tensor | None
    """Which token of the batch stands where; None: as they are."""

    def input_order_of(self, x_BS: Tensor) -> Tensor:
        """What the batch has for each token (B, S), in the order in which the model is given them."""
        return x_BS if self.order is None else x_BS[:, self.order]

    def in_order(self, x_BS: Tensor) -> Tensor:
        """What a model gives for each token (B, S, ...), in the order of the batch."""
        return x_BS if self.order is None else x_BS[:, self.order.argsort()]


def token_order(model: nn.Module, plan: Plan) -> TokenOrder | None:
    """How tokens are ordered for a model; None for one that does not attend by tokens.

    Raises UserError where it does not attend as the plan says.
    """
    config = getattr(model, "config", None)
    mode = None if config is None else mode_of(config)
    if mode != (plan.run.attention if plan.run.by_tokens else None):
        how = "does not attend by tokens" if mode is None else f'attends by tokens ("{mode}")'
        raise UserError(
            f'run.attention is "{plan.run.attention}", but the model {how}: make it of the configuration that '
            "tangram.models.capturing.attention.by_tokens gives"
            + (", or set run.attention" if mode is None else " only where the plan says so")
        )
    return None if mode is None else TokenOrder(plan.context_ranks if plan.context.order == "balanced" else 1)


def model_inputs(tokens: TokenOrder | None, batch: Batch) -> ModelInputs:
    keywords = {} if batch.positions_BS is None else {"position_ids": batch.positions_BS}
    if tokens is None:
        return ModelInputs(batch, keywords, None)
    positions_BS, length = batch.positions_BS, batch.inputs_BS.shape[1]
    if positions_BS is None:
        positions_BS = torch.arange(length, device=batch.inputs_BS.device).expand_as(batch.inputs_BS)
    numbers_BSN = numbers_of(positions_BS)
    if tokens.parts == 1 or length % (2 * tokens.parts):  # a probe is short
        return ModelInputs(batch, {**keywords, "attention_mask": mask_of(numbers_BSN)}, None)
    order = balanced(length, tokens.parts).to(positions_BS.device)
    inputs_BS, labels_BS, positions_BS = (x[:, order] for x in (batch.inputs_BS, batch.labels_BS, positions_BS))
    moved = replace(batch, inputs_BS=inputs_BS, labels_BS=labels_BS, positions_BS=positions_BS)
    return ModelInputs(moved, {"position_ids": positions_BS, "attention_mask": mask_of(numbers_BSN[:, order])}, order)


def logits_in_order(module: nn.Module, tokens: TokenOrder | None, batch: Batch) -> Tensor:
    """A Hugging Face model's logits (B, S, V), in the order of the batch."""
    inputs = model_inputs(tokens, batch)
    logits_BSV: Tensor = module(input_ids=inputs.batch.inputs_BS, use_cache=False, **inputs.keywords).logits
    return inputs.in_order(logits_BSV)


@cache
def balanced(length: int, parts: int) -> Tensor:
    """Tokens in such an order that equal parts of it have as much of a causal sequence to attend to.

    Of 2 * `parts` pieces a part has the first and the last that are left (Llama 3's context parallelism does so;
    Meta, 2024, section 3.3.2).
    """
    pieces = torch.arange(length).view(2 * parts, -1)
    return torch.stack([pieces[:parts], pieces[parts:].flip(0)], 1).flatten()
