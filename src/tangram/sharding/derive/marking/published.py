"""What transformers publishes of a model's weights (`tp_plan`, `ep_plan`), read as marks: checked, never trusted.

Only where weights are cut is taken; what its styles would do with activations and gradients follows from it. A style
of another kind, as those of activations and of modules, gives no mark. What does not fit the model or the mesh is left
out by `of_model.fitting`, what contradicts itself is refused by the derivation.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch import nn

from tangram.sharding.derive.marking.marks import Mark, marked_types, marks_for, marks_of, matching
from tangram.text import alternatives


class Style(NamedTuple):
    """How a style cuts a weight."""

    dim: int
    """From the last: -1."""
    blocks: int = 1
    """How many weights lie in the dim one after the other, each cut by itself."""


STYLES: Mapping[str, Style] = {
    "colwise": Style(-2),
    "colwise_rep": Style(-2),
    "colwise_gather_output": Style(-2),
    "embedding_rowwise": Style(-2),
    "rowwise": Style(-1),
    "rowwise_rep": Style(-1),
    "rowwise_split_input": Style(-1),
    "packed_colwise": Style(-2, 2),
    "packed_rowwise": Style(-1, 2),
}
"""transformers' words for how the weight of a module, or one that stands by itself, is cut over the tensor axis."""
EXPERTS = frozenset({"grouped_gemm"})
"""Its words for weights of all experts, cut by expert: the first dim."""


PEFT = (".weight", ".base_layer.weight", ".modules_to_save.default.weight")
"""What peft calls the weight of a layer: one that it leaves as it is, one that has an adapter, one that is trained."""


def marks_known_for(model: nn.Module) -> list[Mark]:
    """The marks over `tp` that come with Tangram for the type in a model's config, else those of transformers' own
    plan of it, else those of a type that calls its modules the same. For a module that holds models of transformers,
    as peft's does or one of one's own around a backbone, those of each of them. None for another module."""
    ways = (_known, _of_models_in) if hasattr(type(model), "base_model_prefix") else (_of_models_in, _known)
    found = ways[0](model) or ways[1](model)
    wrapped = any(".base_layer." in name for name, _ in model.named_parameters())
    return [_as_peft(mark) for mark in found] if wrapped else found


def _as_peft(mark: Mark) -> Mark:
    names = [one.removesuffix(PEFT[0]) for one in alternatives(mark.pattern) if one.endswith(PEFT[0])]
    others = [one for one in alternatives(mark.pattern) if not one.endswith(PEFT[0])]
    return _of_names(mark, [*others, *(name + weight for name in names for weight in PEFT)])


def _of_names(mark: Mark, names: Sequence[str]) -> Mark:
    return replace(mark, pattern="{" + ",".join(dict.fromkeys(names)) + "}")


def _of_models_in(model: nn.Module, prefix: str = "") -> list[Mark]:
    """Those of the outermost models of transformers that a module holds."""
    found: list[Mark] = []
    for name, child in model.named_children():
        if hasattr(type(child), "base_model_prefix"):
            inner = [(mark, alternatives(mark.pattern)) for mark in _known(child)]
            found += [_of_names(mark, [f"{prefix}{name}.{own}" for own in names]) for mark, names in inner]
        else:
            found += _of_models_in(child, f"{prefix}{name}.")
    return found


def _known(model: nn.Module) -> list[Mark]:
    """Those of one model, of which some name something of it."""
    config = getattr(model, "config", None)
    if not getattr(config, "model_type", ""):
        return published(model, "tp", "tp")
    prefix = getattr(model, "base_model_prefix", "") if getattr(model, "base_model", None) is model else ""
    own = [_below(mark, prefix) for mark in marks_for(config) or ()]
    return own or published(model, "tp", "tp") or _alike(model, prefix)


def _below(mark: Mark, prefix: str) -> Mark:
    """A mark on the names that a type's bare model has, without its head and what stands before each name; "": same."""
    if not prefix:
        return mark
    patterns = [*alternatives(mark.pattern)]
    patterns += [one.removeprefix("*.") for one in patterns if one.startswith("*.")]
    return _of_names(mark, [one.removeprefix(f"{prefix}.") for one in patterns])


def _alike(model: nn.Module, prefix: str) -> list[Mark]:
    """Those of the type of which each mark names something of a model, and the most patterns do: what follows from a
    mark is derived from the model itself, so the wrong type costs time at most."""
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    every = [name for name, _ in model.named_parameters()] + [name for name, _ in modules if name]
    names = {re.sub(r"(?<=\.)\d+(?=\.|$)", "0", name) for name in every}  # layers are alike
    best: list[Mark] = []
    most = 0
    for kind in marked_types():
        marks = [_below(mark, prefix) for mark in marks_of(kind) or ()]
        fits = [[one for one in alternatives(mark.pattern) if matching(one, names)] for mark in marks]
        if all(fits) and (count := sum(map(len, fits))) > most:
            best, most = marks, count
    return best


def published(model: nn.Module, tensor: str, experts: str | None = None) -> list[Mark]:
    """The marks that a transformers model's plans come to, one for each of their lines; none for another module.

    `tensor`, `experts`: the axes of the tensor-parallel and of the expert-parallel plan; without the latter experts are
    cut as the former says. Over one axis for both, its weights of experts are cut by expert.
    """
    shapes = {name: len(p.shape) for name, p in model.named_parameters()}  # of a tied one its first name, as captured
    plans = [cast("Mapping[str, str]", getattr(model, name, None) or {}) for name in ("_tp_plan", "_ep_plan")]
    whole_experts = {name for name, style in plans[1].items() if style in EXPERTS} if experts else set[str]()
    found: list[Mark] = []
    for name, style in plans[0].items():
        if style in STYLES and not (name in whole_experts and experts == tensor):
            found += _mark(name, shapes, tensor, STYLES[style])
    for name in sorted(whole_experts):
        found += _mark(name, shapes, str(experts), None)
    return found


def _mark(name: str, shapes: Mapping[str, int], axis: str, style: Style | None) -> list[Mark]:
    """Of a line of a plan, which names a module or a weight; without a style a weight of experts."""
    for pattern in (name, f"{name}.weight"):
        ndim = next((n for own, n in shapes.items() if fnmatch.fnmatchcase(own, pattern)), None)
        if ndim is not None:
            dim = 0 if style is None else max(ndim + style.dim, 0)
            if style is not None and ndim == 1 and style.dim == -1:
                return []  # a bias that is added to what is summed
            factor = (
                f"({style.blocks} _/{axis})" if style is not None and style.blocks > 1 and ndim > 1 else f"_/{axis}"
            )
            return [Mark.parse(f"{pattern}: {' '.join(factor if d == dim else '_' for d in range(ndim))}")]
    return []
