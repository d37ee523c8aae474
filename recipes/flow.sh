# Flow matching on the built-in digits:   bash recipes/flow.sh runs/digits-flow
#
# Hardware: 2 CPU cores. Time: as train_ddpm.py without it, minutes: the network and the number of updates are the same.
# Expected: fd_randconv about 1.2 of 1,797 samples in 50 steps of Euler's method (two halves of the real digits: 1.1).
set -e
accelerate launch train_ddpm.py --objective flow --output_dir "${1:?a folder for the run}" --resume_from_checkpoint latest
accelerate launch evaluate.py --pipeline "$1" --dataset_name digits
