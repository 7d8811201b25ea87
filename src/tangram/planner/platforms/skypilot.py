"""A task for SkyPilot, which finds the machines in clouds, Kubernetes or Slurm and starts it on all nodes."""

from __future__ import annotations

from typing import Any

from tangram.errors import UserError
from tangram.planner.platforms.jobs import PORT, Job, written

ACCELERATORS = {
    "a100": "A100-80GB", "a100-40": "A100", "gb200": "GB200", "gb300": "GB300", "b200": "B200", "b300": "B300",
    "h100": "H100", "h200": "H200", "h20": "H20", "v100": "V100", "l4": "L4", "l40s": "L40S", "a10": "A10",
    "a10g": "A10G", "t4": "T4", "mi300x": "MI300X",
}  # fmt: skip
"""What SkyPilot's catalogues call devices, by their names in `devices.toml`."""


def skypilot(job: Job) -> str:
    """The YAML for `sky launch`. Raises UserError for a device that SkyPilot's catalogues do not name."""
    if job.device not in ACCELERATORS:
        raise UserError(f"SkyPilot has no name for {job.device}: it has {', '.join(ACCELERATORS)}")
    resources: dict[str, Any] = {"accelerators": f"{ACCELERATORS[job.device]}:{job.devices}"}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    run = (
        "first=${SKYPILOT_NODE_IPS%%$'\\n'*}\n"
        "torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE "
        f"--node-rank $SKYPILOT_NODE_RANK --master-addr $first --master-port {PORT} {job.run}\n"
    )
    task = {"name": job.name, "num_nodes": job.nodes, "resources": resources, "run": run}
    return written(task)
