"""How the tensors of a Hugging Face directory become those of a module: as statements of the mapping notation.

transformers loads many checkpoints whose structure is not the module's: experts that lie one by one and are stacked on
loading, other names, prefixes. It declares these conversions as data, `transformers.conversion_mapping`. Here the
names go through transformers' own renaming, and the operations are translated (see
`tangram.models.building.operations`), so a rank that holds some experts reads those and no others. There is no table
of ours by model.

Trade-off: the functions that apply the declaration to one name are not documented by transformers, but copying their
rules (scopes, groups, prefixes) would be another reading of the declaration, and wrong with the next release.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)

from tangram.layout import TensorPattern
from tangram.layout.syntax import Dim, Index
from tangram.models.building.operations import Factors, Symbol, Work, follow

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Some tensors of the module and the stored ones that they are made of: one statement of a mapping."""

    sources: tuple[str, ...]
    source: tuple[TensorPattern, ...]
    target: tuple[TensorPattern, ...]
    shapes: Mapping[str, Shape]
    """Of what it makes, by the module's name."""


@dataclass
class Conversion:
    """How a module is made of what a directory has, and what does not fit."""

    parts: list[Part] = field(default_factory=list[Part])
    missing: list[str] = field(default_factory=list[str])
    """Stored tensors that a part would need. A tensor of the module that nothing is stored for is not among them."""
    surplus: list[str] = field(default_factory=list[str])
    """Stored tensors that the module has no place for."""
    beside: list[str] = field(default_factory=list[str])
    """Stored tensors of modules that the class leaves out."""
    unlike: list[str] = field(default_factory=list[str])
    """Sentences about tensors that should have the same shape."""
    spoilt: set[str] = field(default_factory=set[str])
    """Tensors of the module that cannot be made for one of these reasons."""


@dataclass(frozen=True)
class _Stored:
    """A tensor of the directory on its way: its name, what renaming made of it, the number for the pattern's `*`."""

    name: str
    renamed: str
    number: int | None


@dataclass
class _Group:
    """The stored tensors of one tensor of the module, by pattern; no converter where they are only renamed."""

    converter: Any
    stored: dict[str, list[_Stored]] = field(default_factory=dict[str, list[_Stored]])

    @property
    def everything(self) -> list[_Stored]:
        return [one for some in self.stored.values() for one in some]


def read_conversion(
    model: nn.Module, stored: Mapping[str, Shape], transforms: Sequence[WeightTransform] | None = None
) -> Conversion:
    """How `model` is made of the tensors `stored`, by name with their shapes.

    The model may be cut by FSDP. `transforms` are what transformers declares for it, unless given; one that is no model
    of transformers has the names of its own state. Raises UserError for an operation that has no translation.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = Conversion()
    if transforms is None:
        transforms = _transforms(model) if isinstance(model, PreTrainedModel) else []
    groups = _grouped(model, transforms, stored, wanted)
    for target, group in groups.items():
        if target not in wanted:
            unneeded = {one.name: _unneeded(model, one.name, target) for one in group.everything}
            found.surplus += [name for name, is_so in unneeded.items() if not is_so]
            found.beside += [name for name, is_so in unneeded.items() if is_so and not _has_owner(model, target)]
        elif group.converter is None:
            for one in group.everything:
                source, made = TensorPattern((one.name,)), TensorPattern((target,))
                found.parts.append(Part((one.name,), (source,), (made,), {target: stored[one.name]}))
        else:
            _convert(found, target, group, stored, wanted, getattr(model, "config", None))
    return found


def keep_names(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Have `model.save_pretrained` write the structure of a directory with the tensors `stored`.

    Without, it writes the one that its class declares, which differs where the directory has newer or longer names.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    transforms = _transforms(model)
    groups = _grouped(model, transforms, dict.fromkeys(stored, ()), wanted)
    other = any(one.name != target for target, group in groups.items() for one in group.everything)
    cast("Any", model)._weight_conversions = [one for one in transforms if other and one.was_used()]


def put_together(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of a module's tensors that transformers puts together on loading, and writes one by one: experts."""
    ends = tuple(
        end
        for one in _transforms(model)
        if isinstance(one, WeightConverter) and one.source_patterns != one.target_patterns
        for end in one.target_patterns
    )
    return [name for name in names if name.endswith(ends)]


