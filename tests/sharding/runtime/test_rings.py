"""Where a plan has keys go round, every attention of the program can: also where gathering earlier would be cheaper."""

import pytest
import torch

from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.models.capturing.attention import by_tokens
from tangram.planner.local.derived_layouts import SEQUENCE
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.of_model import derive_model, graph_of
from tangram.sharding.derive.problem.states import cut
from tangram.sharding.derive.transitions import apart
from tangram.sharding.runtime.lower import lower
from tangram.sharding.runtime.program import Program
from tangram.sharding.runtime.ring_attention import KEYS, NAME, VALUES, RingMark
from tests.models.test_attention import MODELS, config_of

ROWS, LENGTH = 2, 16


def program_of(kind: str, mesh: str) -> Program:
    own = Mesh.parse(mesh)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    numbers = torch.zeros(ROWS, 1, LENGTH, 2, dtype=torch.int64, device="meta")
    given = {"input_ids": ids, "position_ids": ids, "attention_mask": numbers, "use_cache": False}
    graph = graph_of(build_on_meta(by_tokens(config_of(kind))), given, torch.float32)
    marks = [
        Mark.parse(SEQUENCE.replace("/AXIS", "".join(f"/{axis}" for axis in own.axes))),
        RingMark.over([*own.axes]),
    ]
    return lower(derive_model(graph, marks, own, left=True))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2 cq=4"])
def test_keys_are_gathered_where_attention_takes_them(kind: str, mesh: str) -> None:
    program = program_of(kind, mesh)
    calls = [action for own in program.actions.values() for key, action in own.items() if key[1] == NAME]
    assert len(calls) == 2  # of two layers
    for action in calls:
        assert not action.why
        for place in (KEYS, VALUES):
            *_, last = apart(action.takes[place])
            assert (last.axis, last.source, last.target.kind) == ("cp", cut(2), "several")
