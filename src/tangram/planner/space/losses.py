"""Ways to make a loss of a head's logits, and the bytes of each logit while that works.

eager           transformers' and torch's own: 16 bits, float32 of which the logarithms of shares are kept, and the
                gradient of both
eager-copies    the same by code that copies once more in float32: shifted by one token, less its maximum
compiled        one kernel reads the 16 bits, and float32 becomes the gradient in place
fused           one kernel for loss and gradient, which is written over the logits (FlashAttention, Apex, Liger)
chunked         head and loss of an eighth of the tokens at a time, made again in the backward: the eager loss of
                that part (fused with the head's product as Liger and Cut Cross-Entropy do it needs no more)
parallel        Megatron's over TP ranks that divide the vocabulary: 16 bits, and float32 that becomes the gradient
parallel-fused  torch's compiled one of Megatron (`--cross-entropy-loss-fusion`), which keeps both
"""

from __future__ import annotations

from collections.abc import Mapping

from tangram.errors import UserError
from tangram.text import nearest_hint

LOSSES: Mapping[str, float] = {
    "eager": 14.0,
    "eager-copies": 16.0,
    "compiled": 6.0,
    "fused": 4.0,
    "chunked": 14.0 / 8,
    "parallel": 6.0,
    "parallel-fused": 10.0,
}
"""Bytes of each logit at the peak."""
BESIDE_REFERENCE: Mapping[str, float] = {"eager": 16.0, "eager-copies": 16.0}
"""The same of preferences where the policy is run before its reference (TRL, LLaMA-Factory, torchtune): while the
reference makes its logits in float32 and the logarithms of shares, the policy's of both kinds are there, too."""


def loss_of(name: str) -> str:
    """The name itself. Raises UserError for one that is none, with the nearest."""
    if name not in LOSSES:
        raise UserError(f'there is no loss "{name}"{nearest_hint(name, LOSSES)}: there are {", ".join(LOSSES)}')
    return name
