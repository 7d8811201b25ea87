"""Rows of embeddings and heads for tokens that were added: the mean of the stored rows.

A mean starts a token in the midst of the others, so that the loss of text without it hardly changes. The rows are a
tensor like those that are stored, which a mapping puts behind them: so any layout reads its part of it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.checkpoint.formats.huggingface import HuggingFaceIndex
from tangram.errors import UserError
from tangram.layout import Mapping as MappingText
from tangram.layout import Region, Statement
from tangram.models.building.build import read_source
from tangram.models.building.conversions import Part
from tangram.relayout import Piece, TensorSpec
from tangram.schema.plan import Plan

BLOCK = 4096
"""Rows that are summed at a time."""


@dataclass(frozen=True)
class NewRows:
    """The rows of one tensor that are not stored. It is the place of their piece, too."""

    target: str
    """The model's name."""
    stored: Piece
    """The rows that are there."""
    spec: TensorSpec
    """Of the new ones."""

    @property
    def name(self) -> str:
        """Among the tensors of the directory."""
        return f"new_rows_of.{self.stored.tensor}"

    @property
    def piece(self) -> Piece:
        """Where they are."""
        return Piece(self, self.name, Region.full(self.spec.shape))

    def statement(self, stored: Sequence[str], options: Any) -> Statement:
        """The stored rows, under any of some names that mean the same, with the new ones behind."""
        rest = " h" if len(self.spec.shape) > 1 else ""
        shape = MappingText.parse(f"old: v{rest}, new: n{rest} -> all: (v + n){rest}").statements[0]
        (old,), (new,), (made,) = *shape.source, *shape.target
        alike = tuple(replace(old, parts=(name,)) for name in stored)
        own, target = replace(new, parts=(self.name,)), replace(made, parts=(self.target,))
        return Statement((alike, (own,)), ((target,),), options)

    def values(self, read: Callable[[Hashable, str], Tensor]) -> Tensor:
        """The mean of the stored rows, once for each new one."""
        rows = read(self.stored.place, self.stored.tensor)
        total = torch.zeros(rows.shape[1:], dtype=torch.float64)
        for first in range(0, len(rows), BLOCK):
            total += rows[first : first + BLOCK].double().sum(0)
        return (total / len(rows)).to(rows.dtype).expand(self.spec.shape).contiguous()


def wider(
    model: nn.Module, index: HuggingFaceIndex, parts: Sequence[Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NewRows]:
    """The tensors of embeddings and head of which the directory has fewer rows, by the model's names.

    `shapes`: of the whole tensors of the model. Raises UserError where the directory has more rows than the model.
    """
    found: dict[str, NewRows] = {}
    embeddings = vocabulary(model)
    for some in parts:
        name, stored = next(iter(some[0].shapes.items()))
        shape = shapes.get(name)
        if name not in embeddings or shape is None or stored == shape or stored[1:] != shape[1:]:
            continue
        source = some[0].sources[0]
        if stored[0] > shape[0]:
            raise UserError(
                f"{source} has {stored[0]} rows and the model {shape[0]}: a vocabulary can only grow, so set "
                f"model.change.vocab_size to {stored[0]} or more"
            )
        home = next(piece for piece in index.pieces if piece.tensor == source)
        spec = TensorSpec((shape[0] - stored[0], *shape[1:]), index.specs[source].dtype)
        found[name] = NewRows(name, home, spec)
    return found


def vocabulary(model: nn.Module) -> set[str]:
    """The names of what has a row for each token: of the input embeddings and of the head."""
    modules: list[Any] = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            modules.append(cast(Any, getattr(model, get, lambda: None))())
        except (NotImplementedError, AttributeError):  # some classes name none
            continue
    own = {id(one) for module in modules if isinstance(module, nn.Module) for one in module.parameters(recurse=False)}
    return {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in own}


def untrained_rows(model: nn.Module, plan: Plan, vocabulary_size: int) -> str | None:
    """A sentence where adapters leave the rows of tokens that the directory has not, of as many as the tokenizer makes,
    as they begin, all alike."""
    if plan.lora is None or (stored := rows_before(plan)) is None:
        return None
    own, names = dict(model.named_parameters()), vocabulary(model)  # of what is tied `own` has the first name alone
    frozen = [name for name in own if name in names and not own[name].requires_grad]
    if vocabulary_size <= stored or not frozen:
        return None
    modules = f"name {' and '.join(name.split('.')[-2] for name in frozen)} in lora.modules_to_save"
    tied = f"give {stored} to {vocabulary_size - 1} in lora.trainable_token_indices"
    return (
        f"new rows   of {vocabulary_size - stored} tokens in {' and '.join(frozen)} are not trained and stay alike: "
        f"{modules if names <= own.keys() else tied}, if the data have these tokens"
    )


def rows_before(plan: Plan) -> int | None:
    """How many rows the directory has, of a plan that may ask for more; None of others."""
    if plan.model.path is None or "vocab_size" not in plan.model.change:
        return None
    return cast(Any, read_source(None, plan.model.path, {}).config).get_text_config().vocab_size


def reading(read: Callable[[Hashable, str], Tensor]) -> Callable[[Hashable, str], Tensor]:
    """A reader that knows new rows as well; they are computed once."""
    known: dict[NewRows, Tensor] = {}

    def both(place: Hashable, name: str) -> Tensor:
        if not isinstance(place, NewRows):
            return read(place, name)
        if place not in known:
            known[place] = place.values(read)
        return known[place]

    return both
