"""What the script's own command line declares, held against what was seen; and where its learning rate ends."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.facts import Facts, schedule_length

LARGE = 0.1  # a learning rate that is rather a factor of one
HARDLY = 3e-7  # a learning rate; fine-tuning goes down to 1e-6
MANY_LEVELS, SIGMAS = 40, 6.0  # noise levels before their mean is judged, and how far it may be
FEW_RATES = 5  # of a schedule, that differ
SELDOM = 20  # updates; averages that move in every tenth are usual
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid")  # by the names that diffusers has
TYPES = ("epsilon", "sample", "v_prediction")


def _number(options: dict[str, Any], *names: str) -> float | None:
    found = (options.get(name) for name in names)
    return next((v for v in found if isinstance(v, (int, float)) and not isinstance(v, bool)), None)


def declared_micro_steps(facts: Facts) -> int | None:
    found = _number(facts.options, "gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accum_steps")
    return int(found) if found and found >= 1 else None


def declared_strength(facts: Facts, strength: float) -> bool:
    """Whether an option such as `noise_scale` says that the noise is so many times as strong."""
    said = [value for name, value in facts.options.items() if "noise" in name and isinstance(value, float)]
    return any(abs(value / strength - 1) < 1e-2 for value in said)


def evaluation_at(facts: Facts, updates: Callable[[int], bool]) -> str:
    """The option that says how often is evaluated, where that is in so many updates, and no other option says as much."""
    said = [name for name, value in facts.options.items() if type(value) is int and value >= SELDOM and updates(value)]
    fits = [
        name for name in said if re.search("eval|valid|sampl|preview", name) and re.search("every|freq|interval|_steps$", name)
    ]
    fits = [name for name in fits if not re.search(r"num|sampl\w*_steps$", name)]  # of the sampler
    return fits[0] if fits and len(fits) == len(said) else ""


def declared_prediction(options: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """By the script's options, where they are given, or by the noise scheduler's config; an option's default comes last."""
    given = any(word.split("=")[0] in ("--prediction_type", "--prediction-type") for word in sys.argv)
    settings = (options, config) if given else (config, options)
    found = (each.get("prediction_type") for each in settings)
    return next((name for name in found if name in TYPES), None)


def check_options(facts: Facts, passes: int, norm: float, searched: bool) -> list[Check]:
    """`passes`: backward passes of the update; `norm`: of the gradient at the step, 0 where it was clipped; `searched`: whether
    averages would have been found."""
    checks = []
    wanted = declared_micro_steps(facts)
    if wanted is not None and wanted > 1 and passes == 1 and facts.micro_steps is None:
        name = "backward passes of an update, by the command line"
        text = f"the command line asks for {wanted} micro steps per update, and the optimizer steps after each backward pass"
        checks.append(Check("gradient", name, str(wanted), str(passes), False, text))
    clip = _number(facts.options, "max_grad_norm", "clip_grad_norm", "grad_clip")
    if clip and clip > 0 and norm > clip * 1.01:
        name = "clipping, by the command line"
        text = f"the command line asks for gradients clipped to {clip:g}, and the gradient's norm is {norm:.3g} at the step"
        checks.append(Check("gradient", name, f"{clip:g}", f"{norm:.3g}", False, text, "warning"))
    checks += _decays(facts)
    if facts.options.get("use_ema") is True and searched and not any(a.is_average for a in facts.averages):
        text = "the command line asks for averaged weights, and none were found"
        checks.append(Check("ema", "averaged weights, by the command line", "some", "none", False, text, "warning"))
    return checks


def check_declared_schedule(facts: Facts, used: Any) -> list[Check]:
    """Of the noise scheduler that is `used`: whether it has the settings of the command line, and those of the model that the
    training starts from."""
    config = getattr(used, "config", None) or {}
    said = [
        (name, value) for name, value in facts.options.items() if name.endswith("beta_schedule") and value in BETA_SCHEDULES
    ]
    if (saved := _saved_schedule(facts.options)) is not None:
        said += [(f"{name} of the model", saved[name]) for name in ("beta_schedule", "beta_start", "beta_end") if name in saved]
    known = {name: config.get("beta_schedule" if name.endswith("beta_schedule") else name.split()[0]) for name, _ in said}
    wrong = [(name, value) for name, value in said if known[name] is not None and known[name] != value]
    if not said:
        return []
    text = "".join(f"{name} is {value}, and images are noised with {known[name]}" for name, value in wrong[:1])
    name, found = "noise schedule, as declared", "another" if wrong else "the same"
    return [Check("input", name, "the same", found, not wrong, text)]


