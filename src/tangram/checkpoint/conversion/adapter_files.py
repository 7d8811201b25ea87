"""What the files of a peft adapter say: pairs of LoRA, magnitudes of DoRA, tensors in full, and scales.

Whatever else a configuration says is refused, also what this version has never heard of: a merge that leaves something
out gives weights that look right.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.conversion.adapter_config import Config, read_config, scale_of
from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.module_names import ExpertRows, ModuleNames, module_names
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.model_part import only
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.store import safetensors_header
from tangram.errors import UserError
from tangram.relayout import bind

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""What the input embeddings of a model are called, at the end of their names."""
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class LowRankPair:
    """A and B of a weight of two dims, or for each expert of three."""

    a: Tensor
    b: Tensor
    scale: float
    experts: int = 0
    """0: a weight of two dims."""
    turned: bool = False
    """The matrix (of each expert) has its inputs as rows."""
    magnitude: Tensor | None = None
    """Of each output, DoRA's length of its weights: [out]."""

    def factors(self, expert: int) -> tuple[Tensor, Tensor]:
        """Two matrices, as views, whose product is what is added."""
        if not self.experts:
            return (self.a.T, self.b.T) if self.turned else (self.b, self.a)
        a = self.a.view(self.experts, -1, self.a.shape[1])[expert]
        b = self.b.view(self.b.shape[0], -1, self.experts)[:, :, expert]
        return (a.T, b.T) if self.turned else (b, a)

    def same(self, other: "LowRankPair") -> bool:
        """Whether both add the same: an embedding and the head that is tied to it have A and B the other way round."""
        one, two = self.factors(0), other.factors(0)
        equal = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, two, strict=True))
        return equal and self.scale == other.scale and (self.magnitude is None) == (other.magnitude is None)


@dataclass(frozen=True)
class WeightChange:
    """What becomes of a tensor."""

    base: str
    """The tensor of the source that it is made of; its own name unless a tied head comes apart."""
    full: Tensor | None = None
    """In the base's place: a module that was trained in full, a bias, embeddings of more tokens."""
    pair: LowRankPair | None = None


@dataclass(frozen=True)
class Changes:
    """What an adapter makes of a source's tensors, by name; others stay."""

    tensors: Mapping[str, WeightChange]
    untied: bool = False
    """The head was the embeddings, and is no longer: as in a model that has the adapter beside its weights."""


def changes_of(source: OpenCheckpoint, folder: Path, maps: Maps, inner: Mapping[str, Tensor] | None = None) -> Changes:
    """What an adapter changes. `maps`: of its folder. `inner`: its tensors, where they are not in the folder's file.

    A head that is tied to the embeddings stays so where both are changed alike, and comes apart where they are not.
    Raises UserError for another kind of adapter, and for tensors that fit nothing in the source.
    """
    config = read_config(folder)
    pairs, full = _sorted(inner or _tensors(folder, maps), config, folder)
    embedding = _embedding(source) if HEAD not in source.specs or _tied(source) else None
    table: dict[str, WeightChange] = {}
    own = _names_in_memory(source, [f"{_owner(one)}.weight" for one in pairs] + [n for n in full if "_delta" not in n])
    stored = {name: source.specs[one] for name, one in own.renamed.items()}
    seen = replace(source, specs={**source.specs, **own.fused, **stored})
    words = {module: embedding or "" if f"{module}.weight" == HEAD else "" for module in pairs}
    places = {module: _places(seen, config, module, pairs[module], folder, words[module]) for module in pairs}
    ways = {turned for some in places.values() if len(some) == 1 for _, experts, turned in some if experts}
    for module, parts in pairs.items():
        tied = words[module]
        # Of square matrices of experts the shapes do not tell: peft has all experts of a model one way round.
        fits = [one for one in places[module] if len(ways) != 1 or not one[1] or one[2] in ways]
        name, pair = _fitted(seen, config, module, parts, folder, fits)
        apart = _apart(pair, own.rows[name]) if name in own.rows else {own.renamed.get(name, name): pair}
        for one, changed in apart.items():
            key = HEAD if tied else one
            if key in table:
                raise UserError(f'the adapter "{folder}" has two pairs that could be for {one}')
            table[key] = WeightChange(one, pair=changed)
        if "bias" in parts:
            bias = f"{_owner(module)}.bias"
            full[bias] = _values(source, own.renamed.get(bias, bias), folder) + pair.scale * parts["bias"]
    for name, value in _rows_replaced(source, config, full, folder, embedding).items():
        name = own.renamed.get(name, name)
        base = embedding if name == HEAD and embedding is not None else name
        if base not in source.specs:
            raise UserError(f'the adapter "{folder}" has {name}, and "{source.path}" has no such tensor')
        _fits(source.specs[base].shape, value, name, folder)
        table[name] = replace(table.get(name, WeightChange(base)), full=value)
    if not table:
        raise UserError(f'the adapter "{folder}" has no tensors')
    return Changes(table) if embedding is None else _of_tied(source, table, embedding)


