"""Every flag of every script: one line each, with its type, default, help and range. Imports no torch: `--help` is quick.

Flags of diffusers' `train_unconditional.py` keep their name, meaning and default, so its users' command lines run unchanged.
A group is a class, and whoever needs some flags takes that group: `load_images(options: DataOptions)`.
"""

import os
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from utils.core.errors import UserError
from utils.options.parser import Options, changed, flag
from utils.options.presets import EDM2_ABOUT, EDM2_FLAGS, FLAGS


@dataclass(kw_only=True)
class DataOptions(Options):
    """data"""

    dataset_name: str | None = flag(None, "Hub name, local dataset (folder, parquet, save_to_disk), or digits (built in)")
    dataset_config_name: str | None = flag(None, "config of the Hub dataset, where it has several")
    dataset_split: str = flag("train", "split of the dataset (train)")
    dataset_revision: str | None = flag(None, "git revision of the Hub dataset, to pin it")
    train_data_dir: str | None = flag(
        None, "folder of images, or a .zip or .tar of one, sub-folders being classes; ignored with --dataset_name"
    )
    image_column: str | None = flag(None, "column with the images (found from the features)")
    label_column: str | None = flag(None, "column with the class labels (found from the features)")
    cache_dir: str | None = flag(None, "where downloads and packed images are kept (Hugging Face's cache)", free=True)
    cache_images: Literal["yes", "no"] = flag(
        "yes", "decode once into a packed uint8 file, or on the fly in workers (yes)", free=True
    )
    on_bad_image: Literal["fail", "replace"] = flag(
        "fail", "an image that cannot be decoded ends the run, or the next one takes its place (fail)"
    )
    max_bad_images: int = flag(100, "replace no more than so many, then end the run (100)", at_least=1, free=True)
    max_train_images: int | None = flag(None, "use only the first N images", at_least=1)
    resolution: int = flag(64, "images are resized to this many pixels (64)", at_least=1)
    image_channels: Literal[1, 3] = flag(3, "1 = grayscale, 3 = RGB (3)")
    background: str = flag("white", "color behind transparent images (white)")
    center_crop: bool = flag(False, "crop the center (random place)")
    preserve_input_precision: bool = flag(False, "keep 16-bit images at 16 bits instead of scaling to 8")


@dataclass(kw_only=True)
class TrainingDataOptions(DataOptions):
    """data"""

    random_flip: bool = flag(False, "flip half of the images left to right")
    color_jitter: float = flag(0.0, "strength of brightness, contrast, saturation (0)", at_least=0, below=1)
    balanced_sampling: bool = flag(False, "every class equally often; needs labels")
    dataloader_num_workers: int = flag(0, "processes that load images (0 = the main one)", at_least=0, free=True)
    validation_images: int = flag(0, "images held out of training (0)", at_least=0)


@dataclass(kw_only=True)
class TrainingOptions(Options):
    """training"""

    seed: int = flag(0, "of weights, order, crops, flips, timesteps and noise (0)")
    train_batch_size: int | Literal["auto"] = flag(
        16, "images per process and micro step (16); auto: as many as fit, --global_batch_size in all", at_least=1, free=True
    )
    global_batch_size: int | None = flag(
        None, "images per update; of --train_batch_size and --gradient_accumulation_steps what is not given follows", at_least=1
    )
    gradient_accumulation_steps: int = flag(1, "micro steps per update (1)", at_least=1, free=True)
    num_epochs: int = flag(100, "passes over the data (100)", at_least=1, free=True)
    max_train_steps: int | None = flag(None, "updates; overrides --num_epochs", at_least=1, free=True)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(
        None, "arithmetic of the training step (what `accelerate launch` was given, else no)"
    )
    gradient_checkpointing: bool = flag(False, "less memory, more time", free=True)
    compile: bool = flag(
        False, "torch.compile the network; off again where its gradients differ from the eager ones", free=True
    )
    channels_last: bool | None = flag(
        None,
        "channels innermost in memory (on a GPU with --compile; eager GPU kernels of group norms turn them round)",
        free=True,
    )
    tf32: bool = flag(True, "fp32 products on a GPU in TF32 (on)", free=True)
    cudnn_benchmark: bool = flag(
        True,
        "take the quickest convolution of a GPU for each shape; turn it off for runs that repeat more exactly (on)",
        free=True,
    )
    dry_run: bool = flag(
        False,
        "print the memory of updates, samples, evaluation and validation, the FLOPs, findings about the options; end",
        free=True,
        once=True,
    )
    max_grad_norm: float = flag(1.0, "clip the gradient's L2 norm to this, 0 = off (1)", at_least=0)
    adaptive_clipping: bool = flag(False, "clip to 2x the running mean of the norm, within [0.1, 10], instead")
    max_bad_steps: int = flag(
        20, "end after so many non-finite updates in a row, when a report sees them (20)", at_least=1, free=True
    )
    collective_timeout: float = flag(600.0, "seconds until a lost process ends all others (600)", above=0, free=True)
    cpu_threads: int | None = flag(
        None, "threads per process on a CPU (OMP_NUM_THREADS where you set it, else cores / processes)", at_least=1, free=True
    )


