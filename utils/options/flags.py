"""Every flag of every script: one line each, with its type, default, help and range. Imports no torch: `--help` is quick.

Flags of diffusers' `train_unconditional.py` keep their name, meaning and default, so its users' command lines run unchanged.
A group is a class, and whoever needs some flags takes that group: `load_images(options: DataOptions)`.
"""

import os
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from utils.core.errors import UserError
from utils.core.size import LARGEST, Size, read_budget, read_bytes
from utils.options.parser import Options, changed, flag
from utils.options.presets import EDM2_ABOUT, EDM2_FLAGS, FLAGS

FEWEST_IMAGES = 10  # whose figures mean anything
WIDEST = 0.2886  # of the averages: the mean of all updates
MOST_WIDTHS = 1000


class DataOptions(Options):
    """data"""

    dataset_name: str | None = flag(
        None, "Hub name, local dataset (folder, parquet, .npz, save_to_disk), or digits (built in)", path=True
    )
    dataset_config_name: str | None = flag(None, "config of the Hub dataset, if it has several")
    dataset_split: str = flag("train", "split of the dataset (train)")
    dataset_revision: str | None = flag(None, "git revision of the Hub dataset")
    train_data_dir: str | None = flag(
        None, "folder of images, or a .zip or .tar file of it; sub-folders are classes; ignored with --dataset_name", path=True
    )
    image_column: str | None = flag(None, "column with the images (found by its type)")
    label_column: str | None = flag(None, "column with the class labels (found by its type)")
    cache_dir: str | None = flag(None, "folder for downloads and packed images (Hugging Face's cache)", free=True, path=True)
    cache_images: Literal["yes", "no"] = flag(
        "yes", "yes: decode once into a packed uint8 file; no: decode during the training (yes)", free=True
    )
    streaming: bool = flag(False, "read parquet, tar or arrow files block by block: for data that is larger than the disk")
    shuffle_window: int = flag(10_000, "streaming: images are shuffled in windows of about this many (10000)", at_least=1)
    cache_limit: str = flag(
        "50GB",
        "streaming: decoded blocks that stay on the disk, of all runs together (50GB)",
        reads=lambda text: (read_bytes(text), text)[1],  # stays as it was written
        words="a size such as 50GB",
        free=True,
    )
    on_bad_image: Literal["fail", "replace"] = flag(
        "fail", "if an image cannot be decoded: stop the run, or use the next image instead (fail)"
    )
    max_bad_images: int = flag(100, "stop the run if more images than this cannot be decoded (100)", at_least=1, free=True)
    max_train_images: int | None = flag(None, "use only the first N images", at_least=1)
    resolution: int | str = flag(
        64,
        "images get this size in pixels; 64x96: height x width; one size for all (64)",
        reads=lambda text: Size.of(text).resolution,
        words=f"a number of pixels up to {LARGEST}, or two as height x width, such as 64x96",
    )
    image_channels: int = flag(3, "1: gray, 3: RGB; any number for arrays (3)", at_least=1)
    background: str = flag("white", "color behind transparent images (white)")
    center_crop: bool = flag(False, "crop the center (random place)")
    preserve_input_precision: bool = flag(False, "keep 16-bit images, and arrays, at 16 bits instead of scaling to 8")
    data_range: list[float] | None = flag(
        None, "arrays: the values of black and white, such as -1 1 (known for uint8 and uint16)", metavar="VALUE"
    )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (self.image_channels, *Size.of(self.resolution))


class TrainingDataOptions(DataOptions):
    """data"""

    random_flip: bool = flag(False, "flip half of the images left to right")
    color_jitter: float = flag(0.0, "strength of brightness, contrast, saturation (0)", at_least=0, below=1)
    augment_probability: float = flag(
        0.0,
        "turn, scale, stretch, shift and mirror images, and tell the network how, so that samples are not: chance of each; "
        "above 0, half of the images are mirrored (0; in Karras et al. 2022 0.12 to 0.15)",
        at_least=0,
        below=1,
    )
    balanced_sampling: bool = flag(False, "show each class equally often; needs labels")
    dataloader_num_workers: int = flag(0, "processes that load images (0: the main process loads them)", at_least=0, free=True)
    validation_images: int = flag(0, "number of images for the validation loss; they are not trained on (0)", at_least=0)


class LatentOptions(Options):
    """latents"""

    vae: str | None = flag(
        None,
        "train on latents of this autoencoder: Hub name or folder of an AutoencoderKL, AutoencoderTiny or AutoencoderDC, "
        "or of a pipeline that has one",
        path=True,
    )
    latent_scale: Literal["config", "auto"] | None = flag(
        None,
        "with --vae: scale the latents as its config says, or auto: to the same mean and spread in each channel, as "
        "measured (config; auto if it has no scaling_factor)",
    )


