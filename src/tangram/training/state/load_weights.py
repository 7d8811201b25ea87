"""Fill a model with the weights of a Hugging Face directory: every rank reads the bytes that it holds.

Which stored tensors make which of the model's is what transformers declares (see
`tangram.models.building.conversions`): most go by their names, experts that lie one by one are parts of a stack.
Values are rounded to the parameters' type where the directory has another one, and tied parameters are read once. What
does not fit is refused: a weight that nobody loads would train from noise unseen; so are values that are not finite.

Embeddings and head may have more rows than the directory (`model.change.vocab_size`, for tokens that were added): new
rows are the mean of those that are stored, in their type, on any layout.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.checkpoint.conversion.adapter_config import read_config
from tangram.checkpoint.formats import huggingface
from tangram.checkpoint.formats.huggingface import HuggingFaceIndex
from tangram.errors import UserError
from tangram.layout import Mapping as MappingText
from tangram.layout import Region, Statement
from tangram.models.building.build import build_on_meta
from tangram.models.building.conversions import Conversion, Part, read_conversion
from tangram.models.lora.adapter_files import NO_SHAPES, stored_adapters
from tangram.models.lora.adapters import initial_adapters
from tangram.relayout import CopyPlan, Piece, TensorSpec, bind, execute
from tangram.relayout import plan as plan_copies
from tangram.relayout.quantised.table import GROUP_CODECS
from tangram.schema.plan import Plan
from tangram.schema.tuning import base_of, of_adapters, packed
from tangram.training.mesh.local_parts import NO_PARTS, PlainParts, local
from tangram.training.mesh.world import World
from tangram.training.objective.step_guard import is_finite
from tangram.training.parallel.apply import fill
from tangram.training.parallel.quantised_base import QuantisedWeight, quantised_weights
from tangram.training.state import new_embedding_rows
from tangram.training.state.state import JobState, StateEntry, TensorPlaces, entries
from tangram.training.state.stored_codes import DEQUANTISE, StoredCodes, without_codes

HERE = "here"
ROUNDED = ("float16", "bfloat16", "float32", "float64")  # the types that mean the same number, more or less exactly


def load_pretrained(
    folder: Path, model: nn.Module, plan: Plan, world: World | None, plain: PlainParts = NO_PARTS
) -> None:
    """Fill the parameters and persistent buffers of `model`, cut as `plan` says, from the directory `folder`.

    The model has memory already; buffers that are not part of its state keep their values. Without a world the model is
    whole in this process. Not collective. Raises UserError for a directory that is not whole or has other tensors.
    """
    targets = _targets(model, plan, world, plain)
    opened = _opened(folder, model, plan, targets.keys())
    dense = {name: entry for name, entry in targets.items() if packed(name)[0] == name}
    if codes := next((name for name in dense if opened.stored_as_codes(name)), None):
        raise UserError(
            f'{codes} is quantised in "{folder}", and is none of the linear layers that lora.base keeps so: leave it '
            f"out of lora.base_skip and lora.modules_to_save, or {DEQUANTISE}"
        )
    for head in opened.heads.keys() & dense.keys():
        words = opened.heads[head]
        _copy(opened, {words: replace(dense.pop(head), name=words)}, {words})
    _copy(opened, dense, {base_of(name)[0] for name, _ in model.named_parameters()})
    for name, weight in quantised_weights(model).items():
        _copy_quantised(opened, model.get_submodule(name.rpartition(".")[0]), weight, targets)


def plan_pretrained(
    folder: Path, model: nn.Module, plan: Plan, world: World | None
) -> tuple[CopyPlan, dict[tuple[str, str], Tensor]]:
    """What `load_pretrained` will copy, and the memory that it goes to, by place and name. No values are read.

    Of a model whose base is not quantised.
    """
    targets = _targets(model, plan, world, NO_PARTS)
    return _planned(_opened(folder, model, plan, targets.keys()), targets)[:2]


@dataclass(frozen=True)
class _Opened:
    """A directory that fits a model."""

    folder: Path
    index: HuggingFaceIndex
    full_model: nn.Module
    """The model that the directory is of: without adapters, and with all stages."""
    parts: list[list[Part]]
    """How each tensor of it is made."""
    heads: Mapping[str, str]
    """Heads that begin as a copy of the embeddings, with the name of these."""
    codes: StoredCodes | None = None
    """What the directory has quantised."""

    def parts_of(self, target: str) -> list[Part]:
        """How a tensor of the model is made."""
        return [part for some in self.parts for part in some if target in part.shapes]

    def stored_as_codes(self, target: str) -> str | None:
        """A stored weight that a tensor of the model is made of, where that is quantised."""
        sources = (name for part in self.parts_of(target) for name in part.sources)
        return next((name for name in sources if self.codes and name in self.codes.groups), None)


def _targets(model: nn.Module, plan: Plan, world: World | None, plain: PlainParts) -> dict[str, StateEntry]:
    """The tensors to fill, by the names that a model without adapters has; of a quantised weight those that keep it, by
    their own names."""
    found: dict[str, StateEntry] = {}
    quantised = quantised_weights(model)
    beside = {f"{name}_{kind}" for name, weight in quantised.items() for kind in weight.base.buffers(weight.shape)}
    for entry in entries(JobState(model, None, plain=plain), TensorPlaces(plan, world)):
        name = entry.name.removeprefix("model.")
        if not of_adapters(name) and name not in beside:
            found[name if packed(name)[0] != name and quantised else base_of(name)[0]] = entry
    return found


def _opened(folder: Path, model: nn.Module, plan: Plan, targets: Collection[str]) -> _Opened:
    """Raises UserError for a directory that is not whole or has other tensors."""
    base = plan.lora.base if plan.lora is not None else "parameters"
    index, codes = without_codes(folder, huggingface.read_index(folder), base)
    # The directory is of the whole model, without adapters; of a stage only what it has is read.
    all_of_it = plan.pipeline is None and plan.lora is None
    whole = model if all_of_it else build_on_meta(cast(Any, model).config)
    first = _first_names(whole, targets if all_of_it else whole.state_dict())
    everything = targets if all_of_it else dict.fromkeys(first.values())  # of what is tied one name
    conversion = read_conversion(whole, {name: spec.shape for name, spec in index.specs.items()})
    parts = _tied(folder, conversion.parts, first)
    heads = _untied(parts, whole) if plan.model.change.get("tie_word_embeddings") is False else {}
    _refuse_others(folder, whole, conversion, parts, [name for name in everything if name not in heads])
    return _Opened(folder, index, whole, parts, heads, codes)


def _copy(opened: _Opened, targets: Mapping[str, StateEntry], parameters: Collection[str]) -> None:
    """Fill tensors. Raises UserError for parameters whose values are not finite."""
    copies, memory, sources = _planned(opened, targets)
    read = huggingface.mapped_reader(opened.folder)
    execute(copies, new_embedding_rows.reading(read), memory)
    for (_, name), own in memory.items():
        if name in parameters and not is_finite(own):
            raise UserError(_not_finite(opened.folder, name, sources[name], read))


def _copy_quantised(
    opened: _Opened, layer: nn.Module, weight: QuantisedWeight, targets: Mapping[str, StateEntry]
) -> None:
    """Fill what keeps a weight: with what is stored, or with what is made of numbers, of which all are read, since
    scales are kept by their mean."""

    def picked(kind: str, tensor: Tensor) -> Tensor:
        entry = targets[f"{weight.name}_{kind}"]
        across, last_dim = tensor.shape[-1] // entry.spec.shape[-1], tensor.dim() - 1
        for dim, some in enumerate(entry.region.boxes[0] if entry.region else ((),)):
            times = across if dim == last_dim else 1
            slices = [tensor.narrow(dim, times * first, times * (last - first)) for first, last in some]
            tensor = slices[0] if len(slices) == 1 else torch.cat(slices, dim) if slices else tensor[:0]
        return tensor

    shape, target = weight.shape, base_of(weight.name)[0]
    if opened.codes is not None:
        stored, parts = opened.stored_as_codes(target), opened.parts_of(target)
        if stored is None or not all(name in opened.codes.groups for part in parts for name in part.sources):
            raise UserError(
                f'{target} is no codes in "{opened.folder}", whose other weights are: name it in lora.base_skip'
            )
        as_it_is = parts[0].target[0].dims is None
        weight.put(layer, opened.codes.kept(stored) if as_it_is else opened.codes.joined(parts, target, shape), picked)
        return
    spec = TensorSpec(shape, str(weight.dtype).removeprefix("torch."))
    whole = torch.empty(shape, dtype=weight.dtype)
    _copy(opened, {target: StateEntry(target, spec, Region.full(shape), whole)}, {target})
    device = next(layer.buffers(recurse=False)).device
    weight.put(layer, weight.base.keep(whole.to(device), picked))


def _planned(
    opened: _Opened, targets: Mapping[str, StateEntry]
) -> tuple[CopyPlan, dict[tuple[str, str], Tensor], dict[str, list[Piece]]]:
    """What to copy, the memory that it goes to, and the pieces that each tensor is made of."""
    folder, index, whole = opened.folder, opened.index, opened.full_model
    parts = [some for some in opened.parts if any(name in targets for part in some for name in part.shapes)]
    wider = new_embedding_rows.wider(whole, index, parts, {name: entry.spec.shape for name, entry in targets.items()})
    statements = [_statement(folder, some, index.specs, targets, wider) for some in parts]
    used = {name for some in parts for part in some for name in part.sources}
    specs = {name: spec for name, spec in index.specs.items() if name in used}
    bound = bind(
        MappingText(tuple(statements)),
        specs | {new.name: new.spec for new in wider.values()},
        {name: entry.spec for name, entry in targets.items()},
    )
    wanted = [Piece(HERE, name, entry.region) for name, entry in targets.items() if entry.region]
    stored = [piece for piece in index.pieces if piece.tensor in used]
    copies = plan_copies(bound, [*stored, *(new.piece for new in wider.values())], wanted)
    makers = {name: set(part.sources) for some in parts for part in some for name in part.shapes}
    made = {name: [piece for piece in stored if piece.tensor in own] for name, own in makers.items()}
    return copies, {(HERE, name): entry.local for name, entry in targets.items() if entry.region}, made


@torch.no_grad()
def begin_adapters(model: nn.Module, plan: Plan, world: World | None, plain: PlainParts = NO_PARTS) -> None:
    """Give the adapters of a model whose weights are there the values that they begin with. Collective for DoRA, and
    for rows of embeddings."""
    lora = plan.lora
    assert lora is not None
    shapes = {name: part.shape for name, part in plain.items()}
    fill(model, initial_adapters(model, plan.seed, shapes), plain)
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            copied = model.get_parameter(name.replace(".modules_to_save.default.", ".original_module."))
            local(parameter).copy_(local(copied))
        elif ".lora_magnitude_vector." in name:
            module = name.partition(".lora_")[0]
            full, turned = _gathered(model, f"{module}.base_layer.weight", world, plain), model.get_submodule(module)
            lengths = cast(Tensor, torch.linalg.norm(full.T if cast(Any, turned).fan_in_fan_out else full, dim=1))
            fill(model, [(name, lengths)], plain)
        elif ".trainable_tokens_delta." in name:
            full = _gathered(model, f"{name.partition('.trainable_')[0]}.base_layer.weight", world, plain)
            fill(model, [(name, full[[*lora.trainable_token_indices]])], plain)
    if lora.start is not None:
        fill(model, begun_with(model, Path(lora.start), all_of_it=plan.pipeline is None, shapes=shapes), plain)


def begun_with(
    model: nn.Module, folder: Path, *, all_of_it: bool = True, shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES
) -> Iterator[tuple[str, Tensor]]:
    """The values of adapters as `stored_adapters` has them. Raises UserError for those that do not fit the model, other
    kinds, and those that changed the weights that they stand beside."""
    read_config(folder)
    return stored_adapters(model, folder, all_of_it=all_of_it, shapes=shapes)


def _gathered(model: nn.Module, name: str, world: World | None, plain: PlainParts) -> Tensor:
    """A parameter of which ranks have parts, on all of them."""
    weight = model.get_parameter(name)
    own = cast(Tensor, cast(Any, weight).full_tensor()) if isinstance(weight, DTensor) else weight
    part = plain.get(name)
    if part is None or world is None:
        return own
    full = own.new_zeros(part.shape)
    full.view(-1)[part.of(torch.arange(full.numel()).view(part.shape)).to(own.device)] = own
    for axis in part.axes:
        dist.all_reduce(full, group=world.over((axis,)).get_group())
    return full


def _not_finite(folder: Path, name: str, sources: Sequence[Piece], read: Callable[[Hashable, str], Tensor]) -> str:
    """A sentence with the stored tensors that are to blame, counted whole, whatever part of them this rank reads."""
    counts = {piece.tensor: int((~read(piece.place, piece.tensor).isfinite()).sum()) for piece in sources}
    bad = {stored: count for stored, count in counts.items() if count}
    if not bad:
        return f'{name} has values in "{folder}" that its type here cannot hold: choose float32 for parameters'
    stored, count = next(iter(bad.items()))
    more = f" (and some in {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    values = "value that is" if count == 1 else "values that are"
    return (
        f'{stored} in "{folder}" has {count:,} {values} not finite (NaN or infinity){more}: the file is '
        "damaged, or the training that wrote it had gone astray; take another copy or an earlier checkpoint"
    )


def _first_names(model: nn.Module, targets: Collection[str]) -> dict[str, str]:
    """The first name of each tensor, which has several where parameters are tied, by every name of it."""
    alike: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names[name] = alike.setdefault(id(tensor), name)
    return {name: first for name, first in names.items() if first in targets}


def _tied(folder: Path, parts: list[Part], first: Mapping[str, str]) -> list[list[Part]]:
    """The parts, with those together that make the same tensor: its copies, which must be equal."""
    groups: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        target = tuple(replace(made, parts=(first[made.name],)) for made in part.target)
        shapes = {first[name]: shape for name, shape in part.shapes.items()}
        names = tuple(made.name for made in target)
        groups.setdefault(names, []).append(replace(part, target=target, shapes=shapes))
    makers: dict[str, str] = {}
    for names, some in groups.items():
        for name in names:
            source = some[0].sources[0]
            if makers.setdefault(name, source) != source or (len(some) > 1 and some[0].target[0].dims is not None):
                raise UserError(
                    f'the weights in "{folder}" have {name} twice, in {makers[name]} and in {some[-1].sources[0]}'
                )
    order = {name: at for at, name in enumerate(first.values())}
    return sorted(groups.values(), key=lambda some: order[some[0].target[0].name])


def _untied(parts: list[list[Part]], model: nn.Module) -> dict[str, str]:
    """The head of a model that its job unties, where a directory has it as the embeddings alone, and their name."""
    made = {name for some in parts for part in some for name in part.shapes}
    words = {name for name in new_embedding_rows.vocabulary(model) if name.endswith(".weight")}
    return {head: stored for head in words - made for stored in words & made}


def _refuse_others(
    folder: Path, model: nn.Module, conversion: Conversion, parts: list[list[Part]], targets: Collection[str]
) -> None:
    """Refuse a directory that lacks a tensor, or has one that the model has no place for."""
    name = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before it
    made = {target for some in parts for part in some for target in part.shapes} | conversion.spoilt
    missing = [target for target in targets if target not in made] + conversion.missing
    surplus = conversion.surplus
    if missing or surplus:
        found = [f"it lacks {_first(missing)}"] if missing else []
        found += [f"it has {_first(surplus)} that the model has not"] if surplus else []
        raise UserError(f'the weights in "{folder}" do not fit a {name}: {"; ".join(found)}{_quantised(model)}')
    if conversion.unlike:
        raise UserError(f'the weights in "{folder}" do not fit a {name}: {conversion.unlike[0]}')


def _quantised(model: nn.Module) -> str:
    """What is the matter where the configuration says that the weights are quantised."""
    how: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if how is None:
        return ""
    method = cast("dict[str, Any]", how).get("quant_method") if isinstance(how, dict) else how.quant_method
    known = any(method in row.methods for row in GROUP_CODECS.values())
    what = DEQUANTISE if known else "let its own library dequantise them"
    return f" (by its configuration they are quantised, with {method}: {what})"


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _statement(
    folder: Path,
    parts: list[Part],
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, StateEntry],
    wider: Mapping[str, "new_embedding_rows.NewRows"],
) -> Statement:
    """How tensors are made: as a part says, or of several tensors that must be equal where it is tied."""
    first = parts[0]
    if new := wider.get(next(iter(first.shapes))):
        names = [name for part in parts for name in part.sources]
        dtype = targets[new.target].spec.dtype
        return new.statement(names, _cast(folder, names, specs, dtype))
    for part in parts:
        for name, shape in part.shapes.items():
            if shape != targets[name].spec.shape:
                many = f", of which {name} is made," if part.sources != (name,) and part.target[0].dims else ""
                has = "would give it" if many else "has"
                raise UserError(
                    f'the weights in "{folder}" do not fit the model: {part.sources[0]}{many} {has} the shape '
                    f"{list(shape)}, not {list(targets[name].spec.shape)}"
                )
    wanted = targets[next(iter(first.shapes))].spec.dtype
    return Statement(
        (tuple(pattern for part in parts for pattern in part.source),)
        if first.target[0].dims is None
        else tuple((pattern,) for pattern in first.source),
        tuple((pattern,) for pattern in first.target),
        _cast(folder, [name for part in parts for name in part.sources], specs, wanted),
    )


def _cast(
    folder: Path, sources: list[str], specs: Mapping[str, TensorSpec], target: str
) -> tuple[tuple[str, Any], ...]:
    """The option that rounds what is stored to the type of the parameter, where it has another one."""
    stored = specs[sources[0]].dtype
    for name in sources:
        dtype = specs[name].dtype
        if dtype != target and (dtype not in ROUNDED or target not in ROUNDED):
            raise UserError(
                f'{name} in "{folder}" is stored as {dtype}, not as {target}: where the weights are quantised, '
                f"{DEQUANTISE}"
            )
        if dtype != stored:
            raise UserError(
                f'{sources[0]} in "{folder}" is stored as {stored}, but {name}, which is a part of the same tensor, as '
                f"{dtype}: convert both to one type"
            )
    return (("cast", f"{stored}:{target}"),) if stored != target else ()
