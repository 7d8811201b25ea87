"""An adapter that lies in a checkpoint beside its weights, as the state of a model of peft's has it.

    q_proj.base_layer.weight, q_proj.lora_A.default.weight ... -> q_proj.weight, and pairs by the names of peft's files

Only what peft's files have no names for is decided here: which tensors are the base's, and that one adapter is there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from tangram.checkpoint.conversion.adapter_files import PREFIX
from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.formats.common.model_part import only
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import named_without, renamed
from tangram.errors import UserError
from tangram.relayout import bind

PART = re.compile(r"(.+\.lora_(?:embedding_)?(?:[AB]|magnitude_vector))\.([^.]+)(\.weight)?")
FULL = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
BASE = re.compile(r"\.(?:base_layer|original_module)(?=\.)")


@dataclass(frozen=True)
class Adapted:
    """A checkpoint's base by the names of its model, and the adapter that was in it, by the names of peft's files."""

    source: OpenCheckpoint
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def without_adapter(source: OpenCheckpoint, read: bool) -> Adapted:
    """The base and the adapter of a checkpoint that has both; any other as it is. Without states of an optimiser.

    `read`: whether the adapter's values are needed. Raises UserError where several adapters are there.
    """
    lead = next(iter(source.specs), "").partition(PREFIX)[0] + PREFIX  # a program's own holder may stand before it
    if all(name.startswith(lead) for name in source.specs):
        source = named_without(source, lead)
    parts = {name: match for name in source.specs if (match := PART.fullmatch(name) or FULL.fullmatch(name))}
    if not parts:
        return Adapted(source)
    if len(adapters := sorted({match[2] for match in parts.values()})) > 1:
        raise UserError(f'"{source.path}" has {len(adapters)} adapters ({", ".join(adapters)}), and one can be merged')
    base = only(source, source.specs.keys() - parts.keys())
    base = renamed(base, {name: BASE.sub("", name) for name in base.specs})
    if not read:
        return Adapted(base)
    inner, base = only(source, parts.keys()), replace(base, beside=source.beside)
    filler = Filler(inner, bind(IDENTITY, inner.specs), inner.specs, 64 << 20)
    return Adapted(base, {f"{PREFIX}{match[1]}{_end(match)}": filler.values_of(name) for name, match in parts.items()})


def _end(match: re.Match[str]) -> str:
    return f".{match[3]}" if match.re is FULL else match[3] or ""
