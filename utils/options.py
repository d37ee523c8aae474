"""Which flag is which argument: keyword arguments for the functions and classes that scripts call, from parsed flags."""

import argparse


def data_options(args: argparse.Namespace) -> dict:
    """The arguments of `data.load_images` that are flags."""
    return {
        "dataset_name": args.dataset_name,
        "dataset_config_name": args.dataset_config_name,
        "dataset_split": args.dataset_split,
        "dataset_revision": args.dataset_revision,
        "train_data_dir": args.train_data_dir,
        "cache_dir": args.cache_dir,
        "image_column": args.image_column,
        "label_column": args.label_column,
        "resolution": args.resolution,
        "image_channels": args.image_channels,
        "center_crop": args.center_crop,
        "background": args.background,
        "preserve_input_precision": args.preserve_input_precision,
        "cache_images": args.cache_images == "yes",
        "max_images": args.max_train_images,
        "on_bad_image": args.on_bad_image,
        "max_bad_images": args.max_bad_images,
    }


def batch_options(args: argparse.Namespace) -> dict:
    """The arguments of `memory_plan.MemoryPlan.split` that are flags: what was not given may follow from what was."""
    steps_given = "--gradient_accumulation_steps" in args.given
    return {
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.train_batch_size,
        "accumulation": args.gradient_accumulation_steps if steps_given else None,
        "exact": "--train_batch_size" in args.given,
    }


def plan_options(args: argparse.Namespace) -> dict:
    """The arguments of `memory_plan.MemoryPlan` that are flags."""
    averages = len(args.ema_widths) if args.ema_type == "power" else 1
    return {
        "use_ema": averages if args.use_ema else 0,
        "samples": args.eval_batch_size,
        "evaluation_batch_size": args.evaluation_batch_size if args.eval_steps else 0,
        "validates": args.validation_images > 0,
        "compiles": args.compile,
    }


def sample_options(args: argparse.Namespace) -> dict:
    """The arguments of `training_samples.TrainingSamples` that are flags."""
    return {
        "seed": args.seed,
        "train_batch_size": args.train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "balanced": args.balanced_sampling,
        "center_crop": args.center_crop,
        "random_flip": args.random_flip,
        "color_jitter": args.color_jitter,
    }


def unet_options(args: argparse.Namespace, device_type: str) -> dict:
    """The arguments of `unet.make_unet` that are flags."""
    channels_last = args.channels_last
    if channels_last is None:
        channels_last = args.compile and device_type == "cuda"
    return {
        "resolution": args.resolution,
        "image_channels": args.image_channels,
        "preset": args.model_preset,
        "config_name_or_path": args.model_config_name_or_path,
        "cache_dir": args.cache_dir,
        "activation": args.activation,
        "dropout": args.dropout,
        "initialisation": args.initialisation,
        "zero_init_output": args.zero_init_output,
        "spectral_norm": args.spectral_norm,
        "seed": args.seed,
        "gradient_checkpointing": args.gradient_checkpointing,
        "channels_last": channels_last,
    }


def edm2_unet_options(args: argparse.Namespace, device_type: str) -> dict:
    """The arguments of `edm2_network.make_edm2_unet` that are flags."""
    channels_last = args.channels_last
    if channels_last is None:
        channels_last = device_type == "cuda"
    return {
        "resolution": args.resolution,
        "image_channels": args.image_channels,
        "preset": args.model_preset,
        "config_name_or_path": args.model_config_name_or_path,
        "cache_dir": args.cache_dir,
        "dropout": args.dropout,
        "seed": args.seed,
        "gradient_checkpointing": args.gradient_checkpointing,
        "channels_last": channels_last,
    }


def optimizer_options(args: argparse.Namespace) -> dict:
    """The arguments of `optimization.make_optimizer` that are flags."""
    return {
        "name": args.optimizer,
        "learning_rate": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "weight_decay": args.adam_weight_decay,
        "epsilon": args.adam_epsilon,
        "momentum": args.momentum,
    }


def evaluation_options(args: argparse.Namespace) -> dict:
    """The arguments of `training_evaluation.TrainingEvaluation` that are flags."""
    return {
        "every": args.eval_steps,
        "best_metric": args.best_metric,
        "num_images": args.eval_images,
        "batch_size": args.evaluation_batch_size,
        "sampler": args.sampler,
        "seed": args.seed,
        "cache_dir": args.cache_dir,
    }


def learning_rate_options(args: argparse.Namespace) -> dict:
    """The arguments of `optimization.learning_rate_at` that are flags."""
    return {
        "schedule": args.lr_scheduler,
        "base": args.learning_rate,
        "warmup_steps": args.lr_warmup_steps,
        "decay_steps": args.lr_decay_steps,
        "floor": args.lr_floor,
        "cycles": args.lr_cycles,
        "power": args.lr_power,
    }


def ema_options(args: argparse.Namespace) -> dict:
    """The arguments of `power_ema.make_ema` that are flags."""
    return {
        "ema_type": args.ema_type,
        "widths": args.ema_widths,
        "max_decay": args.ema_max_decay,
        "inv_gamma": args.ema_inv_gamma,
        "power": args.ema_power,
    }


def milestone_options(args: argparse.Namespace) -> dict:
    """The arguments of `milestones.Milestones` that are flags."""
    return {
        "validation_steps": args.validation_steps,
        "save_images_steps": args.save_images_steps,
        "save_images_epochs": args.save_images_epochs,
        "save_model_steps": args.save_model_steps,
        "save_model_epochs": args.save_model_epochs,
        "checkpointing_steps": args.checkpointing_steps,
        "checkpoints_total_limit": args.checkpoints_total_limit,
        "best_metric": args.best_metric,
        "early_stopping_patience": args.early_stopping_patience,
    }


def monitor_options(args: argparse.Namespace) -> dict:
    """The arguments of `monitors.Monitors` that are flags."""
    return {
        "every": args.logging_steps,
        "max_bad_steps": args.max_bad_steps,
        "stop_on_critical": args.stop_on == "critical",
    }
