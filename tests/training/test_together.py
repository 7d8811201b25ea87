"""Everything at once is one process: every gradient and every loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tangram.training.run.launch import run_ranks
from tests.training.small import small_tables, write_text
from tests.training.together import Seen, alone, plan_of, run

BOUND = 1e-5


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Seen], Seen, bool]:
    text = write_text(tmp_path_factory.mktemp("text"))
    optimiser = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3, "clip_norm": math.inf}
    tables = small_tables(
        text,
        data={"global_batch": 8, "micro_batch": 2, "sequence": 16},
        optimiser=optimiser,
        run={"steps": 3, "recompute": ["model.layers.*"], "compile": request.param},
    )
    tables["model"] = {}
    plan = plan_of(tables)
    return run_ranks(run, plan, world=8, on_event=lambda _: None, device="cpu"), alone(plan), request.param


def test_every_gradient_is_that_of_one_process(seen: tuple[list[Seen], Seen, bool]) -> None:
    ranks, one, compiled = seen
    found: set[str] = set()
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=BOUND)
        assert "torch.int8" in rank.kinds
        assert (rank.graphs > 0) == compiled
        for ours, right in ((rank.first, one.first), (rank.last, one.last)):
            norms = {name: (np.linalg.norm(g - right[name]), np.linalg.norm(right[name])) for name, g in ours.items()}
            assert {name: float(off / size) for name, (off, size) in norms.items() if off > BOUND * size} == {}
        found |= rank.first.keys()
    assert found == one.first.keys()
    assert "model.layers.0.mlp.up_proj.down.weight" in found
    assert "model.layers.0.mlp.up_proj.weight" not in found
