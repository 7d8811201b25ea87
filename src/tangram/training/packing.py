"""Whether a model keeps packed documents apart: measured, not assumed.

Where attention stops is known to nobody but the model: transformers' newer classes find documents by position ids that
begin anew; others take no notice and would train on a context that is none, with a loss that looks well. So the model
is asked before training, by its gradients: what a document's logits owe to the tokens of the one before it must be
exactly zero. Logits alone would not tell: in bfloat16, with the small weights of a fresh model, they round a leak away.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from typing import Any, cast

import torch
from torch import Tensor, nn

PROBED = 8  # tokens of each of the two documents
SAME_SWAPPED = 8.0  # units in the last place of the largest logit; nothing but the order of sums may differ
SAME_ALONE = 0.1  # relative, of norms; a token that stands at another place differs by much more


def respects_documents(model: nn.Module, *, device: torch.device | None = None) -> bool:
    """Whether a document's logits are the same behind one document, behind another, and alone.

    The model is called as in training: position ids that begin anew, no attention mask. All ranks that share its
    parameters call this together and get the same answer; gradients are None afterwards. Costs four passes of at
    most 16 tokens. A model in which no token sees an earlier one (weights that are zero) cannot be judged: False.
    """
    device = device or next(model.parameters()).device
    ids_S = torch.arange(3, 3 + 3 * PROBED, device=device) % _vocabulary(model)
    one_S, other_S, document_S = ids_S[:PROBED], ids_S[PROBED:-PROBED], ids_S[-PROBED:]
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # what is compiled for 16 tokens serves nobody
            behind_one_SV, owed_S = _traced(model, one_S, document_S)
            with torch.no_grad():
                behind_other_SV = _logits(model, other_S, document_S)
                alone_SV = _logits(model, document_S)
                changed_SV = _logits(model, torch.cat([other_S[:1], document_S[1:]]))
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    if owed_S is not None and bool((owed_S[:PROBED] != 0).any()):
        return False
    if not bool((alone_SV[1:] != changed_SV[1:]).any()):
        return False
    unit = torch.finfo(alone_SV.dtype).eps * float(alone_SV.abs().max())
    if float((behind_one_SV - behind_other_SV).abs().max()) > SAME_SWAPPED * unit:
        return False
    apart = float((behind_one_SV - alone_SV).double().square().sum())
    return apart <= SAME_ALONE**2 * float(alone_SV.double().square().sum())


def _traced(model: nn.Module, before_S: Tensor, document_S: Tensor) -> tuple[Tensor, Tensor | None]:
    """The document's logits, and how much they owe to the embedding of each token of the row.

    None where embeddings are not to be had whole: there is no such module, or it hands on a part of the sequence.
    """
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a frozen embedding
        output.retain_grad()
        kept.append(output)

    embeddings = _embeddings(model)
    handle = embeddings.register_forward_hook(keep) if embeddings is not None else None
    try:
        with torch.enable_grad():
            logits_SV = _logits(model, before_S, document_S)
            weights_M = torch.cos(torch.arange(logits_SV.numel(), device=logits_SV.device))  # which cancel nowhere
            (logits_SV.float() * weights_M.view_as(logits_SV)).sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    whole = len(before_S) + len(document_S)
    if len(kept) != 1 or kept[0].grad is None or kept[0].shape[:2] != (1, whole):
        return logits_SV.detach(), None
    return logits_SV.detach(), kept[0].grad[0].float().abs().amax(-1)


def _logits(model: nn.Module, *documents: Tensor) -> Tensor:
    """The logits of the last of some documents that are packed into one row."""
    inputs_BS = torch.cat(documents)[None]
    positions_BS = torch.cat([torch.arange(len(ids_S), device=ids_S.device) for ids_S in documents])[None]
    logits_BSV: Tensor = model(input_ids=inputs_BS, position_ids=positions_BS, use_cache=False).logits
    return logits_BSV[0, -len(documents[-1]) :]


def _embeddings(model: nn.Module) -> nn.Module | None:
    get: Any = getattr(model, "get_input_embeddings", None)
    return cast("nn.Module | None", get()) if callable(get) else None


def _vocabulary(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 4 * PROBED))
