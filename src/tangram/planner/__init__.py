"""The planner: the plan as an artefact, what is legal, what it needs, and which one to take.

    from tangram.planner import Workload, plan

    print(plan("llama-3-8b", "h100-8x8", Workload(tokens="4M", sequence=8192)))

Importing it needs pydantic; transformers is imported when a model is looked up by name.
"""

from tangram.planner.report.cluster_plan import ClusterPlan, Workload, plan
from tangram.schema.files import dumps
from tangram.schema.files import load as read_plan
from tangram.schema.job import CheckpointPlan, DataPlan, ModelPlan, OptimiserPlan, PrecisionPlan, RunPlan, SourcePlan
from tangram.schema.plan import Job, Plan

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
