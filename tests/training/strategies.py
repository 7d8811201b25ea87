"""The strategies that this version trains, as plans: which mesh, what its axes are for, how everything lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tangram.schema.plan import Plan
from tests.training.small import SMALL_MODEL

MARKS = {"{*.q_proj.weight,*.up_proj.weight}": "out/tp in", "model.layers.*": "b s/tp h"}
"""Tensor and sequence parallelism; the vocabulary is odd and stays whole."""


GATHERED = {"{model.embed_tokens,model.layers.*,model.norm}": "b s/cp h"}
"""Context parallelism: keys and values are gathered."""
HEADS = {
    **GATHERED,
    "{*.q_proj,*.k_proj,*.v_proj}": "b s out/cp",
}
"""The sequence outside of attention, heads inside."""
EXPERTS = {
    "*.experts.{gate_up_proj,down_proj}": "experts/ep _ _",
    "{model.embed_tokens,model.layers.*,model.norm}": "b s/ep h",
}
"""Whole experts on a rank; what lies between them is computed in parts."""


def with_experts(data: str) -> dict[str, str]:
    """The layouts that follow from the marks of experts."""
    return {"*.experts.*": f"e/ep/{data} ...", "*": f"_/{data} ..."}


def derived(data: str) -> dict[str, str]:
    """Layouts of a decoder's parameters over tp, cut further over the data axis (empty: copies), as marks would do."""
    dp = f"/{data}" if data else ""
    return {
        "*.[qkv]_proj.weight": f"(heads/tp head_dim){dp} h",
        "*.[qkv]_proj.bias": f"(heads/tp head_dim){dp}",
        "*.o_proj.weight": f"h{dp} (heads/tp head_dim)",
        "*.gate_proj.weight": f"f/tp{dp} h",
        "*.gate_proj.bias": f"f/tp{dp}",
        "*.up_proj.weight": f"f/tp{dp} h",
        "*.up_proj.bias": f"f/tp{dp}",
        "*.down_proj.weight": f"h{dp} f/tp",
        "*": f"_{dp} ...",
    }


@dataclass(frozen=True)
class Strategy:
    """One way to lie over the ranks."""

    mesh: str
    data: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    """None: all follows from how parameters lie."""
    stages: tuple[tuple[str, ...], ...] = ()
    """Of the axis pp."""
    schedule: str = "1F1B"
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Of the other roles: context and expert."""

    @property
    def tables(self) -> dict[str, Any]:
        """The tables of a plan that say it."""
        return {
            "mesh": self.mesh,
            "axes": {
                "data": list(self.data),
                "tensor": list(self.tensor),
                "pipeline": ["pp"] if self.stages else [],
                **{role: list(axes) for role, axes in self.axes.items()},
            },
            **({"pipeline": {"schedule": self.schedule, "stages": self.stages}} if self.stages else {}),
            "layouts": {
                "parameters": dict(self.parameters),
                "marks": dict(self.marks),
                "sizes": {"head_dim": SMALL_MODEL["head_dim"]},
            },
        }


TWO_STAGES = (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head"))
FOUR_STAGES = (("model.embed_tokens",), ("model.layers.0",), ("model.layers.1",), ("model.norm", "lm_head"))
THREE_STAGES = (TWO_STAGES[0], *FOUR_STAGES[2:])
FIVE_STAGES = (*FOUR_STAGES[:3], ("model.norm",), ("lm_head",))
FSDP, COPIES = {"*": "_/dp ..."}, {"*": "..."}
STRATEGIES: Mapping[str, Strategy] = {
    "fsdp": Strategy("dp=4", ("dp",), (), FSDP),
    "copies": Strategy("dp=4", ("dp",), (), COPIES),
    "hsdp": Strategy("rep=2 dp=2", ("rep", "dp"), (), FSDP),
    "hsdp, shards far apart": Strategy("dp=2 rep=2", ("dp", "rep"), (), FSDP),
    "tensor": Strategy("tp=2 one=2", ("one",), ("tp",), derived("")),
    "tensor inside fsdp": Strategy("dp=2 tp=2", ("dp",), ("tp",), derived("dp")),
    "fsdp inside tensor": Strategy("tp=2 dp=2", ("dp",), ("tp",), derived("dp")),
}


def planned(base: Mapping[str, Any], strategy: str) -> Plan:
    """The plan of a strategy on the tables of a job."""
    return Plan.model_validate({**base, **STRATEGIES[strategy].tables})
