"""Options beside each other, the data and the length of the run: what is compared, the limits, why, and what to say.

A row gives one number, which is small where all is well. The limits stand between what published recipes have and what ruins a
training; benchmarks/doctor/sets/options.toml has both. Beyond `info` a finding is for information, beyond
`warning` it is a warning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.core.size import Size
from utils.diagnostics.entry import Entry
from utils.optim.ema import ema_decay
from utils.options.flags import RunOptions
from utils.runs.record import RunRecord

NEVER = math.inf
DEFAULT_WARM_UP = RunOptions.__dataclass_fields__["lr_warmup_steps"].default
MOST_OF_A_RUN = 0.5


class UnknownFact(Exception):
    """A row needs what is not known of the run, or has no meaning for it."""


class Facts:
    """What is known of a run, by name: options, or in their place what followed from them. Raises UnknownFact for others."""

    def __init__(self, record: RunRecord):
        self._values: dict[str, Any] = {**record.options, **{k: v for k, v in record.resolved.items() if v is not None}}
        for kind in ("data", "schedule"):
            self._values |= next((known for _, known in reversed(record.known(kind))), {})

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise UnknownFact(name)
        return value

    def require(self, holds: bool) -> None:
        """Raises UnknownFact where a row has no meaning otherwise."""
        if not holds:
            raise UnknownFact

    @property
    def is_adam(self) -> bool:
        return self.optimizer in ("adam", "adamw", "adamw8bit")

    @property
    def is_edm2(self) -> bool:
        return "sigma_data" in self._values

    @property
    def keeps_unit_variance(self) -> bool:
        """Whether each weight vector is scaled after each update, which makes other learning rates usual."""
        return bool(self._values.get("force_weight_norm"))

    @property
    def of_latents(self) -> bool:
        return bool(self._values.get("vae"))

    @property
    def fine_tuned(self) -> bool:
        return bool(self._values.get("pretrained"))

    @property
    def gradient_norm(self) -> float:
        """The largest that an optimizer sees, as far as the options say: 1 where nothing is clipped."""
        return self.max_grad_norm if self._values.get("max_grad_norm") and not self.adaptive_clipping else 1.0

    @property
    def epsilon(self) -> float:
        return self._values.get("optimizer_epsilon") or self.adam_epsilon

    @property
    def ema_length(self) -> float:
        """Updates that the shortest average spans at the end of the run."""
        self.require(self.use_ema)
        if self.ema_type == "power":
            return min(self.ema_widths) * self.max_train_steps
        decay = ema_decay(self.max_train_steps, self.ema_max_decay, self.ema_inv_gamma, self.ema_power)
        return 1.0 / (1.0 - decay)

    @property
    def spreads(self) -> tuple[float, float]:
        """(standard deviation, root mean square) of the images in [-1, 1]; without and with the mean."""
        variance = sum(value**2 for value in self.std) / len(self.std)
        square = sum(value**2 for value in self.mean) / len(self.mean)
        return math.sqrt(variance), math.sqrt(variance + square)


Figure = Callable[[Facts], tuple[float, str]]  # (the number, what to say of it)


@dataclass(frozen=True)
class Row:
    code: str
    compared: str
    figure: Figure
    info: float
    warning: float
    reason: str
    source: str
    entry: Entry | None = None  # None where another row says it


def warm_up(run: Facts) -> tuple[float, str]:
    run.require(run.lr_scheduler != "constant")  # which has none
    share = run.lr_warmup_steps / run.max_train_steps
    if run.lr_warmup_steps == DEFAULT_WARM_UP:  # nobody chose it for this run, which may be a short trial: for information
        share = min(share, MOST_OF_A_RUN)
    return share, f"--lr_warmup_steps {run.lr_warmup_steps}, and the run has {run.max_train_steps} updates"


def cycles(run: Facts) -> tuple[float, str]:
    run.require(run.lr_scheduler in ("cosine_with_restarts", "cyclic"))
    updates = max(run.max_train_steps - run.lr_warmup_steps, 1) / run.lr_cycles
    return 1 / updates, f"--lr_cycles {run.lr_cycles}: one takes {updates:.3g} updates"


def beta2_below_beta1(run: Facts) -> tuple[float, str]:
    run.require(run.is_adam)
    return run.adam_beta1 - run.adam_beta2, f"--adam_beta2 {run.adam_beta2:g} is below --adam_beta1 {run.adam_beta1:g}"


def momentum_length(run: Facts) -> tuple[float, str]:
    name = "adam_beta1" if run.is_adam else "momentum"
    length = 1 / (1 - getattr(run, name))
    return length, f"--{name} {getattr(run, name):g} averages gradients over {length:,.0f} updates"


def second_moment_short(run: Facts) -> tuple[float, str]:
    run.require(run.is_adam)
    length = 1 / (1 - run.adam_beta2)
    return 1 / length, f"--adam_beta2 {run.adam_beta2:g} averages squared gradients over {length:,.0f} updates"


def second_moment_long(run: Facts) -> tuple[float, str]:
    _, what = second_moment_short(run)
    return 1 / (1 - run.adam_beta2), what


def epsilon(run: Facts) -> tuple[float, str]:
    run.require(run.optimizer != "sgd")
    size = run.gradient_norm / math.sqrt(run.parameters)
    return run.epsilon / size, f"epsilon {run.epsilon:.3g}; gradients of norm {run.gradient_norm:g} have {size:.2g} per weight"


def power_width(run: Facts) -> tuple[float, str]:
    run.require(run.use_ema and run.ema_type == "power")
    return max(run.ema_widths), f"--ema_widths {max(run.ema_widths):g}"


def ema_short(run: Facts) -> tuple[float, str]:
    run.require(run.max_train_steps >= 1000)
    length = run.ema_length
    return 1 / length, f"of {run.max_train_steps} updates it spans the last {length:.3g}"


def latent_scale(run: Facts) -> tuple[float, str]:
    run.require(not run.fine_tuned)  # whose network knows its own scale
    goal = run.sigma_data if run.is_edm2 else 1.0
    worst = max(run.latent_spread, key=lambda spread: max(spread / goal, goal / spread))
    said = f"a channel of the latents has a standard deviation of {worst:.3g}; best is {goal:g}"
    return max(worst / goal, goal / worst), said


def sigma_data(run: Facts) -> tuple[float, str]:
    run.require(not run.of_latents)
    deviation, size = run.spreads
    times = max(run.sigma_data / size, deviation / run.sigma_data) if size > 0 and deviation > 0 else 0.0
    return times, f"--sigma_data {run.sigma_data:g}; the images have a standard deviation of {deviation:.2g}"


def noise_levels(run: Facts) -> tuple[float, str]:
    center = math.log(run.sigma_data) - run.P_mean
    low, high = ((center + side * math.log(10)) / run.P_std / math.sqrt(2) for side in (-1, 1))
    share = (math.erf(high) - math.erf(low)) / 2
    what = f"--P_mean {run.P_mean:g} --P_std {run.P_std:g}: {1 - share:.0%} of the levels are beyond 10 times --sigma_data"
    return 1 - share, f"{what} {run.sigma_data:g}, or below a tenth of it"


def noise_spread(run: Facts) -> tuple[float, str]:
    return (
        1 / run.P_std,
        f"--P_std {run.P_std:g}: two thirds of the levels lie within a factor of {math.exp(2 * run.P_std):.2g}",
    )


def resolution(run: Facts) -> tuple[float, str]:
    side = run.sizes.get("shorter_side_median")
    run.require(bool(side))
    text = f"--resolution {run.resolution}; half of the files have a side of at most {side:g} pixels"
    return min(Size.of(run.resolution)) / side, text


def batch(run: Facts) -> tuple[float, str]:
    share = run.global_batch_size / run.training_images
    return share, f"{run.global_batch_size} of {run.training_images} images in each update, {share:.0%}"


def held_out(run: Facts) -> tuple[float, str]:
    count = run.validation_images
    return count / (count + run.training_images), f"{count} images are held out, {run.training_images} are left to train on"


def evaluation_size(run: Facts) -> tuple[float, str]:
    run.require(run.best_metric != "loss")
    needed = {"fd": 120, "kd": 100}[run.best_metric]
    return needed / run.eval_images, f"--best_metric {run.best_metric} of --eval_images {run.eval_images}, below {needed}"


def judged_too_late(run: Facts) -> tuple[float, str]:
    """The last update is judged besides: this is about what comes before."""
    by_samples = run.best_metric != "loss"
    run.require(by_samples or run.early_stopping_patience > 0)
    name = "eval_steps" if by_samples else "validation_steps"
    every = getattr(run, name)
    return (run.early_stopping_patience + 1) * every / run.max_train_steps, f"--{name} {every} of {run.max_train_steps} updates"


def clip_range(run: Facts) -> tuple[float, str]:
    reach = max(abs(run.min), abs(run.max))
    return reach / run.clip_range, f"the sampler clips at {run.clip_range:g}, the images reach {reach:.3g}"


def clipping(run: Facts) -> tuple[float, str]:
    run.require(run.max_grad_norm > 0 and not run.adaptive_clipping)
    return 1 / run.max_grad_norm, f"--max_grad_norm {run.max_grad_norm:g}"


def learning_rate(run: Facts) -> tuple[float, str]:
    unit = run.keeps_unit_variance
    sgd = run.optimizer == "sgd" and not unit
    # EDM2's network begins with weights of unit variance, whether they are kept there or not; another network may not.
    usual = (1e-3, 0.02) if unit else (1e-4, 0.5) if sgd else (1e-5, 0.02 if run.is_edm2 else 2e-3)
    # Momentum adds up 1 / (1 - momentum) gradients: the usual range is that of 0.9.
    rate = run.learning_rate * (0.1 / (1 - run.momentum) if sgd else 1)
    times = max(rate / usual[1], usual[0] / rate)
    kept = " with weights of unit variance" if unit else " with --momentum 0.9" if sgd else ""
    return times, f"--learning_rate {run.learning_rate:g}; usual for {run.optimizer}{kept} are {usual[0]:g} to {usual[1]:g}"


def weight_decay(run: Facts) -> tuple[float, str]:
    decay = run.adam_weight_decay
    run.require(run.optimizer in ("adamw", "adamw8bit"))
    run.require(run.learning_rate * decay * run.max_train_steps > 1)  # or it does not get there
    size = math.sqrt(run.learning_rate / (2 * decay))
    return 1 / size, f"--adam_weight_decay {decay:g}: weights of about {size:.2g} will be left"


def coupled_decay(run: Facts) -> tuple[float, str]:
    run.require(run.optimizer in ("adam", "rmsprop") and not run.keeps_unit_variance)
    times = run.adam_weight_decay * 0.05 * math.sqrt(run.parameters) / run.gradient_norm
    return times, f"--optimizer {run.optimizer} adds the decay to the gradient, and makes {times:.2g} times as much of it"


def l1_penalty(run: Facts) -> tuple[float, str]:
    times = run.l1_weight * math.sqrt(run.parameters) / run.gradient_norm
    return times, f"--l1_weight {run.l1_weight:g}: its gradient is about {times:.2g} times that of the loss"


def label_dropout(run: Facts) -> tuple[float, str]:
    run.require(run.class_conditional and run.classes and (isinstance(run.classes, dict) or run.classes > 0))
    return run.label_dropout, f"--label_dropout {run.label_dropout:g}: {run.label_dropout:.0%} of the labels"


def color_jitter(run: Facts) -> tuple[float, str]:
    return run.color_jitter, f"--color_jitter {run.color_jitter:g}"


def snr_gamma(run: Facts) -> tuple[float, str]:
    return 1 / run.snr_gamma, f"--snr_gamma {run.snr_gamma:g}"


ROWS: tuple[Row, ...] = (
    Row(
        "option-warmup",
        "warm-up over the length of the run",
        warm_up,
        info=0.3,
        warning=MOST_OF_A_RUN,
        reason="published runs warm up for less than a fifth of the run; a warm-up longer than the run never ends",
        source="Karras et al. 2022, table 7: 10 of 200 M images; diffusers' tutorial: 500 of 3150 updates",
        entry=Entry(
            "the warm-up is long for this run",
            "the warm-up was chosen for a longer run",
            ("set --lr_warmup_steps to a tenth of the run or less", "more --max_train_steps"),
            stage="learning_rate",
        ),
    ),
    Row(
        "option-cycles",
        "cycles of the learning rate per update",
        cycles,
        info=0.02,
        warning=0.1,
        reason="in ten updates, the network cannot learn anything at one rate",
        source="Loshchilov & Hutter 2017: cycles of an epoch or more",
        entry=Entry(
            "the learning rate restarts too often",
            "--lr_cycles is the number of cycles in the whole run, not the updates of a cycle",
            ("--lr_cycles 1 to 10",),
            stage="learning_rate",
        ),
    ),
    Row(
        "option-betas",
        "beta1 - beta2",
        beta2_below_beta1,
        info=0.0,
        warning=0.0,
        reason="the mean gradient is divided by the size of newer gradients; in published runs, beta2 is at least beta1",
        source="Kingma & Ba 2015, theorem 4.1; Bao et al. 2023 have 0.9 0.9 and 0.99 0.99",
        entry=Entry(
            "Adam's betas do not fit each other",
            "beta1 and beta2 are exchanged, or one of them is mistyped",
            ("--adam_beta1 0.9 --adam_beta2 0.999 (0.95 0.999, 0.9 0.99)",),
            stage="optimizer",
        ),
    ),
    Row(
        "option-betas",
        "updates that the momentum spans (beta1; momentum of sgd and rmsprop)",
        momentum_length,
        info=100,
        warning=200,
        reason="published runs have 10 to 100; a longer momentum continues in directions that no longer lower the loss",
        source="Bao et al. 2023: beta1 0.99",
    ),
    Row(
        "option-betas",
        "1 - beta2",
        second_moment_short,
        info=0.1,
        warning=0.1,
        reason="an average over fewer than ten updates depends on single batches",
        source="Bao et al. 2023 have the lowest: 0.9",
    ),
    Row(
        "option-betas",
        "updates that the squared gradients span (beta2)",
        second_moment_long,
        info=10_000,
        warning=20_000,
        reason="large gradients at the beginning make the steps of the whole run small",
        source="0.999 (1000 updates) is usual",
    ),
    Row(
        "option-epsilon",
        "epsilon over the gradient per weight (at the norm after clipping; 1 without clipping)",
        epsilon,
        info=0.02,
        warning=0.1,
        reason="gradients fall by a factor of 10 to 100 in a run; with a large epsilon, Adam's steps fall with them",
        source="Kingma & Ba 2015: 1e-8",
        entry=Entry(
            "epsilon is large beside the gradients",
            "the optimizer divides by epsilon instead of the size of the gradients: its steps are much too small",
            ("--adam_epsilon 1e-8",),
            stage="optimizer",
        ),
    ),
    Row(
        "ema-too-long",
        "relative width of a power average",
        power_width,
        info=0.25,
        warning=0.25,
        reason="0.29 is the plain mean of all updates; reconstruct_ema.py makes widths up to 0.25",
        source="Karras et al. 2024, figure 5: the best are 0.01 to 0.25",
    ),
    Row(
        "option-ema-short",
        "1 / updates that the average spans, in runs of 1000 and more",
        ema_short,
        info=0.02,
        warning=0.1,
        reason="the average of ten updates is as noisy as the weights; published runs have 100 and more",
        source="Lin et al. 2023: 0.99; most have 0.9999",
        entry=Entry(
            "the average is too short to smooth the weights",
            "the decay or the warm-up of the EMA is too small",
            ("--ema_max_decay 0.999 or more", "--ema_inv_gamma 1 --ema_power 0.75", "--ema_widths 0.05 0.1"),
            stage="ema",
        ),
    ),
    Row(
        "option-sigma-data",
        "sigma_data over the root mean square of the images, or their standard deviation over sigma_data",
        sigma_data,
        info=1.8,
        warning=2.5,
        reason="only with the right value, the network has inputs and targets of unit size",
        source="Karras et al. 2022, appendix B.6",
        entry=Entry(
            "--sigma_data is not the standard deviation of the images",
            "a value of other images, or in other units than [-1, 1]",
            ("set --sigma_data to the standard deviation in the message", "0.5 fits most sets of photographs"),
            stage="network",
        ),
    ),
    Row(
        "option-latent-scale",
        "standard deviation of a channel of the latents over 1 (EDM2: --sigma_data), or the reverse",
        latent_scale,
        info=1.8,
        warning=2.5,
        reason="the noise levels are made for data of this size",
        source="Rombach et al. 2022, appendix G; Karras et al. 2024",
        entry=Entry(
            "the latents are larger or smaller than the noise is made for",
            "the scaling_factor in the config of the autoencoder is that of another one",
            ("--latent_scale auto",),
            stage="data",
        ),
    ),
    Row(
        "option-noise-levels",
        "share of the noise levels beyond a factor of 10 of sigma_data",
        noise_levels,
        info=0.35,
        warning=0.5,
        reason="images form where noise and images have about the same size; published runs have 8 % to 25 % beyond",
        source="Karras et al. 2022, 2024: P_mean -1.2 to -0.4; Blattmann et al. 2023: 1.0",
        entry=Entry(
            "part of the training is at noise levels where there is little to learn",
            "--P_mean, --P_std or --sigma_data are for other data, or have the wrong sign: they are values of ln sigma",
            ("--P_mean -0.8 --P_std 1.6", "for other units, start with --P_mean ln(sigma_data)"),
            stage="timestep",
        ),
    ),
    Row(
        "option-noise-levels",
        "1 / P_std",
        noise_spread,
        info=1.5,
        warning=2.5,
        reason="a sampler uses all levels from 80 down to 0.002; some of them were not trained",
        source="Karras et al. 2022, 2024: P_std 1.0 to 1.6",
    ),
    Row(
        "option-resolution",
        "resolution over the median side of the files",
        resolution,
        info=NEVER,  # data-enlarged says that
        warning=3.9,
        reason="the resizing makes 15 of 16 pixels; samples will be as soft as these images",
        source="CIFAR-10 at 64 and the digits at 16 are enlarged twice",
        entry=Entry(
            "the files are far smaller than the resolution",
            "--resolution is much higher than that of the files",
            ("a lower --resolution", "larger files"),
            stage="data",
        ),
    ),
    Row(
        "option-batch",
        "images of an update over all training images",
        batch,
        info=0.25,
        warning=0.5,
        reason="each update sees a large part of the data: little noise in the gradient, few updates per pass",
        source="published runs: 0.4 % at most",
        entry=Entry(
            "each update sees a large part of the images",
            "the batch is too large for the data, or there are fewer images than expected",
            ("a smaller --train_batch_size", "more images: check the folder, the split and --max_train_images"),
            stage="data",
        ),
    ),
    Row(
        "option-held-out",
        "share of the images that is held out",
        held_out,
        info=0.3,
        warning=0.5,
        reason="a few hundred images are enough to measure the loss; the others are lost for the training",
        source="CIFAR-10: 10,000 of 60,000",
        entry=Entry(
            "a large part of the images is held out",
            "--validation_images is a number of images, and the dataset is smaller than expected",
            ("set --validation_images to a tenth of the data or less",),
            stage="data",
        ),
    ),
    Row(
        "option-evaluation",
        "features or samples that the metric needs over the samples of an evaluation",
        evaluation_size,
        info=1.0,
        warning=1.0,
        reason="with fewer samples than features, the distance depends mostly on the number of samples",
        source="Heusel et al. 2017: more samples than features",
        entry=Entry(
            "the evaluation has too few samples for its metric",
            "--eval_images is too small for --best_metric",
            ("--eval_images 1000 or more", "--best_metric loss with --validation_images"),
        ),
    ),
    Row(
        "option-never",
        "updates until the first result that counts, over the length of the run",
        judged_too_late,
        info=1.0,
        warning=1.0,
        reason="the best checkpoint is then always the last one, and the run cannot stop early",
        source="",
        entry=Entry(
            "the first result for the best checkpoint comes after the end of the run",
            "--eval_steps or --validation_steps is longer than the run",
            ("set --validation_steps or --eval_steps to a tenth of the run or less",),
        ),
    ),
    Row(
        "option-clip-range",
        "largest pixel over the sampler's clipping",
        clip_range,
        info=1.02,
        warning=1.05,
        reason="the sampler cannot make the largest pixels",
        source="Ho et al. 2020: both are 1",
        entry=Entry(
            "the sampler clips below the range of the images",
            "clip_sample_range of the scheduler is too small for the training data",
            ("set clip_sample_range in scheduler/scheduler_config.json to the largest pixel", "for latents: clip_sample false"),
            stage="export",
        ),
    ),
    Row(
        "option-clipping",
        "1 / limit of the gradient norm",
        clipping,
        info=50,
        warning=300,
        reason="gradient norms of trained networks are 0.01 to 1: clipping removes nearly all of each gradient",
        source="1 is usual; Chen et al. 2024 (PixArt) have 0.01",
        entry=Entry(
            "--max_grad_norm is far below the usual norm of gradients",
            "a limit for another loss, or a typing mistake",
            ("--max_grad_norm 1", "--adaptive_clipping"),
            stage="gradient",
        ),
    ),
    Row(
        "option-learning-rate",
        "times above or below the optimizer's usual range",
        learning_rate,
        info=1.0,
        warning=4.0,
        reason="Adam changes each weight by about the learning rate; first weights are 0.01 to 0.1, or 1 in EDM2",
        source="Ho et al. 2020: 2e-5 to 2e-4; Karras et al. 2022: 1e-3; Karras et al. 2024, table 6: 0.0065 to 0.017",
        entry=Entry(
            "the learning rate is far from what is usual for this optimizer",
            "a learning rate of another optimizer or network, or a typing mistake",
            ("--learning_rate 1e-4 with adamw (0.01 in train_edm2.py)",),
            stage="learning_rate",
        ),
    ),
    Row(
        "option-weight-decay",
        "1 / weight at which AdamW's decay and steps balance, sqrt(lr / (2 decay)), if the run is long enough",
        weight_decay,
        info=25,
        warning=50,
        reason="layers start with weights of 0.02 to 0.1: the decay is stronger than the learning",
        source="Kosson et al. 2023; published runs: 0.04 or more",
        entry=Entry(
            "the weight decay is too strong",
            "the decay is for another learning rate, length or optimizer",
            ("--adam_weight_decay 0.01 or less", "--optimizer adamw, which does not scale the decay by the gradients"),
            stage="optimizer",
        ),
    ),
    Row(
        "option-weight-decay",
        "gradient of the decay over that of the loss, in adam and rmsprop",
        coupled_decay,
        info=1.0,
        warning=5.0,
        reason="these optimizers divide the sum of both by its size: the loss has almost no effect",
        source="Loshchilov & Hutter 2019",
    ),
    Row(
        "option-l1",
        "gradient of the penalty over that of the loss",
        l1_penalty,
        info=0.1,
        warning=1.0,
        reason="the penalty is a sum over all weights; its gradient has the norm l1_weight x sqrt(parameters)",
        source="",
        entry=Entry(
            "the L1 penalty is large beside the loss",
            "--l1_weight multiplies the sum over all weights, not their mean",
            ("--l1_weight 0.01 / parameters", "--l1_weight 0"),
            stage="gradient",
        ),
    ),
    Row(
        "option-label-dropout",
        "share of the labels that is dropped",
        label_dropout,
        info=0.3,
        warning=0.5,
        reason="guidance needs few samples without a label; the network learns the classes from the others",
        source="Ho & Salimans 2022: 0.1 and 0.2 are best",
        entry=Entry(
            "labels are dropped too often",
            "--label_dropout is the share that is dropped, not the share that is kept",
            ("--label_dropout 0.1",),
            stage="condition",
        ),
    ),
    Row(
        "option-augmentation",
        "strength of the color jitter",
        color_jitter,
        info=0.05,
        warning=0.4,
        reason="samples will have the changed colors",
        source="Karras et al. 2022, appendix F.2: augmentations leak unless the network gets them as input",
        entry=Entry(
            "samples will have the colors of the augmentation",
            "color jitter is useful for classifiers; a generator copies the changed colors",
            ("--color_jitter 0",),
            stage="data",
        ),
    ),
    Row(
        "option-snr-gamma",
        "1 / gamma of min-SNR",
        snr_gamma,
        info=1.5,
        warning=10,
        reason="with a gamma below 0.1, only the noisiest levels have a weight",
        source="Hang et al. 2023, table 1: 1 to 20, best 5",
        entry=Entry(
            "--snr_gamma is low: noise levels with a higher signal-to-noise ratio lose their weight",
            "gamma is a signal-to-noise ratio; at 1, image and noise have the same size",
            ("--snr_gamma 5", "leave out --snr_gamma"),
            stage="weight",
        ),
    ),
)


def table() -> str:
    """The rows as a Markdown table."""
    lines = ["| compared | for information | warning | why | source |", "|---|---|---|---|---|"]
    for row in ROWS:
        info = f"{row.info:g}" if row.info < row.warning else ""
        cells = [f"{row.compared} (`{row.code}`)", info, f"{row.warning:g}", row.reason, row.source]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
