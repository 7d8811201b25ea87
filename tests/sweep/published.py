"""Types of transformers as cases: over two ranks by what is known of a type, else by samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.layout import Mesh
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.marking.published import marks_known_for
from tangram.sharding.derive.of_model import fitting, graph_of, off_results
from tangram.training.mesh.modes import without_cache
from tangram.training.mesh.tensor_parallel import without_memory
from tests.sweep.inputs import BATCH, inputs_of
from tests.sweep.ranks import Case, Unfit
from tests.sweep.sizes import Way, build, ways


def cases(names: Sequence[str]) -> list[Case]:
    """Of these types of models."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return [Case(name, partial(_model, name), _inputs, _marks) for name in names]


def _model(kind: str) -> nn.Module:
    return build(_way(kind))


@cache
def _way(kind: str) -> Way:
    """The first in which one process runs it."""
    refusals: list[tuple[bool, str]] = []
    model = None
    try:
        for way in ways(kind):
            model = None
            try:
                model = build(way)
                inputs_of(model)
                return way
            except Exception as error:  # noqa: BLE001  whatever a model's class raises
                refusals.append((model is None, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    except Exception as error:  # noqa: BLE001  a configuration's own
        refusals.append((True, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    raise Unfit(min(refusals, key=lambda one: one[0])[1] if refusals else "no class")


def _inputs(model: nn.Module) -> Mapping[str, Any]:
    try:
        return inputs_of(copy.deepcopy(model))
    except ValueError as error:
        raise Unfit(str(error)) from None


def _marks(model: nn.Module, inputs: Mapping[str, Any]) -> list[Mark]:
    """Those that are known for it; where there are none, samples are cut."""
    known = marks_known_for(model)
    if known:
        graph = graph_of(without_memory(model), without_cache(inputs, model), torch.float32)
        known = off_results(graph, fitting(graph, known, Mesh.parse("tp=2")))
    return known or [samples_cut(model, inputs)]


def samples_cut(model: nn.Module, inputs: Mapping[str, Any]) -> Mark:
    """A mark on the first module that gives numbers of all samples."""
    firsts: list[str] = []
    model = copy.deepcopy(model).eval()  # a call in training would change what it counts
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(_seen, firsts, name))
    with torch.no_grad():
        model(**inputs)
    if not firsts:
        raise Unfit("no module of it gives numbers of all samples")
    return Mark.parse(f"{firsts[0]}: b/tp ...")


def _seen(firsts: list[str], name: str, _: nn.Module, __: Any, output: Any) -> None:
    first = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
    if first is not None and first.is_floating_point() and first.ndim > 1 and len(first) == BATCH:
        firsts.append(name)