class TrainingOptions(Options):
    """training"""

    budget: str | None = flag(
        None,
        "how long the run may take: a time (20min, 2h) or 3000updates; sets the network, batch, updates, EMA and learning rate "
        "that you do not set",
        reads=lambda text: read_budget(text) and text,  # stays as it was written
        words="a time such as 90s, 20min or 2h, or a number of updates such as 3000updates",
        free=True,
        once=True,
    )
    seed: int = flag(0, "seed of weights, order, crops, flips, timesteps and noise (0)")
    train_batch_size: int | Literal["auto"] = flag(
        16, "images per process and micro step; auto: as many as fit; needs --global_batch_size (16)", at_least=1, free=True
    )
    global_batch_size: int | None = flag(
        None, "images per update; sets --train_batch_size or --gradient_accumulation_steps if you do not set them", at_least=1
    )
    gradient_accumulation_steps: int = flag(1, "micro steps per update (1)", at_least=1, free=True)
    num_epochs: int = flag(100, "passes over the data (100)", at_least=1, free=True)
    max_train_steps: int | None = flag(None, "updates; overrides --num_epochs", at_least=1, free=True)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(
        None, "precision of the training step (that of `accelerate launch`, else no)"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time", free=True)
    compile: bool = flag(False, "torch.compile the network; turned off if the compiled gradients are wrong", free=True)
    channels_last: bool | None = flag(
        None, "channels-last memory format (on for a GPU with --compile; EDM2: on for a GPU)", free=True
    )
    tf32: bool = flag(True, "fp32 products on a GPU in TF32 (on)", free=True)
    cudnn_benchmark: bool = flag(
        True, "try several cuDNN algorithms and use the fastest; off with --deterministic (on)", free=True
    )
    deterministic: bool = flag(
        False, "kernels that give the same bits each time; without it, a resumed run on a GPU has other rounding", free=True
    )
    dry_run: bool = flag(
        False,
        "print the memory that the run needs, its FLOPs, and findings about the options; do not train",
        free=True,
        once=True,
    )
    max_grad_norm: float = flag(1.0, "clip the L2 norm of the gradient to this; 0: off (1)", at_least=0)
    adaptive_clipping: bool = flag(False, "clip to 2 x the running mean of the norm instead, between 0.1 and 10")
    max_bad_steps: int = flag(
        20, "stop the run after this many non-finite updates in a row; checked at each report (20)", at_least=1, free=True
    )
    collective_timeout: float = flag(
        600.0, "if a process is lost, the others stop after this many seconds (600)", above=0, free=True
    )
    hang_timeout: float | None = flag(
        None,
        "if a process does not reach the next collective of an update for this many seconds, write the stacks of all "
        "processes and stop; 0: off (10 x the longest update, at least 30)",
        at_least=0,
        free=True,
    )
    cpu_threads: int | None = flag(
        None,
        "threads per process on a CPU (OMP_NUM_THREADS if you set it, else cores / processes)",
        at_least=1,
        below=1025,
        free=True,
    )


class OptimizerOptions(Options):
    """optimizer and learning rate"""

    optimizer: Literal["adamw", "adam", "rmsprop", "sgd", "adamw8bit"] = flag("adamw")
    learning_rate: float = flag(0.0001, "learning rate after the warm-up (1e-4)", above=0)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "cyclic", "inverse_sqrt"
    ] = flag("cosine", "curve of the learning rate over the updates (cosine)")
    lr_warmup_steps: int = flag(500, "updates of linear warm-up; 5,000 to 10,000 for long runs (500)", at_least=0)
    lr_decay_steps: int | None = flag(None, "inverse_sqrt: updates until the decay starts (--lr_warmup_steps)", at_least=1)
    lr_floor: float = flag(0.0, "learning rate at the end, as a share of --learning_rate (0)", at_least=0, below=1)
    lr_cycles: int = flag(1, "number of cycles for cosine_with_restarts and cyclic (1)", at_least=1)
    lr_power: float = flag(1.0, "power of the polynomial curve (1)")
    adam_beta1: float = flag(0.95, at_least=0, below=1)
    adam_beta2: float = flag(0.999, at_least=0, below=1)
    adam_weight_decay: float = flag(1e-06, "weight decay; not for biases and norms (1e-6)", at_least=0)
    adam_epsilon: float = flag(1e-08, "(1e-8)", above=0)
    momentum: float = flag(0.9, "momentum of sgd and rmsprop (0.9)", at_least=0, below=1)
    l1_weight: float = flag(0.0, "weight of an L1 penalty on kernels (0)", at_least=0)


class EMAOptions(Options):
    """EMA of the weights"""

    use_ema: bool = flag(True, "average the weights, and validate, sample and export the average")
    ema_type: Literal["exponential", "power"] = flag(
        "exponential", "power: averages of several lengths; reconstruct_ema.py makes other lengths from them (exponential)"
    )
    ema_max_decay: float = flag(0.9999, "exponential: largest decay (0.9999)", at_least=0, below=1)
    ema_inv_gamma: float = flag(1.0, "exponential: warm-up of the decay, 1 - (1 + t / inv_gamma)^-power (1)", above=0)
    ema_power: float = flag(0.75, "exponential: power of this warm-up; 2/3 for a million updates or more (0.75)", above=0)
    ema_widths: list[float] = flag(
        [0.05, 0.1],
        "power: lengths relative to the training; the first one is validated, sampled and exported (0.05 0.10)",
        metavar="WIDTH",
        above=0,
        below=WIDEST,
    )
    ema_snapshot_steps: int | None = flag(None, "power: updates between two snapshots (1/40 of the run)", at_least=1, free=True)
    ema_snapshot_dtype: Literal["fp16", "fp32"] = flag(
        "fp16", "power: precision of the snapshots; fp32 for narrow widths (fp16)", free=True
    )

    @property
    def num_averages(self) -> int:
        """Copies of the weights that are averages."""
        return (len(self.ema_widths) if self.ema_type == "power" else 1) if self.use_ema else 0


