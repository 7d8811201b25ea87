"""What transformers loads from an export is what was trained, in all that a user sees of it.

    every tensor           bit for bit, not only those that a batch of logits happens to use
    logits                 of a fixed batch, by the loaded model's own code
    settings of generation by the loaded model: those of the directory that training began from
    generated tokens       by default settings of the loaded model, and by those of that directory
    tokenizer              the same ids of a text, the same special and added tokens, the same template

Each answers with "" or with what is not so. The side that is compared with is never read from the export.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from tangram.models.building.build import Source
from tangram.training.data import Tokens
from tangram.training.state.export_hf import GENERATION, no_progress_bars, owns_tokenizer

PROMPT, LENGTH = 16, 16  # tokens
_UNSETTLED = {"transformers_version", "_from_model_config", "_original_object_hash"}
_IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def load_exported(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The export of `model` as transformers loads it, where the model is, in its type."""
    with no_progress_bars():
        loaded = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype))
    return cast(Any, loaded).to(model.device).eval()


def unlike_weights(model: PreTrainedModel, loaded: PreTrainedModel) -> str:
    """The first tensor of the state that is not the same, bit for bit."""
    own, theirs = model.state_dict(), loaded.state_dict()
    if own.keys() != theirs.keys():
        name = sorted(own.keys() ^ theirs.keys())[0]
        return f"{name} is in one of them only"
    for name, tensor in own.items():
        other = theirs[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return f"{name} is {other.dtype} of {list(other.shape)}, not {tensor.dtype} of {list(tensor.shape)}"
        if not torch.equal(tensor, other):
            return f"{int((tensor != other).sum())} of {tensor.numel()} values of {name} differ"
    return ""


@torch.no_grad()
def logits_difference(model: PreTrainedModel, loaded: PreTrainedModel, inputs_BS: Tensor) -> float:
    """The largest difference between the logits of a model and of what transformers loads from its export."""
    ours_BSV = model.eval()(input_ids=inputs_BS).logits
    theirs_BSV = loaded.eval()(input_ids=inputs_BS).logits
    return float((ours_BSV - theirs_BSV).abs().max().item())


def settings_of(source: Source) -> GenerationConfig:
    """How the model generated that training began from: what transformers reads from its directory."""
    if source.folder is not None and (source.folder / GENERATION).is_file():
        return GenerationConfig.from_pretrained(source.folder)
    return GenerationConfig.from_model_config(source.config)


def unlike_settings(loaded: PreTrainedModel, source: Source, tokens: Tokens) -> str:
    """The first setting of generation that is another than the source's; ids by the tokenizer that was trained on."""
    before, after = settings_of(source).to_dict(), loaded.generation_config.to_dict()
    own = owns_tokenizer(source, tokens)
    for key in sorted((before.keys() | after.keys()) - _UNSETTLED - (set() if own else _IDS)):
        if before.get(key) != after.get(key):
            return f"{key} is {after.get(key)}, not {before.get(key)}"
    ends = after.get("eos_token_id")
    if not own and tokens.end not in (ends if isinstance(ends, list) else [ends]):
        return f"eos_token_id is {ends}, and documents end with {tokens.end}"
    return ""


def unlike_writing(
    model: PreTrainedModel, loaded: PreTrainedModel, source: Source, tokens: Tokens, inputs_BS: Tensor
) -> str:
    """How what the loaded model writes by its own settings differs from what the model writes by the source's."""
    settings = settings_of(source)
    if not owns_tokenizer(source, tokens):
        for key in _IDS:
            setattr(settings, key, getattr(loaded.generation_config, key))
    ours, theirs = _written(model, inputs_BS, settings), _written(loaded, inputs_BS, None)
    return "" if ours == theirs else f"it goes on with {theirs}, not with {ours}"


@torch.no_grad()
def _written(model: PreTrainedModel, inputs_BS: Tensor, settings: GenerationConfig | None) -> object:
    """The tokens that follow a prompt, drawn with the same seed; where it cannot generate so, the kind of error."""
    prompt_BS = inputs_BS[:1, :PROMPT]
    generate = cast("Callable[..., Any]", model.eval().generate)
    how: dict[str, Any] = {"max_new_tokens": LENGTH}
    if settings is not None:  # transformers takes either settings or single options
        how = {"generation_config": copy.deepcopy(settings)}
        how["generation_config"].max_new_tokens = LENGTH
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that do not go together, which are the source's
        torch.random.default_generator.manual_seed(0)
        try:
            made = generate(prompt_BS, attention_mask=torch.ones_like(prompt_BS), **how)
        except Exception as error:  # noqa: BLE001  settings that this model cannot use are the source's too
            return type(error).__name__
    rows = made if isinstance(made, Tensor) else made.sequences
    return cast("list[int]", rows[0, prompt_BS.shape[1] :].tolist())


def unlike_tokenizer(folder: Path, tokens: Tokens, text: str) -> str:
    """What the exported tokenizer does otherwise than the one that the text was read with."""
    if tokens.folder is None:
        own: Any = None
    else:
        own = cast(Any, AutoTokenizer.from_pretrained(tokens.folder, local_files_only=True))
    made = cast(Any, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    if own is None:
        ids = made(text, add_special_tokens=False).input_ids
        return "" if ids == list(text.encode()) else "a text has other tokens than its bytes"
    for what in ("special_tokens_map", "chat_template", "padding_side"):
        if getattr(own, what) != getattr(made, what):
            return f"its {what} is {getattr(made, what)}, not {getattr(own, what)}"
    if own.get_vocab() != made.get_vocab():
        return f"it has {len(made.get_vocab()):,} tokens, not the same {len(own.get_vocab()):,}"
    marked = f"{text} {' '.join(own.all_special_tokens)}"
    if own(marked).input_ids != made(marked).input_ids:
        return "a text has other tokens"
    return ""
