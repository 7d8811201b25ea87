"""Export a trained model as a Hugging Face directory: weights, a configuration true of them, and all that was beside.

Weights are written by the class's own `save_pretrained`, in the structure of the directory that training began from.
Side files come from that directory as they are (`tangram.checkpoint.formats.common.side_files`): how it generates, its
templates, preprocessors, code and licence. The tokenizer is the one that the text was read with, which may be another.
"""

import contextlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from tangram import __version__
from tangram.checkpoint.formats.common.config_json import CONFIG, true_of
from tangram.checkpoint.formats.common.side_files import (
    SideFiles,
    is_of_tokenizer,
    of_tokenizer,
    side_files,
    with_provenance,
    write_side_files,
)
from tangram.checkpoint.formats.huggingface import INDEX, has_weights, read_index
from tangram.models.building.build import Source
from tangram.models.building.conversions import keep_names
from tangram.training.data import END, Tokens
from tangram.training.state.carried import carried_by, carry, with_towers

END_TEXT = "<|endoftext|>"
GENERATION = "generation_config.json"


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
def no_progress_bars() -> Generator[None]:
    """Keep transformers' bars for reading and writing out of our own progress line."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def export(
    model: PreTrainedModel,
    folder: Path,
    tokens: Tokens,
    source: Source | None = None,
    made: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write model, configuration, tokenizer and side files; the model must be whole in this process. In words what goes
    along that no part of the model is made of.

    The tensors have the names and the structure of those in the directory of `source` that training began from; without
    one, or where it is there no longer, what the model's class declares. What is in `folder` already, from a run that
    was resumed, is replaced. `made`: what `provenance.json` says beside where the side files come from.
    """
    if source is not None and source.weights is not None and has_weights(source.weights):
        keep_names(model, read_index(source.weights).specs)
    carried = carried_by(model, None if source is None else source.weights)
    _remove_weights(folder)
    with no_progress_bars():
        model.save_pretrained(folder)
    if carried is not None and carried.names:
        carry(carried, folder)
    beside = _beside(source)
    files = {name: data for name, data in beside.files.items() if not is_of_tokenizer(name)}
    files |= of_tokenizer(side_files(tokens.folder).files) if tokens.folder is not None else {}
    for name in (CONFIG, GENERATION):
        if name == CONFIG or name not in files:
            files[name] = (folder / name).read_bytes()
    if carried is not None and carried.names:
        files[CONFIG] = with_towers(files[CONFIG], carried.folder)
    if source is not None and not owns_tokenizer(source, tokens):
        files[GENERATION] = _with_ids_of(files[GENERATION], tokens, source.folder)
    files, changed = true_of(files, read_index(folder).specs)
    name = source.name if source is not None else ""
    about = {"from": "tangram train", "model": name, "to": "hf", "tangram": __version__, **made, "config": changed}
    files = with_provenance(files, about, name if beside.files else "", beside.left)
    for written in files:
        (folder / written).unlink(missing_ok=True)
    write_side_files(folder, files)
    if tokens.folder is None:
        byte_tokenizer().save_pretrained(folder)
    return "" if carried is None else carried.words()


def _remove_weights(folder: Path) -> None:
    """Of an export before: in a folder with other files than it had, those that are left would be read."""
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink(missing_ok=True)


def owns_tokenizer(source: Source | None, tokens: Tokens) -> bool:
    """Whether the text was read with the tokenizer that the model's directory has."""
    if source is None or source.folder is None or tokens.folder is None:
        return False
    return source.folder.resolve() == tokens.folder.resolve()


def _beside(source: Source | None) -> SideFiles:
    """What is beside the model's configuration, and of it."""
    if source is None or source.folder is None or not source.folder.is_dir():
        return SideFiles({})
    if not source.alone:
        return side_files(source.folder)
    file = source.folder / GENERATION
    return SideFiles({GENERATION: file.read_bytes()} if file.is_file() else {})


def _with_ids_of(data: bytes, tokens: Tokens, folder: Path | None) -> bytes:
    """Settings of generation with the begin and end of the tokens that the model was trained on.

    An id stays where it is the same token to both: the new tokenizer may be the model's with some more.
    """
    fields: Any = json.loads(data)
    ends = {"bos_token_id": tokens.begin, "eos_token_id": tokens.end, "pad_token_id": tokens.end}
    before, now = _tokenizer(folder), _tokenizer(tokens.folder)
    for key, end in ends.items():
        ids = fields.get(key)
        some = cast("list[int]", ids if isinstance(ids, list) else [] if ids is None else [ids])
        same = bool(before and now and some) and all(_text(before, id_) == _text(now, id_) != "" for id_ in some)
        if not same and (some or key == "eos_token_id"):
            fields[key] = end
    return json.dumps(fields, indent=2).encode()


def _tokenizer(folder: Path | None) -> Any:
    try:
        if folder is None or not folder.is_dir():
            return None
        return cast(Any, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except Exception:  # noqa: BLE001  a directory without one, which fails in many ways: nothing is the same then
        return None


def _text(tokenizer: Any, number: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(number) or "") if number < len(tokenizer) else ""
