"""Command-line flags, in groups that training scripts share. Light on purpose: `--help` must not pay for importing torch.

A flag that diffusers' `train_unconditional.py` also has keeps its name, meaning and default, so that its users' command lines
run unchanged. A preset only changes defaults: what is given on the command line always wins.
"""

import argparse
import os
import sys

from utils.errors import UserError
from utils.presets import FLAGS

UNIT_INTERVAL = "in [0, 1)"


class Flags(argparse.Namespace):
    """The values of all flags; beside them, not among `vars`, the names of those `given` on the command line, with dashes."""

    __slots__ = ("given",)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset_name", help="Hub name, local dataset (folder, parquet, save_to_disk), or digits (built in)")
    group.add_argument("--dataset_config_name", help="config of the Hub dataset, where it has several")
    group.add_argument("--dataset_split", default="train", help="split to train on (train)")
    group.add_argument("--dataset_revision", help="git revision of the Hub dataset, to pin it")
    group.add_argument("--train_data_dir", help="folder of images, sub-folders being classes; ignored with --dataset_name")
    group.add_argument("--image_column", help="column with the images (found from the features)")
    group.add_argument("--label_column", help="column with the class labels (found from the features)")
    group.add_argument("--cache_dir", help="where downloads and packed images are kept (Hugging Face's cache)")
    group.add_argument(
        "--cache_images",
        choices=("yes", "no"),
        default="yes",
        help="decode once into a packed uint8 file, or on the fly in workers (yes)",
    )
    group.add_argument(
        "--on_bad_image",
        choices=("fail", "replace"),
        default="fail",
        help="an image that cannot be decoded ends the run, or the next one takes its place (fail)",
    )
    group.add_argument(
        "--max_bad_images", type=positive_int, default=100, help="replace no more than so many, then end the run (100)"
    )
    group.add_argument("--streaming", action="store_true", help="not available yet: ends with a message")
    group.add_argument("--max_train_images", type=positive_int, help="use only the first N images")
    group.add_argument("--resolution", type=positive_int, default=64, help="images are resized to this many pixels (64)")
    group.add_argument("--image_channels", type=int, choices=(1, 3), default=3, help="1 = greyscale, 3 = RGB (3)")
    group.add_argument("--background", default="white", help="colour behind transparent images (white)")
    group.add_argument("--center_crop", action="store_true", help="crop the centre (random place)")
    group.add_argument("--random_flip", action="store_true", help="flip half of the images left to right")
    group.add_argument("--color_jitter", type=float, default=0.0, help="strength of brightness, contrast, saturation (0)")
    group.add_argument("--balanced_sampling", action="store_true", help="every class equally often; needs labels")
    group.add_argument(
        "--preserve_input_precision", action="store_true", help="keep 16-bit images at 16 bits instead of scaling to 8"
    )
    group.add_argument("--dataloader_num_workers", type=int, default=0, help="processes that load images (0 = the main one)")
    group.add_argument("--validation_images", type=int, default=0, help="images held out of training (0)")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--seed", type=int, default=0, help="of weights, order, crops, flips, timesteps and noise (0)")
    group.add_argument(
        "--train_batch_size",
        type=positive_int_or_auto,
        default=16,
        help="images per process and micro step (16); auto: as many as fit, --global_batch_size in all",
    )
    group.add_argument(
        "--global_batch_size",
        type=positive_int,
        help="images per update; of --train_batch_size and --gradient_accumulation_steps what is not given follows",
    )
    group.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="micro steps per update (1)")
    group.add_argument("--num_epochs", type=positive_int, default=100, help="passes over the data (100)")
    group.add_argument("--max_train_steps", type=positive_int, help="updates; overrides --num_epochs")
    group.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16"),
        default=None,
        help="arithmetic of the training step (what `accelerate launch` was given, else no)",
    )
    group.add_argument("--gradient_checkpointing", action="store_true", help="less memory, more time")
    group.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the network; off again where its gradients differ from the eager ones",
    )
    group.add_argument(
        "--channels_last",
        action=argparse.BooleanOptionalAction,
        help="channels innermost in memory (on a GPU with --compile; eager GPU kernels of group norms turn them round)",
    )
    group.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="fp32 products on a GPU in TF32 (on)"
    )
    group.add_argument(
        "--cudnn_benchmark",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take the quickest convolution of a GPU for each shape; turn it off for runs that repeat more exactly (on)",
    )
    group.add_argument(
        "--dry_run",
        action="store_true",
        help="print the memory of updates, samples, evaluation and validation, and the FLOPs, and end",
    )
    group.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the gradient's L2 norm to this, 0 = off (1)")
    group.add_argument(
        "--adaptive_clipping", action="store_true", help="clip to 2x the running mean of the norm, within [0.1, 10], instead"
    )
    group.add_argument(
        "--max_bad_steps",
        type=positive_int,
        default=20,
        help="end after so many non-finite updates in a row, when a report sees them (20)",
    )
    group.add_argument(
        "--collective_timeout", type=float, default=600.0, help="seconds until a lost process ends all others (600)"
    )
    group.add_argument("--cpu_threads", type=positive_int, help="threads per process on a CPU (cores / processes)")