class ReportOptions(Options):
    """logging, validation and samples"""

    logger: str = flag(
        "tensorboard",
        "trackers, separated by commas: tensorboard, wandb, trackio, mlflow, ...; or none (tensorboard)",
        free=True,
    )
    project_name: str | None = flag(
        None, "project in wandb, trackio, mlflow, ... (their own variable, such as WANDB_PROJECT, or the script)", free=True
    )
    logging_dir: str = flag("logs", "folder for TensorBoard inside --output_dir (logs)", free=True)
    logging_steps: int = flag(50, "updates between two reports (50)", at_least=1, free=True)
    ledger_steps: int | None = flag(
        None, "updates between two lines of ledger.jsonl, the hashes of the state (each report)", at_least=1, free=True
    )
    rerun_steps: int | None = flag(
        None,
        "after every N updates, make the last one again and compare the bits: finds devices that err; 1000 on GPUs (off)",
        at_least=1,
        free=True,
    )
    quiet: bool = flag(False, "show no progress, only notes, findings and errors", free=True)
    stop_on: Literal["never", "critical"] = flag(
        "never", "critical: stop the run at a critical finding, with exit status 3 (never)", free=True
    )
    doctor: Literal["on", "off"] = flag(
        "on", "off: nobody measures what an update does, and compares it with these options (on)", free=True
    )
    validation_steps: int = flag(1000, "updates between two validations (1000)", at_least=1, free=True)
    early_stopping_patience: int = flag(
        0, "stop after this many validations without a better result (0: off)", at_least=0, free=True
    )
    eval_steps: int | None = flag(None, "updates between two evaluations of the samples (off)", at_least=1, free=True)
    eval_images: int = flag(5000, "samples per evaluation (5000)", at_least=1, free=True)
    best_metric: Literal["loss", "fd", "kd"] = flag(
        "loss",
        "figure that decides which checkpoint is best: validation loss, or distance of samples and data (loss)",
        free=True,
    )
    evaluation_batch_size: int = flag(
        64, "evaluation: samples that each process makes at once, in fp32 (64)", at_least=1, free=True
    )
    eval_batch_size: int = flag(16, "images in a sample grid, made in fp32 (16)", at_least=1, free=True)
    save_images_epochs: int = flag(10, "epochs between two sample grids (10, and at least 100 updates)", at_least=1, free=True)
    save_images_steps: int | None = flag(
        None, "updates between two sample grids; overrides --save_images_epochs", at_least=1, free=True
    )

    @property
    def trackers(self) -> list[str]:
        """Names, each once."""
        names = (name.strip() for name in self.logger.split(","))
        return [name for name in dict.fromkeys(names) if name not in ("", "none")]


class OutputOptions(Options):
    """output, checkpoints and resuming"""

    output_dir: str = flag("ddpm-model-64", "folder of the run and of the exported pipeline", free=True, path=True)
    overwrite_output_dir: bool = flag(False, "delete the run in --output_dir and start a new one", free=True, once=True)
    checkpointing_steps: int = flag(500, "updates between two checkpoints (500)", at_least=1, free=True)
    checkpoints_total_limit: int | None = flag(
        None, "checkpoints to keep: the newest ones (at least 2); the best one is also kept", at_least=1, free=True
    )
    resume_from_checkpoint: str | None = flag(
        None, "latest, best, checkpoint-N or a path; latest starts a new run if there is none yet", free=True, once=True
    )
    allow_option_change: list[str] = flag([], "allow these options to change on resume", free=True, once=True, metavar="NAME")
    save_model_epochs: int = flag(10, "epochs between two exports of the pipeline (10)", at_least=1, free=True)
    save_model_steps: int | None = flag(
        None, "updates between two exports; overrides --save_model_epochs", at_least=1, free=True
    )
    push_to_hub: bool = flag(False, "upload the pipeline at the end; for a finished run, only upload", free=True)
    hub_token: str | None = flag(None, "token for the Hub (HF_TOKEN, or the token of `hf auth login`)", free=True, secret=True)
    hub_model_id: str | None = flag(None, "repository to push to (name of --output_dir)", free=True)
    hub_private_repo: bool = flag(False, "make a new repository private", free=True)


AnySampler = Literal["ddim", "ddpm", "dpmsolver++", "euler", "heun"]
_NETWORK = ("model_preset", "model_config_name_or_path")
_DDPM_NETWORK = (*_NETWORK, "activation", "initialisation", "zero_init_output", "spectral_norm")
_OF_CHAINS = ("ddpm_num_steps", "ddpm_beta_schedule", "rescale_betas_zero_snr", "snr_gamma")
PIPELINE_DECIDES = (
    *("vae", "latent_scale", "image_channels", *_DDPM_NETWORK),
    *("prediction_type", "ddpm_num_steps", "ddpm_beta_schedule", "rescale_betas_zero_snr", "sigma_data"),
)


