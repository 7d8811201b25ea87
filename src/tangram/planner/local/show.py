"""A plan in words: what a person wants to know before running it, as rows of (what, how)."""

from math import inf

from tangram.layout import Mesh
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.schema.schedule_table import simulate
from tangram.schema.tuning import LoraPlan

Row = tuple[str, str]


def rows(plan: Job) -> list[Row]:
    """What is said of a plan or a job, in the order in which a person asks."""
    strategy = (
        _strategy(plan) if isinstance(plan, Plan) else [("strategy", "none: this is a job; `tangram plan` makes plans")]
    )
    return [*_model(plan), *strategy, *_batch(plan), *_numbers(plan), *_training(plan), *_checkpoints(plan)]


def _model(plan: Job) -> list[Row]:
    model = plan.model
    name = f'the preset "{model.preset}"' if model.preset else str(model.path)
    changes = ", ".join(f"{key} = {value}" for key, value in model.change.items())
    found = [("model", f"{name}, with {changes}" if changes else name)]
    if model.freeze:
        found.append(("not trained", ", ".join(model.freeze)))
    if (lora := plan.lora) is not None:
        beside = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        found.append(("adapters", f"of rank {lora.rank} beside {beside}; all else is frozen{_kept_in(lora)}"))
    if plan.task != "pretrain":
        by = plan.preference or plan.distill
        loss = f", by the loss {by.loss_type}" if by is not None else ""
        of = "documents" if plan.distill is not None and plan.distill.on == "text" else "answers"
        found.append(("task", f"{plan.task}: {of} are in the loss{loss}"))
    if plan.distill is not None:
        cache = plan.distill.cache
        found.append(("teacher", f"what {cache} has of it" if cache else str(plan.distill.teacher)))
    total = sum(source.weight for source in plan.data.sources)
    for source in plan.data.sources:
        where = f"{source.path} ({source.pattern})" if source.pattern else source.path
        found.append(("text", f"{where}, {source.weight / total:.0%} of the samples"))
    found.append(
        ("tokens", {"model": "of the model (bytes for a preset)"}.get(plan.data.tokenizer, plan.data.tokenizer))
    )
    return found


def _measured(plan: Job) -> str:
    data = plan.data
    return ", ".join(one.path for one in data.evaluation or ()) or f"{data.held_out:.0%} of the documents"


def _kept_in(lora: LoraPlan) -> str:
    return "" if lora.base == "parameters" else f", linear layers but the head in {lora.base}"


def _strategy(plan: Plan) -> list[Row]:
    found = [("mesh", f"{plan.mesh}: {plan.ranks} ranks")]
    cut = {
        axis for text in plan.layouts.parameters.values() for axis in text.replace(")", " ").replace("/", " ").split()
    }
    for axis, (size, _) in Mesh.parse(plan.mesh).axes.items():
        if axis in plan.axes.pipeline:
            what = "pipeline: each has stages of the model"
        elif axis in plan.axes.tensor:
            what = "tensor: cuts what modules compute and their weights"
        elif axis in plan.axes.context:
            what = "context: cuts the sequence"
        elif axis in plan.axes.expert:
            what = "expert: cuts a mixture's experts"
        elif axis in cut:
            what = "data: cuts the batch and the parameters (FSDP)"
        else:
            what = "data: cuts the batch, parameters are copies"
        found.append((f"axis {axis}", f"{size} ranks, {what}"))
    found += [(f"parameters {pattern}", text) for pattern, text in plan.layouts.parameters.items()]
    if plan.pipeline is not None:
        table = plan.actions()
        waits = f"ranks wait {simulate(table).bubble:.0%} of a step where stages are alike"
        found.append(("schedule", f"{plan.pipeline.schedule}, {table.stages} stages; {waits}"))
        for i, names in enumerate(plan.pipeline.stages):
            found.append((f"stage {i}", f"{', '.join(names)}; on rank {table.rank_of[i]} of {plan.axes.pipeline[0]}"))
    found += [(f"mark {pattern}", text) for pattern, text in plan.layouts.marks.items()]
    if plan.run.attention != "model":
        found.append(("attention", _attention(plan)))
    return found


