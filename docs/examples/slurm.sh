#!/bin/bash
# One process on each GPU of two nodes:  sbatch docs/examples/slurm.sh run.yaml
# The job may be cut off or requeued: it continues from the newest checkpoint.
#SBATCH --job-name=rlstab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@180
#SBATCH --requeue
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# one launcher on each node; when one of them fails, srun ends the others
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first:${PORT:-29500}" \
  -m rlstab train "$1" --resume
