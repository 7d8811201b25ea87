"""`config.json` beside weights that were written anew: it says what is true of them, and what was changed is said.

    dtype            of a configuration that names a type which no tensor has: the one that most bytes have
    quantisation     goes where every tensor is a plain number, with the side files that describe it
    vocabulary       the rows of the input embeddings

Weights decide, for they were proved; the configuration may be of another copy of the model.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, cast

from tangram.checkpoint.formats.common.side_files import QUANTISED
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.relayout import TensorSpec

CONFIG = "config.json"
NUMBERS = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Types whose values mean themselves."""
_TYPE_KEYS = ("dtype", "torch_dtype")
_QUANTISED_KEYS = ("quantization_config", "compression_config")
_COMPANIONS = (
    "_scale_inv", "weight_scale", "weight_scales", ".scales", "_scales", "_blocks", ".qweight", ".qzeros", ".g_idx",
    "_packed", ".absmax", ".quant_map", ".SCB", "_scale_2", "input_scale", ".W_q", "weight._data",
)  # fmt: skip
"""How names of tensors end that are parts of quantised ones."""
EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "backbone.embeddings.weight", "backbone.embedding.weight",
)  # fmt: skip
"""How names of input embeddings end."""
HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "proj_out.weight")
"""How names of output layers over the vocabulary end."""


def is_quantised(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether some tensors mean numbers only together with others: codes of few bits, and their scales."""
    return any(
        spec.dtype.startswith(("float8", "float4"))
        or name.endswith(_COMPANIONS)
        or (name.endswith(".weight") and spec.dtype not in NUMBERS and len(spec.shape) > 1)
        for name, spec in specs.items()
    )


def true_of(small: Mapping[str, bytes], specs: Mapping[str, TensorSpec]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The side files with a configuration that is true of these tensors, and what was changed, in words.

    `specs`: of the model, by transformers' names, without states of an optimiser. Raises UserError for a configuration
    of more rows of embeddings than there are: those would be made up on loading.
    """
    files = dict(small)
    try:
        fields: Any = json.loads(files.get(CONFIG, b"null"))
    except ValueError:
        return files, ()  # whoever needs it says so
    if not isinstance(fields, dict) or not specs:
        return files, ()
    known = cast("dict[str, Any]", fields)
    said = [*_with_type(known, specs), *_without_quantisation(known, files, specs), *_with_vocabulary(known, specs)]
    if said:
        files[CONFIG] = json.dumps(known, indent=2).encode()
    return files, tuple(said)


def _tables(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration and those of its parts (text_config, vision_config)."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("_config") and key not in _QUANTISED_KEYS:
            yield cast("dict[str, Any]", value)


def _with_type(fields: dict[str, Any], specs: Mapping[str, TensorSpec]) -> list[str]:
    nbytes = Counter[str]()
    for spec in specs.values():
        if spec.dtype in NUMBERS:
            nbytes[spec.dtype] += max(1, prod(spec.shape)) * DTYPES[spec.dtype]
    if not nbytes:
        return []
    said: list[str] = []
    most = nbytes.most_common(1)[0][0]
    for table in _tables(fields):
        for key in _TYPE_KEYS:
            own = table.get(key)
            if isinstance(own, str) and own.removeprefix("torch.") in NUMBERS - nbytes.keys():
                table[key] = most
                said.append(f"{key} is {most}, not {own}")
    return list(dict.fromkeys(said))


def _without_quantisation(
    fields: dict[str, Any], files: dict[str, bytes], specs: Mapping[str, TensorSpec]
) -> list[str]:
    if is_quantised(specs):
        return []
    gone = {key for table in _tables(fields) for key in _QUANTISED_KEYS if table.pop(key, None) is not None}
    gone |= {name for name in QUANTISED if files.pop(name, None) is not None}
    return [f"{' and '.join(sorted(gone))} left out, for no tensor is quantised"] if gone else []


def _with_vocabulary(fields: dict[str, Any], specs: Mapping[str, TensorSpec]) -> list[str]:
    names = sorted((name for name in specs if name.endswith(EMBEDDINGS)), key=len)
    table = fields if "vocab_size" in fields else fields.get("text_config")
    if not names or not isinstance(table, dict):
        return []
    text = cast("dict[str, Any]", table)
    rows, own = specs[names[0]].shape[0], text.get("vocab_size")
    heads = {spec.shape[0] for name, spec in specs.items() if name.endswith(HEADS) and spec.shape}
    if not isinstance(own, int) or own == rows or not heads <= {rows}:  # some classes have a row more in one of them
        return []
    if own > rows:
        raise UserError(
            f"{names[0]} has {rows:,} rows, and config.json a vocab_size of {own:,}: give the configuration of these "
            "weights with --config"
        )
    text["vocab_size"] = rows
    return [f"vocab_size is {rows}, not {own}, as {names[0]} has rows"]
