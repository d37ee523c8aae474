"""What the script's own command line declares, held against what was seen; and where its learning rate ends."""

from typing import Any

from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.facts import Facts, schedule_length

TYPES = ("epsilon", "sample", "v_prediction")


def _number(options: dict[str, Any], *names: str) -> float | None:
    found = (options.get(name) for name in names)
    return next((v for v in found if isinstance(v, (int, float)) and not isinstance(v, bool)), None)


def declared_micro_steps(facts: Facts) -> int | None:
    found = _number(facts.options, "gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accum_steps")
    return int(found) if found and found >= 1 else None


def declared_prediction(facts: Facts) -> str | None:
    found = facts.options.get("prediction_type")
    return found if found in TYPES else None


def check_options(facts: Facts, passes: int, limit: float, searched: bool) -> list[Check]:
    """`passes`: backward passes of the update; `limit`: of the gradient's norm, 0 where it was not clipped; `searched`: whether
    averages would have been found."""
    checks = []
    wanted = declared_micro_steps(facts)
    if wanted is not None and wanted > 1 and passes == 1 and facts.micro_steps in (None, 1):
        name = "backward passes of an update, by the command line"
        text = f"the command line asks for {wanted} micro steps per update, and the optimizer steps after each backward pass"
        checks.append(Check("gradient", name, str(wanted), str(passes), False, text))
    clip = _number(facts.options, "max_grad_norm", "clip_grad_norm", "grad_clip")
    if clip and not limit:
        name = "clipping, by the command line"
        text = f"the command line asks for gradients clipped to {clip:g}, and nothing clips them"
        checks.append(Check("gradient", name, f"{clip:g}", "none", False, text, "warning"))
    if facts.options.get("use_ema") is True and searched and not any(a.is_average for a in facts.averages):
        text = "the command line asks for averaged weights, and none were found"
        checks.append(Check("ema", "averaged weights, by the command line", "some", "none", False, text))
    return checks


def check_schedule(facts: Facts, rates: list[tuple[int, list[float]]], updates: int, ended: bool) -> list[Check]:
    """Where the learning rate's schedule stands at the end of the run: seen, or projected from the script's options."""
    name, wanted = "schedule of the learning rate at the end of the run", "at its own end"
    made_none = [schedule for schedule in facts.schedules if int(schedule.last_epoch) == 0]
    if made_none and updates >= 5:
        text = f"the schedule of the learning rate has not been stepped in {updates} updates: its step() is not called"
        return [Check("learning_rate", name, wanted, "never stepped", False, text)]
    if updates >= 5 and rates and all(max(values) == 0 for _, values in rates):
        text = f"the learning rate has been 0 in all {updates} updates: the network does not move"
        return [Check("learning_rate", name, wanted, "0", False, text)]
    lengths = [(s, schedule_length(s)) for s in facts.schedules]
    known = [(schedule, length) for schedule, length in lengths if length]
    if not known or not rates or not updates:
        return []
    schedule, length = known[0]
    made = int(schedule.last_epoch)
    total = updates if ended else _length(facts)
    if total is None:
        return [not_observed("learning_rate", name, wanted, "the end of the run was not seen")]
    at_end = made * total / updates
    share = at_end / length
    peak = max(max(values) for _, values in rates)
    rate = _rate_at(schedule, at_end) if not ended else max(rates[-1][1])
    left = rate / peak if peak else 0.0
    how = "is" if ended else "will be"
    observed = f"{at_end:.0f} of {length} of its steps made; {left:.0%} of the peak"
    if share < 0.9 and left > 0.1:
        text = (
            f"the learning rate {how} still at {left:.0%} of its peak when the script ends: its schedule is laid out for "
            f"{length} steps and makes {at_end:.0f} (of batches, but stepped once per update?)"
        )
        return [Check("learning_rate", name, wanted, observed, False, text, "warning")]
    if share > 1.1:
        text = (
            f"the schedule of the learning rate {how} over after {1 / share:.0%} of the run: it is laid out "
            f"for {length} steps and makes {at_end:.0f} (stepped once per process, or per micro step?)"
        )
        return [Check("learning_rate", name, wanted, observed, False, text, "warning")]
    return [Check("learning_rate", name, wanted, observed, True)]


def _length(facts: Facts) -> int | None:
    """Updates of the whole run, by the script's options."""
    steps = _number(facts.options, "max_train_steps", "max_steps", "total_steps")
    if steps:
        return int(steps)
    epochs = _number(facts.options, "num_epochs", "num_train_epochs", "epochs")
    batches = max((len(loader) for loader in facts.loaders if _sized(loader)), default=0)
    if not epochs or not batches:
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
