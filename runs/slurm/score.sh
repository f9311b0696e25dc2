#!/bin/bash
# Score a corpus with an array of jobs that know nothing of each other, one GPU each:
#
#   sbatch --array=1-32 runs/slurm/score.sh TEACHER CORPUS STORE
#
# The array may begin at 0 as well (--array=0-31). The store must lie on storage that all nodes see.
# The job that ends last completes it. Run the same line again for what is missing; to run some
# shares of the 32 alone, say of how many, and FIRST=0 if the array began at 0:
#
#   SHARES=32 sbatch --array=3,17 runs/slurm/score.sh TEACHER CORPUS STORE
#
# A job that is preempted, or whose node fails, is put into the queue again by SLURM.
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
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    echo "score.sh: this is no array job, so there are no shares. Submit it with sbatch" \
        "--array=1-32, or score without --share." >&2
    exit 2
fi
first=${FIRST:-$((SLURM_ARRAY_TASK_MIN > 0))}
shares=${SHARES:-$((SLURM_ARRAY_TASK_MAX - first + 1))}
share=$((SLURM_ARRAY_TASK_ID - first + 1))

# since SLURM 22.05 srun takes the CPUs of a task from its own option alone
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    vocagnolm score --teacher "$teacher" --corpus "$corpus" --out "$store" --device cuda \
    --share "$share/$shares"