def _transforms(model: PreTrainedModel) -> list[WeightTransform]:
    """What transformers declares for a model. FSDP puts its name before classes', so a twin without it is asked."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        plain = next(c for c in cast("Iterable[Any]", type(model).__mro__) if not issubclass(c, FSDPModule))
        with torch.device("meta"):
            model = plain._from_config(copy.deepcopy(model.config))
    return get_model_conversion_mapping(model)


def _grouped(
    model: nn.Module, transforms: Sequence[WeightTransform], stored: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> dict[str, _Group]:
    """The stored tensors by the module's tensor that they go to, in transformers' order."""
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    rename = cast("Any", core_model_loading.rename_source_key)
    prefix = getattr(model, "base_model_prefix", "")
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed = apply_renamings(name, renamings)
        target, pattern = apply_converters(renamed, converters)
        target, _ = rename(target, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
        if target not in wanted and name in wanted:  # it has the module's name already
            target, pattern = name, None
        number = None if pattern is None else _number(pattern, renamed)
        converter = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(target, _Group(converter))
        if group.converter is not converter:  # both the stored structure and the module's: the second is one too many
            target = f"{target} (of {name})"
            group = groups.setdefault(target, _Group(converter))
        group.stored.setdefault(pattern or target, []).append(_Stored(name, renamed, number))
    return groups


def _number(pattern: str, renamed: str) -> int | None:
    """The number that stands for the pattern's `*`."""
    found = re.search(pattern.replace("*.", r"(?P<number>\d+)\."), renamed) if pattern.count("*.") == 1 else None
    return None if found is None else int(found["number"])


