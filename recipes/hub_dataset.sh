# A dataset of the Hub by its name, at 32x32:   bash recipes/hub_dataset.sh huggan/smithsonian_butterflies_subset runs/butterflies
#
# Hardware: 2 CPU cores, or any GPU. `small32` has 2.8 M parameters.
# Time: 10,000 updates of 16 images: about 1 hour of processor time, from the first 2,416 on drawn shapes.
# Expected: on drawn shapes, about 27 of 36 samples were clean after 2,416 updates (benchmarks/quality/RESULTS.md). Whole runs and
# other sets: not measured.
accelerate launch train_ddpm.py --dataset_name "${1:?a dataset of the Hub}" --model_preset small32 --random_flip \
    --output_dir "${2:?a folder for the run}" --resume_from_checkpoint latest
