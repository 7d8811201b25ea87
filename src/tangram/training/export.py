"""Export a trained model as a Hugging Face directory, and prove that it loads as the same model."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from tangram.checkpoint.formats.huggingface import has_weights, read_index
from tangram.models.conversions import keep_names
from tangram.training.data import END, Tokens

END_TEXT = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `tangram.training.data`: token i is byte i, and `END` is one special token."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_TEXT, eos_token=END_TEXT)
    if wrapped.eos_token_id != END:
        raise RuntimeError(f"the end token got number {wrapped.eos_token_id}, not {END}")
    return wrapped


@contextlib.contextmanager
def _no_progress_bars() -> Generator[None]:
    """Keep transformers' bars for reading and writing out of our own progress line."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def export(model: PreTrainedModel, folder: Path, tokens: Tokens, weights: Path | None = None) -> None:
    """Write model, configuration and tokenizer; the model must be whole in this process.

    The tensors have the names and the structure of those in the directory `weights` that training began from; without
    one, or where it is there no longer, what the model's class declares. What stands in `folder` already, from a run
    that was resumed, is replaced.
    """
    if weights is not None and has_weights(weights):
        keep_names(model, read_index(weights).specs)
    with _no_progress_bars():
        model.save_pretrained(folder)
    tokenizer = byte_tokenizer() if tokens.folder is None else cast(Any, AutoTokenizer.from_pretrained(tokens.folder))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def logits_difference(model: PreTrainedModel, folder: Path, inputs_BS: Tensor) -> float:
    """The largest difference between the logits of a model and of what transformers loads from its export."""
    with _no_progress_bars():
        loaded = cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype))
    loaded = loaded.to(inputs_BS.device)
    ours_BSV = model.eval()(input_ids=inputs_BS).logits
    theirs_BSV = loaded.eval()(input_ids=inputs_BS).logits
    return float((ours_BSV - theirs_BSV).abs().max().item())
