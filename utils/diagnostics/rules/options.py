"""Options beside each other, the data and the length of the run, before the first update: what is compared, and the limits.

A row gives one number, which is small where all is well. The limits stand between what published recipes have and what ruins a
training; benchmarks/doctor/sets/options.toml has both, and findings.toml the reasons. Beyond `info` a finding is for
information, beyond `warning` it is a warning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.core.size import Size
from utils.diagnostics.finding import Finding, Found
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

    def has(self, name: str) -> bool:
        """Whether an option is set."""
        return bool(self._values.get(name))

    @property
    def gradient_norm(self) -> float:
        """The largest that an optimizer sees, as far as the options say: 1 where nothing is clipped."""
        return self.max_grad_norm if self.has("max_grad_norm") and not self.adaptive_clipping else 1.0

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
    figure: Figure
    info: float
    warning: float


ROWS: list[Row] = []  # in the order of this file


def row(code: str, *, info: float, warning: float) -> Callable[[Figure], Figure]:
    def add(figure: Figure) -> Figure:
        ROWS.append(Row(code, figure, info, warning))
        return figure

    return add


@row("option-warmup", info=0.3, warning=MOST_OF_A_RUN)
def warm_up(run: Facts) -> tuple[float, str]:
    run.require(run.lr_scheduler != "constant")  # which has none
    share = run.lr_warmup_steps / run.max_train_steps
    if run.lr_warmup_steps == DEFAULT_WARM_UP:  # nobody chose it for this run, which may be a short trial: for information
        share = min(share, MOST_OF_A_RUN)
    return share, f"--lr_warmup_steps {run.lr_warmup_steps}, and the run has {run.max_train_steps} updates"


@row("option-cycles", info=0.02, warning=0.1)
def cycles(run: Facts) -> tuple[float, str]:
    run.require(run.lr_scheduler in ("cosine_with_restarts", "cyclic"))
    updates = max(run.max_train_steps - run.lr_warmup_steps, 1) / run.lr_cycles
    return 1 / updates, f"--lr_cycles {run.lr_cycles}: one takes {updates:.3g} updates"


@row("option-betas", info=0, warning=0)
def beta2_below_beta1(run: Facts) -> tuple[float, str]:
    run.require(run.is_adam)
    return run.adam_beta1 - run.adam_beta2, f"--adam_beta2 {run.adam_beta2:g} is below --adam_beta1 {run.adam_beta1:g}"


@row("option-betas", info=100, warning=200)
def momentum_length(run: Facts) -> tuple[float, str]:
    name = "adam_beta1" if run.is_adam else "momentum"
    length = 1 / (1 - getattr(run, name))
    return length, f"--{name} {getattr(run, name):g} averages gradients over {length:,.0f} updates"


@row("option-betas", info=0.1, warning=0.1)
def second_moment_short(run: Facts) -> tuple[float, str]:
    run.require(run.is_adam)
    length = 1 / (1 - run.adam_beta2)
    return 1 / length, f"--adam_beta2 {run.adam_beta2:g} averages squared gradients over {length:,.0f} updates"


@row("option-betas", info=10_000, warning=20_000)
def second_moment_long(run: Facts) -> tuple[float, str]:
    _, what = second_moment_short(run)
    return 1 / (1 - run.adam_beta2), what


@row("option-epsilon", info=0.02, warning=0.1)
def epsilon(run: Facts) -> tuple[float, str]:
    run.require(run.optimizer != "sgd")
    size = run.gradient_norm / math.sqrt(run.parameters)
    return run.epsilon / size, f"epsilon {run.epsilon:.3g}; gradients of norm {run.gradient_norm:g} have {size:.2g} per weight"


@row("ema-too-long", info=0.25, warning=0.25)
def power_width(run: Facts) -> tuple[float, str]:
    run.require(run.use_ema and run.ema_type == "power")
    return max(run.ema_widths), f"--ema_widths {max(run.ema_widths):g}"


@row("option-ema-short", info=0.02, warning=0.1)
def ema_short(run: Facts) -> tuple[float, str]:
    run.require(run.max_train_steps >= 1000)
    length = run.ema_length
    return 1 / length, f"of {run.max_train_steps} updates it spans the last {length:.3g}"


@row("option-sigma-data", info=1.8, warning=2.5)
def sigma_data(run: Facts) -> tuple[float, str]:
    run.require(not run.has("vae"))
    deviation, size = run.spreads
    times = max(run.sigma_data / size, deviation / run.sigma_data) if size > 0 and deviation > 0 else 0.0
    return times, f"--sigma_data {run.sigma_data:g}; the images have a standard deviation of {deviation:.2g}"


@row("option-latent-scale", info=1.8, warning=2.5)
def latent_scale(run: Facts) -> tuple[float, str]:
    run.require(not run.has("pretrained"))  # whose network knows its own scale
    goal = run.sigma_data if run.is_edm2 else 1.0
    worst = max(run.latent_spread, key=lambda spread: max(spread / goal, goal / spread))
    said = f"a channel of the latents has a standard deviation of {worst:.3g}; best is {goal:g}"
    return max(worst / goal, goal / worst), said


@row("option-noise-levels", info=0.35, warning=0.5)
def noise_levels(run: Facts) -> tuple[float, str]:
    center = math.log(run.sigma_data) - run.P_mean
    low, high = ((center + side * math.log(10)) / run.P_std / math.sqrt(2) for side in (-1, 1))
    share = (math.erf(high) - math.erf(low)) / 2
    what = f"--P_mean {run.P_mean:g} --P_std {run.P_std:g}: {1 - share:.0%} of the levels are beyond 10 times --sigma_data"
    return 1 - share, f"{what} {run.sigma_data:g}, or below a tenth of it"


@row("option-noise-levels", info=1.5, warning=2.5)
def noise_spread(run: Facts) -> tuple[float, str]:
    return (
        1 / run.P_std,
        f"--P_std {run.P_std:g}: two thirds of the levels lie within a factor of {math.exp(2 * run.P_std):.2g}",
    )


@row("option-resolution", info=NEVER, warning=3.9)  # data-enlarged says what is less
def resolution(run: Facts) -> tuple[float, str]:
    side = run.sizes.get("shorter_side_median")
    run.require(bool(side))
    text = f"--resolution {run.resolution}; half of the files have a side of at most {side:g} pixels"
    return min(Size.of(run.resolution)) / side, text


@row("option-batch", info=0.25, warning=0.5)
def batch(run: Facts) -> tuple[float, str]:
    share = run.global_batch_size / run.training_images
    return share, f"{run.global_batch_size} of {run.training_images} images in each update, {share:.0%}"


@row("option-held-out", info=0.3, warning=0.5)
def held_out(run: Facts) -> tuple[float, str]:
    count = run.validation_images
    return count / (count + run.training_images), f"{count} images are held out, {run.training_images} are left to train on"


@row("option-evaluation", info=1, warning=1)
def evaluation_size(run: Facts) -> tuple[float, str]:
    run.require(run.best_metric != "loss")
    needed = {"fd": 120, "kd": 100}[run.best_metric]
    return needed / run.eval_images, f"--best_metric {run.best_metric} of --eval_images {run.eval_images}, below {needed}"


@row("option-never", info=1, warning=1)
def judged_too_late(run: Facts) -> tuple[float, str]:
    """The last update is judged besides: this is about what comes before."""
    by_samples = run.best_metric != "loss"
    run.require(by_samples or run.early_stopping_patience > 0)
    name = "eval_steps" if by_samples else "validation_steps"
    every = getattr(run, name)
    return (run.early_stopping_patience + 1) * every / run.max_train_steps, f"--{name} {every} of {run.max_train_steps} updates"


@row("option-clip-range", info=1.02, warning=1.05)
def clip_range(run: Facts) -> tuple[float, str]:
    reach = max(abs(run.min), abs(run.max))
    return reach / run.clip_range, f"the sampler clips at {run.clip_range:g}, the images reach {reach:.3g}"


@row("option-clipping", info=50, warning=300)
def clipping(run: Facts) -> tuple[float, str]:
    run.require(run.max_grad_norm > 0 and not run.adaptive_clipping)
    return 1 / run.max_grad_norm, f"--max_grad_norm {run.max_grad_norm:g}"


@row("option-learning-rate", info=1, warning=4)
def learning_rate(run: Facts) -> tuple[float, str]:
    unit = run.has("force_weight_norm")  # each weight vector is scaled after each update
    sgd = run.optimizer == "sgd" and not unit
    # EDM2's network begins with weights of unit variance, whether they are kept there or not; another network may not.
    usual = (1e-3, 0.02) if unit else (1e-4, 0.5) if sgd else (1e-5, 0.02 if run.is_edm2 else 2e-3)
    # Momentum adds up 1 / (1 - momentum) gradients: the usual range is that of 0.9.
    rate = run.learning_rate * (0.1 / (1 - run.momentum) if sgd else 1)
    times = max(rate / usual[1], usual[0] / rate)
    kept = " with weights of unit variance" if unit else " with --momentum 0.9" if sgd else ""
    return times, f"--learning_rate {run.learning_rate:g}; usual for {run.optimizer}{kept} are {usual[0]:g} to {usual[1]:g}"


@row("option-weight-decay", info=25, warning=50)
def weight_decay(run: Facts) -> tuple[float, str]:
    decay = run.adam_weight_decay
    run.require(run.optimizer in ("adamw", "adamw8bit"))
    run.require(run.learning_rate * decay * run.max_train_steps > 1)  # or it does not get there
    size = math.sqrt(run.learning_rate / (2 * decay))
    return 1 / size, f"--adam_weight_decay {decay:g}: weights of about {size:.2g} will be left"


@row("option-weight-decay", info=1, warning=5)
def coupled_decay(run: Facts) -> tuple[float, str]:
    run.require(run.optimizer in ("adam", "rmsprop") and not run.has("force_weight_norm"))
    times = run.adam_weight_decay * 0.05 * math.sqrt(run.parameters) / run.gradient_norm
    return times, f"--optimizer {run.optimizer} adds the decay to the gradient, and makes {times:.2g} times as much of it"


@row("option-l1", info=0.1, warning=1)
def l1_penalty(run: Facts) -> tuple[float, str]:
    times = run.l1_weight * math.sqrt(run.parameters) / run.gradient_norm
    return times, f"--l1_weight {run.l1_weight:g}: its gradient is about {times:.2g} times that of the loss"


@row("option-label-dropout", info=0.3, warning=0.5)
def label_dropout(run: Facts) -> tuple[float, str]:
    run.require(run.class_conditional and run.classes and (isinstance(run.classes, dict) or run.classes > 0))
    return run.label_dropout, f"--label_dropout {run.label_dropout:g}: {run.label_dropout:.0%} of the labels"


@row("option-augmentation", info=0.05, warning=0.4)
def color_jitter(run: Facts) -> tuple[float, str]:
    return run.color_jitter, f"--color_jitter {run.color_jitter:g}"


@row("option-snr-gamma", info=1.5, warning=10)
def snr_gamma(run: Facts) -> tuple[float, str]:
    return 1 / run.snr_gamma, f"--snr_gamma {run.snr_gamma:g}"


def options_amiss(record: RunRecord) -> Found:
    facts = Facts(record)
    found: dict[str, list[tuple[str, str]]] = {}
    for row in ROWS:
        try:
            figure, what = row.figure(facts)
        except UnknownFact:
            continue
        yield row.code
        if figure > min(row.info, row.warning):
            found.setdefault(row.code, []).append(("warning" if figure > row.warning else "info", what))
    for code, said in found.items():
        worst = "warning" if any(severity == "warning" for severity, _ in said) else "info"
        yield Finding(code, worst, "; ".join(what for severity, what in said if severity == worst))
