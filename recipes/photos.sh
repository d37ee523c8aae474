# Your own photos, from scratch, at 64x64:   bash recipes/photos.sh photos/ runs/photos
#
# Hardware: 2 CPU cores, or any GPU. `small64` has 3.8 M parameters.
# Time: 10,000 updates of 16 images: about 5 hours of processor time, from 4,404 images in 9 minutes; a whole run was not measured.
# Expected: not measured on photos.
# With 1,000 images or fewer, samples become copies: --model_preset few in place of small64.
set -e
accelerate launch train_ddpm.py --train_data_dir "${1:?a folder of photos}" --model_preset small64 --random_flip \
    --validation_images 64 --output_dir "${2:?a folder for the run}" --resume_from_checkpoint latest
accelerate launch evaluate.py --pipeline "$2" --train_data_dir "$1" --resolution 64
