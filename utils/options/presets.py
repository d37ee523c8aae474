"""Model presets: each is a network and the flags it was published with. A plain table, shown in `--help`."""

from typing import Any

from utils.core.size import Size

# Ho et al. 2020, appendix B, as google/ddpm-cifar10-32 has it: 35.7 M parameters.
_CIFAR10 = {
    "block_out_channels": (128, 256, 256, 256),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
}
# Song et al. 2021 (DDIM), CelebA 64x64: multipliers (1, 2, 2, 2, 4), attention at 16x16; 78.7 M parameters.
_CELEBA64 = {
    **_CIFAR10,
    "block_out_channels": (128, 256, 256, 256, 512),
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
}
# Ho et al. 2020, 256x256, as diffusers' train_unconditional.py builds it for every resolution: 113.7 M parameters.
_UNCONDITIONAL = {
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": (*["DownBlock2D"] * 4, "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", *["UpBlock2D"] * 4),
}
# Chosen by what 2 CPU cores can train in a few minutes: few channels at full size, where they cost most.
_DIGITS16 = {
    "block_out_channels": (16, 32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
    "norm_num_groups": 4,
    "resnet_time_scale_shift": "scale_shift",
}
# For small folders of images on a CPU: 2.8 M and 3.8 M parameters, most of them where the images are small.
_SMALL32 = {
    **_DIGITS16,
    "block_out_channels": (16, 32, 64, 128),
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    "attention_head_dim": 16,
    "norm_num_groups": 8,
}
_SMALL64 = {
    **_SMALL32,
    "block_out_channels": (16, 32, 64, 96, 128),
    "down_block_types": (*["DownBlock2D"] * 3, "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", *["UpBlock2D"] * 3),
}

NETWORKS: dict[str, dict[str, Any]] = {
    "digits16": _DIGITS16,
    "small32": _SMALL32,
    "small64": _SMALL64,
    "few": _DIGITS16,
    "cifar10": _CIFAR10,
    "celeba64": _CELEBA64,
    "256": _UNCONDITIONAL,
}

_SHORT = {  # for trainings of minutes and hours
    # The strokes of a digit are decided at the middle noise levels, on which the cosine schedule dwells.
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "learning_rate": 2e-3,  # of small32 on drawn shapes: with 1e-3, the loss falls more slowly
    "lr_warmup_steps": 100,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "snr_gamma": 5.0,
    # As good as DDIM on the finished network and better on a less trained one: the chain's noise mends its errors.
    "sampler": "ddpm",
    "ddpm_num_inference_steps": 50,
}
_SMALL = {
    "train_batch_size": 16,
    "max_train_steps": 10_000,
    "save_images_steps": 1000,
    "save_model_steps": 5000,
    "checkpointing_steps": 1000,
    "checkpoints_total_limit": 3,
}
_DIGITS = {
    "dataset_name": "digits",
    "resolution": 16,
    "image_channels": 1,
    "validation_images": 64,
    "train_batch_size": 32,
    "checkpointing_steps": 600,
    "checkpoints_total_limit": 3,
}
FEW_IMAGES = 1000  # a set that is no larger is a small one
_FEW = {  # for 100 to 1,000 images, which are copied once each was seen some 200 times, whatever their number
    "resolution": 32,
    "validation_images": 20,  # with the evaluations they decide which checkpoint is best, and say when copying began
    "train_batch_size": 16,
    "num_epochs": 300,
    "dropout": 0.1,
    "validation_steps": 100,
    "eval_steps": 400,
    "eval_images": 64,
    "save_images_steps": 400,
    "save_model_steps": 2000,
    "checkpointing_steps": 400,
    "checkpoints_total_limit": 3,
    "logging_steps": 20,
}
_LONG = {  # for the published trainings of days
    "random_flip": True,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 5000,
    "adam_beta1": 0.9,
    "adam_weight_decay": 0.0,
    "checkpointing_steps": 10_000,
    "checkpoints_total_limit": 3,
    "save_images_steps": 10_000,
}

FLAGS: dict[str, dict[str, Any]] = {
    "digits16": {
        **_DIGITS,
        "output_dir": "runs/digits",
        "eval_batch_size": 36,
        "max_train_steps": 3600,
        **_SHORT,
        "save_images_steps": 1800,
        "save_model_steps": 1800,
        "validation_steps": 360,
        "logging_steps": 36,
    },
    "small32": {"resolution": 32, **_SMALL, **_SHORT},
    "small64": {"resolution": 64, **_SMALL, **_SHORT},
    "few": {**_FEW, **_SHORT},
    "cifar10": {
        "resolution": 32,
        **_LONG,
        "train_batch_size": 128,
        "max_train_steps": 800_000,
        "learning_rate": 2e-4,
        "dropout": 0.1,
    },
    "celeba64": {"resolution": 64, **_LONG, "train_batch_size": 128, "max_train_steps": 500_000, "learning_rate": 2e-4},
    "256": {"resolution": 256, **_LONG, "train_batch_size": 64, "max_train_steps": 500_000, "learning_rate": 2e-5},
}


_EDM2 = {
    "global_batch_size": 2048,  # what the image counts below hold for
    "train_batch_size": 32,  # auto: as many as fit
    "max_grad_norm": 0.0,  # the paper clips nothing
    "lr_warmup_steps": 4883,  # 10 M images
    "lr_decay_steps": 35_000,
    "ema_snapshot_steps": 4096,  # 8 x 2^20 images
    "checkpointing_steps": 4096,
    "save_images_steps": 4096,
    "save_model_steps": 65_536,
    "checkpoints_total_limit": 3,
}
# Other than the paper, a norm of gradients is clipped, as train_ddpm.py does: what digits16 was tuned and measured with.
_EDM2_SHORT = {"learning_rate": 0.01, "max_grad_norm": 1.0, "lr_warmup_steps": 100}
# train_edm2.py's. The paper's sizes with its settings (Karras et al. 2024); small sets need smaller learning rates.
EDM2_ABOUT = """\
  small32 and small64 are for small sets on a CPU.
  XXS to XXL have the paper's settings for pixels (ImageNet-64). XXS and XXL, which it trained on latents alone, have the
  lengths of that. For latents (ImageNet-512) set --vae, --lr_decay_steps 70000 and the length.
  All their counts are updates of 2048 images and do not follow another --global_batch_size: set --max_train_steps,
  --lr_warmup_steps and --ema_snapshot_steps with it."""
EDM2_FLAGS: dict[str, dict[str, Any]] = {
    "digits16": {
        **_DIGITS,
        "output_dir": "runs/digits-edm2",
        "eval_batch_size": 40,
        "max_train_steps": 2400,
        **_EDM2_SHORT,
        "lr_decay_steps": 400,
        "P_mean": -0.6,
        "P_std": 1.2,
        "sigma_data": 0.7,
        "save_images_steps": 1200,
        "save_model_steps": 1200,
        "validation_steps": 240,
        "logging_steps": 24,
    },
    "small32": {"resolution": 32, **_SMALL, **_EDM2_SHORT, "lr_decay_steps": 1600},
    "small64": {"resolution": 64, **_SMALL, **_EDM2_SHORT, "lr_decay_steps": 1600},
    "few": {**_FEW, **_EDM2_SHORT, "lr_decay_steps": 400},
    "XXS": {**_EDM2, "max_train_steps": 1_048_576, "learning_rate": 0.0170},  # 2048 x 2^20 images
    "XS": {**_EDM2, "max_train_steps": 524_288, "learning_rate": 0.0120},  # 1024 x 2^20 images
    "S": {**_EDM2, "max_train_steps": 524_288, "learning_rate": 0.0100},  # 1024 x 2^20 images
    "M": {**_EDM2, "max_train_steps": 1_048_576, "learning_rate": 0.0090, "dropout": 0.1},  # 2048 x 2^20 images
    "L": {**_EDM2, "max_train_steps": 524_288, "learning_rate": 0.0080, "dropout": 0.1},  # 1024 x 2^20 images
    "XL": {**_EDM2, "max_train_steps": 327_680, "learning_rate": 0.0070, "dropout": 0.1},  # 640 x 2^20 images
    "XXL": {**_EDM2, "max_train_steps": 458_752, "learning_rate": 0.0065, "dropout": 0.1},  # 896 x 2^20 images
}


def small_preset(resolution: int | str) -> str | None:
    """Returns the preset for a CPU that suits images of this size, the same name in both scripts; None where none does."""
    name = "small64" if max(Size.of(resolution)) >= 48 else "small32"
    return name if _fits(name, resolution) else None


def networks_by_size(presets: dict[str, dict], resolution: int | str, *, few: bool, on_cpu: bool) -> list[str]:
    """Returns those of `presets` that may suit such images, the smallest network first; on a CPU none published for GPUs."""
    small = [name for name in ("digits16", small_preset(resolution)) if name in presets]
    large = [name for name in presets if name not in ("digits16", "small32", "small64", "few")]
    names = ["few"] if few else small if on_cpu else [*small, *large]
    return [name for name in names if _fits(name, resolution)]


def network_for_resolution(resolution: int | str) -> str | None:
    """Returns the network for images of this size, when none was named; None where no preset's levels divide the size. Sizes
    that diffusers' script can train get its network, so that its command lines export the same model."""
    for name in ("256", "cifar10", "digits16"):
        if _fits(name, resolution):
            return name
    return None


def _fits(name: str, resolution: int | str) -> bool:
    """Whether the levels of a preset network divide both sides; those of the EDM2 paper have as many as cifar10."""
    levels = len(NETWORKS.get(name, _CIFAR10)["block_out_channels"])
    return all(side % (1 << (levels - 1)) == 0 for side in Size.of(resolution))
