"""A batch script for Slurm: one task a node, which starts the ranks of its devices by torchrun."""

from __future__ import annotations

from tangram.planner.platforms.jobs import PORT, Job


def slurm(job: Job) -> str:
    """The script for `sbatch`."""
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.devices}
#SBATCH --exclusive
#SBATCH --output=%x-%j.log

set -euo pipefail

names=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
srun --kill-on-bad-exit=1 torchrun \\
  --nnodes "$SLURM_NNODES" --nproc-per-node {job.devices} \\
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${{names[0]}}:{PORT}" \\
  {job.run}
"""
