"""Which documents a sample of this model may hold: measured, not assumed.

Where attention stops is known to nobody but the model: transformers' newer classes find documents by position ids that
begin anew; others take no notice and would train on a context that is none, with a loss that looks well. So the model
is asked before training, by its gradients: what a document's logits owe to the tokens of the one before it must be
exactly zero. Logits alone would not tell: in bfloat16, with the small weights of a fresh model, they round a leak away.

A model that does not keep documents apart trains on windows of one document each. That needs no more than what every
training of the next token needs: that nothing reaches a token from its right. It is asked in the same way.

What a model is told of its tokens, and in which order it is given them.

    position ids    where rows hold several documents
    numbers         document and place of each token, where attention is by tokens (`models.capturing.attention`)

Then tokens need not lie in order. Of a causal sequence that ranks of a context axis cut into equal parts the last has
nearly all of the work: with `context.order = "balanced"` each has one piece from the front and one from the back, as
many pairs of query and key as any other. A loss is summed over tokens, so nothing else notices; logits that are to be
in order are put back (`in_order`).
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tangram.errors import UserError
from tangram.models.capturing.attention import mask_of, mode_of, numbers_of
from tangram.models.capturing.reasons import place_and_reason
from tangram.schema.job import Packing
from tangram.schema.plan import Plan
from tangram.training.data import Batch
from tangram.training.objective.step_guard import is_finite


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


PROBED = 8  # tokens of each of the two documents
_ROWS = 4 * PROBED - 1  # of both questions, for which a derived model then needs one program
SAME_SWAPPED = 8.0  # units in the last place of the largest logit; nothing but the order of sums may differ
SAME_ALONE = 0.1  # relative, of norms; a token that stands at another place differs by much more


@dataclass(frozen=True)
class SettledPacking:
    """How the text of a run is packed, and why, in words."""

    packing: Packing
    why: str


@dataclass(frozen=True)
class _Probed:
    module: nn.Module
    tokens: TokenOrder | None


def settle(
    model: nn.Module,
    requested: Literal[Packing, "auto"],
    before: Packing | None,
    on_all: Callable[[bool], bool],
    *,
    device: torch.device | None = None,
    tokens: TokenOrder | None = None,
) -> SettledPacking:
    """What `data.packing` comes to for this model, which is asked; `before`: what the run had that is resumed.

    `on_all` makes one answer of those of all ranks, which call this together. Raises UserError for a model that is not
    causal, and where documents are to share windows in a model that does not keep them apart.
    """
    name = _class_of(model)
    wanted = before or "auto" if requested == "auto" else requested
    apart = wanted != "single" and on_all(respects_documents(model, device=device, tokens=tokens))
    if wanted in ("packed", "best-fit") and not apart:
        raise UserError(
            f"{name} lets a document see the one that is packed before it: it takes no notice of position ids, so give "
            'each document windows of its own with data.packing = "single"'
        )
    fault = why_not_causal(model, positions=apart, device=device, tokens=tokens)
    if not on_all(not fault):
        raise UserError(f"{name} cannot be trained on the next token: {fault or 'another rank finds it not causal'}")
    if requested != "auto":
        why = "as the plan says"
    elif before is not None:
        why = "as in the run that goes on"
    elif apart:
        why = f"{name} keeps them apart"
    else:
        why = f"{name} would let a document see the one that is packed before it"
    if not apart:
        return SettledPacking("single", why)
    return SettledPacking("best-fit" if wanted == "best-fit" else "packed", why)


def why_not_causal(
    model: nn.Module,
    *,
    positions: bool = False,
    device: torch.device | None = None,
    tokens: TokenOrder | None = None,
) -> str:
    """Why a model is not one in which nothing reaches a token from its right, or cannot be shown to be; "" if it is.

    Every place of a row is asked at once: row r of a batch counts the logits up to place r only, and what they owe to
    the embeddings of the tokens after it must be exactly zero. `positions`: whether training gives position ids. All
    ranks that share its parameters call this together; gradients are None afterwards. Costs one pass, forward and
    backward, of (4 * `PROBED` - 1) * 2 * `PROBED` tokens: a derived model has a program for each size.
    """
    device = device or next(model.parameters()).device
    length = 2 * PROBED
    vocabulary = _vocabulary(model)
    rows = length - 1
    ids_BS = (torch.arange(3, 3 + length, device=device) % vocabulary).repeat(rows, 1)
    right_BS = torch.ones_like(ids_BS, dtype=torch.bool).triu(1)  # of row r: what stands to the right of place r
    changed_BS = (ids_BS + length) % vocabulary
    behind_S = torch.cat([changed_BS[0, :1], ids_BS[0, 1:]])
    inputs_BS = torch.cat([ids_BS, torch.where(right_BS, changed_BS, ids_BS), behind_S[None]])
    counted_BS = torch.cat([~right_BS, torch.zeros_like(inputs_BS[rows:], dtype=torch.bool)])
    probed, was_training = _Probed(model, tokens), model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            logits_BSV, owed_BS = _owed(probed, inputs_BS, positions, counted_BS)
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    given_BSV, other_BSV, behind_BSV = logits_BSV[:rows], logits_BSV[rows:-1], logits_BSV[-1:]
    owed_BS = None if owed_BS is None else owed_BS[:rows]
    if not (is_finite(given_BSV) and (owed_BS is None or is_finite(owed_BS))):
        return _not_finite(model)
    unit = torch.finfo(given_BSV.dtype).eps * float(given_BSV.abs().max())
    apart_BS = (given_BSV - other_BSV).abs().amax(-1)
    if bool((apart_BS[~right_BS] > SAME_SWAPPED * unit).any()) or (
        owed_BS is not None and bool((owed_BS[right_BS] != 0).any())
    ):
        return (
            "what stands to the right of a token reaches it, so it sees what it has to predict; take a causal model (a "
            "BERT-like one becomes one with model.change.is_decoder = true)"
        )
    if not bool((given_BSV[:, 1:] != behind_BSV[:, 1:]).any()):
        return "no token sees the one before it, so whether it is causal cannot be told; give it weights other than 0"
    return ""


def _not_finite(model: nn.Module) -> str:
    """What is the matter with a model whose logits are not finite: the first parameter that is not, counted here."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not is_finite(local):
            count = int((~local.detach().isfinite()).sum())
            return f"{name} has {count:,} of {local.numel():,} values here that are not finite (NaN or infinity)"
    return (
        "its logits or gradients are not finite, though its parameters here are: its type of numbers may be too small"
    )


