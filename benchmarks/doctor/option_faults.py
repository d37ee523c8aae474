"""Option combinations that ruin a training, each with the finding that is expected, and published recipes that must pass.

Written down before the doctor was asked. benchmarks/doctor/options.py asks it.
"""

from dataclasses import dataclass, field

DDPM, EDM2 = "train_ddpm", "train_edm2"


@dataclass(frozen=True)
class Images:
    """What the doctor is told of a data set, in place of its files."""

    images: int
    mean: float = -0.05  # of the pixels in [-1, 1]
    std: float = 0.5
    shorter_side: int = 256  # of the files, in pixels: their median
    classes: int = 0
    validation: int = 0


@dataclass(frozen=True)
class Case:
    """Flags of a script, and the images that they are used with."""

    script: str
    flags: str
    images: Images
    parameters: int = 100_000_000  # of the network
    codes: tuple[str, ...] = field(default=())  # any of these is right; empty for a recipe


PHOTOS = Images(10_000, std=0.54)
FEW = Images(300, std=0.54)
FACES = Images(70_000, mean=-0.1, std=0.53, shorter_side=1024)
CIFAR10 = Images(50_000, mean=-0.05, std=0.5, shorter_side=32, classes=10)
IMAGENET = Images(1_281_167, mean=-0.07, std=0.55, shorter_side=375, classes=1000)
FLOWERS = Images(8_189, mean=-0.2, std=0.56, shorter_side=500)
DIGITS = Images(1_733, mean=-0.4, std=0.75, shorter_side=8, classes=10, validation=64)
DARK = Images(5_000, mean=-0.93, std=0.12)

_DDPM = "--train_data_dir x --resolution 64 --train_batch_size 32 --max_train_steps 20000"
_EDM2 = (
    "--dataset_name x --resolution 64 --train_batch_size 32 --gradient_accumulation_steps 4 --max_train_steps 20000 "
    "--lr_warmup_steps 500 --lr_decay_steps 5000 --save_model_steps 5000"
)


def _ddpm(flags: str, *codes: str, images: Images = PHOTOS, parameters: int = 100_000_000) -> Case:
    return Case(DDPM, f"{_DDPM} {flags}", images, parameters, codes)


def _edm2(flags: str, *codes: str, images: Images = PHOTOS) -> Case:
    return Case(EDM2, f"{_EDM2} {flags}", images, codes=codes)