class PretrainedOptions(Options):
    """network"""

    pretrained: str | None = flag(
        None, "start from this pipeline: folder of a run, or Hub name; its network and noise schedule are taken", path=True
    )
    train_only: list[str] | None = flag(
        None, 'with --pretrained: train only the parameters of these names, such as "up_blocks.*" (all)', metavar="NAME"
    )

    network_flags: ClassVar[tuple[str, ...]]  # that say what a pipeline says itself

    def check(self) -> None:
        if self.pretrained is None:
            if self.train_only:
                raise UserError(
                    "--train_only needs --pretrained: without it, layers that are not trained stay random\nadd --pretrained"
                )
            return
        for name in sorted(self.given.intersection(self.network_flags)):
            raise UserError(f"--{name} and --pretrained: the pipeline has its own network\nleave one of the two out")


class RunOptions(
    PretrainedOptions,
    TrainingDataOptions,
    LatentOptions,
    TrainingOptions,
    OptimizerOptions,
    EMAOptions,
    ReportOptions,
    OutputOptions,
):
    """What the training scripts have in common."""

    script: ClassVar[str]
    sampling_flag: ClassVar[str]
    basics: ClassVar[tuple[str, ...]] = (
        *("dataset_name", "train_data_dir", "resolution", "image_channels", "random_flip", "validation_images"),
        *("budget", "model_preset", "class_conditional", "pretrained", "train_batch_size", "max_train_steps"),
        *("mixed_precision", "learning_rate", "output_dir", "resume_from_checkpoint"),
    )
    if TYPE_CHECKING:  # flags of each script, with its own choices
        sampler: Any = None
        model_preset: str | None = None
    usual_preset: ClassVar[str | None] = None  # where data is named, and neither a preset nor a config
    excludes: ClassVar[dict[str, tuple[str, ...]]] = {
        "train_data_dir": ("dataset_name",),
        "num_epochs": ("max_train_steps",),
        "gradient_accumulation_steps": ("global_batch_size",),  # the update is what the user's split makes
        "save_images_epochs": ("save_images_steps",),
        "save_model_epochs": ("save_model_steps",),
        "rescale_betas_zero_snr": ("snr_gamma",),  # which would not train the last timestep
        "pretrained": PIPELINE_DECIDES,
    }
    conflicts: ClassVar[tuple[tuple[str, str, str], ...]] = (  # flags that do not go together, and why
        ("balanced_sampling", "streaming", "a stream is read in blocks of any images"),
        ("vae", "streaming", "a stream is read in blocks of any images"),
        ("color_jitter", "vae", "images are encoded once, before the training"),
        ("augment_probability", "vae", "images are encoded once, before the training"),
        ("latent_scale", "pretrained", "a pipeline of latents has its own scale, and one of images has no latents"),
    )

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "shuffle_window cache_limit": ("streaming",),
        "max_bad_images": ("on_bad_image", "replace"),
        "momentum": ("optimizer", "sgd", "rmsprop"),
        "lr_cycles": ("lr_scheduler", "cosine_with_restarts", "cyclic"),
        "lr_power": ("lr_scheduler", "polynomial"),
        "lr_decay_steps": ("lr_scheduler", "inverse_sqrt"),
        "ema_type ema_max_decay ema_inv_gamma ema_power ema_widths": ("use_ema",),
        "ema_max_decay ema_inv_gamma ema_power": ("ema_type", "exponential"),
        "ema_widths ema_snapshot_steps ema_snapshot_dtype": ("ema_type", "power"),
        "validation_steps": ("validation_images",),
        "eval_images evaluation_batch_size": ("eval_steps",),
        "hub_model_id hub_private_repo": ("push_to_hub",),
        "dataset_config_name dataset_revision": ("dataset_name",),
    }

    @property
    def micro_batch_size(self) -> int:
        """`train_batch_size`, once the memory plan has made a number of "auto"."""
        return int(self.train_batch_size)

    @property
    def sampling_steps(self) -> int | None:
        """Steps of the sampler that were asked for."""
        raise NotImplementedError

    @classmethod
    def preset_name(cls, given: dict[str, Any]) -> str | None:
        """digits16 for the digits and where no data is named, `usual_preset` for other data, none beside a config."""
        names_data = given.get("dataset_name") or given.get("train_data_dir")
        if given.get("model_preset") is not None or given.get("model_config_name_or_path") or given.get("pretrained"):
            return given.get("model_preset")
        return "digits16" if not names_data or given.get("dataset_name") == "digits" else cls.usual_preset

    def check(self) -> None:
        by_budget = [name for name in ("max_train_steps", "num_epochs", "pretrained", "vae") if name in self.given]
        problem = ""
        if not self.dataset_name and not self.train_data_dir:
            problem = "no data was given\n"
            problem += "set --dataset_name NAME or --train_data_dir FOLDER (for digits, give neither a model nor data)"
        elif os.path.isabs(self.logging_dir) or ".." in self.logging_dir.split(os.sep):
            problem = f"--logging_dir {self.logging_dir} is not inside --output_dir\nset a relative path, for example logs"
        elif self.train_batch_size == "auto" and self.global_batch_size is None:
            problem = "--train_batch_size auto needs to know how many images an update has\nset --global_batch_size"
        elif self.train_batch_size == "auto" and "gradient_accumulation_steps" in self.given:
            problem = "--train_batch_size auto and --gradient_accumulation_steps do not go together\n"
            problem += "leave out --gradient_accumulation_steps: auto computes it"
        elif self.color_jitter and self.image_channels not in (1, 3):
            problem = f"--color_jitter needs gray or RGB, not --image_channels {self.image_channels}\nleave out --color_jitter"
        elif self.budget is not None and by_budget:
            problem = f"--budget and --{by_budget[0]} do not go together: leave one of the two out"
        elif self.eval_steps and self.eval_images < FEWEST_IMAGES:
            problem = f"--eval_images must be a whole number of at least {FEWEST_IMAGES}; got {self.eval_images}\n"
            problem += "set --eval_images, or leave --eval_steps out"
        elif self.best_metric != "loss" and not self.eval_steps:
            problem = f"--best_metric {self.best_metric} is measured on samples, and --eval_steps is 0\nset --eval_steps"
        elif self.early_stopping_patience and self.best_metric == "loss" and not self.validation_images:
            problem = "--early_stopping_patience needs a validation loss\nset --validation_images (or --best_metric fd)"
        if problem:
            raise UserError(problem)
        self.check_latents()
        super().check()

    def check_latents(self) -> None:
        """Raises UserError for `conflicts`, and where flags need latents."""
        for name, other, why in self.conflicts:
            if getattr(self, name) and getattr(self, other):
                raise UserError(f"--{name} and --{other}: {why}\nleave one of the two out")
        if self.vae is None and self.latent_scale is not None:
            raise UserError("--latent_scale is for latents\nset --vae, or leave --latent_scale out")