def add_optimizer_flags(parser: argparse.ArgumentParser, epsilon_help: str = "(1e-8)") -> None:
    """`epsilon_help` says what --adam_epsilon stands beside."""
    group = parser.add_argument_group("optimizer and learning rate")
    group.add_argument("--optimizer", choices=("adamw", "adam", "rmsprop", "sgd", "adamw8bit"), default="adamw")
    group.add_argument("--learning_rate", type=float, default=1e-4, help="after warm-up (1e-4)")
    group.add_argument(
        "--lr_scheduler",
        default="cosine",
        choices=(
            *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts"),
            *("polynomial", "cyclic", "inverse_sqrt"),
        ),
        help="closed form of the update count (cosine)",
    )
    group.add_argument("--lr_warmup_steps", type=int, default=500, help="updates of linear warm-up; 5-10 k for long runs (500)")
    group.add_argument(
        "--lr_decay_steps", type=positive_int, help="for inverse_sqrt: updates until it decays (--lr_warmup_steps)"
    )
    group.add_argument("--lr_floor", type=float, default=0.0, help="share of the learning rate left at the end (0)")
    group.add_argument("--lr_cycles", type=positive_int, default=1, help="for cosine_with_restarts and cyclic (1)")
    group.add_argument("--lr_power", type=float, default=1.0, help="for polynomial (1)")
    group.add_argument("--adam_beta1", type=float, default=0.95)
    group.add_argument("--adam_beta2", type=float, default=0.999)
    group.add_argument("--adam_weight_decay", type=float, default=1e-6, help="spares biases and norms (1e-6)")
    group.add_argument("--adam_epsilon", type=float, default=1e-8, help=epsilon_help)
    group.add_argument("--momentum", type=float, default=0.9, help="for sgd and rmsprop (0.9)")
    group.add_argument("--l1_weight", type=float, default=0.0, help="L1 penalty on kernels (0)")


def add_ema_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("EMA of the weights")
    group.add_argument(
        "--use_ema", action=argparse.BooleanOptionalAction, default=True, help="validate, sample, export with EMA"
    )
    group.add_argument(
        "--ema_type",
        choices=("exponential", "power"),
        default="exponential",
        help="power: of several lengths, from which reconstruct_ema.py makes any other (exponential)",
    )
    group.add_argument("--ema_max_decay", type=float, default=0.9999, help="exponential: (0.9999)")
    group.add_argument("--ema_inv_gamma", type=float, default=1.0, help="warm-up 1 - (1 + t / inv_gamma)^-power (1)")
    group.add_argument("--ema_power", type=float, default=0.75, help="3/4 for short runs, 2/3 from a million updates (0.75)")
    group.add_argument(
        "--ema_widths",
        type=float,
        nargs="+",
        default=[0.05, 0.10],
        metavar="WIDTH",
        help="power: lengths relative to the training; the first is validated, sampled and exported (0.05 0.10)",
    )
    group.add_argument(
        "--ema_snapshot_steps", type=positive_int, help="power: updates between two snapshots (a fortieth of the run)"
    )
    group.add_argument("--ema_snapshot_dtype", choices=("fp16", "fp32"), default="fp16", help="fp32 for narrow widths (fp16)")