def _unneeded(model: nn.Module, name: str, target: str) -> bool:
    """Whether transformers says that a tensor in a directory means nothing, as the masks of old models."""
    buffers = {name for name, _ in model.named_buffers()}
    patterns = list(cast("Iterable[str]", getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    for last, pattern in ((r"rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        patterns += [pattern] if any(buffer.endswith(last) for buffer in buffers) else []
    return target in buffers or any(re.search(pattern, text) for pattern in patterns for text in (name, target))


def _has_owner(model: nn.Module, target: str) -> bool:
    """Whether a tensor would be of a module that is there, as the masks that old models kept in a layer."""
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return any(name == target.rpartition(".")[0] for name, _ in modules)


def _convert(
    found: Conversion, first: str, group: _Group, stored: Mapping[str, Shape], wanted: Mapping[str, Shape], config: Any
) -> None:
    """Add the part of one converter, or what keeps it from being one."""
    converter = group.converter
    patterns, targets = tuple(converter.source_patterns), tuple(converter.target_patterns)
    families = any(type(operation).__name__ == "MergeModulelist" for operation in converter.operations)
    numbers = [one.number for one in group.everything if one.number is not None]
    factors = Factors()
    factors.sizes["e"] = max(numbers, default=0) + 1
    work = Work(factors, {}, Dim("e"), targets, first, wanted, config)
    sources: list[tuple[_Stored, str, tuple[Dim, ...]]] = []
    for pattern in (p for p in patterns if p in group.stored):
        some = sorted(group.stored[pattern], key=lambda one: one.number or 0)
        shape, odd = _alike(some, stored)
        found.unlike += odd
        for one in some[:1] if families else some:
            label = f"s{len(sources)}"
            factors.label(label)
            dims = tuple(factors.fresh(n) for n in (shape if families else stored[one.name]))
            sources.append((one, label, dims))
            work.tensors.setdefault(pattern, []).append(Symbol(label, dims))
    if any(name.startswith(f"{one.name} ") for name in found.unlike for one in group.everything):
        found.spoilt.add(first)
        return
    follow(work, converter.operations)
    made = _made(work, first)
    if _incomplete(found, group, work, patterns, _count(work, made, wanted, converter, config)):
        found.spoilt.update(made)
        return
    unknown = [name for name in made if name not in wanted]
    if unknown or len(made) != len(targets):
        found.surplus += [one.name for one in group.everything]
        return
    index = (Index(factors.written(Dim("e"))),) if families else ()
    written = {label: tuple(map(factors.written, dims)) for _, label, dims in sources}
    results = [tuple(map(factors.written, symbol.dims)) for symbol in made.values()]
    marks = {leaf.name for dims in (*written.values(), *results) for dim in dims for leaf in dim.leaves}
    found.parts.append(
        Part(
            tuple(one.name for one in group.everything),
            tuple(
                TensorPattern(_family(one, *index), label if label in marks else None, written[label])
                for one, label, _ in sources
            ),
            tuple(
                TensorPattern((name,), f"t{i}" if f"t{i}" in marks else None, dims)
                for i, (name, dims) in enumerate(zip(made, results, strict=True))
            ),
            {name: factors.shape(symbol.dims) for name, symbol in made.items()},
        )
    )


def _alike(some: Sequence[_Stored], stored: Mapping[str, Shape]) -> tuple[Shape, list[str]]:
    """The shape that most tensors of a family have, and sentences about those that have another."""
    usual, _ = Counter(stored[one.name] for one in some).most_common(1)[0]
    odd = [
        f"{one.name} has the shape {list(stored[one.name])}, not {list(usual)}"
        for one in some
        if stored[one.name] != usual
    ]
    return usual, odd


def _made(work: Work, first: str) -> dict[str, Symbol]:
    """What came out, by the module's names, which transformers derives from the first."""
    made = {pattern: symbol for pattern, symbols in work.tensors.items() for symbol in symbols}
    if len(made) == 1:
        return {first: next(iter(made.values()))}
    before, _, after = first.partition(work.targets[0])
    return {f"{before}{pattern}{after}": symbol for pattern, symbol in made.items()}


def _count(work: Work, made: Mapping[str, Symbol], wanted: Mapping[str, Shape], converter: Any, config: Any) -> int:
    """How many tensors a family should have: by the module's shape, the configuration, or as many as there are."""
    for name, symbol in made.items():
        for dim, size in zip(symbol.dims, wanted.get(name, ()), strict=False):
            if work.factors.written(dim) == work.factors.written(Dim("e")):
                return size
    for operation in converter.operations:
        if attribute := getattr(operation, "num_shards_attribute", None):
            return int(getattr(config.get_text_config(), attribute))
    return work.factors.sizes["e"]


def _incomplete(found: Conversion, group: _Group, work: Work, patterns: Sequence[str], count: int) -> bool:
    """Note the members of the families that are missing or too many."""
    numbered = any(one.number is not None for one in group.everything)
    missing: list[str] = []
    surplus: list[str] = []
    for pattern in patterns:
        have = {one.number: one for one in group.stored.get(pattern, [])}
        if not numbered:
            missing += [] if have else [_sibling(group, pattern, None)]
            continue
        missing += [_sibling(group, pattern, number) for number in range(count) if number not in have]
        surplus += [one.name for number, one in have.items() if number is None or number >= count]
    found.missing += missing
    found.surplus += surplus
    return bool(missing or surplus)


def _sibling(group: _Group, pattern: str, number: int | None) -> str:
    """The name that a missing tensor would have, by one that is there."""
    known = pattern if pattern in group.stored else next(iter(group.stored))
    one = group.stored[known][0]
    name = one.name
    if number is not None and one.number is not None:
        before, after = _around(one)
        name = f"{before}{number}{after}"
    old, new = (re.sub(r"\\(.)", r"\1", p.rpartition("*")[2]) for p in (known, pattern))
    return name.removesuffix(old) + new if name.endswith(old) else f"{name}, but for {pattern}"


def _around(one: _Stored) -> tuple[str, str]:
    """A stored name before and after the number that counts it: the last that is the one in the renamed name."""
    found = [m for m in re.finditer(r"\d+", one.name) if int(m[0]) == one.number]
    if not found:
        raise RuntimeError(f"{one.name} has no number {one.number}, but {one.renamed}, what it is renamed to, has")
    return one.name[: found[-1].start()], one.name[found[-1].end() :]


def _family(one: _Stored, *index: Index) -> tuple[str | Index, ...]:
    """The name as a pattern, with an index where the names of the family count."""
    if not index:
        return (one.name,)
    before, after = _around(one)
    return (before, *index, after)
