"""Where nothing fits: what is proposed fits, and nothing smaller of its kind does."""

from dataclasses import replace

import pytest

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster, builtin
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.legality.trainer_support import RUNS
from tangram.planner.search import evaluate
from tangram.planner.search.query import LEAST_SEQUENCE, Answer, plan
from tangram.planner.search.strategy import Ask
from tangram.planner.space.grid import Array, Grid
from tangram.planner.space.optimisers_and_offload import OFFLOADS, OPTIMISERS, offloads_of, optimisers_of
from tangram.planner.space.setting import Setting

DENSE = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
CLUSTER = builtin("h100-8x8")
ASK = Ask(48 * 16384, 16384, framework="megatron-core", devices=1, most=1)
ADAMW = {one.name: one.nbytes for one in OPTIMISERS if one.name.startswith("adamw")}


def fits(ask: Ask) -> bool:
    """Whether anything does."""
    return bool(plan(DENSE, CLUSTER, ask, what_if=False).choices)


def changes(found: Answer) -> dict[str, int | str]:
    """By their kinds."""
    return {one.kind: one.to for one in found.would}


@pytest.mark.parametrize("memory", [7e9, 8e9, 9e9, 10e9])
def test_what_is_proposed_fits_and_nothing_smaller_does(memory: float) -> None:
    ask = replace(ASK, memory=memory)
    assert not fits(ask)
    found = changes(plan(DENSE, CLUSTER, ask))
    assert found
    if kind := str(found.get("optimiser", "")):
        assert fits(replace(ask, optimisers=optimisers_of(kind)))
        before = [name for name, nbytes in ADAMW.items() if ADAMW.get(kind, 0.0) < nbytes < ADAMW["adamw"]]
        assert not any(fits(replace(ask, optimisers=optimisers_of(name))) for name in before)
    names = list(OFFLOADS)
    at = names.index(str(found["offload"])) if "offload" in found else len(names)
    assert [fits(replace(ask, offloads=offloads_of(name))) for name in names[: at + 1]] == [
        *[False] * at, *[True] * (at < len(names))
    ]  # fmt: skip
    if sequence := int(found.get("sequence", 0)):
        assert fits(replace(ask, sequence=sequence))
        assert not fits(replace(ask, sequence=2 * sequence))
    else:
        assert not fits(replace(ask, sequence=LEAST_SEQUENCE))
    devices = int(found["devices"])
    assert fits(replace(ask, devices=devices))
    smaller = [2**power for power in range(7) if 2**power < devices] + list(range(8, devices, 8))
    assert not any(fits(replace(ask, devices=one)) for one in smaller)


def test_devices_are_whole_nodes_between_two_doublings() -> None:
    """Of nodes of four: nothing with fewer, but not as few as there are of them."""
    near, *far = CLUSTER.links
    cluster = replace(CLUSTER, links=(replace(near, ranks=4), *far))
    ask = replace(ASK, tokens=48 * 4096, sequence=4096, devices=4)
    for memory, enough in ((3.5e9, 48), (3.7e9, 24), (3.8e9, 16), (4e9, 12)):
        assert plan(DENSE, cluster, replace(ask, memory=memory)).enough == enough
        least = next(one for one in range(4, 64, 4) if plan_fits(cluster, replace(ask, memory=memory, devices=one)))
        assert least == enough


def test_that_nothing_fits_of_a_model_far_too_large_is_known_after_few_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mixture of 280B whose kinds of layers alternate, on 32 devices: the mean over ranks says it, and cuts into
    uneven stages are tried only of what may fit cut so."""
    mixture = decoder(Dims(46, 5120, 40, 150000, kv_heads=8, experts=256, per_token=8, expert_ffn=1536))
    (block, count), narrow = mixture.runs[0], Dims(1, 5120, 40, 150000, kv_heads=4, experts=256, expert_ffn=1536)
    other = decoder(replace(narrow, per_token=8)).runs[0][0]
    outline = replace(mixture, runs=tuple((other if at % 4 else block, 1) for at in range(count)), name="alternating")
    assert outline.numbers > 270e9
    evaluated, real = [0], evaluate.needs

    def counted(outline: Outline, g: Grid, setting: Setting) -> Array:
        evaluated[0] += len(g)
        return real(outline, g, setting)

    monkeypatch.setattr(evaluate, "needs", counted)
    ask = Ask(2**20, 4096, devices=32)
    assert not plan(outline, CLUSTER, ask, what_if=False).choices
    assert 0 < evaluated[0] < 40_000
    evaluated[0] = 0
    assert changes(plan(outline, CLUSTER, ask))
    assert evaluated[0] < 80_000


def plan_fits(cluster: Cluster, ask: Ask) -> bool:
    """On another cluster; not where there is no legal layout."""
    try:
        return bool(plan(DENSE, cluster, ask, what_if=False).choices)
    except UserError:
        return False


def test_what_runs_the_plan_knows_few_other_optimisers_and_not_the_host() -> None:
    found = changes(plan(DENSE, CLUSTER, replace(ASK, memory=9e9, able=RUNS)))
    assert found.get("optimiser") in (None, "adamw-8bit"), "the trainer has that one, and no other"
    assert "offload" not in found
    assert "devices" in found
