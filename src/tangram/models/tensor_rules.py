"""Which tensor parallelism a decoder can have: the rules of `tensor_rules.toml`, fitted to one model.

Rules are patterns of names, so a model that Tangram has never heard of gets them where its modules are called as
Llama's are; but names are only a guess. What is taken is checked: every pattern against the shapes that really flow
through the module, every cut for being even, and every parameter of a block for having a rule or being known to see
whole activations. What fails is refused with the reason.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from tangram.layout import Layout, LayoutError, Mesh, region
from tangram.models.costs import block_names
from tangram.models.twin import Shapes, module_shapes

_BATCH = 2


@dataclass(frozen=True)
class TensorRules:
    """Layouts by name pattern, as a plan has them, without the rule for the parameters that no pattern names."""

    parameters: Mapping[str, str]
    activations: Mapping[str, str]
    sizes: Mapping[str, int]
    vocabulary: bool
    """Whether the vocabulary is cut, too."""


@dataclass
class _Fitted:
    parameters: dict[str, str] = field(default_factory=dict[str, str])
    activations: dict[str, str] = field(default_factory=dict[str, str])


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("tangram.models").joinpath("tensor_rules.toml").read_text(encoding="utf-8"))


def rules_for(
    config: PreTrainedConfig, model: nn.Module, tensor: tuple[str, int], shard: str | None
) -> TensorRules | str:
    """The rules that cut a model (on meta or not) over an axis (its name and size), or a sentence why there are none.

    `shard`: the data axis over which every parameter is cut as well (FSDP), None where they are copies.
    """
    if reason := undivided_heads(config, tensor):
        return reason
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    try:
        shapes = module_shapes(model, _BATCH, _unlike(sizes.values()))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"what flows through its modules cannot be found: {reason}"
    found = _Fitted()
    if reason := _fit(_table(), model, shapes, tensor, shard, sizes, found):
        return reason
    if reason := _left_out(model, found, tensor):
        return reason
    whole_words = _Fitted()
    vocabulary = _plain_vocabulary(model, text.vocab_size, tensor[1]) and not _fit(
        _table()["vocabulary"], model, shapes, tensor, shard, sizes, whole_words
    )
    if vocabulary:
        found.parameters |= whole_words.parameters
        found.activations |= whole_words.activations
    return TensorRules(found.parameters, found.activations, {"head_dim": head_dim}, vocabulary)


def undivided_heads(config: PreTrainedConfig, tensor: tuple[str, int]) -> str:
    """The reason why ranks of a tensor axis (its name and size) cannot have whole heads of attention each, or ""."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return f"a {config.model_type} model has no num_attention_heads"
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for what, count in (("attention heads", heads), ("key-value heads", kv_heads)):
        if count % tensor[1]:
            return f"the {count} {what} do not divide by {tensor[0]}={tensor[1]}"
    return ""


def _unlike(sizes: Iterable[int]) -> int:
    """A sequence that cannot be taken for another dim."""
    length = 5
    while length in sizes:
        length += 2
    return length


def _fit(
    table: Mapping[str, Any],
    model: nn.Module,
    shapes: Shapes,
    tensor: tuple[str, int],
    shard: str | None,
    sizes: Mapping[str, int],
    found: _Fitted,
) -> str:
    """Put the rules that name something in the model into `found`; the reason where one does not fit."""
    modules = [name for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())]
    mesh = Mesh.parse(f"{tensor[0]}={tensor[1]}")
    for pattern, texts in cast("Mapping[str, str | list[str]]", table["activations"]).items():
        named = [name for name in modules if fnmatchcase(name, pattern)]
        if not named:
            continue
        choices = [_words(text, tensor[0], None) for text in ([texts] if isinstance(texts, str) else texts)]
        fitting = next((text for text in choices if all(_flows(text, shapes.get(n), sizes, mesh) for n in named)), None)
        if fitting is None:
            return f'what goes through {named[0]} does not have the shape of "{choices[0]}", evenly over {mesh}'
        found.activations[pattern] = fitting
    for pattern, text in cast("Mapping[str, str]", table["parameters"]).items():
        for name, parameter in model.named_parameters():
            if not fnmatchcase(name, pattern):
                continue
            if not _even(_words(text, tensor[0], None), tuple(parameter.shape), sizes, mesh):
                return f"{name} of shape {tuple(parameter.shape)} does not divide by {mesh}"
            found.parameters[pattern] = _words(text, tensor[0], shard)
    return ""


def _words(text: str, tensor: str, shard: str | None) -> str:
    text = text.replace("TENSOR", tensor)
    return text.replace("/SHARD", f"/{shard}" if shard else "")


def _flows(
    text: str, shape: tuple[tuple[int, ...], tuple[int, ...]] | None, sizes: Mapping[str, int], mesh: Mesh
) -> bool:
    """Whether a rule "input -> output" fits the shapes of a module."""
    if shape is None:
        return False
    sides = text.split("->")
    return all(_even(side, dims, sizes, mesh) for side, dims in zip(sides, shape, strict=True))


def _even(text: str, shape: tuple[int, ...], sizes: Mapping[str, int], mesh: Mesh) -> bool:
    """Whether a layout fits a shape and gives every rank of the mesh as much."""
    named = {name: size for name, size in sizes.items() if name in text.replace("(", " ").replace("/", " ").split()}
    # "head_dim)" is one word of the text with its bracket
    named |= {name: size for name, size in sizes.items() if f"{name})" in text}
    try:
        layout = Layout.parse(text).bind(shape, **named)
        return len({region(layout, mesh, rank).local_shape for rank in range(mesh.size)}) == 1
    except LayoutError:
        return False


def _left_out(model: nn.Module, found: _Fitted, tensor: tuple[str, int]) -> str:
    """The reason why parameters of the blocks that no rule names forbid the cut, "" where none does."""
    blocks = tuple(f"{name}." for name in block_names(model))
    inside = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith(blocks)]
    if not inside:
        return "it has no repeated blocks"
    left = [
        (name, parameter.ndim)
        for name, parameter in inside
        if not _matched(found.parameters, name)
        and not _matched(found.activations, name.rpartition(".")[0])
        and not _matched(_table()["whole"], name)
    ]
    if left:
        first = max(left, key=lambda item: item[1])[0]  # a matrix says more than a bias
        others = f" and {len(left) - 1} more" if left[1:] else ""
        return f"no rule of tensor parallelism names {first}{others}"
    bare = [
        name
        for name, _ in inside
        if _matched(found.parameters, name) and not _matched(found.activations, name.rpartition(".")[0])
    ]
    return f"{bare[0]} is cut over {tensor[0]}, but no rule says how activations flow through it" if bare else ""


def _matched(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _plain_vocabulary(model: nn.Module, size: int, ranks: int) -> bool:
    """Whether the vocabulary can be cut: evenly, and no embedding or head does more than its class."""
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    ends = [module for name, module in named if name.endswith(("embed_tokens", "lm_head"))]
    return size % ranks == 0 and len(ends) == 2 and all(type(end) in (nn.Embedding, nn.Linear) for end in ends)