AnyRun = TypeVar("AnyRun", bound=RunOptions)


class ClassOptions(Options):
    """classes"""

    class_conditional: bool = flag(False, "train with the classes of the images (no)")
    label_dropout: float = flag(
        0.1, "share of samples that are trained without a label, for guidance (0.1)", at_least=0, below=1
    )
    guidance: float = flag(
        1.0, "strength of the guidance in sample grids and evaluations of the run; 1: off (1)", at_least=0, free=True
    )

    def check(self) -> None:
        super().check()
        if self.guidance != 1.0 and not self.class_conditional:
            raise UserError(f"--guidance {self.guidance:g} needs a network with classes\nset --class_conditional")
        if self.guidance != 1.0 and not self.label_dropout:
            raise UserError(
                f"--guidance {self.guidance:g} needs a network that was also trained without classes\nset --label_dropout 0.1"
            )


class DDPMNetworkOptions(Options):
    """network"""

    model_preset: str | None = flag(
        None,
        "digits16, small32, small64, few (100 to 1,000 images), cifar10, celeba64 or 256 (only a network, by the resolution)",
    )
    model_config_name_or_path: str | None = flag(
        None, "config of a diffusers UNet2DModel: Hub name, folder or file", free=True, path=True
    )
    activation: Literal["silu", "mish", "gelu", "relu"] | None = flag(None, "(the network's own)")
    dropout: float | None = flag(None, "(the network's own)", at_least=0, below=1)
    initialisation: Literal["default", "xavier", "he"] = flag("default")
    zero_init_output: bool = flag(False, "initialize the output layer with zeros")
    spectral_norm: bool = flag(False, "limit the largest singular value to 1 in every layer except the last")
    enable_xformers_memory_efficient_attention: bool = flag(
        False, "needs xformers; torch's own attention is already memory-efficient", free=True
    )


class DDPMDiffusionOptions(Options):
    """diffusion"""

    objective: Literal["ddpm", "flow"] = flag("ddpm", "flow: flow matching on straight lines from images to noise (ddpm)")
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = flag(
        "epsilon", "with --objective flow: v_prediction, the velocity, or sample, the image (epsilon; v_prediction)"
    )
    P_mean: float | None = flag(None, "with --objective flow: mean of logit sigma, such as 0 (sigma is uniform)")
    P_std: float = flag(1.0, "with --P_mean: standard deviation of logit sigma (1)", above=0)
    ddpm_num_steps: int = flag(1000, "number of noise levels (1000)", at_least=1)
    ddpm_beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] = flag(
        "linear", "squaredcos_cap_v2 is the cosine schedule (linear)"
    )
    rescale_betas_zero_snr: bool = flag(False, "rescale the betas so that the last timestep is pure noise (zero terminal SNR)")
    snr_gamma: float | None = flag(
        None, "gamma of min-SNR loss weights; the paper has 5; not with --rescale_betas_zero_snr (off)"
    )


class DDPMSamplingOptions(Options):
    """logging, validation and samples"""

    sampler: Literal["ddim", "ddpm", "dpmsolver++", "euler", "heun"] = flag(
        "ddim", "euler and heun: with --objective flow (ddim; euler)", free=True
    )
    ddpm_num_inference_steps: int | None = flag(
        None, "sampling steps (50, or the preset's; with ddpm all noise levels, with heun 25)", at_least=1, free=True
    )


