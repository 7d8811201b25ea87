"""The proofs at the end of a job: what it leaves behind is what it trained.

The newest checkpoint's model is loaded whole in one process, another layout than the one that wrote it. There the
held-out loss and the logits of a fixed batch must be those that the ranks have measured. Transformers must load the
export with every tensor, the same logits, the settings of generation that the model came with, the same tokens written
by them, and the same tokenizer: the side that is compared with is never read from the export. The states of the
optimiser are proved by the checkpoint's own digests only.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from tangram.hardware.host.machine import pick_device
from tangram.models.building.build import Source
from tangram.models.capturing.attention import exactly
from tangram.models.lora.adapter_files import merge_adapters, save_adapters
from tangram.schema.plan import Plan
from tangram.training.data import Corpus, Tokens, held_out_batches
from tangram.training.mesh.modes import without_cache
from tangram.training.objective.packing import logits_in_order, token_order
from tangram.training.observe.events import Doing, Note
from tangram.training.observe.text_tables import printable
from tangram.training.parallel.quantised_base import dequantise
from tangram.training.run.rank import RankReport, probe_batch
from tangram.training.run.run_folder import near
from tangram.training.state.build_model import build_unsharded
from tangram.training.state.checkpointer import JobState, load
from tangram.training.state.export_hf import GENERATION, export, no_progress_bars, owns_tokenizer
from tangram.training.state.new_embedding_rows import rows_before
from tangram.training.step.evaluate import evaluate_unsharded
from tangram.training.step.objectives import objective_of

# Relative; of a loss below one nat absolute, since rounding is of logits, which do not get smaller with the loss. The
# sums are the same but for their order.
SAME_LOSS = {"float32": 1e-6, "bfloat16": 2e-3, "float16": 3e-4}
SAME_LOGITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}  # of the largest logit


ADAPTER = "adapter"
"""The folder of a run that has its adapters."""


class ProofError(Exception):
    """The job ran, but what it left behind is not what it trained."""


@dataclass(frozen=True)
class Proved:
    """What was measured in one process."""

    loss: float | None
    """None where nothing is held out to measure it on."""
    relative: float | None
    """Of the loss, to the one that the ranks measured."""
    logits: float
    """The largest difference to the logits of the ranks."""
    export: float
    """The largest difference to the logits of the exported model."""
    prompt: str
    written: str
    """What the model makes of the prompt."""


def prove(
    plan: Plan,
    source: Source,
    tokens: Tokens,
    corpus: Corpus,
    checkpoint: Path,
    out: Path,
    measured: RankReport,
    on_event: Callable[[object], None],
) -> Proved:
    """Measure all of it in this process. Raises ProofError for the first thing that is not so."""
    on_event(Doing("loading the checkpoint whole in one process"))
    device = pick_device(plan.run.device, 0, 1)
    model = build_unsharded(plan, source, device)
    load(checkpoint, JobState(model, None), plan, None)
    dequantise(model)
    assert measured.probe is not None  # the caller has seen to it
    computed = as_computed(model, plan)
    loss = relative = None
    words = "in one process"
    if measured.held_out_loss is not None and not plan.has_reference and plan.distill is None:
        loss, relative = same_loss(computed, plan, corpus, measured.held_out_loss)
        limit = SAME_LOSS[plan.precision.compute]
        words = f"loss {loss:.6f} in one process; relative difference {relative:.1e}, at most {limit:.0e}"
    difference = same_logits(computed, plan, corpus, measured.probe)
    on_event(Note(f"reloaded   {words}; logits of a fixed batch differ by {difference:.1e}"))
    if plan.lora is not None:
        rows, before = cast(Any, model.config).get_text_config().vocab_size, rows_before(plan)
        grown = before is not None and before < rows
        save_adapters(model, out / ADAPTER, str(source.weights), tables=grown)
        merge_adapters(model)
        merged = same_logits(as_computed(model, plan), plan, corpus, measured.probe)
        beside = f" after resize_token_embeddings({rows})" if grown else ""
        words = f"as peft reads them{beside}; merged, logits differ by {merged:.1e}"
        on_event(Note(f"adapters   {near(out / ADAPTER)}, {words}"))
    on_event(Doing("exporting, and loading the export with transformers"))
    folder = out / "export"
    with exactly(model):  # transformers has no casts of attention
        along = export(model, folder, tokens, source, {"checkpoint": checkpoint.name})
        inputs_BS = probe_batch(corpus, plan, device).inputs_BS
        exported, wrote = same_export(model, folder, source, tokens, inputs_BS)
    writes = f"how {source.name} generates" if wrote and source.folder is not None else "settings of generation"
    words = f"every tensor, the tokenizer and {writes} the same, logits differ by {exported:.1e}"
    on_event(Note(f"exported   {near(folder)}; loaded by transformers: {words}{'; ' if along else ''}{along}"))
    prompt, written = sample_text(model, tokens, inputs_BS)
    shown = indent(printable(written.strip()), " " * 11)
    on_event(Note(f"sample     of what the model writes, after {prompt[-24:]!r}:\n{shown}"))
    return Proved(loss, relative, difference, exported, prompt, written)


def same_export(
    model: PreTrainedModel, folder: Path, source: Source, tokens: Tokens, inputs_BS: torch.Tensor
) -> tuple[float, bool]:
    """The difference in logits to what transformers loads from an export, and whether what both write was compared.

    It is not where neither can generate. Raises ProofError for anything that is not so.
    """
    loaded = load_exported(model, folder)
    difference = logits_difference(model, loaded, inputs_BS)
    wrong = unlike_weights(model, loaded)
    if wrong or not difference <= SAME_LOGITS["float32"]:
        raise ProofError(
            f"transformers loads {folder} as another model: {wrong or f'the logits differ by {difference}'}"
        )
    written = writing(model, loaded, source, tokens, inputs_BS)
    if wrong := unlike_settings(loaded, source, tokens) or unlike_writing(*written):
        raise ProofError(f"the model in {folder} generates otherwise than the one that training began from: {wrong}")
    if wrong := unlike_tokenizer(folder, tokens, tokens.decode(cast("list[int]", inputs_BS[0].tolist()))):
        raise ProofError(f"the tokenizer in {folder} is not the one that the text was read with: {wrong}")
    return difference, isinstance(written[0], list)


def as_computed(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """The model as the ranks computed with it: a copy with rounded parameters, where the plan's precision is low."""
    if plan.precision.compute == "float32":
        return model
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(getattr(torch, plan.precision.compute))
    return rounded