def add_report_flags(
    parser: argparse.ArgumentParser,
    samplers: tuple[str, ...] = ("ddim", "ddpm", "dpmsolver++"),
    steps_flag: str = "--ddpm_num_inference_steps",
    steps_help: str = "sampling steps (50; all of them with --sampler ddpm)",
) -> None:
    """`samplers` are what --sampler takes, the first being its default; `steps_flag` sets how many steps they make."""
    group = parser.add_argument_group("logging, validation and samples")
    group.add_argument("--logger", default="tensorboard", help="any tracker that Accelerate knows: tensorboard, wandb, ...")
    group.add_argument("--logging_dir", default="logs", help="inside output_dir (logs)")
    group.add_argument("--logging_steps", type=positive_int, default=50, help="updates between two reports (50)")
    group.add_argument(
        "--stop_on",
        choices=("never", "critical"),
        default="never",
        help="end the run at a critical finding, with status 3 (never)",
    )
    group.add_argument("--validation_steps", type=positive_int, default=1000, help="updates between two validations (1000)")
    group.add_argument(
        "--early_stopping_patience", type=int, default=0, help="stop after so many validations without gain (0 = off)"
    )
    group.add_argument("--eval_steps", type=positive_int, help="updates between two evaluations of the samples (off)")
    group.add_argument("--eval_images", type=positive_int, default=5000, help="samples per evaluation (5000)")
    group.add_argument(
        "--best_metric",
        choices=("loss", "fd", "kd"),
        default="loss",
        help="what makes a checkpoint the best: held-out loss, or a distance of the samples from the data (loss)",
    )
    group.add_argument(
        "--evaluation_batch_size",
        type=positive_int,
        default=64,
        help="samples at once on each process in an evaluation, in fp32 (64)",
    )
    group.add_argument("--eval_batch_size", type=positive_int, default=16, help="sample images in a grid, made in fp32 (16)")
    group.add_argument("--sampler", choices=samplers, default=samplers[0])
    group.add_argument(steps_flag, type=positive_int, help=steps_help)
    group.add_argument("--save_images_epochs", type=positive_int, default=10, help="epochs between two sample grids (10)")
    group.add_argument("--save_images_steps", type=positive_int, help="the same in updates; overrides the epochs")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output, checkpoints and resuming")
    group.add_argument("--output_dir", default="ddpm-model-64", help="folder of the run and of the exported pipeline")
    group.add_argument("--overwrite_output_dir", action="store_true", help="delete the run that is there")
    group.add_argument("--checkpointing_steps", type=positive_int, default=500, help="updates between two checkpoints (500)")
    group.add_argument(
        "--checkpoints_total_limit", type=positive_int, help="how many to keep: the newest, at least 2, and the best"
    )
    group.add_argument(
        "--resume_from_checkpoint", help="latest, best, checkpoint-N or a path; latest starts anew where none is"
    )
    group.add_argument(
        "--allow_option_change", nargs="+", default=[], metavar="NAME", help="let these options differ on resume"
    )
    group.add_argument(
        "--save_model_epochs", type=positive_int, default=10, help="epochs between two exports of the pipeline (10)"
    )
    group.add_argument("--save_model_steps", type=positive_int, help="the same in updates; overrides the epochs")
    group.add_argument("--push_to_hub", action="store_true", help="upload the pipeline at the end")
    group.add_argument("--hub_token")
    group.add_argument("--hub_model_id", help="repository to push to (name of output_dir)")
    group.add_argument("--hub_private_repo", action="store_true")


def preset_table(presets: dict[str, dict] = FLAGS, about: str = "") -> str:
    """The presets as text for `--help`: what is to be said `about` them, and each with the flags that it changes."""
    lines = ["model presets (a network and these defaults; your own flags win):", *about.splitlines()]
    for name, flags in presets.items():
        words = " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in flags.items())
        lines.append(f"  {name}: {words}")
    return "\n".join(lines)