class DDPMOptions(DDPMNetworkOptions, DDPMDiffusionOptions, ClassOptions, RunOptions, DDPMSamplingOptions):
    """train_ddpm.py"""

    presets, script, network_flags = FLAGS, "train_ddpm", _DDPM_NETWORK
    sampling_flag: ClassVar[str] = "--ddpm_num_inference_steps"
    conflicts = (*RunOptions.conflicts, ("spectral_norm", "gradient_checkpointing", "the two do not work together"))

    @property
    def sampling_steps(self) -> int | None:
        return self.ddpm_num_inference_steps

    def uses_channels_last(self, device_type: str) -> bool:
        """`channels_last`, or where the network is compiled for a GPU."""
        return self.compile and device_type == "cuda" if self.channels_last is None else self.channels_last

    def check(self) -> None:
        super().check()
        if self.label_dropout != type(self).label_dropout and not self.class_conditional:
            raise UserError("--label_dropout needs a network with classes\nset --class_conditional")
        self._check_objective()

    def _check_objective(self) -> None:
        """Sets what the flags mean for flow matching. Raises UserError for flags of the other objective."""
        is_flow = self.objective == "flow"
        others = _OF_CHAINS if is_flow else ("P_mean", "P_std")
        for name in sorted(self.given.intersection(others)):
            if getattr(self, name) != getattr(type(self), name):
                goes = f"--{name} does not go with --objective {self.objective}"
                raise UserError(f"{goes}\nleave --{name} out, or change --objective")
        if is_flow and self.P_mean is None and self.P_std != type(self).P_std:
            raise UserError("--P_std needs --P_mean: without it, all noise levels are trained alike\nset --P_mean 0")
        if is_flow:  # a preset may have others
            usual = {name: getattr(type(self), name) for name in _OF_CHAINS}
            for name, value in (usual | {"prediction_type": "v_prediction", "sampler": "euler"}).items():
                if name not in self.given:
                    setattr(self, name, value)
        if is_flow and self.prediction_type == "epsilon":
            raise UserError("--objective flow has no --prediction_type epsilon\nset v_prediction (the velocity) or sample")
        if is_flow != (self.sampler in ("euler", "heun")):
            goes = "euler or heun" if is_flow else "ddim, ddpm or dpmsolver++"
            raise UserError(f"--sampler {self.sampler} does not go with --objective {self.objective}\nset {goes}")
        if is_flow and self.pretrained is not None:
            raise UserError("--pretrained cannot be continued by --objective flow\nleave one of the two out")


class EDM2NetworkOptions(Options):
    """network"""

    model_preset: str | None = flag(
        None,
        "digits16, small32, small64, few (100 to 1,000 images), or XXS, XS, S, M, L, XL, XXL (XS; digits16 for the digits)",
    )
    model_config_name_or_path: str | None = flag(None, "config of an EDM2UNet: Hub name, folder or file", free=True, path=True)
    dropout: float | None = flag(None, "(the network's own)", at_least=0, below=1)
    force_weight_norm: bool = flag(True, "scale each weight vector to unit variance after each update (yes)")


class EDM2DiffusionOptions(Options):
    """diffusion"""

    P_mean: float = flag(-0.8, "mean of ln sigma in training (-0.8; -0.4 with --vae)")
    P_std: float = flag(1.6, "standard deviation of ln sigma (1.6; 1.0 with --vae)", above=0)
    sigma_data: float = flag(0.5, "standard deviation of the images in [-1, 1] (0.5)", above=0)


class EDM2SamplingOptions(Options):
    """logging, validation and samples"""

    sampler: Literal["heun", "dpmsolver++"] = flag("heun", free=True)
    num_inference_steps: int | None = flag(None, "sampling steps (32)", at_least=1, free=True)


class EDM2Options(EDM2NetworkOptions, EDM2DiffusionOptions, ClassOptions, RunOptions, EDM2SamplingOptions):
    """train_edm2.py"""

    presets, about_presets, usual_preset = EDM2_FLAGS, EDM2_ABOUT, "XS"
    script, network_flags = "train_edm2", _NETWORK
    sampling_flag: ClassVar[str] = "--num_inference_steps"

    @property
    def sampling_steps(self) -> int | None:
        return self.num_inference_steps

    optimizer: Any = changed(OptimizerOptions, "optimizer", "adam")
    learning_rate: float = changed(OptimizerOptions, "learning_rate", 0.01)
    lr_scheduler: Any = changed(OptimizerOptions, "lr_scheduler", "inverse_sqrt")
    adam_beta1: float = changed(OptimizerOptions, "adam_beta1", 0.9)
    adam_beta2: float = changed(OptimizerOptions, "adam_beta2", 0.99)
    adam_weight_decay: float = changed(OptimizerOptions, "adam_weight_decay", 0.0)
    adam_epsilon: float = changed(
        OptimizerOptions,
        "adam_epsilon",
        1e-8,
        "epsilon of the reference code; the loss there is a sum and here a mean, so the optimizer uses "
        "epsilon / (channels x pixels) (1e-8)",
    )
    ema_type: Any = changed(EMAOptions, "ema_type", "power")
    output_dir: str = changed(OutputOptions, "output_dir", "edm2-model-64")
    class_conditional: bool = changed(ClassOptions, "class_conditional", True, "train with classes if there are labels (yes)")

    def check_latents(self) -> None:
        super().check_latents()
        if self.vae is not None:  # Karras et al. 2024, for ImageNet-512
            usual = {"P_mean": -0.4, "P_std": 1.0, "sigma_data": 0.5}
            for name in usual.keys() - self.given:
                setattr(self, name, usual[name])

    def uses_channels_last(self, device_type: str) -> bool:
        """`channels_last`, or on a GPU."""
        return device_type == "cuda" if self.channels_last is None else self.channels_last


# ---- the other scripts


