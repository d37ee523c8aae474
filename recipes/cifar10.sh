# CIFAR-10 as published (Ho et al. 2020): 35.7 M parameters, 800,000 updates of 128 images.   bash recipes/cifar10.sh runs/cifar10
#
# Hardware: one GPU with 16 GiB: batches of 256 took 11.0 GiB, and those of 128 took 5.8, where they were not compiled.
# Time: about 9 hours on an H100, by its 3,270 images/s with batches of 256. A whole run was not measured.
# Expected: FID 3.17 (Ho et al. 2020). Here: not measured. It needs Inception's weights, see docs/evaluation.md.
set -e
: "${INCEPTION:?the file weights-inception-2015-12-05-6726825d.pth}"
accelerate launch train_ddpm.py --dataset_name uoft-cs/cifar10 --model_preset cifar10 --mixed_precision bf16 --compile \
    --output_dir "${1:?a folder for the run}" --resume_from_checkpoint latest
accelerate launch generate.py --pipeline "$1" --sampler ddpm --num_images 50000 --batch_size 500 --output_dir "$1-samples"
accelerate launch evaluate.py --images "$1-samples" --dataset_name uoft-cs/cifar10 --features inception \
    --feature_weights "$INCEPTION"
