#!/usr/bin/env bash
# Several machines. Run this on each of them, with the same HEAD (the first machine and a free port) and MACHINES:
#   HEAD=node-0:29400 MACHINES=2 examples/cluster.sh
# If a machine fails, torchrun starts the workers again, and they go on from the last checkpoint.
set -euo pipefail
cd "$(dirname "$0")"

: "${HEAD:?such as node-0:29400}" "${MACHINES:?how many machines}"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
torchrun --nnodes "$MACHINES" --nproc-per-node "${RANKS:-$((gpus > 0 ? gpus : 2))}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-scrimp}" -m scrimp train cluster.toml "$@"
