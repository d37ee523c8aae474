"""Options beside each other, the data and the length of the run, before the first update.

Each function gives one number, which is small where all is well, and what its text needs beside the options. The text, the
limits and their reasons stand in the table of its name in findings.toml. The limits stand between what published recipes have
and what ruins a training; benchmarks/doctor/sets/options.toml has both. Beyond `info` a finding is for information, beyond
`warning` it is a warning.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from utils.core.size import Size
from utils.diagnostics.finding import CATALOG, Finding, Found
from utils.optim.ema import ema_decay
from utils.options.flags import RunOptions
from utils.runs.record import RunRecord

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

    def ema_decay(self, update: int) -> float:
        self.require(self.use_ema and self.ema_type == "exponential")
        return ema_decay(update, self.ema_max_decay, self.ema_inv_gamma, self.ema_power)


def warm_up(run: Facts) -> tuple[float, dict]:
    run.require(run.lr_scheduler != "constant")  # which has none
    share = run.lr_warmup_steps / run.max_train_steps
    # Nobody chose the default for this run, which may be a short trial: for information.
    return min(share, MOST_OF_A_RUN) if run.lr_warmup_steps == DEFAULT_WARM_UP else share, {}


def cycles(run: Facts) -> tuple[float, dict]:
    run.require(run.lr_scheduler in ("cosine_with_restarts", "cyclic"))
    updates = max(run.max_train_steps - run.lr_warmup_steps, 1) / run.lr_cycles
    return 1 / updates, {"updates": updates}


def beta2_below_beta1(run: Facts) -> tuple[float, dict]:
    run.require(run.is_adam)
    return run.adam_beta1 - run.adam_beta2, {}


def momentum_length(run: Facts) -> tuple[float, dict]:
    name = "adam_beta1" if run.is_adam else "momentum"
    momentum = getattr(run, name)
    return 1 / (1 - momentum), {"name": name, "momentum": momentum, "length": 1 / (1 - momentum)}


def second_moment_short(run: Facts) -> tuple[float, dict]:
    run.require(run.is_adam)
    return 1 - run.adam_beta2, {"length": 1 / (1 - run.adam_beta2)}


def second_moment_long(run: Facts) -> tuple[float, dict]:
    share, length = second_moment_short(run)
    return 1 / share, length


def epsilon(run: Facts) -> tuple[float, dict]:
    run.require(run.optimizer != "sgd")
    size = run.gradient_norm / math.sqrt(run.parameters)
    return run.epsilon / size, {"size": size}


def power_width(run: Facts) -> tuple[float, dict]:
    run.require(run.use_ema and run.ema_type == "power")
    return max(run.ema_widths), {}


def share_of_the_beginning(run: Facts) -> tuple[float, dict]:
    """The share of the first tenth's weights in the average at the end: the product of the decays of all later updates."""
    total = run.max_train_steps
    decays = [run.ema_decay(max(1, round(total * (0.1 + 0.9 * (i + 0.5) / 200)))) for i in range(200)]
    return math.exp(0.9 * total * sum(math.log(max(decay, 1e-300)) for decay in decays) / 200), {"decay": decays[-1]}


def ema_short(run: Facts) -> tuple[float, dict]:
    run.require(run.use_ema and run.max_train_steps >= 1000)
    power = run.ema_type == "power"
    length = min(run.ema_widths) * run.max_train_steps if power else 1 / (1 - run.ema_decay(run.max_train_steps))
    return 1 / length, {"length": length}


def sigma_data(run: Facts) -> tuple[float, dict]:
    run.require(not run.has("vae"))
    deviation, mean = (math.sqrt(sum(value**2 for value in values) / len(values)) for values in (run.std, run.mean))
    size = math.hypot(deviation, mean)  # the root mean square of the images in [-1, 1]
    times = max(run.sigma_data / size, deviation / run.sigma_data) if size > 0 and deviation > 0 else 0.0
    return times, {"deviation": deviation}


def latent_scale(run: Facts) -> tuple[float, dict]:
    run.require(not run.has("pretrained"))  # whose network knows its own scale
    goal = run.sigma_data if run.is_edm2 else 1.0
    worst = max(run.latent_spread, key=lambda spread: max(spread / goal, goal / spread))
    return max(worst / goal, goal / worst), {"worst": worst, "goal": goal}


def noise_levels(run: Facts) -> tuple[float, dict]:
    center = math.log(run.sigma_data) - run.P_mean
    low, high = ((center + side * math.log(10)) / run.P_std / math.sqrt(2) for side in (-1, 1))
    return 1 - (math.erf(high) - math.erf(low)) / 2, {}


def noise_spread(run: Facts) -> tuple[float, dict]:
    run.require(run.is_edm2)
    return 1 / run.P_std, {"factor": math.exp(2 * run.P_std)}


