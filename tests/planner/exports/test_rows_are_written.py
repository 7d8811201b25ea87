"""What the search lays out for a project is what its file can say: no row of a ranking is refused."""

from itertools import islice

import numpy as np
import pytest

from tangram.errors import UserError
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.exports.numbers import Numbers
from tangram.planner.exports.targets import EXPORTS, written
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid
from tangram.planner.space.recompute import again_name
from tangram.planner.space.schedule_formulas import SCHEDULES
from tests.planner.exports.drawn import CLUSTER, MIXED

# 13 layers are uneven over most stages, 2 key-value heads fewer than TP ranks, 36 tokens no multiple of all ranks.
DENSE = decoder(Dims(13, 1024, 16, 32000, ffn=4096, kv_heads=2), "dense")
TIED = decoder(Dims(12, 1024, 16, 32000, ffn=4096, tied=True), "tied")
FURTHER = decoder(Dims(13, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512, predictors=1), "further")


def numbers(g: Grid, i: int) -> Numbers:
    at = {name: int(values[i]) for name, values in g.columns().items()}
    same = ("virtual", "tensor", "context", "expert", "expert_tensor", "data", "zero", "shard", "micro", "batch")
    return Numbers(
        **{name: at[name] for name in (*same, "pipeline", "sequence", "ulysses", "ahead", "behind")},
        schedule=SCHEDULES[at["schedule"]].name if at["pipeline"] > 1 else "",
        sequence_parallel=at["sequence_parallel"] > 0,
        again=again_name(at["recompute"], float(g.recomputed[i])),
        precision="bf16",
        inner=at["inner"] > 0,
    )


def rows(name: str, outline: Outline, sequence: int) -> list[Numbers]:
    """Some of each mesh of 16 devices."""
    target = EXPORTS[name]
    schedules = framework(target.framework).schedules
    asked = Request(16, 64, sequence, 4, schedules, target.able(outline), node=8)
    draw, found = np.random.default_rng(3), list[Numbers]()
    for mesh in meshes(outline, asked):
        g = of_mesh(outline, asked, mesh)
        found += [numbers(g, int(i)) for i in draw.choice(len(g), min(len(g), 6), replace=False)]
    return found


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("outline", [DENSE, MIXED, TIED, FURTHER], ids=lambda one: one.name)
@pytest.mark.parametrize("sequence", [4096, 36])
def test_all_that_is_searched_can_be_written(name: str, outline: Outline, sequence: int) -> None:
    reasons = dict[str, Numbers]()
    found = rows(name, outline, sequence)
    for one in found:
        try:
            written(name, one, outline, CLUSTER)
        except UserError as reason:
            reasons[str(reason)] = one
    assert found
    assert not reasons, next(islice(reasons.items(), 1))
