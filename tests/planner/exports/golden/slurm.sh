#!/bin/bash
#SBATCH --job-name=tangram-x
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

set -euo pipefail

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 1 --max-restarts 1000 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${names[0]}:29500" \
  -m tangram launch plan.toml --resume &
step=$! over=no code=0

# Its time is nearly over: srun passes the signal on, the state goes to the disk, and the job is queued again.
trap 'over=yes; kill -TERM "$step"' USR1
wait "$step" || code=$?
if [ "$over" = yes ]; then
  code=0
  wait "$step" || code=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
