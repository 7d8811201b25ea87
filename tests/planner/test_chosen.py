"""A chosen sharding as a plan: what each axis becomes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.models.capturing.graph import Graph
from tangram.planner.local.plan_from_sharding import plan_of_choice, roles_of
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.sharding.choose.choose import choose
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.marking.marks import Mark
from tests.sharding.choose.test_choose import H100, SMALL, least_bytes, tiny
from tests.training.small import small_tables

SAMPLES = "{model.embed_tokens,model.layers.*,model.norm,logits}: b/dp _ _"
TENSOR = "{*.q_proj.weight,*.up_proj.weight}: out/tp in"


def job(folder: Path) -> Job:
    tables = small_tables(folder)
    return Job.model_validate({key: value for key, value in tables.items() if key not in ("mesh", "axes", "layouts")})


def never(samples: int) -> Graph:
    raise AssertionError("no graph of fewer samples is needed")


def llama(**fields: int) -> nn.Module:
    return build_on_meta(AutoConfig.for_model("llama", **{**SMALL, **fields}))


def plan_of(folder: Path, chosen: Derived) -> Plan:
    return plan_of_choice(job(folder), chosen, 4, never, H100, llama())


def test_parts_over_the_axes_of_samples_are_fsdp(tmp_path: Path) -> None:
    graph, _ = tiny("llama")
    found = choose(graph, Mesh.parse("dp=2"), H100, memory_limit=1.05 * least_bytes(graph, "dp=2"), gap=0.1).plan
    assert roles_of(found).data == roles_of(found).shards == ("dp",)
    plan = plan_of(tmp_path, found)
    assert (plan.mesh, plan.axes.data, plan.axes.model, plan.layouts.marks) == ("dp=2", ("dp",), (), {})
    assert plan.layouts.parameters["*"] == "_/dp ..."
    assert plan.data.micro_batch == 2


def test_samples_alone_are_copies(tmp_path: Path) -> None:
    found = choose(tiny("llama")[0], Mesh.parse("dp=2"), H100, gap=0.1).plan
    assert plan_of(tmp_path, found).layouts.parameters == {"*": "..."}


def test_other_axes_are_cut_by_marks(tmp_path: Path) -> None:
    graph, _ = tiny("llama")
    found = derive(graph, [Mark.parse(SAMPLES), Mark.parse(TENSOR)], Mesh.parse("dp=2 tp=2"))
    roles = roles_of(found)
    assert (roles.data, roles.model, roles.shards) == (("dp",), ("tp",), ())
    asked: list[int] = []

    def captured(samples: int) -> Graph:
        asked.append(samples)
        return graph

    plan = plan_of_choice(job(tmp_path), found, 4, captured, H100, llama())
    assert asked == [2]
    assert plan.axes.tensor == ("tp",)
    assert plan.layout_of("model.layers.1.self_attn.o_proj.weight") == "_ _/tp"
    assert plan.layout_of("model.norm.weight") == "..."
    assert any("/tp" in layout for layout in plan.layouts.marks.values())
    assert not any("/dp" in layout for layout in plan.layouts.marks.values())


def test_what_the_jobs_model_does_not_allow_is_refused(tmp_path: Path) -> None:
    graph, _ = tiny("llama")
    found = derive(graph, [Mark.parse(SAMPLES), Mark.parse(TENSOR)], Mesh.parse("dp=2 tp=2"))

    def judged(model: nn.Module) -> Plan:
        return plan_of_choice(job(tmp_path), found, 4, lambda samples: graph, H100, model)

    with pytest.raises(UserError, match=r"the 1 attention heads \(num_attention_heads\) do not divide by tp=2"):
        judged(llama(num_attention_heads=1, num_key_value_heads=1))
    with pytest.raises(UserError, match=r"the choice is for a model with model.layers.1.*, and the job's model has no"):
        judged(llama(num_hidden_layers=1))
    with pytest.raises(UserError, match=r"the job's model has model.layers.2.*, and the choice is for a model without"):
        judged(llama(num_hidden_layers=3))


def test_an_axis_over_which_nothing_is_cut_is_refused() -> None:
    graph, _ = tiny("llama")
    found = derive(graph, [Mark.parse(SAMPLES)], Mesh.parse("dp=2"))
    (over,) = found.axes
    idle = {n: move._replace(label=None) for n, move in over.communication.items()}
    whole = replace(found, axes=(replace(over, communication=idle, used=dict.fromkeys(over.used, over.lying[0])),))
    with pytest.raises(UserError, match="over dp nothing is cut by the chosen plan"):
        roles_of(whole)
