"""Whether a model keeps packed documents apart: measured, not assumed.

Where attention stops is known to nobody but the model: transformers' classes find documents by position ids that begin
anew, if the attention implementation and the family do so; others take no notice and would train on a context that is
none, with a loss that looks well. So the model is asked before training.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from typing import Any

import torch
from torch import Tensor, nn

PROBED = 8  # tokens of each of the two documents


@torch.no_grad()
def respects_documents(model: nn.Module, *, device: torch.device | None = None) -> bool:
    """Whether a document's logits are the same behind another one, behind a third one, and alone.

    The model is called as in training, with position ids that begin anew and no attention mask. All ranks that share
    its parameters call this together and get the same answer. It costs three forward passes of 16 tokens.
    """
    device = device or next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        ids_S = torch.arange(3, 3 + 3 * PROBED, device=device) % _vocabulary(model)
        one_S, other_S, document_S = ids_S[:PROBED], ids_S[PROBED:-PROBED], ids_S[-PROBED:]
        behind_one_SV = _logits(model, one_S, document_S)
        behind_other_SV = _logits(model, other_S, document_S)
        alone_SV = _logits(model, document_S)
    finally:
        model.train(was_training)
    # What lies before is masked out exactly, so the same kernels give the same numbers; alone, the kernels may differ.
    unit = torch.finfo(behind_one_SV.dtype).eps * float(alone_SV.abs().max())
    return float((behind_one_SV - behind_other_SV).abs().max()) <= 8 * unit and float(
        (behind_one_SV - alone_SV).abs().max()
    ) <= 64 * max(unit, 1e-7)


def _logits(model: nn.Module, *documents: Tensor) -> Tensor:
    """The logits of the last of some documents that are packed into one row."""
    inputs_BS = torch.cat(documents)[None]
    positions_BS = torch.cat([torch.arange(len(ids_S), device=ids_S.device) for ids_S in documents])[None]
    logits_BSV: Tensor = model(input_ids=inputs_BS, position_ids=positions_BS, use_cache=False).logits
    return logits_BSV[0, -len(documents[-1]) :]


def _vocabulary(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 4 * PROBED))
