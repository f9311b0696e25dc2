#!/usr/bin/env bash
# A run of the paper at full scale: one machine with 8 GPUs here, the paper used 32 H100. The step is
# the same on any number of processes; only accumulation changes. docs/full-scale.md has the costs,
# docs/paper.md says which run is which row of the paper.
#   vocagnolm recipe list
#   runs/paper.sh cpt
#   runs/paper.sh guided-qwen2.5-math-instruct
set -euo pipefail
cd "$(dirname "$0")/.."
RECIPE=paper/${1:?usage: runs/paper.sh NAME, one of: vocagnolm recipe list}
GPUS=${GPUS:-8}
folder_of() { vocagnolm recipe show "$RECIPE" | awk -v key="$1:" '$1 == key {print $2; exit}'; }

# 1. score once: every student and every method afterwards uses the same store
STORE=$(folder_of path)
if [ "$STORE" != null ]; then
    torchrun --nproc_per_node "$GPUS" -m vocagnolm score --recipe "$RECIPE"
fi

# 2. pack, look, train, evaluate
vocagnolm prepare "$RECIPE"
vocagnolm check "$RECIPE" --processes "$GPUS"
torchrun --nproc_per_node "$GPUS" -m vocagnolm train "$RECIPE"
RUN=$(folder_of folder)
vocagnolm evaluate "$RUN/model" --protocol paper --out "$RUN"
