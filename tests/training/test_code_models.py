"""Small models of code that is hard to run in parts, on ranks: values and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from tangram.errors import UserError
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.runtime.lower import lower
from tangram.training.run.launch import run_ranks
from tests.training.code_models import ATTRIBUTES, TABLES, Off, mesh_of, model_of, run_all
from tests.training.oracle.warm import once as run_once

BOUND = 1e-5
Results = Mapping[str, list[Off]]


def _run(table: str, world: int) -> Results:
    ranks = run_ranks(run_all, table, world=world, on_event=lambda _: None, device="cpu")
    return {name: [own[name] for own in ranks] for name in TABLES[table]}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Results]:
    return lambda: run_once(tmp_path_factory, "code-two", lambda _: _run("attributes", 2))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_tensors_that_attributes_give_are_moved_as_others_are(two: Callable[[], Results], name: str) -> None:
    assert [off for off in two()[name] if off.refused or max(off.values, off.gradients) > BOUND] == []


def test_an_operator_outside_of_any_call_is_refused_with_its_line() -> None:
    """Whatever the next function is that is not written down: a sentence, and no KeyError."""
    work = ATTRIBUTES["a Gram matrix"]
    model, x = model_of(work)
    graph = graph_of(model, {"x": x}, torch.float32)
    found = derive_model(graph, [Mark.parse(mark) for mark in work.marks], mesh_of(work, 2))
    folded = replace(found.folded, graph=replace(found.folded.graph, calls=()))
    with pytest.raises(UserError, match=r"code_models.py:\d+: aten.* runs in no function that the model's code calls"):
        lower(replace(found, folded=folded))
