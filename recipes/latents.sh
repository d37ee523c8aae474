# Latents of an autoencoder, at 256x256:   bash recipes/latents.sh photos/ runs/latents
#
# Hardware: a GPU. What it needs, `--dry_run` says. Memory: not measured. Time: not measured.
# Expected: digits by class in latents, 82 s: distance 2.0 instead of 6.3 in pixels (benchmarks/quality/RESULTS.md).
accelerate launch train_edm2.py --vae stabilityai/sd-vae-ft-mse --train_data_dir "${1:?a folder of photos}" --resolution 256 \
    --model_preset XS --train_batch_size 64 --max_train_steps 100000 --mixed_precision bf16 \
    --output_dir "${2:?a folder for the run}" --resume_from_checkpoint latest