class SampledOptions(Options):
    """how images are made"""

    sampler: AnySampler | None = flag(None, "(ddim; heun for EDM2, or dpmsolver++; euler for flow matching, or heun)")
    num_inference_steps: int | None = flag(
        None, "denoising steps (50; with ddpm all that were trained; 32 for EDM2; with euler 50, with heun 25)", at_least=1
    )
    class_labels: list[str] | None = flag(None, "make images of these classes in turn: names, or numbers from '#0' on (all)")
    guidance: float = flag(1.0, "strength of the guidance; 1: off (1)", at_least=0)
    guide_pipeline: str | None = flag(
        None, "autoguidance: a smaller or less trained pipeline of the same data (the model without classes)"
    )
    batch_size: int = flag(64, "images at once per process (64)", at_least=1)
    mixed_precision: Literal["no", "bf16", "fp16"] = flag("no", "precision of the network (no)")
    cpu_threads: int = flag(1, "on a CPU, threads per process (1)", at_least=1, below=1025)
    quiet: bool = flag(False, "show no progress")


class GenerateOptions(SampledOptions):
    """the images"""

    pipeline: str = flag(MISSING, "folder or Hub name of a diffusers pipeline, unconditional or of these scripts")
    output_dir: Path = flag(MISSING, "folder for the images")
    num_images: int = flag(MISSING, "number of images", at_least=1)
    seed: int = flag(0, "another seed gives another set of images (0)")
    bits: Literal[8, 16] | None = flag(
        None, "bits of each value in the files (16 for a run with --preserve_input_precision, else 8)"
    )
    compile: bool = flag(False, "torch.compile the network: takes a minute, useful for thousands of images")


class EvaluatedOptions(Options):
    """what is evaluated"""

    command: Literal["make-reference"] | None = flag(None, "store the statistics of real images", positional=True)
    pipeline: list[str] = flag([], "diffusers pipelines: folders, Hub names, checkpoints of a run")
    images: list[Path] = flag([], "folders of finished images, all of one size")
    compare: list[Path] = flag([], "add the results of these earlier evaluation.json files to the table")
    num_images: int | None = flag(
        None, "images per pipeline and seed (as many as the reference, up to 10,000)", at_least=FEWEST_IMAGES
    )
    seeds: list[int] = flag([0], "make one set of images for each of these seeds (0)")
    validation_images: int = flag(
        0, "number of validation images of the training, if --pipeline is not a run of these scripts (0)", at_least=0
    )


PRETRAINED_FEATURES = {  # and the weights that they need
    "inception": "weights-inception-2015-12-05-6726825d.pth (a release file of torch-fidelity)",
    "dinov2": "a folder with the config.json and model.safetensors of a DINOv2 model",
}


class FeatureOptions(Options):
    """what it is measured with"""

    reference: Path | None = flag(None, "real images: a folder, arrays (.npy, .npz, HDF5), or a file of make-reference")
    features: Literal["randconv", "classifier", "inception", "dinov2"] = flag(
        "randconv", "features for the distances (randconv)"
    )
    feature_weights: Path | None = flag(None, "local weights of inception (a file) or dinov2 (a folder)")
    feature_weights_sha256: str | None = flag(None, "expected start of the SHA-256 of these weights (inception: 6726825d)")
    no_classes: bool = flag(False, "do not measure the class balance, which needs a classifier")


class EvaluationOutputOptions(Options):
    """output"""

    output: Path | None = flag(None, "make-reference: the file to write")
    output_dir: Path | None = flag(None, "folder for evaluation.json and nearest.png (evaluation/ in the folder of the run)")
    json: bool = flag(False, "print JSON instead of tables")


_OF_SAMPLES = {"num_images", "seeds", "sampler", "num_inference_steps", "class_labels", "guidance", "guide_pipeline"}


class EvaluateOptions(EvaluatedOptions, SampledOptions, FeatureOptions, EvaluationOutputOptions, DataOptions):
    """evaluate.py"""

    basics: ClassVar[tuple[str, ...]] = (
        *("command", "pipeline", "images", "compare", "num_images", "seeds", "sampler", "num_inference_steps"),
        *("dataset_name", "train_data_dir", "reference", "features", "output_dir", "output", "json"),
    )

    def check(self) -> None:
        named, makes_reference = bool(self.dataset_name or self.train_data_dir), self.command == "make-reference"
        of_samples = [name for name in sorted(self.given & _OF_SAMPLES) if getattr(self, name) != [0]]  # seeds in a file
        weights, problem = PRETRAINED_FEATURES.get(self.features), ""
        if named and self.reference:
            problem = "the real images are given twice\nset only one of --dataset_name, --train_data_dir and --reference"
        elif not named and not self.reference:
            problem = "there are no real images to compare with\n"
            problem += "set --dataset_name, --train_data_dir or --reference (a folder, arrays, or a file of make-reference)"
        elif makes_reference and (self.output is None or self.pipeline or self.images):
            problem = "make-reference needs --output, and does not use --pipeline or --images\n"
            problem += "give only the real images and --output FILE"
        elif not makes_reference and not self.pipeline and not self.images:
            problem = "there is nothing to evaluate\nset --pipeline or --images"
        elif not makes_reference and not self.pipeline and of_samples:
            problem = f"--{of_samples[0]} is for --pipeline, and only --images is set\nleave --{of_samples[0]} out"
        elif not makes_reference and self.output is not None:
            problem = "--output is for make-reference\nset --output_dir, or evaluate.py make-reference --output FILE"
        elif weights is not None and self.feature_weights is None:
            problem = f"--features {self.features} needs weights\nset --feature_weights to {weights}"
        elif weights is None and self.feature_weights is not None:
            problem = f"--feature_weights is not for --features {self.features}\n"
            problem += f"set --features to {' or '.join(PRETRAINED_FEATURES)}, or leave --feature_weights out"
        if problem:
            raise UserError(problem)


