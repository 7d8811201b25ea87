#!/bin/bash
#SBATCH --job-name=tangram-x
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log

set -euo pipefail

names=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${names[0]}:29500" \
  -m tangram train plan.toml
