"""The planner: what strategies are legal, what they need, and which one to take.

    from tangram.planner import Workload, plan

    print(plan("llama-3-8b", "h100-8x8", Workload(tokens="4M", sequence=8192)))

Names are imported when they are first used; transformers when a model is looked up by name.
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = [
    "CheckpointPlan",
    "ClusterPlan",
    "DataPlan",
    "Job",
    "ModelPlan",
    "OptimiserPlan",
    "Plan",
    "PrecisionPlan",
    "RunPlan",
    "SourcePlan",
    "Workload",
    "dumps",
    "plan",
    "read_plan",
]

if TYPE_CHECKING:
    from tangram.planner.report.cluster_plan import ClusterPlan, Workload, plan
    from tangram.schema.files import dumps
    from tangram.schema.files import load as read_plan
    from tangram.schema.job import (
        CheckpointPlan,
        DataPlan,
        Job,
        ModelPlan,
        PrecisionPlan,
        RunPlan,
        SourcePlan,
    )
    from tangram.schema.optimiser import OptimiserPlan
    from tangram.schema.plan import Plan
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.planner.report.cluster_plan": ["ClusterPlan", "Workload", "plan"],
            "tangram.schema.files": ["dumps", "load as read_plan"],
            "tangram.schema.job": [
                "CheckpointPlan",
                "DataPlan",
                "Job",
                "ModelPlan",
                "PrecisionPlan",
                "RunPlan",
                "SourcePlan",
            ],
            "tangram.schema.optimiser": ["OptimiserPlan"],
            "tangram.schema.plan": ["Plan"],
        },
    )