class DiagnosedOptions(Options):
    """what is diagnosed"""

    run: Path | None = flag(None, "output_dir of a run", positional=True)
    pipeline: str | None = flag(None, "folder or Hub name of an unconditional diffusers pipeline")
    probe_images: int = flag(64, "real images to test a pipeline with (64)", at_least=1)
    compare: list[Path] = flag(
        [], "two runs: find the first update at which they differ, what differs first, and which options differ", metavar="RUN"
    )
    json: bool = flag(False, "print JSON instead of a table")
    all: bool = flag(False, "print all checks and figures, too, not only the findings")
    fail_on: Literal["critical", "warning"] | None = flag(
        None, "exit status 1 for findings of this severity or above (warning; with --watch, it is the status of the script)"
    )
    no_report: bool = flag(False, "do not write report.html and diagnosis.json")
    report_dir: Path | None = flag(None, "for a dataset or a pipeline: folder for report.html and its pictures")
    seed: int = flag(0)
    watch: str | None = flag(
        None, "run a training script and watch it; everything after SCRIPT is for the script", metavar="SCRIPT ..."
    )
    watch_dir: Path | None = flag(None, "folder for the report and the findings (watch/<the script's name>)")
    watch_updates: int | None = flag(None, "stop the script after this many updates", at_least=1)


class DiagnoseOptions(DiagnosedOptions, DataOptions):
    """diagnose.py"""

    basics: ClassVar[tuple[str, ...]] = (
        *("run", "pipeline", "dataset_name", "train_data_dir", "resolution", "image_channels", "compare"),
        *("all", "json", "fail_on", "report_dir", "watch", "watch_dir", "watch_updates"),
    )

    needs: ClassVar[dict[str, tuple[str, ...]]] = {"watch_dir watch_updates": ("watch",), "probe_images": ("pipeline",)}

    def check(self) -> None:
        for problem in self.without_effect():
            raise UserError(f"{problem}\nleave it out")
        named = [self.run is not None, self.pipeline is not None, bool(self.dataset_name or self.train_data_dir)]
        wrong, others = any(named), "together with a run, --pipeline or a dataset\nleave these out"
        if self.watch is not None:
            problem = f"--watch SCRIPT does not go {others}"
        elif self.compare:
            wrong |= len(self.compare) != 2
            problem = f"--compare needs two runs, and does not go {others}"
        else:
            wrong = named not in ([True, False, False], [False, True, True], [False, False, True])
            problem = "these flags do not say what to diagnose\ngive the folder of a run, "
            problem += "or --pipeline with --dataset_name or --train_data_dir, or only a dataset"
        if wrong:
            raise UserError(problem)


def read_widths(text: str) -> list[float]:
    """0.02:0.25:0.01 -> 0.02, 0.03 ... 0.25; without colons the one width. Raises ValueError."""
    first, last, step = [float(part) for part in text.split(":")] if ":" in text else [float(text), float(text), 1.0]
    if not (0 < first <= last < WIDEST and step > 0):
        raise ValueError(f"{text} has no widths, or impossible ones")
    count = (last - first) / step + 1e-6
    if not count < MOST_WIDTHS:
        raise ValueError(f"{text} has more than {MOST_WIDTHS} widths")
    return [round(first + i * step, 10) for i in range(int(count) + 1)]


class ReconstructionOptions(Options):
    """the average"""

    run: Path = flag(MISSING, "folder of the run, with its exported pipeline and ema_snapshots/", positional=True)
    width: float | None = flag(
        None, "relative width; usually 0.05 to 0.15; 0.02 to 0.25 works with 40 snapshots", above=0, below=WIDEST
    )
    widths: str | None = flag(
        None,
        "try these widths and keep the best one",
        metavar="FIRST:LAST:STEP",
        reads=lambda text: read_widths(text) and text,  # stays as it was written
        words=f"FIRST:LAST:STEP, such as 0.02:0.25:0.01, with at most {MOST_WIDTHS} widths above 0 and below {WIDEST}",
    )
    metric: Literal["fd_randconv", "kd_randconv"] = flag(
        "fd_randconv", "figure that decides which width is best: Frechet or kernel distance of features (fd_randconv)"
    )
    num_images: int = flag(1000, "samples for each width (1000)", at_least=FEWEST_IMAGES)
    batch_size: int = flag(64, "images at once (64)", at_least=1)
    seed: int = flag(0, "seed of the samples; each width gets the same noise (0)")
    cpu_threads: int | None = flag(None, "threads on a CPU (all cores)", at_least=1)
    step: int | None = flag(None, "step of a snapshot (default: the last one)", at_least=1)
    output_dir: Path = flag(MISSING, "folder for the pipeline")

    needs: ClassVar[dict[str, tuple[str, ...]]] = {"metric num_images batch_size seed": ("widths",)}

    def check(self) -> None:
        for problem in self.without_effect():
            raise UserError(f"{problem}\nleave it out")
        if (self.width is None) == (self.widths is None):
            raise UserError("--width or --widths is needed, and not both\nset one of the two")
