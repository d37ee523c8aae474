# EDM2 on the built-in digits, and the best EMA length chosen afterwards:   bash recipes/edm2.sh runs/digits-edm2
#
# Hardware: 2 CPU cores. Time: 4 to 8 minutes; the search of the length was not measured.
# Expected: fd_randconv about 0.8 of 1,797 samples (two halves of the real digits: 1.1).
set -e
accelerate launch train_edm2.py --output_dir "${1:?a folder for the run}" --resume_from_checkpoint latest
python reconstruct_ema.py "$1" --widths 0.05:0.20:0.05 --output_dir "$1-best"
accelerate launch evaluate.py --pipeline "$1-best" --dataset_name digits
