"""A sample of what a model writes: the continuation of a held-out text."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tangram.training.data import Tokens

PROMPT, LENGTH = 32, 160  # tokens
TEMPERATURE = 0.7


@torch.no_grad()
def sample_text(model: PreTrainedModel, tokens: Tokens, inputs_BS: Tensor, seed: int = 0) -> tuple[str, str]:
    """A prompt, from the first row of a batch, and how the model goes on; the same for a seed."""
    prompt_BS = inputs_BS[:1, :PROMPT]
    chosen = GenerationConfig(
        max_new_tokens=LENGTH,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=20,
        eos_token_id=tokens.end,
        pad_token_id=tokens.end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        generate = cast("Callable[..., Tensor]", model.eval().generate)
        written_BS = generate(prompt_BS, attention_mask=torch.ones_like(prompt_BS), generation_config=chosen)
    ids = cast("list[int]", written_BS[0].tolist())
    return tokens.decode(ids[: prompt_BS.shape[1]]), tokens.decode(ids[prompt_BS.shape[1] :])