def _values(source: OpenCheckpoint, name: str, folder: Path) -> Tensor:
    """All of a tensor of the source."""
    if name not in source.specs:
        raise UserError(f'the adapter "{folder}" adds to {name}, and "{source.path}" has no such tensor')
    one = only(source, {name})
    return Filler(one, bind(IDENTITY, one.specs), one.specs, 64 << 20).values_of(name).clone()


def _rows_replaced(
    source: OpenCheckpoint, config: Config, full: Mapping[str, Tensor], folder: Path, embedding: str | None
) -> dict[str, Tensor]:
    """Full tensors, and embeddings with the rows in their place that were trained (`trainable_token_indices`).

    A head that is tied to them (`embedding`) stays so, as peft has both change.
    """
    found: dict[str, Tensor] = {}
    left = {*config.tokens}
    for name, value in full.items():
        module = name.removesuffix(".token_adapter.trainable_tokens_delta")
        if module == name:
            found[name] = value
            continue
        ends = [end for end in config.tokens if not end or module == end or module.endswith(f".{end}")]
        rows = torch.tensor(config.tokens[max(ends, key=len)] if ends else ())
        left -= {*ends}
        whole = _values(source, f"{module}.weight", folder)
        if len(rows) != len(value) or value.shape[1:] != whole.shape[1:] or not bool((rows < len(whole)).all()):
            raise UserError(
                f'the adapter "{folder}" has {len(value)} rows for {module}, which do not fit its '
                f"trainable_token_indices and {list(whole.shape)}"
            )
        found[f"{module}.weight"] = whole.index_copy_(0, rows, value.to(whole.dtype))
        if f"{module}.weight" == embedding:
            found[HEAD] = found[f"{module}.weight"]
    if left:
        raise UserError(
            f'the adapter "{folder}" says trainable_token_indices, and has no rows of {min(left) or "them"}'
        )
    return found


def _names_in_memory(source: OpenCheckpoint, names: Sequence[str]) -> ModuleNames:
    """What the model calls otherwise than the source, where that has not all of some names."""
    modules = {name.rpartition(".")[0] for name in source.specs} | {HEAD.rpartition(".")[0]}
    if all(name.rpartition(".")[0] in modules for name in names):
        return ModuleNames({}, {}, {})
    return module_names(source, _fields(source))


def _owner(module: str) -> str:
    """A module without what peft puts around it, once for each of its parameters that are adapted."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _apart(pair: LowRankPair, rows: Sequence[ExpertRows]) -> dict[str, LowRankPair]:
    """What is added to each expert's tensors by a pair that is of all experts together, as views."""
    found: dict[str, LowRankPair] = {}
    for one in rows:
        left, right = pair.factors(one.expert)
        found[one.name] = LowRankPair(right, left[one.first : one.last], pair.scale)
    return found


def _of_tied(source: OpenCheckpoint, table: dict[str, WeightChange], embedding: str) -> Changes:
    """Whether a head stays tied to embeddings, and what becomes of it."""
    head, own = table.get(HEAD), table.get(embedding)
    if head is None and own is None:
        return Changes(table)
    if own is not None:
        rows = own.full is not None and len(own.full) != source.specs[embedding].shape[0]
        if (head is None and rows) or (head is not None and _alike(own, head)):  # more tokens are no other head
            others = {name: change for name, change in table.items() if name != HEAD}
            return Changes({**others, HEAD: own} if HEAD in source.specs else others)
    return Changes({HEAD: WeightChange(embedding), **table}, untied=True)


