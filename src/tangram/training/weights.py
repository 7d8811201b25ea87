"""Fill a model with the weights of a Hugging Face directory: every rank reads the bytes that it holds.

Tensors go by their names. Values are rounded to the parameters' type where the directory has another one, and tied
parameters are read once. What does not fit is refused: a weight that nobody loads would train from noise unseen.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from tangram.checkpoint.formats import huggingface
from tangram.errors import UserError
from tangram.layout import Mapping as MappingText
from tangram.layout import Statement, TensorPattern
from tangram.planner.plan import Plan
from tangram.relayout import Piece, TensorSpec, bind, execute
from tangram.relayout import plan as plan_copies
from tangram.training.state import Entry, JobState, Places, entries
from tangram.training.world import World

HERE = "here"
ROUNDED = ("float16", "bfloat16", "float32", "float64")  # the types that mean the same number, more or less exactly


def load_pretrained(folder: Path, model: nn.Module, plan: Plan, world: World | None) -> None:
    """Fill the parameters and persistent buffers of `model`, cut as `plan` says, from the directory `folder`.

    The model has memory already; buffers that are not part of its state keep their values. Without a world the model is
    whole in this process. Not collective. Raises UserError for a directory that is not whole or has other tensors.
    """
    index = huggingface.read_index(folder)
    targets = {
        entry.name.removeprefix("model."): entry for entry in entries(JobState(model, None), Places(plan, world))
    }
    names = _names(model, targets)
    stored = _translated(model, index.specs, {name for alike in names.values() for name in alike})
    _refuse_others(folder, model, names, stored)
    sources = {name: [stored[alias] for alias in alike if alias in stored] for name, alike in names.items()}
    statements = [_statement(folder, sources[name], index.specs, name, entry) for name, entry in targets.items()]
    used = {name for some in sources.values() for name in some}
    bound = bind(
        MappingText(tuple(statements)),
        {name: spec for name, spec in index.specs.items() if name in used},
        {name: entry.spec for name, entry in targets.items()},
    )
    wanted = [Piece(HERE, name, entry.region) for name, entry in targets.items() if entry.region]
    copies = plan_copies(bound, [piece for piece in index.pieces if piece.tensor in used], wanted)
    execute(
        copies,
        huggingface.mapped_reader(folder),
        {(HERE, name): entry.local for name, entry in targets.items() if entry.region},
    )


def _names(model: nn.Module, targets: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Every name of each tensor, which are several where parameters are tied; by its first."""
    alike: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        alike.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in alike.values() if group[0] in targets}


def _translated(model: nn.Module, specs: Mapping[str, TensorSpec], names: set[str]) -> dict[str, str]:
    """The directory's names by the model's: they are the same, but for the prefix of a model without its head."""
    ways = [{name: name for name in specs}]
    if base := getattr(model, "base_model_prefix", ""):
        ways += [{f"{base}.{name}": name for name in specs}, {name.removeprefix(f"{base}."): name for name in specs}]
    return max(ways, key=lambda way: len(names & way.keys()))  # the first of those that fit as well


def _refuse_others(folder: Path, model: nn.Module, names: Mapping[str, list[str]], stored: Mapping[str, str]) -> None:
    """Refuse a directory that lacks a tensor, or has one that the model has no place for."""
    missing = [name for name, alike in names.items() if not any(alias in stored for alias in alike)]
    known = {alias for alike in names.values() for alias in alike} | dict(model.named_buffers()).keys()
    surplus = [name for name in stored if name not in known and not _unneeded(model, name)]
    if not missing and not surplus:
        return
    parts = [f"it lacks {_first(missing)}"] if missing else []
    parts += [f"it has {_first(surplus)} that the model has not"] if surplus else []
    fused = any("experts" in name for name in (*missing, *surplus))
    why = " (weights of experts that transformers fuses on loading are not supported yet)" if fused else ""
    name = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before it
    raise UserError(f'the weights in "{folder}" do not fit a {name}: {"; ".join(parts)}{why}')


def _unneeded(model: nn.Module, name: str) -> bool:
    """Whether the model's class says that this name in a directory means nothing, as the masks of old models."""
    patterns = cast(Iterable[str], getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return any(re.search(pattern, name) for pattern in patterns)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _statement(folder: Path, sources: list[str], specs: Mapping[str, TensorSpec], name: str, entry: Entry) -> Statement:
    """How one tensor is made: of the tensor of its name, or of several that must be equal where it is tied."""
    spec = specs[sources[0]]
    if spec.shape != entry.spec.shape:
        raise UserError(
            f'the weights in "{folder}" do not fit the model: {sources[0]} has the shape {list(spec.shape)}, '
            f"not {list(entry.spec.shape)}"
        )
    options: tuple[tuple[str, Any], ...] = ()
    if spec.dtype != entry.spec.dtype:
        if spec.dtype not in ROUNDED or entry.spec.dtype not in ROUNDED:
            raise UserError(
                f'{sources[0]} in "{folder}" is stored as {spec.dtype}, not as {entry.spec.dtype}: weights that are '
                "quantised must be converted before"
            )
        options = (("cast", f"{spec.dtype}:{entry.spec.dtype}"),)
    tied = tuple(TensorPattern((source,)) for source in sources)
    return Statement((tied,), ((TensorPattern((name,)),),), options)
