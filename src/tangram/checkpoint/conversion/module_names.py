"""The tensors of a directory as the module of transformers has them in memory, whose names an adapter's are.

    model.layers.0.mlp.experts.3.gate_proj.weight ...  ->  model.layers.0.mlp.experts.gate_up_proj, of 128 experts
    model.layers.0.block_sparse_moe.gate.weight        ->  model.layers.0.mlp.gate.weight

transformers says which (`tangram.models.building.conversions`). Only experts whose matrices are rows of the fused
one's are taken, in any order of parts; what else a model makes of its files stays by the files' names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.relayout import TensorSpec

if TYPE_CHECKING:
    from tangram.models.building.conversions import Part


@dataclass(frozen=True)
class ExpertRows:
    """A stored tensor: some rows of one expert's matrix in a tensor of all experts."""

    name: str
    expert: int
    first: int
    last: int


@dataclass(frozen=True)
class ModuleNames:
    """What a module has under other names than the files."""

    renamed: Mapping[str, str]
    """The stored name of a tensor, by the module's."""
    fused: Mapping[str, TensorSpec]
    """Tensors of all experts of a layer, [expert, row, column], by the module's names."""
    rows: Mapping[str, tuple[ExpertRows, ...]]
    """Of each of those what it is made of."""


def module_names(source: OpenCheckpoint, config: Mapping[str, Any]) -> ModuleNames:
    """What the module of a configuration calls otherwise, or has fused; nothing where transformers has no class."""
    from tangram.models.building.build import declared_on_meta  # loads transformers
    from tangram.models.building.conversions import read_conversion

    renamed: dict[str, str] = {}
    fused: dict[str, TensorSpec] = {}
    rows: dict[str, tuple[ExpertRows, ...]] = {}
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    # Adapters are of the class that reads the text alone, too (Qwen3.5's, whose directory has a tower).
    models = [declared_on_meta(config), declared_on_meta({**config, "architectures": None})]
    for model in {type(one): one for one in models if one is not None}.values():
        for part in read_conversion(model, shapes).parts:
            ((name, shape), *more) = part.shapes.items()
            made = () if more else _rows(part, shape, source.specs)
            if made:
                fused[name], rows[name] = TensorSpec(shape, source.specs[made[0].name].dtype), made
            elif len(part.sources) == 1 and not more and name not in source.specs:
                renamed[name] = part.sources[0]
    return ModuleNames(renamed, fused, rows)


def _rows(part: "Part", shape: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> tuple[ExpertRows, ...]:
    """Where each expert's tensors are in the fused one; nothing where they are no rows of it, one after the other."""
    (target,) = part.target
    if len(shape) != 3 or not all(len(one.index) == 1 and len(one.dims or ()) == 2 for one in part.source):
        return ()
    assert target.dims is not None
    _, middle, last = target.dims
    own = {str(one.dims[0]): one for one in part.source if one.dims and str(one.dims[1]) == str(last)}
    order = [term[-1].name for term in middle.terms] if middle.terms else [str(middle)]
    if sorted(order) != sorted(own) or len(own) != len(part.source):
        return ()
    names = [["".join(str(e) if one in own[key].index else str(one) for one in own[key].parts) for e in range(shape[0])]
             for key in order]  # fmt: skip
    ends = [0, *accumulate(specs[some[0]].shape[0] for some in names)]
    if ends[-1] != shape[1]:
        return ()
    return tuple(
        ExpertRows(name, expert, first, end)
        for some, (first, end) in zip(names, pairwise(ends), strict=True)
        for expert, name in enumerate(some)
    )