def resolution(run: Facts) -> tuple[float, dict]:
    side = run.sizes.get("shorter_side_median")
    run.require(bool(side))
    return min(Size.of(run.resolution)) / side, {"side": side}


def batch(run: Facts) -> tuple[float, dict]:
    return run.global_batch_size / run.training_images, {}


def held_out(run: Facts) -> tuple[float, dict]:
    return run.validation_images / (run.validation_images + run.training_images), {}


def evaluation_size(run: Facts) -> tuple[float, dict]:
    run.require(run.best_metric != "loss")
    needed = {"fd": 120, "kd": 100}[run.best_metric]
    return needed / run.eval_images, {"needed": needed}


def judged_too_late(run: Facts) -> tuple[float, dict]:
    """The last update is judged besides: this is about what comes before."""
    by_samples = run.best_metric != "loss"
    run.require(by_samples or run.early_stopping_patience > 0)
    name = "eval_steps" if by_samples else "validation_steps"
    every = getattr(run, name)
    return (run.early_stopping_patience + 1) * every / run.max_train_steps, {"name": name, "every": every}


def clip_range(run: Facts) -> tuple[float, dict]:
    reach = max(abs(run.min), abs(run.max))
    return reach / run.clip_range, {"reach": reach}


def clipping(run: Facts) -> tuple[float, dict]:
    run.require(run.max_grad_norm > 0 and not run.adaptive_clipping)
    return 1 / run.max_grad_norm, {}


def learning_rate(run: Facts) -> tuple[float, dict]:
    unit = run.has("force_weight_norm")  # each weight vector is scaled after each update
    sgd = run.optimizer == "sgd" and not unit
    # EDM2's network begins with weights of unit variance, whether they are kept there or not; another network may not.
    low, high = (1e-3, 0.02) if unit else (1e-4, 0.5) if sgd else (1e-5, 0.02 if run.is_edm2 else 2e-3)
    # Momentum adds up 1 / (1 - momentum) gradients: the usual range is that of 0.9.
    rate = run.learning_rate * (0.1 / (1 - run.momentum) if sgd else 1)
    kept = " with weights of unit variance" if unit else " with --momentum 0.9" if sgd else ""
    return max(rate / high, low / rate), {"low": low, "high": high, "kept": kept}


def weight_decay(run: Facts) -> tuple[float, dict]:
    decay = run.adam_weight_decay
    run.require(run.optimizer in ("adamw", "adamw8bit"))
    run.require(run.learning_rate * decay * run.max_train_steps > 1)  # or it does not get there
    size = math.sqrt(run.learning_rate / (2 * decay))
    return 1 / size, {"size": size}


def coupled_decay(run: Facts) -> tuple[float, dict]:
    run.require(run.optimizer in ("adam", "rmsprop") and not run.has("force_weight_norm"))
    return run.adam_weight_decay * 0.05 * math.sqrt(run.parameters) / run.gradient_norm, {}


def l1_penalty(run: Facts) -> tuple[float, dict]:
    return run.l1_weight * math.sqrt(run.parameters) / run.gradient_norm, {}


def dropout(run: Facts) -> tuple[float, dict]:
    return run.dropout, {}


def label_dropout(run: Facts) -> tuple[float, dict]:
    run.require(run.class_conditional and run.classes and (isinstance(run.classes, dict) or run.classes > 0))
    return run.label_dropout, {}


def color_jitter(run: Facts) -> tuple[float, dict]:
    return run.color_jitter, {}


def snr_gamma(run: Facts) -> tuple[float, dict]:
    return 1 / run.snr_gamma, {}


Figure = Callable[[Facts], tuple[float, dict]]


class Row(NamedTuple):
    code: str
    figure: Figure
    info: float
    warning: float
    said: str


ROWS = [
    Row(code, globals()[name], min(table.get("info", math.inf), table["warning"]), table["warning"], table["said"])
    for code, entry in CATALOG.items()
    for name, table in entry.items()
    if isinstance(table, dict) and "said" in table
]


def options_amiss(record: RunRecord) -> Found:
    facts = Facts(record)
    found: dict[str, list[tuple[str, str]]] = {}
    for row in ROWS:
        try:
            figure, values = row.figure(facts)
            what = row.said.format(run=facts, figure=figure, **values)
        except UnknownFact:
            continue
        yield row.code
        if figure > row.info:
            found.setdefault(row.code, []).append(("warning" if figure > row.warning else "info", what))
    for code, said in found.items():
        worst = "warning" if any(severity == "warning" for severity, _ in said) else "info"
        yield Finding(code, worst, "; ".join(what for severity, what in said if severity == worst))