def respects_documents(
    model: nn.Module, *, device: torch.device | None = None, tokens: TokenOrder | None = None
) -> bool:
    """Whether a document's logits are the same behind one document, behind another, and alone.

    The model is called as in training: position ids that begin anew, no attention mask. Alone is what stands first in
    its row, of a model that is causal, which `why_not_causal` asks. All ranks that share its parameters call this
    together and get the same answer; gradients are None afterwards. Costs one pass of as many tokens as
    `why_not_causal` asks about, of which a derived model so has the program already. A model in which no token sees an
    earlier one (weights that are zero) cannot be judged: False.
    """
    if not _takes_positions(model):
        return False
    device = device or next(model.parameters()).device
    ids_S = torch.arange(3, 3 + 3 * PROBED, device=device) % _vocabulary(model)
    one_S, other_S, document_S = ids_S[:PROBED], ids_S[PROBED:-PROBED], ids_S[-PROBED:]
    changed_S = torch.cat([other_S[:1], document_S[1:]])
    pairs = ((one_S, document_S), (other_S, document_S), (document_S, other_S), (changed_S, other_S))
    inputs_BS = torch.stack([torch.cat(pair) for pair in pairs])[torch.arange(_ROWS) % len(pairs)]
    positions_BS = torch.arange(PROBED, device=device).repeat(2).expand_as(inputs_BS)
    counted_BS = torch.zeros_like(inputs_BS, dtype=torch.bool)
    counted_BS[0, PROBED:] = True
    probed, was_training = _Probed(model, tokens), model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # what is compiled for 16 tokens serves nobody
            logits_BSV, owed_BS = _owed(probed, inputs_BS, positions_BS, counted_BS)
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    owed_S = None if owed_BS is None else owed_BS[0]
    (behind_one_SV, behind_other_SV), (alone_SV, changed_SV) = logits_BSV[:2, PROBED:], logits_BSV[2:4, :PROBED]
    if owed_S is not None and bool((owed_S[:PROBED] != 0).any()):
        return False
    if not bool((alone_SV[1:] != changed_SV[1:]).any()):
        return False
    unit = torch.finfo(alone_SV.dtype).eps * float(alone_SV.abs().max())
    if float((behind_one_SV - behind_other_SV).abs().max()) > SAME_SWAPPED * unit:
        return False
    apart = float((behind_one_SV - alone_SV).double().square().sum())
    return apart <= SAME_ALONE**2 * float(alone_SV.double().square().sum())