@dataclass(kw_only=True)
class OptimizerOptions(Options):
    """optimizer and learning rate"""

    optimizer: Literal["adamw", "adam", "rmsprop", "sgd", "adamw8bit"] = flag("adamw")
    learning_rate: float = flag(0.0001, "after warm-up (1e-4)", above=0)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "cyclic", "inverse_sqrt"
    ] = flag("cosine", "closed form of the update count (cosine)")
    lr_warmup_steps: int = flag(500, "updates of linear warm-up; 5-10 k for long runs (500)", at_least=0)
    lr_decay_steps: int | None = flag(None, "for inverse_sqrt: updates until it decays (--lr_warmup_steps)", at_least=1)
    lr_floor: float = flag(0.0, "share of the learning rate left at the end (0)", at_least=0, below=1)
    lr_cycles: int = flag(1, "for cosine_with_restarts and cyclic (1)", at_least=1)
    lr_power: float = flag(1.0, "for polynomial (1)")
    adam_beta1: float = flag(0.95, at_least=0, below=1)
    adam_beta2: float = flag(0.999, at_least=0, below=1)
    adam_weight_decay: float = flag(1e-06, "spares biases and norms (1e-6)", at_least=0)
    adam_epsilon: float = flag(1e-08, "(1e-8)", above=0)
    momentum: float = flag(0.9, "for sgd and rmsprop (0.9)", at_least=0, below=1)
    l1_weight: float = flag(0.0, "L1 penalty on kernels (0)", at_least=0)


@dataclass(kw_only=True)
class EMAOptions(Options):
    """EMA of the weights"""

    use_ema: bool = flag(True, "validate, sample, export with EMA")
    ema_type: Literal["exponential", "power"] = flag(
        "exponential", "power: of several lengths, from which reconstruct_ema.py makes any other (exponential)"
    )
    ema_max_decay: float = flag(0.9999, "exponential: (0.9999)", at_least=0, below=1)
    ema_inv_gamma: float = flag(1.0, "warm-up 1 - (1 + t / inv_gamma)^-power (1)", above=0)
    ema_power: float = flag(0.75, "3/4 for short runs, 2/3 from a million updates (0.75)", above=0)
    ema_widths: list[float] = flag(
        [0.05, 0.1],
        "power: lengths relative to the training; the first is validated, sampled and exported (0.05 0.10)",
        metavar="WIDTH",
    )
    ema_snapshot_steps: int | None = flag(
        None, "power: updates between two snapshots (a fortieth of the run)", at_least=1, free=True
    )
    ema_snapshot_dtype: Literal["fp16", "fp32"] = flag("fp16", "fp32 for narrow widths (fp16)", free=True)

    @property
    def num_averages(self) -> int:
        """Copies of the weights that are averages."""
        return (len(self.ema_widths) if self.ema_type == "power" else 1) if self.use_ema else 0


