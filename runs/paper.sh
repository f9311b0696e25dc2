#!/usr/bin/env bash
# The paper's runs at full scale: one machine with 8 GPUs here, the paper used 32 H100. The step is
# the same on any number of processes; only accumulation changes. docs/full-scale.md has the costs.
#   runs/paper.sh qwen2.5-math-instruct Qwen/Qwen2.5-Math-7B-Instruct
#   runs/paper.sh deepseek-math deepseek-ai/deepseek-math-7b-base refs/pr/1   # teacher.revision
#   runs/paper.sh cpt
set -euo pipefail
cd "$(dirname "$0")/.."
RECIPE=recipes/paper/${1:?usage: runs/paper.sh RECIPE [TEACHER [REVISION]]}.yaml
TEACHER=${2:-}
GPUS=${GPUS:-8}

# 1. score once: every student and every method afterwards uses the same store
if [ -n "$TEACHER" ]; then
    torchrun --nproc_per_node "$GPUS" -m vocagnolm score --teacher "$TEACHER" \
        ${3:+--revision "$3"} --corpus open-web-math/open-web-math --out "out/paper/stores/$1"
fi

# 2. pack, look, train, evaluate
vocagnolm prepare "$RECIPE"
vocagnolm check "$RECIPE" --processes "$GPUS"
torchrun --nproc_per_node "$GPUS" -m vocagnolm train "$RECIPE"
FOLDER=$(python -c "from vocagnolm.recipe import load_recipe; print(load_recipe('$RECIPE').run.folder)")
vocagnolm evaluate "$FOLDER/model" --suite math --out "$FOLDER"