def _owed(
    probed: _Probed, inputs_BS: Tensor, positions: Tensor | bool, counted_BS: Tensor
) -> tuple[Tensor, Tensor | None]:
    """All logits, and how much the counted ones owe to the embedding of each token.

    None where embeddings are not to be had whole: there is no such module, or it hands on a part of the sequence.
    """
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a frozen embedding
        output.retain_grad()
        kept.append(output)

    embeddings = _embeddings(probed.module)
    handle = embeddings.register_forward_hook(keep) if embeddings is not None else None
    try:
        with torch.enable_grad():
            logits_BSV = _run(probed, inputs_BS, positions)
            weights_M = torch.cos(torch.arange(logits_BSV.numel(), device=logits_BSV.device))  # which cancel nowhere
            weighted_BSV = logits_BSV.float() * weights_M.view_as(logits_BSV)
            weighted_BSV.masked_fill(~counted_BS[..., None], 0).sum().backward()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or dist.is_initialized():  # perhaps of another rank
            raise
        rows, length = inputs_BS.shape
        raise UserError(
            f"{_class_of(probed.module)} cannot compute {rows} rows of {length} tokens: {place_and_reason(error)}"
        ) from error
    finally:
        if handle is not None:
            handle.remove()
    if len(kept) != 1 or kept[0].grad is None or kept[0].shape[:2] != inputs_BS.shape:
        return logits_BSV.detach(), None
    return logits_BSV.detach(), kept[0].grad.float().abs().amax(-1)


def _run(probed: _Probed, inputs_BS: Tensor, positions: Tensor | bool) -> Tensor:
    """The logits, as in training: with position ids (True: from 0 on), or (False) without any."""
    whole_BS = torch.arange(inputs_BS.shape[1], device=inputs_BS.device).expand_as(inputs_BS)
    positions_BS = None if positions is False else whole_BS if positions is True else positions
    return logits_in_order(probed.module, probed.tokens, Batch(inputs_BS, inputs_BS, positions_BS))


def _embeddings(model: nn.Module) -> nn.Module | None:
    get: Any = getattr(model, "get_input_embeddings", None)
    try:
        return cast("nn.Module | None", get()) if callable(get) else None
    except (NotImplementedError, AttributeError):  # some classes name none
        return None


def _class_of(model: nn.Module) -> str:
    """As transformers names it; FSDP makes a class of its own of it."""
    return next(kind.__name__ for kind in inspect.getmro(type(model)) if not issubclass(kind, FSDPModule))


def _takes_positions(model: nn.Module) -> bool:
    taken = inspect.signature(model.forward).parameters
    return "position_ids" in taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())


def _vocabulary(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 4 * PROBED))
