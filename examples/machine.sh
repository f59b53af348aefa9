#!/usr/bin/env bash
# One machine: one process for each GPU, or RANKS processes on its CPU. --standalone finds a free port.
set -euo pipefail
cd "$(dirname "$0")"

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
torchrun --standalone --nproc-per-node "${RANKS:-$((gpus > 0 ? gpus : 2))}" -m scrimp train machine.toml "$@"
