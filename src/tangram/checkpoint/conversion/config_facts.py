"""Numbers of a configuration that the shapes of a checkpoint's tensors contradict: a short sentence about each."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tangram.relayout import TensorSpec


def facts(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> list[str]:
    """Numbers of a configuration that the shapes of a directory's tensors contradict: a short sentence each."""
    configured = {key: value for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)}
    found = [fact(specs, configured) for fact in FACTS]
    return [one for one in found if one]


def contradictions(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> list[str]:
    """Those with which no model can have the tensors: without a predictor of a later token it can."""
    return [one for one in facts(specs, config) if "num_nextn_predict_layers" not in one]


def _layers(specs: Mapping[str, TensorSpec], configured: Mapping[str, int]) -> str:
    numbers = {int(match[1]) for name in specs if (match := re.match(r"(?:model\.)?layers\.(\d+)\.", name))}
    layers, later = configured.get("num_hidden_layers"), configured.get("num_nextn_predict_layers", 0)
    if layers is None or not numbers:
        return ""
    there = max(numbers) + 1
    if there == layers and later:
        return f"config.json has num_nextn_predict_layers {later}, but no weights of it are there (layer {layers})"
    if there not in (layers, layers + later):
        return f"config.json has num_hidden_layers {layers}, but the weights are of {there}"
    return ""


def _groups(specs: Mapping[str, TensorSpec], configured: Mapping[str, int]) -> str:
    key = next((name for name in specs if name.endswith("self_attn.k_proj.weight")), None)
    query = next((name for name in specs if name.endswith("self_attn.q_proj.weight")), None)
    heads = configured.get("num_attention_heads")
    if key is None or query is None or not heads or not specs[key].shape:
        return ""
    dim = configured.get("head_dim") or specs[query].shape[0] // heads
    rows, groups = specs[key].shape[0], configured.get("num_key_value_heads")
    there = rows // dim if dim and rows % dim == 0 else None
    if there is None or there == (groups or heads):
        return ""
    what = f"has num_key_value_heads {groups}" if groups else f"has no num_key_value_heads, which means {heads}"
    return f"config.json {what}, but the weights have {there} (k_proj has {rows} rows, {dim} each)"


def _words(specs: Mapping[str, TensorSpec], configured: Mapping[str, int]) -> str:
    spec, rows = specs.get("model.embed_tokens.weight"), configured.get("vocab_size")
    if spec is None or rows is None or not spec.shape or spec.shape[0] == rows:
        return ""
    return f"config.json has vocab_size {rows:,}, but the embeddings have {spec.shape[0]:,} rows"


def _inside(specs: Mapping[str, TensorSpec], configured: Mapping[str, int]) -> str:
    width = configured.get("intermediate_size")
    rows = {spec.shape[0] for name, spec in specs.items() if name.endswith(".mlp.up_proj.weight") and spec.shape}
    if width is None or len(rows) != 1 or width in rows:  # of layers of unlike widths the configuration says them apart
        return ""
    return f"config.json has intermediate_size {width:,}, but up_proj has {rows.pop():,} rows"


FACTS: Sequence[Callable[[Mapping[str, TensorSpec], Mapping[str, int]], str]] = (_layers, _groups, _words, _inside)