@dataclass(kw_only=True)
class ReportOptions(Options):
    """logging, validation and samples"""

    logger: str = flag(
        "tensorboard", "trackers, with commas: tensorboard, wandb, trackio, mlflow, ...; or none (tensorboard)", free=True
    )
    project_name: str | None = flag(
        None, "project in wandb, trackio, mlflow, ... (their own variable, such as WANDB_PROJECT, or the script)", free=True
    )
    logging_dir: str = flag("logs", "inside output_dir (logs)", free=True)
    logging_steps: int = flag(50, "updates between two reports (50)", at_least=1, free=True)
    quiet: bool = flag(False, "show no progress: notes, findings and errors alone", free=True)
    stop_on: Literal["never", "critical"] = flag("never", "end the run at a critical finding, with status 3 (never)", free=True)
    validation_steps: int = flag(1000, "updates between two validations (1000)", at_least=1, free=True)
    early_stopping_patience: int = flag(0, "stop after so many validations without gain (0 = off)", at_least=0, free=True)
    eval_steps: int | None = flag(None, "updates between two evaluations of the samples (off)", at_least=1, free=True)
    eval_images: int = flag(5000, "samples per evaluation (5000)", at_least=1, free=True)
    best_metric: Literal["loss", "fd", "kd"] = flag(
        "loss", "what makes a checkpoint the best: held-out loss, or a distance of the samples from the data (loss)", free=True
    )
    evaluation_batch_size: int = flag(
        64, "samples at once on each process in an evaluation, in fp32 (64)", at_least=1, free=True
    )
    eval_batch_size: int = flag(16, "sample images in a grid, made in fp32 (16)", at_least=1, free=True)
    save_images_epochs: int = flag(10, "epochs between two sample grids (10)", at_least=1, free=True)
    save_images_steps: int | None = flag(None, "the same in updates; overrides the epochs", at_least=1, free=True)

    @property
    def trackers(self) -> list[str]:
        """Names, each once."""
        names = (name.strip() for name in self.logger.split(","))
        return [name for name in dict.fromkeys(names) if name not in ("", "none")]


@dataclass(kw_only=True)
class OutputOptions(Options):
    """output, checkpoints and resuming"""

    output_dir: str = flag("ddpm-model-64", "folder of the run and of the exported pipeline", free=True)
    overwrite_output_dir: bool = flag(False, "delete the run that is there", free=True, once=True)
    checkpointing_steps: int = flag(500, "updates between two checkpoints (500)", at_least=1, free=True)
    checkpoints_total_limit: int | None = flag(
        None, "how many to keep: the newest, at least 2, and the best", at_least=1, free=True
    )
    resume_from_checkpoint: str | None = flag(
        None, "latest, best, checkpoint-N or a path; latest starts anew where none is", free=True, once=True
    )
    allow_option_change: list[str] = flag([], "let these options differ on resume", free=True, once=True, metavar="NAME")
    save_model_epochs: int = flag(10, "epochs between two exports of the pipeline (10)", at_least=1, free=True)
    save_model_steps: int | None = flag(None, "the same in updates; overrides the epochs", at_least=1, free=True)
    push_to_hub: bool = flag(False, "upload the pipeline at the end, or that of a finished run alone", free=True)
    hub_token: str | None = flag(None, "(HF_TOKEN, or that of `hf auth login`)", free=True, secret=True)
    hub_model_id: str | None = flag(None, "repository to push to (name of output_dir)", free=True)
    hub_private_repo: bool = flag(False, "a new repository is private", free=True)