def _attention(plan: Plan) -> str:
    if not plan.run.by_tokens:
        return "torch's scaled_dot_product_attention"
    over = f" over {', '.join(plan.axes.context)}" if plan.axes.context else ""
    keys = f"; keys go round{over}" if plan.context.keys == "ring" else ""
    order = "; tokens in a balanced order" if plan.context.order == "balanced" else ""
    mode = "" if plan.run.attention == "tokens" else f"{plan.run.attention}, "
    return f"{mode}by documents and places of tokens{keys}{order}"


def _batch(plan: Job) -> list[Row]:
    data = plan.data
    step = f"{data.global_batch} samples of {data.sequence} tokens = {data.global_batch * data.sequence:,} tokens"
    if not isinstance(plan, Plan):
        return [("step", step)]
    share = data.global_batch / plan.data_ranks
    even = (
        f"{share:g} samples a DP rank" if share == int(share) else f"up to {-(-data.global_batch // plan.data_ranks)}"
    )
    took = f"{plan.micro_steps} micro-batch{'es' if plan.micro_steps > 1 else ''} of {data.micro_batch}"
    full = plan.micro_steps * data.micro_batch * plan.data_ranks
    left = f"; {full - data.global_batch} places of the last stay empty" if full != data.global_batch else ""
    return [("step", step), ("of which", f"{even} of {plan.data_ranks}, as {took}{left}")]


def _numbers(plan: Job) -> list[Row]:
    masters = plan.precision.masters
    but = f", but for {' and '.join(plan.run.recompute_keep)}" if plan.run.recompute_keep else ""
    added = f", {plan.accumulates} over micro-batches" if isinstance(plan, Plan) and plan.micro_steps > 1 else ""
    found = [
        ("parameters in", f"{plan.precision.parameters}; updated, with the optimiser's states, in {masters}"),
        ("computed in", plan.precision.compute),
        ("gradients summed in", f"{plan.precision.reduce} over ranks{added}"),
        ("recomputed", ", ".join(plan.run.recompute) + but or "nothing: every activation is kept"),
    ]
    return [*found, ("compiled", "each block")] if plan.run.compile else found


def _training(plan: Job) -> list[Row]:
    optimiser, run = plan.optimiser, plan.run
    warm = (
        f"{optimiser.warmup_steps} steps up to {optimiser.lr:g}, " if optimiser.warmup_steps else f"{optimiser.lr:g}, "
    )
    after = {
        "cosine": f"then half a cosine down to {optimiser.lr * optimiser.final_lr:g}",
        "linear": f"then linear down to {optimiser.lr * optimiser.final_lr:g} after the last",
        "wsd": f"constant, then {optimiser.decay_steps} steps down to {optimiser.lr * optimiser.final_lr:g}",
        "constant": "constant",
    }[optimiser.schedule]
    decay = f", weight decay {optimiser.weight_decay:g}" if optimiser.weight_decay else ""
    limit = f", or {run.max_seconds:g} s if that is sooner" if run.max_seconds != inf else ""
    often = f"every {run.evaluate_every} steps and at the end" if run.evaluate_every else "at the end"
    return [
        ("optimiser", f"{optimiser.words}{decay}, norm at most {optimiser.clip_norm:g}"),
        ("learning rate", f"{warm}{after}"),
        ("length", f"{run.steps} steps{limit}; {run.steps * plan.data.global_batch * plan.data.sequence:,} tokens"),
        (
            "held-out loss",
            f"{often}, on {plan.data.held_out_samples} samples of {_measured(plan)}",
        ),
    ]


def _checkpoints(plan: Job) -> list[Row]:
    policy = plan.checkpoint
    often = f"every {policy.every_steps} steps and at the end" if policy.every_steps else "at the end"
    how = ", while training goes on" if policy.asynchronous and policy.every_steps else ""
    return [("checkpoints", f"{often}{how}; the newest {policy.keep} are kept"), ("seed", str(plan.seed))]