def same_loss(model: PreTrainedModel, plan: Plan, corpus: Corpus, before: float) -> tuple[float, float]:
    """The held-out loss of the reloaded model and how far it is from the one before; ProofError when too far."""
    batches = held_out_batches(corpus, plan.data, index=0, size=1, device=model.device)
    after = evaluate_unsharded(model, batches, token_order(model, plan), objective_of(plan))
    relative = loss_difference(after, before)
    if not relative <= SAME_LOSS[plan.precision.compute]:
        raise ProofError(f"the reloaded checkpoint has a held-out loss of {after}, not the {before} that was measured")
    return after, relative


def loss_difference(after: float, before: float) -> float:
    """As `SAME_LOSS` counts it."""
    return abs(after - before) / max(1.0, before)


def same_logits(model: PreTrainedModel, plan: Plan, corpus: Corpus, before_BSV: npt.NDArray[np.float32]) -> float:
    """How far the logits of the fixed batch are from the ones before; ProofError when too far."""
    with torch.no_grad():
        batch = probe_batch(corpus, plan, model.device)
        after_BSV = logits_in_order(model.eval(), token_order(model, plan), batch).float().cpu().numpy()
    difference = float(np.abs(after_BSV - before_BSV).max())
    limit = SAME_LOGITS[plan.precision.compute] * float(np.abs(before_BSV).max())
    if not difference <= limit:
        raise ProofError(
            f"the reloaded checkpoint has other logits: they differ by {difference}, at most {limit} is right"
        )
    return difference


# ----------------------------------------------------------------
# A sample of what a model writes: the continuation of a held-out text.


PROMPT, LENGTH = 32, 160  # tokens


TEMPERATURE = 0.7


@torch.no_grad()
def sample_text(model: PreTrainedModel, tokens: Tokens, inputs_BS: Tensor, seed: int = 0) -> tuple[str, str]:
    """A prompt, from the first row of a batch, and how the model goes on; the same for a seed."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or PROMPT + LENGTH
    prompt_BS = inputs_BS[:1, : min(PROMPT, positions // 2)]
    chosen = GenerationConfig(
        max_new_tokens=min(LENGTH, positions - prompt_BS.shape[1]),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=20,
        eos_token_id=tokens.end,
        pad_token_id=tokens.end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        generate = cast("Callable[..., Tensor]", model.eval().generate)
        prompt = tokens.decode(cast("list[int]", prompt_BS[0].tolist()))
        try:
            written_BS = generate(prompt_BS, attention_mask=torch.ones_like(prompt_BS), generation_config=chosen)
        except Exception as error:  # noqa: BLE001  the code is transformers', and the model is trained, saved and proved
            return prompt, f"[transformers cannot generate with a {type(model).__name__} like this: {error}]"
    return prompt, tokens.decode(cast("list[int]", written_BS[0, prompt_BS.shape[1] :].tolist()))


COMPARED = 16
"""Tokens of a prompt whose continuation is compared, and of that."""
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
    inputs = without_cache({"input_ids": inputs_BS}, model)  # which xlstm's own code cannot fill at every size
    ours_BSV, theirs_BSV = (one.eval()(**inputs).logits for one in (model, loaded))
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


def writing(
    model: PreTrainedModel, loaded: PreTrainedModel, source: Source, tokens: Tokens, inputs_BS: Tensor
) -> tuple[object, object]:
    """What the model writes by the source's settings, and what the loaded one writes by its own."""
    settings = settings_of(source)
    if not owns_tokenizer(source, tokens):
        for key in _IDS:
            setattr(settings, key, getattr(loaded.generation_config, key))
    return _written(model, inputs_BS, settings), _written(loaded, inputs_BS, None)


def unlike_writing(ours: object, theirs: object) -> str:
    """How the one differs from the other."""
    return "" if ours == theirs else f"it goes on with {theirs}, not with {ours}"


@torch.no_grad()
def _written(model: PreTrainedModel, inputs_BS: Tensor, settings: GenerationConfig | None) -> object:
    """The tokens that follow a prompt, drawn with the same seed; where it cannot generate so, the kind of error."""
    prompt_BS = inputs_BS[:1, :COMPARED]
    generate = cast("Callable[..., Any]", model.eval().generate)
    how: dict[str, Any] = {"max_new_tokens": COMPARED}
    if settings is not None:  # transformers takes either settings or single options
        how = {"generation_config": copy.deepcopy(settings)}
        how["generation_config"].max_new_tokens = COMPARED
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
