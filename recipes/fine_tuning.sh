# Start from a trained pipeline:   bash recipes/fine_tuning.sh google/ddpm-celebahq-256 photos/ runs/photos
#
# Hardware: for a network of 113.7 M parameters at 256x256, a GPU. What it needs, `--dry_run` says. Memory: not measured.
# Time: not measured.
# Expected: letters from digits, 150 updates: distance 22 instead of 108 from scratch (benchmarks/quality/RESULTS.md).
accelerate launch train_ddpm.py --pretrained "${1:?a pipeline}" --train_data_dir "${2:?a folder of images}" --resolution 256 \
    --learning_rate 1e-5 --max_train_steps 10000 --mixed_precision bf16 --output_dir "${3:?a folder for the run}" \
    --resume_from_checkpoint latest