FAULTS: dict[str, Case] = {
    "warm-up longer than the run": _ddpm("--lr_warmup_steps 30000", "option-warmup"),
    "warm-up of most of the run": _ddpm("--lr_warmup_steps 15000", "option-warmup"),
    "EDM2: warm-up of a paper in a short run": _edm2("--lr_warmup_steps 40000", "option-warmup"),
    "betas exchanged": _ddpm("--adam_beta1 0.999 --adam_beta2 0.9", "option-betas"),
    "second moment of two updates": _ddpm("--adam_beta1 0.5 --adam_beta2 0.5", "option-betas"),
    "momentum of 1000 updates": _ddpm("--adam_beta1 0.999 --adam_beta2 0.999", "option-betas"),
    "beta2 of a million updates": _ddpm("--adam_beta2 0.999999", "option-betas"),
    "epsilon 0.01": _ddpm("--adam_epsilon 0.01", "option-epsilon"),
    "epsilon 1e-3 in a small network": _ddpm("--adam_epsilon 0.001", "option-epsilon", parameters=2_000_000),
    "epsilon above the gradients of a large network": _ddpm("--adam_epsilon 1e-4", "option-epsilon", parameters=400_000_000),
    "average longer than the run": _ddpm("--ema_max_decay 0.99999 --ema_power 5", "ema-too-long"),
    "average of a paper in a short run": _ddpm("--max_train_steps 2000 --ema_power 1.5", "ema-too-long"),
    "average of two updates": _ddpm("--ema_max_decay 0.5", "option-ema-short"),
    "average whose warm-up never ends": _ddpm("--ema_power 0.1", "option-ema-short"),
    "power average of nearly the whole run": _edm2("--ema_widths 0.28", "ema-too-long"),
    "power average of an instant": _edm2("--ema_widths 0.0002", "option-ema-short"),
    "sigma_data 2": _edm2("--sigma_data 2", "option-sigma-data"),
    "sigma_data 0.1": _edm2("--sigma_data 0.1", "option-sigma-data"),
    "sigma_data in units of 255": _edm2("--sigma_data 64", "option-sigma-data"),
    "sigma_data 0.5 for dark images around 0.1": _edm2("", "option-sigma-data", images=Images(5_000, mean=-0.02, std=0.1)),
    "P_mean 2.5": _edm2("--P_mean 2.5", "option-noise-levels"),
    "P_mean -5": _edm2("--P_mean -5", "option-noise-levels"),
    "P_std 0.1": _edm2("--P_std 0.1", "option-noise-levels"),
    "P_std 8": _edm2("--P_std 8", "option-noise-levels"),
    "files of 16 pixels at 128": _ddpm("--resolution 128", "option-resolution", images=Images(9_000, shorter_side=16)),
    "batch of all images": _ddpm("--train_batch_size 256", "option-batch", images=FEW),
    "held out are most images": _ddpm(
        "--validation_images 250", "option-held-out", images=Images(50, std=0.54, validation=250)
    ),
    "best by a distance of 50 samples": _ddpm("--best_metric fd --eval_steps 1000 --eval_images 50", "option-evaluation"),
    "best by an evaluation after the end": _ddpm("--best_metric fd --eval_steps 50000", "option-never"),
    "early stopping, validations after the end": _ddpm(
        "--early_stopping_patience 3 --validation_steps 50000 --validation_images 100",
        "option-never",
        images=Images(10_000, validation=100),
    ),
    "100 steps of the linear schedule": _ddpm("--ddpm_num_steps 100", "schedule-leaves-signal"),
    "300 steps of the linear schedule": _ddpm("--ddpm_num_steps 300", "schedule-leaves-signal"),
    "20,000 steps of the linear schedule": _ddpm("--ddpm_num_steps 20000", "schedule-destroys-early"),
    "clipping at 1e-4": _ddpm("--max_grad_norm 0.0001", "option-clipping"),
    "learning rate 0.1": _ddpm("--learning_rate 0.1", "option-learning-rate"),
    "learning rate 1e-8": _ddpm("--learning_rate 1e-8", "option-learning-rate"),
    "EDM2 with the learning rate of DDPM": _edm2("--learning_rate 1e-5", "option-learning-rate"),
    "EDM2: learning rate 1": _edm2("--learning_rate 1", "option-learning-rate"),
    "EDM2: learning rate 1, weights not kept": _edm2("--learning_rate 1 --no-force_weight_norm", "option-learning-rate"),
    "AdamW at 0.01": _ddpm("--learning_rate 1e-2 --adam_weight_decay 1", "option-learning-rate"),
    "SGD at 1e-4 without momentum": _ddpm("--optimizer sgd --learning_rate 1e-4 --momentum 0", "option-learning-rate"),
    "SGD with the learning rate of Adam": _ddpm("--optimizer sgd --learning_rate 1e-6", "option-learning-rate"),
    "weight decay 10": _ddpm("--adam_weight_decay 10", "option-weight-decay"),
    "weight decay 0.1 in Adam's gradient": _ddpm("--optimizer adam --adam_weight_decay 0.1", "option-weight-decay"),
    "L1 penalty 0.01": _ddpm("--l1_weight 0.01", "option-l1"),
    "dropout 0.7": _ddpm("--dropout 0.7", "train-eval-gap", "option-dropout"),
    "label dropout 0.95": _edm2("--label_dropout 0.95", "option-label-dropout", images=IMAGENET),
    "color jitter 0.9": _ddpm("--color_jitter 0.9", "option-augmentation"),
    "min-SNR gamma 0.001": _ddpm("--snr_gamma 0.001", "option-snr-gamma"),
    "a restart every 2 updates": _ddpm(
        "--lr_scheduler cosine_with_restarts --lr_cycles 9000", "option-warmup", "option-cycles"
    ),
}


