#!/bin/bash
# The same line on each of several machines that see one folder; HOST is the first of them:
#   HOST=node1 NODES=2 PROCESSES=8 docs/examples/torchrun.sh run.yaml
set -euo pipefail
exec torchrun \
  --nnodes "$NODES" --nproc_per_node "$PROCESSES" \
  --rdzv_id "${JOB:-rlstab}" --rdzv_backend c10d --rdzv_endpoint "$HOST:${PORT:-29500}" \
  -m rlstab train "$@"