def _alike(a: WeightChange, b: WeightChange) -> bool:
    full = a.full is b.full if a.full is None or b.full is None else torch.equal(a.full, b.full)
    return full and (a.pair is b.pair if a.pair is None or b.pair is None else a.pair.same(b.pair))


def _fits(shape: tuple[int, ...], value: Tensor, name: str, folder: Path) -> None:
    """Embeddings and a head may have other numbers of rows: tokens were added. Raises UserError for another shape."""
    rows = name == HEAD or name.endswith(EMBEDDINGS)
    if tuple(value.shape) != shape and not (rows and value.ndim == 2 and value.shape[1] == shape[1]):
        raise UserError(
            f'the adapter "{folder}" has {name} as {list(value.shape)}, and in the checkpoint it is {list(shape)}'
        )


def _sorted(
    tensors: Mapping[str, Tensor], config: Config, folder: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Pairs (A, B, magnitude) by module, and full tensors by name. Raises UserError for what is neither."""
    pairs: dict[str, dict[str, Tensor]] = {}
    full: dict[str, Tensor] = {}
    for name, value in tensors.items():
        own = name.removeprefix(PREFIX)
        match = re.fullmatch(
            r"(.+)\.lora_(?:(embedding_)?([AB])(?:\.weight)?|(magnitude)_vector(?:\.weight)?|B\.(bias))", own
        )
        if own == name or (match is None and "lora_" in own):
            raise UserError(f'the adapter "{folder}" has {name}, which is no tensor of LoRA or DoRA')
        dims = {1} if match is not None and (match[4] or match[5]) else {2} if match is not None else {1, 2, 3}
        if str(value.dtype).removeprefix("torch.") not in FLOATS or value.ndim not in dims:
            raise UserError(
                f'the adapter "{folder}" has {name} as {value.dtype} {list(value.shape)}: no matrix of LoRA'
            )
        if not value.isfinite().all():
            raise UserError(
                f'the adapter "{folder}" has numbers in {name} that are not finite: its training went wrong'
            )
        if match is None:
            full[own.replace(".base_layer.", ".")] = value
        else:
            pairs.setdefault(match[1], {})[f"{match[2] or ''}{match[3] or match[4] or match[5]}"] = value
    for module, parts in pairs.items():
        if {"A", "B"} - parts.keys() and {"embedding_A", "embedding_B"} - parts.keys():
            raise UserError(f'the adapter "{folder}" has {module}.lora_{min(parts)} without the other of A and B')
        if ("magnitude" in parts) != config.magnitudes:
            what = "no magnitude, and use_dora is true" if config.magnitudes else "a magnitude, and use_dora is false"
            raise UserError(f'the adapter "{folder}" has for {module} {what}: it is not whole')
        if ("bias" in parts) != config.biases:
            what = "no bias, and lora_bias is true" if config.biases else "a bias, and lora_bias is false"
            raise UserError(f'the adapter "{folder}" has for {module} {what}: it is not whole')
    return pairs, full


def _tensors(folder: Path, maps: Maps) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = f" (its {PICKLED} is pickled and is not read)" if (folder / PICKLED).is_file() else ""
        raise UserError(f'the adapter "{folder}" has no {WEIGHTS}{pickled}')
    data, size = maps.data(WEIGHTS), file.stat().st_size
    length = safetensors_header.header_length(data[:8], size, str(file))
    slots, _ = safetensors_header.parse(data[: 8 + length], size, str(file))
    return {slot.name: maps.view(WEIGHTS, slot.offset, slot.dtype, slot.shape) for slot in slots}


def _places(
    source: OpenCheckpoint, config: Config, module: str, parts: Mapping[str, Tensor], folder: Path, tied: str
) -> list[tuple[str, int, bool]]:
    """Which weights A and B of a module fit, with their experts and whether turned. Raises UserError where none does.

    `tied`: the embeddings, where the module is a head that is tied to them.
    """
    embedding, a, b = _matrices(parts)
    plain = tied or f"{module}.weight"
    owner = _owner(module)
    ends = [f"{owner}.{one.rpartition('.')[2]}" for one in config.parameters]
    named = {n for n, one in zip(ends, config.parameters, strict=True) if n == one or n.endswith(f".{one}")}
    candidates = [plain] if plain in source.specs else sorted(named & source.specs.keys())
    if not candidates:
        apart = any(name.startswith(f"{owner}.0.") for name in source.specs)
        why = "; there the experts lie one by one, and the adapter is of all together" if apart and named else ""
        raise UserError(f'the adapter "{folder}" has {module}, and "{source.path}" no weight of it{why}')
    fits: list[tuple[str, int, bool]] = []
    for name in candidates:
        shape = source.specs[name].shape
        experts = shape[0] if len(shape) == 3 else 0
        if not all(shape) or len(shape) not in (2, 3) or a.shape[0] != b.shape[1] or a.shape[0] % (experts or 1):
            continue
        ways = [way for way in (False, True) if _shape(a, b, way) == shape[-2:]]
        if not experts and len(ways) > 1:  # a square matrix: the head of a model of transposed ones is none
            ways = [embedding or (config.transposed and module != "lm_head")]
        fits += [(name, experts, way) for way in ways if way in (True, embedding)]
    if not fits:
        shapes = ", ".join(f"{name} {list(source.specs[name].shape)}" for name in candidates)
        raise UserError(
            f'the adapter "{folder}" has A {list(a.shape)} and B {list(b.shape)} for {module}, and {shapes} is of '
            "another shape"
        )
    return fits


def _matrices(parts: Mapping[str, Tensor]) -> tuple[bool, Tensor, Tensor]:
    """Whether a pair is of embeddings, its A, and its B."""
    front = "embedding_" if "embedding_A" in parts else ""
    return bool(front), parts[f"{front}A"], parts[f"{front}B"]


def _fitted(
    source: OpenCheckpoint, config: Config, module: str, parts: Mapping[str, Tensor], folder: Path,
    fits: Sequence[tuple[str, int, bool]],
) -> tuple[str, LowRankPair]:  # fmt: skip
    """The weight that A and B of a module are for. Raises UserError where it is not plain which."""
    _, a, b = _matrices(parts)
    if len(fits) > 1:
        said = ", ".join(sorted({name for name, *_ in fits}))
        raise UserError(
            f'the shapes of {module} in the adapter "{folder}" do not tell how they fit {said}: merge by peft'
        )
    ((name, experts, turned),) = fits
    if source.specs[name].dtype not in FLOATS:
        raise UserError(f"{name} is {source.specs[name].dtype}, into which nothing is merged: add --dequantise")
    rank = a.shape[0] // (experts or 1)
    key = name if experts else module
    magnitude = parts.get("magnitude")
    if magnitude is not None and (experts or len(magnitude) != b.shape[0]):
        raise UserError(
            f'the adapter "{folder}" has a magnitude of {len(magnitude)} for {module}, which does not fit it'
        )
    return name, LowRankPair(a, b, scale_of(config, key, rank, folder), experts, turned, magnitude)


def _shape(a: Tensor, b: Tensor, turned: bool) -> tuple[int, int]:
    """Of what is added."""
    return (a.shape[1], b.shape[0]) if turned else (b.shape[0], a.shape[1])


def _tied(source: OpenCheckpoint) -> bool:
    """Whether the configuration says that the head is the embeddings."""
    return bool(_fields(source).get("tie_word_embeddings"))


def _fields(source: OpenCheckpoint) -> dict[str, Any]:
    """The configuration; nothing where there is none that can be read."""
    try:
        fields: Any = json.loads(source.small.get("config.json", b"{}"))
    except ValueError:
        return {}
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}


def _embedding(source: OpenCheckpoint) -> str | None:
    """The embeddings that a head without a tensor of its own is tied to; None where it is not plain which."""
    found = [name for name in source.specs if name.endswith(EMBEDDINGS)]
    return found[0] if len(found) == 1 else None
