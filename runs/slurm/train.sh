#!/bin/bash
# Train on several nodes, with a launcher of torchrun on each:
#
#   sbatch --nodes=4 runs/slurm/train.sh RECIPE
#
# Blocks and the run's folder must lie on storage that all nodes see. The launchers find each other
# through the first node (c10d rendezvous); when a process dies, all of them start again from the
# newest checkpoint. Five minutes before the time is up the run writes a checkpoint and ends: submit
# the same line again to go on. A job that is preempted, or whose node fails, is put into the queue
# again by SLURM. A checkpoint that takes longer than four minutes needs larger numbers in
# --signal and --shutdown-timeout, the first above the second. Before torch 2.12 torchrun has no
# --shutdown-timeout: remove it there, and give the run checkpoints that take less than 30 seconds.
#
#SBATCH --job-name=vocagnolm-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=train-%j.log
set -euo pipefail

recipe=${1:?RECIPE}
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))

# since SLURM 22.05 srun takes the CPUs of a task from its own option alone
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" --max_restarts 3 \
    --shutdown-timeout 240 --rdzv_backend c10d --rdzv_endpoint "$first_node:$port" --rdzv_id "$SLURM_JOB_ID" \
    -m vocagnolm train "$recipe"
