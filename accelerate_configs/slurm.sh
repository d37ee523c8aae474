#!/bin/bash
# DDP on SLURM: stopped before the time limit, requeued, continued from its checkpoint, until it is done.
#   sbatch accelerate_configs/slurm.sh --dataset_name uoft-cs/cifar10 --model_preset cifar10 --mixed_precision bf16 \
#       --output_dir /shared/runs/cifar10
# Submit from the repository, and keep it and output_dir on a file system that all nodes see. `scancel JOB` ends it for good.
#SBATCH --job-name=steady-diffusion
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8     # one task per GPU
#SBATCH --gpus-per-node=8       # not --gpus-per-task: every task must see all GPUs of its node to pick number LOCAL_RANK
#SBATCH --cpus-per-task=6
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300       # warns the tasks, not this shell (no B:); time for one update, a preview, a checkpoint and --wait
#SBATCH --requeue               # also after a failed node or a preemption
#SBATCH --open-mode=append      # or each start would empty the log
#SBATCH --output=slurm-%j.log

TRAIN=${TRAIN:-python train_ddpm.py}
MAX_CRASHES=${MAX_CRASHES:-3}   # crashes in a row, without a stop on demand in between
crashes=slurm-$SLURM_JOB_ID.crashes

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))  # differs between jobs that share a node; below the ports given out at random
export MASTER_ADDR MASTER_PORT WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE

# `exec`, because SLURM may signal the task's own process alone. Ranks that stop together must not shoot one another
# (--kill-on-bad-exit=0), but survivors of a crash end 60 s after it (--wait; raise it where --push_to_hub takes longer).
# srun gives the highest status of its tasks, so 75 or 2 from all of them is 75 or 2 here; one ended by a signal counts as a crash.
# shellcheck disable=SC2016
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60 \
    bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' task \
    $TRAIN "$@" --resume_from_checkpoint latest
status=$?

case $status in
0) rm -f "$crashes" ;;
2 | 3) echo "status $status: not requeued, another start would end the same way" ;;
75)
    rm -f "$crashes"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
*)
    count=$(($(cat "$crashes" 2>/dev/null || echo 0) + 1))
    echo $count >"$crashes"
    echo "status $status: crash $count of at most $MAX_CRASHES in a row"
    [ $count -ge "$MAX_CRASHES" ] || scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit $status