@dataclass(kw_only=True)
class RunOptions(TrainingDataOptions, TrainingOptions, OptimizerOptions, EMAOptions, ReportOptions, OutputOptions):
    """What the training scripts have in common."""

    script: ClassVar[str]
    if TYPE_CHECKING:  # a flag of each script, with its own choices
        sampler: Any
    usual_preset: ClassVar[str | None] = None  # where data is named, and neither a preset nor a config
    excludes: ClassVar[dict[str, tuple[str, ...]]] = {
        "train_data_dir": ("dataset_name",),
        "num_epochs": ("max_train_steps",),
        "gradient_accumulation_steps": ("global_batch_size",),  # the update is what the user's split makes
        "save_images_epochs": ("save_images_steps",),
        "save_model_epochs": ("save_model_steps",),
        "rescale_betas_zero_snr": ("snr_gamma",),  # which would not train the last timestep
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
        if given.get("model_preset") is not None or given.get("model_config_name_or_path"):
            return given.get("model_preset")
        return "digits16" if not names_data or given.get("dataset_name") == "digits" else cls.usual_preset

    def check(self) -> None:
        if not self.dataset_name and not self.train_data_dir:
            raise UserError(
                "name the data: --dataset_name NAME or --train_data_dir FOLDER (or neither model nor data, for digits)"
            )
        if os.path.isabs(self.logging_dir) or ".." in self.logging_dir.split(os.sep):
            raise UserError(f"--logging_dir {self.logging_dir} leaves --output_dir; name a folder inside it, such as logs")
        if self.train_batch_size == "auto" and self.global_batch_size is None:
            raise UserError("--train_batch_size auto needs --global_batch_size, the images of an update")
        if self.train_batch_size == "auto" and "gradient_accumulation_steps" in self.given:
            raise UserError("--train_batch_size auto finds --gradient_accumulation_steps itself: leave that out")
        if self.best_metric != "loss" and not self.eval_steps:
            raise UserError(f"--best_metric {self.best_metric} is a figure of the samples: set --eval_steps")
        if self.early_stopping_patience and self.best_metric == "loss" and not self.validation_images:
            raise UserError("--early_stopping_patience needs held-out images: set --validation_images (or --best_metric fd)")


@dataclass(kw_only=True)
class DDPMNetworkOptions(Options):
    """network"""

    model_preset: str | None = flag(
        None, "digits16, small32, small64, cifar10, celeba64 or 256, see below (chosen from the resolution)"
    )
    model_config_name_or_path: str | None = flag(None, "config of a diffusers UNet2DModel: Hub name, folder or file", free=True)
    activation: Literal["silu", "mish", "gelu", "relu"] | None = flag(None, "(the network's own)")
    dropout: float | None = flag(None, "(the network's own)", at_least=0, below=1)
    initialisation: Literal["default", "xavier", "he"] = flag("default")
    zero_init_output: bool = flag(False, "start with an output layer of zeros")
    spectral_norm: bool = flag(False, "largest singular value 1 in every layer but the last")
    enable_xformers_memory_efficient_attention: bool = flag(
        False, "needs xformers; torch's own attention is already memory-efficient", free=True
    )


@dataclass(kw_only=True)
class DDPMDiffusionOptions(Options):
    """diffusion"""

    prediction_type: Literal["epsilon", "sample", "v_prediction"] = flag("epsilon")
    ddpm_num_steps: int = flag(1000, "noise levels (1000)", at_least=1)
    ddpm_beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] = flag(
        "linear", "squaredcos_cap_v2 is the cosine schedule (linear)"
    )
    rescale_betas_zero_snr: bool = flag(False, "no signal left at the last timestep")
    snr_gamma: float | None = flag(
        None, "min-SNR weighting of the loss, 5 in the paper; not with --rescale_betas_zero_snr (off)"
    )


@dataclass(kw_only=True)
class DDPMSamplingOptions(Options):
    """logging, validation and samples"""

    sampler: Literal["ddim", "ddpm", "dpmsolver++"] = flag("ddim", free=True)
    ddpm_num_inference_steps: int | None = flag(
        None, "sampling steps (50; all of them with --sampler ddpm)", at_least=1, free=True
    )


@dataclass(kw_only=True)
class DDPMOptions(DDPMNetworkOptions, DDPMDiffusionOptions, RunOptions, DDPMSamplingOptions):
    """train_ddpm.py"""

    presets, script = FLAGS, "train_ddpm"

    @property
    def sampling_steps(self) -> int | None:
        return self.ddpm_num_inference_steps

    def uses_channels_last(self, device_type: str) -> bool:
        """`channels_last`, or where the network is compiled for a GPU."""
        return self.compile and device_type == "cuda" if self.channels_last is None else self.channels_last

    def check(self) -> None:
        super().check()
        if self.spectral_norm and self.gradient_checkpointing:
            raise UserError(
                "--spectral_norm and --gradient_checkpointing: computing a layer again would move its power iteration"
            )


@dataclass(kw_only=True)
class EDM2NetworkOptions(Options):
    """network"""

    model_preset: str | None = flag(None, "digits16, or XXS, XS, S, M, L, XL, XXL (XS; digits16 for the digits)")
    model_config_name_or_path: str | None = flag(None, "config of an EDM2UNet: Hub name, folder or file", free=True)
    dropout: float | None = flag(None, "(the network's own)", at_least=0, below=1)
    force_weight_norm: bool = flag(True, "every stored weight vector at unit variance after each update (yes)")


@dataclass(kw_only=True)
class EDM2DiffusionOptions(Options):
    """diffusion"""

    P_mean: float = flag(-0.8, "mean of ln sigma in training (-0.8; -0.4 for latents)")
    P_std: float = flag(1.6, "standard deviation of ln sigma (1.6; 1.0 for latents)", above=0)
    sigma_data: float = flag(0.5, "standard deviation of the images in [-1, 1] (0.5)", above=0)
    class_conditional: bool = flag(True, "where there are labels (yes)")
    label_dropout: float = flag(0.1, "share of samples trained without label, for guidance (0.1)", at_least=0, below=1)


@dataclass(kw_only=True)
class EDM2SamplingOptions(Options):
    """logging, validation and samples"""

    sampler: Literal["heun", "dpmsolver++"] = flag("heun", free=True)
    num_inference_steps: int | None = flag(None, "sampling steps (32)", at_least=1, free=True)