def _saved_schedule(options: Mapping[str, Any]) -> dict | None:
    """The config of the noise scheduler in the folder of the model that an option names."""
    path = options.get("pretrained_model_name_or_path")
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = json.loads((Path(path) / "scheduler" / "scheduler_config.json").read_text())  # type: ignore[arg-type]
        return found if isinstance(found, dict) else None
    return None


def _decays(facts: Facts) -> list[Check]:
    """What the command line says of the decay of diffusers' EMAModel."""
    said = [value for name, value in facts.options.items() if re.search(r"ema.*decay", name) and type(value) is float]
    own = [average.settings.decay for average in facts.averages if average.settings is not None]
    if len(said) != 1 or not own or not 0.5 < said[0] < 1:
        return []
    fine = any(abs(decay - said[0]) < 1e-9 for decay in own)
    text = f"the command line asks for averaged weights with a decay of {said[0]:g}, and EMAModel was made with {own[0]:g}"
    return [Check("ema", "decay, by the command line", f"{said[0]:g}", f"{own[0]:g}", fine, text, "warning")]


def numbers_of_steps(facts: Facts) -> list[int]:
    """Of a noise schedule, as options may say them, and the usual one."""
    said = [
        value for name, value in facts.options.items() if type(value) is int and re.search(r"timesteps|num_steps|^T$", name)
    ]
    return [value for value in said if 2 <= value <= 10_000] + [1000]


def check_log_normal(facts: Facts, logs: list[float]) -> list[Check]:
    """`logs`: ln(sigma) of the images so far; of a script that says P_mean and P_std, as EDM's do."""
    options = {name.lower(): value for name, value in facts.options.items()}
    mean, spread = options.get("p_mean"), options.get("p_std")
    if not isinstance(mean, (int, float)) or not isinstance(spread, (int, float)) or len(logs) < MANY_LEVELS or not spread:
        return []
    found = sum(logs) / len(logs)
    fine = abs(found - mean) < SIGMAS * abs(spread) / len(logs) ** 0.5 + 0.05
    text = f"ln(sigma) of the images has the mean {found:.3g}, and P_mean is {mean:g}"
    return [Check("timestep", "mean of ln(sigma)", f"{mean:g}", f"{found:.3g}", fine, text)]