def _recipe(script: str, flags: str, images: Images, parameters: int = 100_000_000) -> Case:
    return Case(script, f"--dataset_name x {flags}", images, parameters)


_ADM = "--adam_beta1 0.9 --adam_weight_decay 0 --lr_scheduler constant --lr_warmup_steps 0 --max_grad_norm 0"
_OF_EDM = (
    "--no-force_weight_norm --P_mean -1.2 --P_std 1.2 --sigma_data 0.5 --adam_beta2 0.999 --max_grad_norm 0 "
    "--lr_scheduler constant_with_warmup --ema_type exponential --ema_power 5 --ema_inv_gamma 20000 --model_preset XS"
)
_EDM2_LATENTS = "--P_mean -0.4 --P_std 1.0 --lr_decay_steps 70000"
LATENTS = Images(1_281_167, mean=0.0, std=0.5, shorter_side=64, classes=1000)

# Flags by what the papers, their code and their READMEs say. What has no flag here is left out: learned variances, labels of a
# DDPM, Karras' augmentation, transformers in place of the U-Net.
RECIPES: dict[str, Case] = {
    "DDPM CIFAR-10 (Ho et al. 2020, appendix B)": _recipe(DDPM, "--model_preset cifar10", CIFAR10, 35_700_000),
    "DDPM CelebA-HQ 256 (the same)": _recipe(DDPM, "--model_preset 256 --resolution 256", Images(30_000, shorter_side=1024)),
    "DDPM LSUN bedroom 256 (the same)": _recipe(
        DDPM, "--model_preset 256 --resolution 256 --max_train_steps 2400000", Images(3_033_042)
    ),
    "DDIM CelebA 64 (Song et al. 2021)": _recipe(
        DDPM, "--model_preset celeba64", Images(162_770, shorter_side=178), 78_700_000
    ),
    "improved DDPM CIFAR-10, 500 K (README)": _recipe(
        DDPM,
        f"--resolution 32 --ddpm_num_steps 4000 --ddpm_beta_schedule squaredcos_cap_v2 --dropout 0.3 --learning_rate 1e-4 "
        f"--train_batch_size 128 --max_train_steps 500000 {_ADM}",
        CIFAR10,
        52_500_000,
    ),
    "improved DDPM ImageNet-64, 1500 K (README)": _recipe(
        DDPM,
        f"--resolution 64 --ddpm_num_steps 4000 --ddpm_beta_schedule squaredcos_cap_v2 --learning_rate 1e-4 "
        f"--train_batch_size 128 --max_train_steps 1500000 {_ADM}",
        IMAGENET,
    ),
    "improved DDPM ImageNet-64, 270 M parameters, 250 K (README)": _recipe(
        DDPM,
        f"--resolution 64 --ddpm_num_steps 4000 --ddpm_beta_schedule squaredcos_cap_v2 --learning_rate 3e-4 "
        f"--train_batch_size 2048 --max_train_steps 250000 {_ADM}",
        IMAGENET,
        270_000_000,
    ),
    "improved DDPM LSUN bedroom, lr 2e-5, 2400 K (README)": _recipe(
        DDPM, f"--resolution 256 --learning_rate 2e-5 --train_batch_size 64 --max_train_steps 2400000 {_ADM}", Images(3_033_042)
    ),
    "ADM ImageNet-64 (Dhariwal & Nichol 2021, table 11)": _recipe(
        DDPM,
        f"--resolution 64 --ddpm_beta_schedule squaredcos_cap_v2 --learning_rate 3e-4 --train_batch_size 2048 --dropout 0.1 "
        f"--max_train_steps 540000 --mixed_precision fp16 {_ADM}",
        IMAGENET,
        296_000_000,
    ),
    "ADM ImageNet-256 (the same)": _recipe(
        DDPM,
        f"--resolution 256 --learning_rate 1e-4 --train_batch_size 256 --max_train_steps 1980000 --mixed_precision fp16 {_ADM}",
        IMAGENET,
        554_000_000,
    ),
    "ADM with weight decay 0.05 (a fork of guided-diffusion)": _recipe(
        DDPM,
        f"--resolution 64 --ddpm_beta_schedule squaredcos_cap_v2 --learning_rate 1e-5 --train_batch_size 32 --dropout 0.1 "
        f"--max_train_steps 500000 {_ADM} --adam_weight_decay 0.05",
        IMAGENET,
        296_000_000,
    ),
    "EDM CIFAR-10 (Karras et al. 2022, README and defaults)": _recipe(
        EDM2,
        f"--resolution 32 --learning_rate 1e-3 --train_batch_size 512 --gradient_accumulation_steps 1 --dropout 0.13 "
        f"--max_train_steps 390625 --lr_warmup_steps 19531 --ema_max_decay 0.99929 {_OF_EDM}",
        CIFAR10,
        55_700_000,
    ),
    "EDM FFHQ-64 (the same)": _recipe(
        EDM2,
        f"--resolution 64 --learning_rate 2e-4 --train_batch_size 256 --gradient_accumulation_steps 1 --dropout 0.05 "
        f"--max_train_steps 781250 --lr_warmup_steps 39062 --ema_max_decay 0.999645 {_OF_EDM}",
        FACES,
        61_800_000,
    ),
    "EDM AFHQv2-64 (the same)": _recipe(
        EDM2,
        f"--resolution 64 --learning_rate 2e-4 --train_batch_size 256 --gradient_accumulation_steps 1 --dropout 0.25 "
        f"--max_train_steps 781250 --lr_warmup_steps 39062 --ema_max_decay 0.999645 {_OF_EDM}",
        Images(15_803, std=0.5, shorter_side=512),
        61_800_000,
    ),
    "EDM ImageNet-64 (the same)": _recipe(
        EDM2,
        f"--resolution 64 --learning_rate 1e-4 --train_batch_size 4096 --gradient_accumulation_steps 1 --dropout 0.1 "
        f"--max_train_steps 610352 --lr_warmup_steps 2441 --ema_max_decay 0.9999432 {_OF_EDM}",
        IMAGENET,
        296_000_000,
    ),
    **{
        f"EDM2 {size} ImageNet-64 (Karras et al. 2024, table 6)": _recipe(
            EDM2, f"--model_preset {size} --resolution 64", IMAGENET
        )
        for size in ("XS", "S", "M", "L", "XL")
    },
    "EDM2 XS ImageNet-64, weights not kept at unit variance": _recipe(
        EDM2, "--model_preset XS --resolution 64 --no-force_weight_norm", IMAGENET
    ),
    "EDM2 XXL ImageNet-512 in latents (the same)": _recipe(
        EDM2, f"--model_preset XXL --resolution 64 {_EDM2_LATENTS}", LATENTS, 1_523_000_000
    ),
    "video latents (Blattmann et al. 2023): P_mean 1, P_std 1.6, sigma_data 1": _recipe(
        EDM2,
        "--resolution 64 --P_mean 1 --P_std 1.6 --sigma_data 1 --learning_rate 1e-4 --train_batch_size 768 "
        "--gradient_accumulation_steps 1 --max_train_steps 100000 --lr_scheduler constant_with_warmup --lr_warmup_steps 1000 "
        "--no-force_weight_norm --ema_type exponential",
        Images(10_000_000, mean=0.0, std=0.9, shorter_side=64),
        1_523_000_000,
    ),
    "DiT-XL/2 (Peebles & Xie 2023)": _recipe(
        DDPM,
        f"--resolution 32 --learning_rate 1e-4 --train_batch_size 256 --max_train_steps 7000000 {_ADM}",
        LATENTS,
        675_000_000,
    ),
    "U-ViT CIFAR-10 (Bao et al. 2023): betas 0.99 0.999, weight decay 0.03": _recipe(
        DDPM,
        "--resolution 32 --learning_rate 2e-4 --train_batch_size 128 --max_train_steps 500000 --lr_warmup_steps 2500 "
        "--lr_scheduler constant_with_warmup --adam_beta1 0.99 --adam_beta2 0.999 --adam_weight_decay 0.03 --max_grad_norm 0",
        CIFAR10,
        44_000_000,
    ),
    "U-ViT ImageNet-256 (the same): betas 0.99 0.99": _recipe(
        DDPM,
        "--resolution 32 --learning_rate 2e-4 --train_batch_size 1024 --max_train_steps 500000 --lr_warmup_steps 5000 "
        "--lr_scheduler constant_with_warmup --adam_beta1 0.99 --adam_beta2 0.99 --adam_weight_decay 0.03 --max_grad_norm 0",
        LATENTS,
        501_000_000,
    ),
    "U-ViT MS-COCO (the same): betas 0.9 0.9": _recipe(
        DDPM,
        "--resolution 32 --learning_rate 2e-4 --train_batch_size 256 --max_train_steps 1000000 --lr_warmup_steps 5000 "
        "--lr_scheduler constant_with_warmup --adam_beta1 0.9 --adam_beta2 0.9 --adam_weight_decay 0.03 --max_grad_norm 0",
        Images(82_783, shorter_side=480),
        58_000_000,
    ),
    "k-diffusion, config_oxford_flowers.json": _recipe(
        DDPM,
        "--resolution 256 --learning_rate 5e-4 --train_batch_size 64 --max_train_steps 200000 --lr_scheduler constant "
        "--adam_beta1 0.9 --adam_beta2 0.95 --adam_weight_decay 1e-3 --dropout 0.1 "
        "--prediction_type v_prediction --snr_gamma 5",
        FLOWERS,
    ),
    "lucidrains, README: EMA 0.995, 8e-5, 700,000 x 32 x 2": _recipe(
        DDPM,
        "--resolution 128 --learning_rate 8e-5 --train_batch_size 32 --gradient_accumulation_steps 2 --max_train_steps 700000 "
        "--lr_scheduler constant --optimizer adam --adam_beta1 0.9 --adam_beta2 0.99 --adam_weight_decay 0 "
        "--ema_max_decay 0.995 --ddpm_beta_schedule sigmoid --prediction_type v_prediction --mixed_precision fp16",
        FLOWERS,
        35_700_000,
    ),
    "diffusers, README: flowers": _recipe(
        DDPM,
        "--resolution 64 --center_crop --random_flip --train_batch_size 16 --num_epochs 100 --use_ema --learning_rate 1e-4 "
        "--lr_warmup_steps 500",
        FLOWERS,
        113_700_000,
    ),
    "diffusers, train.sh: pokemon": _recipe(
        DDPM,
        "--resolution 64 --center_crop --random_flip --train_batch_size 64 --num_epochs 100 --use_ema --learning_rate 1e-4 "
        "--lr_warmup_steps 500",
        Images(7_357, mean=0.6, std=0.5, shorter_side=512),
        113_700_000,
    ),
    "diffusers, basic training tutorial: butterflies": _recipe(
        DDPM,
        "--resolution 128 --random_flip --train_batch_size 16 --num_epochs 50 --learning_rate 1e-4 --lr_warmup_steps 500 "
        "--mixed_precision fp16",
        Images(1_000, mean=0.5, std=0.5, shorter_side=512),
        113_700_000,
    ),
    "Hugging Face's course, unit 1: butterflies": _recipe(
        DDPM,
        "--resolution 32 --random_flip --train_batch_size 64 --num_epochs 30 --learning_rate 4e-4 --lr_scheduler constant "
        "--ddpm_beta_schedule squaredcos_cap_v2",
        Images(1_000, mean=0.5, std=0.5, shorter_side=512),
        20_000_000,
    ),
    "Stable Diffusion 1 (model card): scaled_linear, epsilon": _recipe(
        DDPM,
        "--resolution 64 --ddpm_beta_schedule scaled_linear --learning_rate 1e-4 --train_batch_size 2048 "
        "--max_train_steps 237000 --lr_warmup_steps 10000 --lr_scheduler constant_with_warmup --adam_beta1 0.9 "
        "--adam_weight_decay 0.01 --max_grad_norm 0",
        Images(170_000_000, mean=0.0, std=0.9, shorter_side=64),
        860_000_000,
    ),
    "Stable Diffusion 2 (model card): scaled_linear, v": _recipe(
        DDPM,
        "--resolution 96 --ddpm_beta_schedule scaled_linear --prediction_type v_prediction --learning_rate 1e-4 "
        "--train_batch_size 2048 --max_train_steps 290000 --lr_warmup_steps 10000 --lr_scheduler constant_with_warmup "
        "--adam_beta1 0.9 --adam_weight_decay 0.01 --max_grad_norm 0",
        Images(170_000_000, mean=0.0, std=0.9, shorter_side=96),
        865_000_000,
    ),
    "zero terminal SNR (Lin et al. 2023): EMA 0.99": _recipe(
        DDPM,
        "--resolution 96 --ddpm_beta_schedule scaled_linear --rescale_betas_zero_snr --prediction_type v_prediction "
        "--learning_rate 1e-4 --train_batch_size 2000 --max_train_steps 50000 --lr_scheduler constant --ema_max_decay 0.99",
        Images(170_000_000, mean=0.0, std=0.9, shorter_side=96),
        865_000_000,
    ),
    "min-SNR-5 (Hang et al. 2023)": _recipe(
        DDPM,
        "--resolution 64 --ddpm_beta_schedule squaredcos_cap_v2 --prediction_type sample --snr_gamma 5 --learning_rate 1e-4 "
        "--train_batch_size 128 --max_train_steps 500000 --adam_beta1 0.9 --adam_weight_decay 0.03 --lr_scheduler constant",
        Images(162_770, shorter_side=178),
        130_000_000,
    ),
    "latent diffusion CelebA-HQ (Rombach et al. 2022)": _recipe(
        DDPM,
        "--resolution 64 --ddpm_beta_schedule scaled_linear --learning_rate 9.6e-5 --train_batch_size 48 "
        "--max_train_steps 410000 --lr_scheduler constant --adam_beta1 0.9 --adam_weight_decay 0.01 --max_grad_norm 0",
        Images(30_000, mean=0.0, std=0.9, shorter_side=64),
        274_000_000,
    ),
    "VP-SDE, DDPM++ CIFAR-10 (Song et al. 2021b)": _recipe(
        DDPM,
        "--resolution 32 --learning_rate 2e-4 --train_batch_size 128 --max_train_steps 1300000 --lr_warmup_steps 5000 "
        "--lr_scheduler constant_with_warmup --optimizer adam --adam_beta1 0.9 --adam_weight_decay 0 --dropout 0.1",
        CIFAR10,
        62_000_000,
    ),
    "simple diffusion ImageNet-128 (Hoogeboom et al. 2023)": _recipe(
        DDPM,
        "--resolution 128 --ddpm_beta_schedule squaredcos_cap_v2 --prediction_type v_prediction --learning_rate 1e-4 "
        "--train_batch_size 2048 --max_train_steps 1500000 --lr_warmup_steps 10000 --lr_scheduler constant_with_warmup "
        "--adam_beta1 0.9 --adam_weight_decay 0.01 --dropout 0.1",
        IMAGENET,
        400_000_000,
    ),
    "digits16 of train_ddpm.py": Case(DDPM, "", DIGITS, 290_000),
    "digits16 of train_edm2.py": Case(EDM2, "", DIGITS, 290_000),
    "our cifar10 with EDM2's average": _recipe(DDPM, "--model_preset cifar10 --ema_type power", CIFAR10, 35_700_000),
}