@dataclass(kw_only=True)
class EDM2Options(EDM2NetworkOptions, EDM2DiffusionOptions, RunOptions, EDM2SamplingOptions):
    """train_edm2.py"""

    presets, about_presets, usual_preset = EDM2_FLAGS, EDM2_ABOUT, "XS"
    script = "train_edm2"

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
        "as in the reference, whose loss is a sum over channels and pixels; here it is their mean, so epsilon "
        "is divided by channels x pixels (1e-8)",
    )
    ema_type: Any = changed(EMAOptions, "ema_type", "power")
    output_dir: str = changed(OutputOptions, "output_dir", "edm2-model-64")

    def uses_channels_last(self, device_type: str) -> bool:
        """`channels_last`, or on a GPU."""
        return device_type == "cuda" if self.channels_last is None else self.channels_last


# ---- the other scripts


@dataclass(kw_only=True)
class GenerateOptions(Options):
    """options"""

    pipeline: str = flag(MISSING, "folder or Hub name of an unconditional diffusers pipeline")
    output_dir: Path = flag(MISSING, "folder for the images")
    num_images: int = flag(MISSING, "images 0 ... N-1 are made", at_least=1)
    seed: int = flag(0, "another seed gives another set of images (default: 0)")
    batch_size: int = flag(64, "images at once per process (default: 64)", at_least=1)
    sampler: Literal["ddim", "ddpm", "dpmsolver++", "heun"] | None = flag(None, "default: ddim; heun for EDM2 (or dpmsolver++)")
    num_inference_steps: int | None = flag(
        None, "denoising steps (default: 50; with ddpm all that were trained; 32 for EDM2)", at_least=1
    )
    class_labels: list[str] | None = flag(None, "classes to make in turn, by name or number (default: all)")
    guidance: float = flag(1.0, "above 1 moves away from the guide (default: 1, off)")
    guide_pipeline: str | None = flag(
        None, "a smaller or less trained pipeline of the same data (default: the model without classes)"
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = flag("no", "precision of the network (default: no)")
    compile: bool = flag(False, "torch.compile the network: a minute at first, pays for thousands of images")
    cpu_threads: int = flag(1, "on a CPU, threads per process (default: 1)", at_least=1)
    quiet: bool = flag(False, "show no progress")


@dataclass(kw_only=True)
class EvaluatedOptions(Options):
    """what is evaluated"""

    command: Literal["make-reference"] | None = flag(None, "store the statistics of real images", positional=True)
    pipeline: list[str] = flag([], "diffusers pipelines: folders, Hub names, checkpoints of a run")
    images: list[Path] = flag([], "folders of finished images, all of one size")
    compare: list[Path] = flag([], "evaluation.json of earlier calls, into the same table")
    num_images: int | None = flag(None, "per pipeline and seed (as many as the reference, up to 10,000)", at_least=1)
    seeds: list[int] = flag([0], "a set of images for each (0)")
    sampler: Literal["ddim", "ddpm", "dpmsolver++", "heun"] | None = flag(None, "(ddim; heun for EDM2, or dpmsolver++)")
    num_inference_steps: int | None = flag(
        None, "denoising steps (50; with ddpm all that were trained; 32 for EDM2)", at_least=1
    )
    class_labels: list[str] | None = flag(None, "EDM2: classes to make in turn, by name or number (all)")
    guidance: float = flag(1.0, "EDM2: above 1 moves away from the guide (1, off)")
    guide_pipeline: str | None = flag(None, "EDM2: a weaker pipeline of the same data (the model without classes)")
    validation_images: int = flag(0, "images that the training held out, where --pipeline is no run of ours (0)", at_least=0)
    batch_size: int = flag(64, "images at once per process (64)", at_least=1)
    mixed_precision: Literal["no", "bf16", "fp16"] = flag("no", "of the sampled network (no)")
    cpu_threads: int = flag(1, "on a CPU, threads per process (1)", at_least=1)


@dataclass(kw_only=True)
class FeatureOptions(Options):
    """what it is measured with"""

    reference: Path | None = flag(None, "folder of real images, or a file of make-reference")
    features: Literal["randconv", "classifier", "pixels", "inception", "dinov2"] = flag("randconv", "(randconv)")
    feature_weights: Path | None = flag(None, "local weights of inception (a file) or dinov2 (a folder)")
    feature_weights_sha256: str | None = flag(None, "what their SHA-256 must begin with (inception: 6726825d)")
    no_classes: bool = flag(False, "no class balance: trains no classifier of the labels")


@dataclass(kw_only=True)
class EvaluationOutputOptions(Options):
    """output"""

    output: Path | None = flag(None, "make-reference: the file to write")
    output_dir: Path | None = flag(None, "for evaluation.json and nearest.png (evaluation/ of the run evaluated)")
    json: bool = flag(False, "print JSON instead of tables")
    quiet: bool = flag(False, "show no progress")


@dataclass(kw_only=True)
class EvaluateOptions(EvaluatedOptions, FeatureOptions, EvaluationOutputOptions, DataOptions):
    """evaluate.py"""

    def check(self) -> None:
        named = bool(self.dataset_name or self.train_data_dir)
        if named and self.reference:
            raise UserError("name the real images once: --dataset_name, --train_data_dir or --reference")
        if not named and not self.reference:
            raise UserError(
                "name the real images: --dataset_name, --train_data_dir or --reference (a folder, or of make-reference)"
            )
        if self.command == "make-reference":
            if self.output is None or self.pipeline or self.images:
                raise UserError("make-reference needs --output FILE and real images alone, without --pipeline or --images")
        elif not self.pipeline and not self.images:
            raise UserError("name what to evaluate: --pipeline or --images")


@dataclass(kw_only=True)
class DiagnosedOptions(Options):
    """options"""

    run: Path | None = flag(None, "output_dir of a run", positional=True)
    pipeline: str | None = flag(None, "folder or Hub name of an unconditional diffusers pipeline")
    probe_images: int = flag(64, "real images that a pipeline is asked about (64)", at_least=1)
    json: bool = flag(False, "print JSON instead of a table")
    no_report: bool = flag(False, "leave the run's report.html and diagnosis.json as they are")
    cache: bool = flag(False, "list the packed images: data, options, size and last use")
    prune_cache: float | None = flag(
        None, "remove the packed images that were not used for so many days", metavar="DAYS", at_least=0
    )
    report_dir: Path | None = flag(None, "of a dataset or a pipeline: folder for report.html and its pictures")
    seed: int = flag(0)
    watch: str | None = flag(
        None, "runs any training script, and watches it; all that follows is the script's", metavar="SCRIPT ..."
    )
    watch_dir: Path | None = flag(None, "folder for what was seen of it (watch/<the script's name>)")
    watch_updates: int | None = flag(None, "ends it after so many updates", at_least=1)


@dataclass(kw_only=True)
class DiagnoseOptions(DiagnosedOptions, DataOptions):
    """diagnose.py"""

    def check(self) -> None:
        named = [self.run is not None, self.pipeline is not None, bool(self.dataset_name or self.train_data_dir)]
        if self.watch is not None:
            if any(named):
                raise UserError("--watch SCRIPT takes no run, --pipeline or dataset")
            return
        if self.cache or self.prune_cache is not None:
            if any(named):
                raise UserError("--cache and --prune_cache take no run, --pipeline or dataset; --cache_dir says where to look")
            return
        if named not in ([True, False, False], [False, True, True], [False, False, True]):
            raise UserError("name a run, or --pipeline with --dataset_name or --train_data_dir, or a dataset alone")


@dataclass(kw_only=True)
class ReconstructionOptions(Options):
    """options"""

    run: Path = flag(MISSING, "folder of the run, with its exported pipeline and ema_snapshots/", positional=True)
    width: float | None = flag(None, "relative width, 0.02 to 0.25 of 40 snapshots; 0.05 to 0.15 is usual")
    widths: str | None = flag(None, "widths to try, and take the best of", metavar="FIRST:LAST:STEP")
    metric: Literal["fd_randconv", "kd_randconv", "fd_pixels", "kd_pixels"] = flag(
        "fd_randconv", "what --widths are judged by: Frechet or kernel distance of features (fd_randconv)"
    )
    num_images: int = flag(1000, "samples for each of --widths (1000)", at_least=1)
    batch_size: int = flag(64, "images at once (64)", at_least=1)
    seed: int = flag(0, "of the samples: the same noise for each width (0)")
    cpu_threads: int | None = flag(None, "on a CPU (all cores)", at_least=1)
    step: int | None = flag(None, "updates done, where there are snapshots (default: at the last)", at_least=1)
    output_dir: Path = flag(MISSING, "folder for the pipeline")

    def check(self) -> None:
        if (self.width is None) == (self.widths is None):
            raise UserError("name either --width or --widths")