class Schedule:
    """Where the learning rate's schedule stands, over the run."""

    def __init__(self) -> None:
        self._stepped: list[tuple[int, int]] = []  # (updates made, steps of the schedule made) at the looks
        self._given: set[float] = set()  # the first group's rates at the steps, and those that the schedule says
        self._said: set[float] = set()

    def look(self, facts: Facts, updates: int) -> None:
        if (main := _main_schedule(facts)) is not None:
            self._stepped.append((updates, int(main.last_epoch)))

    def see_step(self, facts: Facts, rates: list[float]) -> None:
        """After a step with these `rates`, before the schedule goes on."""
        said = getattr(_main_schedule(facts), "_last_lr", None)
        if said and len(self._said) < FEW_RATES:
            self._given.add(rates[0])
            self._said.add(float(said[0]))

    def _overwritten(self) -> list[Check]:
        """Whether the rate stays as it is while the schedule goes on. What warms up beside a schedule changes it as well."""
        if len(self._said) < FEW_RATES or len(self._given) > 1:
            return []
        text = (
            "the schedule of the learning rate goes on, and the optimizer's rate stays at "
            f"{next(iter(self._given)):.3g}: does something else set it?"
        )
        return [Check("learning_rate", "rate of the optimizer", "that of its schedule", "another", False, text)]

    def _asked_rate(self, facts: Facts) -> tuple[float, str]:
        """The highest that was asked for, 0 where that is not known, and how bad it is where it is never reached.

        A schedule that goes on with an earlier run has passed its peak; the function of a LambdaLR may give the rate.
        A loop without a schedule may scale what the command line says.
        """
        schedules = [schedule for schedule in facts.schedules if hasattr(schedule, "base_lrs")]
        if not schedules:
            return _number(facts.options, "learning_rate", "lr") or 0.0, "info"
        base = max((float(base) for schedule in schedules for base in schedule.base_lrs), default=0.0)
        own = base >= LARGE and any(hasattr(schedule, "lr_lambdas") for schedule in schedules)
        begun = any(made <= updates for updates, made in self._stepped[:1])
        return (base if begun and not own else 0.0), "warning"

    def end(self, facts: Facts, rates: list[tuple[int, list[float]]], updates: int, ended: bool) -> list[Check]:
        """At the end of the run: seen, or projected from the script's options. `ended`: the script came to its own end."""
        name, wanted = "schedule of the learning rate at the end of the run", "at its own end"
        if updates < 5 or not rates:
            return []
        if overwritten := self._overwritten():
            return overwritten
        if all(max(values) == 0 for _, values in rates):
            text = f"the learning rate has been 0 in all {updates} updates: the network does not move"
            return [Check("learning_rate", name, wanted, "0", False, text)]
        if ended and any(int(schedule.last_epoch) == 0 for schedule in facts.schedules):
            text = f"the schedule of the learning rate has not been stepped in {updates} updates: its step() is not called"
            return [Check("learning_rate", name, wanted, "never stepped", False, text)]
        peaks = [(update, max(values)) for update, values in rates]
        rises = all(before[1] <= after[1] for before, after in pairwise(peaks))
        if ended and updates >= 20 and rises and peaks[-1][1] > 1.5 * peaks[0][1] and peaks[-1][0] > 0.95 * updates:
            text = f"the learning rate still rises when the script ends, after {updates} updates: a warm-up without an end"
            return [Check("learning_rate", name, wanted, f"{peaks[-1][1]:.3g}, and rising", False, text, "warning")]
        top = max(rate for _, rate in peaks)
        for share, part in ((5e-3, 0.5), (1e-4, 0.9)) if ended else ():
            over = next(update for update, rate in reversed(peaks) if rate > share * top)
            begun = next((update for update, _ in peaks if update > over), updates)
            if begun < part * updates:
                text = (
                    f"the learning rate is below {top * share:.2g} from update {begun} of {updates} on: the rest trains nothing"
                )
                return [Check("learning_rate", name, wanted, f"{peaks[-1][1]:.2g} at the end", False, text, "warning")]
        if ended and updates >= 20 and top < HARDLY:
            text = f"the learning rate never exceeds {top:.2g} in {updates} updates: the network hardly moves"
            return [Check("learning_rate", "highest learning rate", "1e-6 or more", f"{top:.2g}", False, text, "warning")]
        constant = len({tuple(values) for _, values in rates}) == 1
        if ended and constant and not facts.schedules and facts.others and not any(map(_is_used, facts.others)):
            text = "a schedule of the learning rate is stepped for an optimizer that makes no steps, and none is for this one"
            return [Check("learning_rate", name, "of the optimizer that is used", "of another one", False, text, "warning")]
        asked, severity = self._asked_rate(facts)
        if ended and updates >= 20 and top < 0.5 * asked:
            text = f"the learning rate never exceeds {top:.2g} in {updates} updates, and {asked:.2g} was asked for"
            if not facts.schedules and len(rates) == 1 and _is_first_of_warm_up(facts, asked / top):
                text, severity = f"{text}: it stays at the first step of its warm-up; are the steps counted?", "warning"
            return [Check("learning_rate", "highest learning rate", f"{asked:.2g}", f"{top:.2g}", False, text, severity)]
        if ended and (still := _never_moved(rates)):
            text = f"{still} of {len(rates[-1][1])} parameter groups have a rate of 0 in the whole run: they are not trained"
            return [Check("learning_rate", "groups with a rate of 0", "none", str(still), False, text, "warning")]
        if not _declares_all(facts, len(rates[0][1])) and (apart := _apart(rates)) > 2:
            text = (
                f"the learning rates of the parameter groups do not go together: their ratio changes by a factor of {apart:.3g}"
            )
            return [Check("learning_rate", "rates of the groups", "in one ratio", f"{apart:.3g}", False, text, "warning")]
        schedule = _main_schedule(facts)
        length = schedule_length(schedule) if schedule is not None else None
        if not length or schedule is None:
            return []
        total = updates if ended else _length(facts)
        at_end = int(schedule.last_epoch), int(schedule.last_epoch)
        if not ended:
            if total is None or not self._stepped or updates - self._stepped[0][0] < 5:
                return [not_observed("learning_rate", name, wanted, "the end of the run was not seen")]
            first, before = self._stepped[0]
            made = int(schedule.last_epoch) - before
            if made < 2:
                return [not_observed("learning_rate", name, wanted, "it was rarely stepped: once per epoch?")]
            # One step may be about to come: a schedule of epochs is stepped seldom.
            of_update = total / (updates - first)
            at_end = int((made - 1) * of_update), int((made + 1) * of_update)
        return [_judged_end(schedule, length, at_end, max(max(values) for _, values in rates), ended)]