def parse_with_preset(
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
    presets: dict[str, dict] = FLAGS,
    usual_preset: str | None = None,
) -> argparse.Namespace:
    """Parses `argv`; the preset's flags replace the parser's defaults. With neither preset nor config named, the preset is
    digits16 for the digits and where no data is named, `usual_preset` for other data."""
    given = {word.split("=")[0] for word in (sys.argv[1:] if argv is None else argv) if word.startswith("--")}
    args = parser.parse_args(argv, Flags())
    names_data = args.dataset_name or args.train_data_dir
    if args.model_preset is None and not args.model_config_name_or_path:
        args.model_preset = "digits16" if not names_data or args.dataset_name == "digits" else usual_preset
    if args.model_preset is not None:
        if args.model_preset not in presets:
            raise UserError(f"unknown --model_preset {args.model_preset!r}; choose from {', '.join(presets)}")
        defaults = dict(presets[args.model_preset])
        overridden = {"--train_data_dir": ["dataset_name"], "--num_epochs": ["max_train_steps"]}
        overridden["--gradient_accumulation_steps"] = ["global_batch_size"]  # the update is what the user's split makes
        overridden |= {f"--save_{what}_epochs": [f"save_{what}_steps"] for what in ("images", "model")}
        overridden["--rescale_betas_zero_snr"] = ["snr_gamma"]  # which would not train the last timestep
        for flag, preset_flags in overridden.items():
            if flag in given:
                defaults = {name: value for name, value in defaults.items() if name not in preset_flags}
        preset = args.model_preset
        parser.set_defaults(**defaults)
        args = parser.parse_args(argv, Flags())
        args.model_preset = preset
    args.given = given
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Turns down values that no run can use. Raises UserError naming the flag, the value and what to do."""
    if not args.dataset_name and not args.train_data_dir:
        raise UserError("name the data: --dataset_name NAME or --train_data_dir FOLDER (or neither model nor data, for digits)")
    if args.streaming:
        raise UserError("--streaming is not available yet; leave it out, or use --cache_images no to decode on the fly")
    own = {name for name in ("P_std", "sigma_data") if hasattr(args, name)}  # train_edm2.py's
    for name in ("learning_rate", "adam_epsilon", "ema_inv_gamma", "ema_power", "collective_timeout", *sorted(own)):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name} must be positive, got {getattr(args, name)}")
    for name in (
        *("max_grad_norm", "lr_warmup_steps", "adam_weight_decay", "l1_weight", "validation_images"),
        *("early_stopping_patience", "dataloader_num_workers"),
    ):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} must not be negative, got {getattr(args, name)}")
    shares = ("adam_beta1", "adam_beta2", "ema_max_decay", "lr_floor", "momentum", "dropout", "color_jitter", "label_dropout")
    for name in shares:
        if not 0 <= (getattr(args, name, None) or 0) < 1:
            raise UserError(f"--{name} must be {UNIT_INTERVAL}, got {getattr(args, name)}")
    if os.path.isabs(args.logging_dir) or ".." in args.logging_dir.split(os.sep):
        raise UserError(f"--logging_dir {args.logging_dir} leaves --output_dir; name a folder inside it, such as logs")
    if getattr(args, "spectral_norm", False) and args.gradient_checkpointing:
        raise UserError("--spectral_norm and --gradient_checkpointing: computing a layer again would move its power iteration")
    if args.train_batch_size == "auto" and args.global_batch_size is None:
        raise UserError("--train_batch_size auto needs --global_batch_size, the images of an update")
    if args.train_batch_size == "auto" and "--gradient_accumulation_steps" in args.given:
        raise UserError("--train_batch_size auto finds --gradient_accumulation_steps itself: leave that out")
    if args.best_metric != "loss" and not args.eval_steps:
        raise UserError(f"--best_metric {args.best_metric} is a figure of the samples: set --eval_steps")
    if args.early_stopping_patience and args.best_metric == "loss" and not args.validation_images:
        raise UserError("--early_stopping_patience needs held-out images: set --validation_images (or --best_metric fd)")


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_int_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive_int(text)
