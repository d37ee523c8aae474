#!/bin/bash
# Training on one machine, for job scripts: it ends when the training has ended, with the exit status of the training.
#   bash accelerate_configs/torchrun.sh 8 runs/cifar10 train_ddpm.py --dataset_name uoft-cs/cifar10 --model_preset cifar10
# 8 processes, a GPU each (or ACCELERATE_USE_CPU=true), and the --output_dir, which continues from its checkpoint if it has one.
# SIGTERM, SIGINT, SIGUSR1 or SIGHUP, to this script alone or to its process group, stop the run, which saves a checkpoint: 75.
processes=$1 output_dir=$2
shift 2
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # torchrun's own 30 s are few for a checkpoint
before=$(stat -c '%i %y' "$output_dir/exit_status" 2>/dev/null)
# Once, and always SIGTERM: torchrun does not pass on SIGUSR1. $! is torchrun.
trap 'trap "" TERM INT USR1 HUP; [ "$!" ] || exit 75; kill -TERM $!' TERM INT USR1 HUP

# In a session of its own, so that a signal to the group reaches it through the trap alone.
setsid torchrun --standalone --nproc_per_node "$processes" "$@" --output_dir "$output_dir" --resume_from_checkpoint latest &
wait $!
status=$?
while kill -0 $! 2>/dev/null; do  # a signal has ended the waiting
    wait $!
    status=$?
done
# torchrun gives 1 for all but 0. The file tells which, unless it is of an earlier start: then this one has crashed, or was
# refused. A 0 in it does not count: what came after the training, such as a push, has failed.
if [ $status != 0 ] && [ "$(stat -c '%i %y' "$output_dir/exit_status" 2>/dev/null)" != "$before" ]; then
    told=$(cat "$output_dir/exit_status" 2>/dev/null)
    [ "${told:-0}" = 0 ] || status=$told
fi
exit $status