def _is_used(schedule: Any) -> bool:
    """Whether the optimizer of a schedule has made a step, which torch's schedules note on it."""
    optimizer = getattr(schedule, "optimizer", None)
    return optimizer is None or bool(getattr(optimizer, "_opt_called", False))


def _is_first_of_warm_up(facts: Facts, times: float) -> bool:
    """Whether an option says that a warm-up has so many steps."""
    said = [v for name, v in facts.options.items() if "warm" in name and "epoch" not in name and type(v) in (int, float)]
    return any(value > 1 and abs(value / times - 1) < 1e-3 for value in said)


def _declares_all(facts: Facts, groups: int) -> bool:
    """Whether a schedule sets the rates of so many groups, each as it was made to."""
    return any(len(getattr(schedule, "base_lrs", ())) == groups for schedule in facts.schedules)


def _never_moved(rates: list[tuple[int, list[float]]]) -> int:
    """Groups whose rate is 0 all the time. Some begin late on purpose, and some are added later."""
    groups = [values for _, values in rates if len(values) == len(rates[-1][1])]
    return sum(max(of) == 0 for of in zip(*groups))


def _apart(rates: list[tuple[int, list[float]]]) -> float:
    """By what factor the ratio of two groups' rates changes over the run, where both have one."""
    known = [values for _, values in rates if len(values) == len(rates[0][1]) and min(values) > 0]
    ratios = [[values[place] / values[0] for values in known] for place in range(1, len(rates[0][1]))]
    return max((max(of) / min(of) for of in ratios if of), default=1.0)


def _main_schedule(facts: Facts) -> Any:
    """The only one, or the one that the others are parts of."""
    parts = {id(part) for schedule in facts.schedules for part in getattr(schedule, "_schedulers", ())}
    whole = [schedule for schedule in facts.schedules if id(schedule) not in parts]
    return whole[0] if len(whole) == 1 else None


def _judged_end(schedule: Any, length: int, at_end: tuple[int, int], peak: float, ended: bool) -> Check:
    """`length`: of the schedule; `at_end`: its steps then, at least and at most; `peak`: of the learning rate."""
    name, wanted = "schedule of the learning rate at the end of the run", "at its own end"
    least, most = at_end
    rate = max(group["lr"] for group in schedule.optimizer.param_groups) if ended else _rate_at(schedule, most)
    left, how = rate / peak, "is" if ended else "will be"
    observed = f"{most} of {length} of its steps made; {left:.0%} of the peak"
    if (most + ended) / length < 0.9 and left > 0.1:
        text = (
            f"the learning rate {how} still at {left:.0%} of its peak when the script ends: its schedule is made for "
            f"{length} steps and makes {most} (of batches, but stepped once per update?)"
        )
        return Check("learning_rate", name, wanted, observed, False, text, "warning")
    if least / length > 1.1:
        text = (
            f"the schedule of the learning rate {how} over after {length / least:.0%} of the run: it is laid out "
            f"for {length} steps and makes {least} (stepped once per process, or per micro step?)"
        )
        return Check("learning_rate", name, wanted, observed, False, text, "warning")
    return Check("learning_rate", name, wanted, observed, True)


def _length(facts: Facts) -> int | None:
    """Updates of the whole run, by the script's options."""
    steps = _number(facts.options, "max_train_steps", "max_steps", "total_steps")
    if steps and steps > 0:
        return int(steps)
    epochs = _number(facts.options, "num_epochs", "num_train_epochs", "epochs")
    shards = [loader for loader in facts.loaders if type(loader).__module__.startswith("accelerate")]  # of this process
    batches = max((len(loader) for loader in shards or facts.loaders if _sized(loader)), default=0)
    if not epochs or epochs < 0 or not batches:
        return None
    micro_steps = facts.micro_steps or declared_micro_steps(facts) or 1
    return int(epochs) * -(-batches // micro_steps)


def _sized(loader: Any) -> bool:
    try:
        return len(loader) > 0
    except TypeError:
        return False


def _rate_at(schedule: Any, step: float) -> float:
    """Of the schedule's own function, where it has one."""
    rates = [base * function(int(step)) for base, function in zip(schedule.base_lrs, getattr(schedule, "lr_lambdas", ()))]
    return max(rates) if rates else max(schedule.get_last_lr())
