"""Layer streaming of a job: what it needs beside it, and what it cannot be beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.schema.tables import Mistake

if TYPE_CHECKING:
    from tangram.schema.job import Job
    from tangram.schema.plan import Plan


def mistake_of_streaming(job: Job) -> Mistake | None:
    """What makes no sense together with `run.stream_layers`."""
    precision, on, off = job.precision, "run.stream_layers", "or leave out run.stream_layers"
    if not job.run.stream_layers:
        return None
    if not job.optimiser.in_backward:
        return Mistake(on, f"all gradients would be kept: set optimiser.in_backward = true, {off}")
    if not job.run.recompute:
        return Mistake(on, f'what a layer computes would keep its parameters: set run.recompute = "full", {off}')
    if job.run.compile:
        return Mistake("run.compile", f"compiled layers hold on to their parameters: set it to false, {off}")
    if job.lora is not None and job.lora.base != "parameters":
        return Mistake("lora.base", f"layers of a quantised base are not streamed: leave out lora.base, {off}")
    if job.has_reference or job.distill is not None:
        return Mistake(on, f"a reference or a teacher is not streamed: take another task, {off}")
    if not precision.parameters == precision.compute == (precision.accumulate or "float32"):
        types = "precision.parameters, compute and accumulate"
        return Mistake("precision", f"streamed parameters are computed with as they are: set {types} alike, {off}")
    if job.checkpoint.asynchronous:
        return Mistake(
            "checkpoint.asynchronous", f"it copies all parameters and states to memory: set it to false, {off}"
        )
    return None


def mistake_on_ranks(plan: Plan) -> Mistake | None:
    """The same of a plan."""
    if not plan.run.stream_layers or plan.ranks == 1:
        return None
    return Mistake("mesh", f"layers are streamed on one process, not on {plan.ranks}: leave out run.stream_layers")
