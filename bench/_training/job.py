"""The job that all of it measures: the quickstart's model and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.schema.job import Job
from tangram.schema.plan import Plan

GLOBAL_BATCH, SEQUENCE = 8, 128


def tables(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job on the standard library's sources, whose tokens are kept in `folder`."""
    return {
        "version": 3,
        "model": {"preset": "qwen3-2m"},
        "data": {
            "sources": [{"path": "stdlib", "pattern": "*.py"}],
            "cache": str(folder),
            "sequence": SEQUENCE,
            "global_batch": GLOBAL_BATCH,
        },
        "optimiser": {"lr": 1e-3},
        "run": {"steps": 100, "device": "cpu"},
        **changes,
    }


def job(folder: Path) -> Job:
    """Without a strategy."""
    return Job.model_validate(tables(folder))


def fsdp(folder: Path, ranks: int, **changes: Any) -> Plan:
    """Parameters cut over all ranks."""
    found = tables(folder, **changes)
    found["data"]["micro_batch"] = GLOBAL_BATCH // ranks
    strategy = {"mesh": f"dp={ranks}", "axes": {"data": ["dp"]}, "layouts": {"parameters": {"*": "_/dp ..."}}}
    return Plan.model_validate({**found, **strategy})
