#!/bin/bash
# Score a corpus with an array of jobs that know nothing of each other, one GPU each:
#
#   sbatch --array=1-32 runs/slurm/score.sh TEACHER CORPUS STORE
#
# The store must lie on storage that all nodes see. The job that ends last completes it. Run the
# same line again for what is missing; to run some shares of the 32 alone, say of how many:
#
#   SHARES=32 sbatch --array=3,17 runs/slurm/score.sh TEACHER CORPUS STORE
#
#SBATCH --job-name=vocagnolm-score
#SBATCH --array=1-8
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=score-%A-%a.log
set -euo pipefail

teacher=${1:?TEACHER CORPUS STORE}
corpus=${2:?TEACHER CORPUS STORE}
store=${3:?TEACHER CORPUS STORE}
shares=${SHARES:-$SLURM_ARRAY_TASK_MAX}

vocagnolm score --teacher "$teacher" --corpus "$corpus" --out "$store" --device cuda \
    --share "$SLURM_ARRAY_TASK_ID/$shares"
