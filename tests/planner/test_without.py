"""What is not to be used: names, what is left of the space, and the best of it beside trying everything."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.legality import exclusions as leaving
from tangram.planner.legality.engine import legal
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.legality.exclusions import AXES, without
from tangram.planner.search.branch_and_bound import search
from tangram.planner.search.query import plan, requested
from tangram.planner.search.strategy import Ask
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, joined
from tangram.planner.space.recompute import is_free
from tangram.planner.space.schedule_formulas import SCHEDULES, code
from tangram.planner.space.setting import Setting
from tests.planner.commands import refused

DENSE = decoder(Dims(6, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(
    Dims(4, 512, 8, 32000, ffn=2048, experts=8, per_token=2, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
SETTING = Setting(device("h100"), framework("megatron-core"))
NAMES = tuple(one.name for one in SCHEDULES)
FEW = Able(uneven=1)


def by_schedule(name: str, g: Grid) -> Any:
    """Whether stages go by it."""
    return (g.pipeline > 1) & (g.schedule == code(name))


USES: dict[str, Callable[[Grid], Any]] = {
    "data": lambda g: g.data > 1,
    "tensor": lambda g: g.tensor > 1,
    "context": lambda g: g.context > 1,
    "ring": lambda g: g.context > g.ulysses,
    "ulysses": lambda g: g.ulysses > 1,
    "pipeline": lambda g: g.pipeline > 1,
    "expert": lambda g: g.expert > 1,
    "zero1": lambda g: g.zero == 1,
    "zero2": lambda g: g.zero == 2,
    "zero3": lambda g: g.zero == 3,
    "hsdp": lambda g: (g.zero > 0) & (g.shard < g.data * g.context),
    "recompute": lambda g: g.recompute > 0,
    "recompute-blocks": lambda g: g.recompute == int(Group.BLOCK),
    "recompute-norms": lambda g: (g.recompute > 0) & (g.recompute != int(Group.BLOCK)),
    "uneven": lambda g: g.ahead + g.behind > 0,
    "inner": lambda g: (g.inner > 0) & (g.pipeline > 1),
    **{name: partial(by_schedule, name) for name in NAMES},
}
"""By words of their own, where a configuration uses an axis."""


def everything(outline: Outline, request: Request) -> Grid:
    """Every configuration with each share of blocks and each cut, laid out one by one."""
    ladder = request.able.ladder
    assert ladder is not None
    rows: list[Grid] = []
    for mesh in meshes(outline, request):
        g = of_mesh(outline, request, mesh)
        g = ladder.all_of(outline, g, is_free(g))
        for ahead in (0, 1):
            for behind in (0, 1):
                fewer = {"ahead": np.full(len(g), float(ahead)), "behind": np.full(len(g), float(behind))}
                rows.append(replace(g, **fewer).take(np.full(len(g), ahead + behind == 0) | (g.pipeline > 1)))
    g = joined(rows)
    return g.take(legal(outline, g))


@given(
    st.sampled_from([DENSE, MIXED]), st.sampled_from([2, 4, 8]), st.sampled_from([8, 24]), st.sampled_from([0, 2]),
    st.lists(st.sampled_from(sorted(AXES)), min_size=1, max_size=3, unique=True), st.floats(0.2, 4.0),
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_the_best_without_is_the_best_of_what_does_not_use_it(
    outline: Outline, devices: int, batch: int, node: int, names: list[str], room: float
) -> None:
    request = Request(devices, batch, 1024, schedules=NAMES, able=FEW, node=node)
    limit = 3e9 + room * 1e9
    every = everything(outline, request)
    for name in names:
        every = every.take(~USES[name](every))
    steps = np.asarray(seconds(outline, every, SETTING).step)
    fits = memory(outline, every, SETTING).device <= limit if len(every) else np.zeros(0, dtype=bool)
    able = without(FEW, names)
    less = replace(request, able=able, schedules=tuple(one for one in NAMES if one in able.schedules))
    if not len(every):
        with pytest.raises(UserError):
            search(outline, less, SETTING, limit, 1)
        return
    found = search(outline, less, SETTING, limit, 1)
    assert not any(USES[name](found.grid).any() for name in names)
    assert found.step.tolist() == pytest.approx([steps[fits].min()] if fits.any() else [])


def test_each_axis_is_in_the_space_and_is_left_out_by_its_name() -> None:
    assert set(USES) == set(AXES)
    for name, uses in USES.items():
        outline = MIXED if name == "expert" else DENSE
        request = Request(8, 24, 1024, schedules=NAMES, able=FEW, node=2)
        assert uses(everything(outline, request)).any(), name
        able = without(FEW, [name])
        less = replace(request, able=able, schedules=tuple(one for one in NAMES if one in able.schedules))
        left = everything(outline, less)
        uneven = USES["uneven"](left) if able.uneven == 0 else np.zeros(len(left), dtype=bool)  # laid out here
        assert not uses(left.take(~uneven)).any(), name


def test_an_axis_that_is_not_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: a name that does nothing, and what is found uses it."""
    cluster, ask = builtin("h100-8x8"), Ask(2**18, 2048, devices=8, most=1, without=("data",))
    found = plan(DENSE, cluster, ask, what_if=False).choices
    assert found[0].at["data"] == 1
    monkeypatch.setitem(leaving.AXES, "data", lambda able: able)
    assert plan(DENSE, cluster, ask, what_if=False).choices[0].at["data"] > 1


def test_names_are_taken_with_small_letters_and_unknown_ones_are_refused() -> None:
    assert "DualPipeV" not in without(Able(), ["dualpipev"]).schedules
    with pytest.raises(UserError, match='nothing of the search is called "recomput" \\(did you mean recompute'):
        without(Able(), ["recomput"])
    with pytest.raises(UserError, match='called "qqq": what may be left out is data, tensor, context'):
        without(Able(), ["qqq"])
    ask = Ask(2**18, 2048, without=("zero1", "zero2", "zero3"), able=Able(staged=(0, 1)))
    assert requested(builtin("h100-8x8"), ask).able.zero == (0,)
    assert requested(builtin("h100-8x8"), ask).able.staged == (0,)


def test_the_command_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--tokens-per-batch", "1M", "--top", "3")
    assert main(["plan", *said, "--without", "tensor, Pipeline,recompute", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ask"]["without"] == ["tensor", "Pipeline", "recompute"]
    assert {(one["at"]["tensor"], one["at"]["pipeline"], one["again"]) for one in found["choices"]} == {(1, 1, "none")}
    assert 'nothing of the search is called "contxt" (did you mean context?)' in refused(
        capsys, *said, "--without", "contxt"
    )
    assert "is of what is planned for a cluster" in refused(capsys, "job.toml", "--without", "context")
