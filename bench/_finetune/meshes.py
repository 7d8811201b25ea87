"""Adapters beside a base in 4 bits: bytes that are kept beside those that are counted, and losses on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from bench._finetune.job import ALONE, planned, write_job
from tangram.hardware.measuring.measure import Row
from tangram.models.lora import nf4
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.plan import Plan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import source_of
from tests.training.tuning_tasks import run_each

WAYS: Mapping[str, Strategy] = {
    "one": ALONE,
    "fsdp=2": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp=2": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp=2": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "fsdp=2 tp=2": Strategy("FSDP x TP", "dp=2 tp=2", ("dp",), (TENSOR,), "dp"),
}
STATES = 12
"""Bytes of a number that is trained: itself and AdamW's two moments."""


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures; `quick` takes fewer meshes and steps."""
    write_job(folder, large=False, count=64)
    more = {"lora.base": '"nf4"', "lora.dropout": "0.1", "data.sequence": "512", "run.steps": "4" if quick else "20"}
    losses: tuple[float, ...] = ()
    for name, way in WAYS.items():
        if quick and name not in ("one", "fsdp=2"):
            continue
        plan = planned(folder, way, 2, **more)
        found = run_each({("qlora", name): plan}, folder / "runs")["qlora", name][0]
        if name in ("one", "fsdp=2"):
            yield Row(f"QLoRA, {name}: bytes kept on a rank", "MB", found.kept_bytes / 1e6,
                      limit=counted_bytes(plan) / 1e6, target_ratio=1.05)  # fmt: skip
        losses = losses or found.losses
        apart = max(abs(own / one - 1) for own, one in zip(found.losses, losses, strict=True))
        if name != "one":
            yield Row(f"QLoRA, {name}: losses of {len(losses)} steps beside one process's", "", apart, target=1e-5)


def counted_bytes(plan: Plan) -> float:
    """0.516 for each number of the base, 12 for one that is trained, 4 for others."""
    counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
    trained = sum(p.numel() for p in counted.model.parameters() if p.requires_grad)
    packed = sum(p.size for p in counted.costs(2).parameters if p.quantised)
    plain = sum(p.numel() for p in counted.model.parameters()) - trained - packed
    return (nf4.BYTES * packed + 4 * plain + STATES * trained) / plan.ranks
