"""Tensor parallelism of a plan by derivation: layouts of all parameters, and what moves, from a few marks.

Marks come with Tangram for some types of model, else from the model's own `tp_plan` and `ep_plan` (transformers), of
which only what they say of weights is taken; what they would do with activations follows. Names that are not in the
model at hand, or that an axis would cut unevenly, are left out, so a vocabulary of odd size stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.graph import Graph
from tangram.models.named import token_inputs
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import moved
from tangram.sharding.derive.marks import Mark, marks_of
from tangram.sharding.derive.of_model import States, derive_whole, fitting, graph_of, parameter_states
from tangram.sharding.derive.published import published


@dataclass(frozen=True)
class Moves:
    """Collectives of one kind that a rank takes part in, in the forward and the backward of one sample."""

    nbytes: float
    """What a rank receives, each time."""
    times: int


@dataclass(frozen=True)
class TensorLayouts:
    """What a plan says of a tensor axis."""

    parameters: Mapping[str, str]
    """By name pattern; those that are whole are not named."""
    marks: Mapping[str, str]
    vocabulary: bool
    """Whether the vocabulary is cut, too."""
    moves: tuple[Moves, ...]


def tensor_layouts(
    config: PreTrainedConfig, model: nn.Module, graph: Graph, axis: tuple[str, int], shard: str | None
) -> TensorLayouts | str | None:
    """The layouts over an axis (name and size) and, of all parameters, over the data axis `shard`.

    `graph`: of one sample. None: no marks are known for such a model. A sentence: they do not fit.
    """
    marks = known_marks(config, model)
    if not marks:
        return None
    mesh = Mesh.parse(f"{axis[0]}={axis[1]}")
    marks = fitting(graph, [_over(mark, axis[0]) for mark in marks], mesh)
    try:
        found = derive_whole(graph, marks, mesh)
    except UserError as error:
        return " ".join(str(error).split())
    lies = parameter_states(found)
    if not any(state.kind == "cut" for states in lies.values() for state in states.values()):
        return f"the marks of a {config.model_type} model cut nothing of this one into {axis[1]} even parts"
    if split := next((name for name, own in lies.items() if any(s.outer > 1 for s in own.values())), None):
        return f"{split} would be cut in several blocks, which this version cannot train"
    shapes = {value.name: value.shape for _, value in graph.of_kind("parameter")}
    parameters = dict(_patterns({name: _text(len(shapes[name]), own, shard) for name, own in lies.items()}))
    ends = [name for name, own in lies.items() if "embed" in name and any(s.kind == "cut" for s in own.values())]
    return TensorLayouts(parameters, {m.pattern: str(m.layout) for m in marks}, bool(ends), tuple(_moves(found)))


def sample_graph(model: nn.Module, sequence: int, dtype: torch.dtype) -> Graph:
    """A language model on one sample."""
    return graph_of(model, token_inputs(1, sequence), dtype)


def known_marks(config: PreTrainedConfig, model: nn.Module) -> list[Mark]:
    """The marks that come with Tangram, else those of transformers' plans of the model, experts whole on a rank."""
    return marks_of(str(config.model_type)) or published(model, "tp", "tp")


def _over(mark: Mark, axis: str) -> Mark:
    """A mark over `tp`, over another axis."""
    text = re.sub(r"/tp\b", f"/{axis}", str(mark.layout))
    return Mark.parse(f"{mark.pattern}: {text}")


def _text(ndim: int, states: States, shard: str | None) -> str | None:
    """A layout as a plan has it; None for a parameter that no tensor axis cuts."""
    cuts = {state.dim: axis for axis, state in states.items() if state.kind == "cut"}
    if not cuts:
        return None
    dims = [f"_/{cuts[d]}" if d in cuts else "_" for d in range(ndim)]
    dims[0] += f"/{shard}" if shard else ""
    return " ".join(dims)


def _patterns(texts: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Layouts by pattern: one for all layers where they lie alike."""
    groups: dict[str, dict[str, str | None]] = {}
    for name, text in texts.items():
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = text
    for pattern, own in groups.items():
        found = {*own.values()}
        one = found.pop()
        if not found:
            yield from [(pattern, one)] if one is not None else []
        else:
            yield from ((name, text) for name, text in own.items() if text is not None)


def _moves(found: Derived) -> Iterator[Moves]:
    for one in moved(found):
        name = found.folded.value(one.value)
        if name.kind == "parameter":
            continue  # once a step
        for nbytes in (one.forward_bytes, one.backward_bytes):
            if nbytes:
                yield Moves(nbytes, one.times)
