"""What follows the loss, identified: gradients and clipping, the optimizer's recursions, the averages, the weights' state."""

import math

import torch

from utils.diagnostics.audit.declared import Declared, DeclaredOptimizer
from utils.diagnostics.audit.fitting import simple
from utils.diagnostics.audit.observer import Observer, Step, Update
from utils.diagnostics.audit.verdict import Check, not_observed

ROUNDING = 2.0**-24  # of fp32, relative
SMALL = 1e-3
NAMES = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}


def check_gradients(
    update: Update, declared: Declared, loss_scale: float = 1.0, mean_gradient: torch.Tensor | None = None
) -> list[Check]:
    """Checks of the gradients from the first backward pass to the optimizer's step.

    `mean_gradient` [n]: what the backward passes left, sampled, averaged over all processes; None with one process.
    """
    checks = []
    if update.left_over is not None:
        wanted, left = "none left over from the update before", float(update.left_over)
        name = "gradients before the first backward pass"
        text = "gradients of the update before are still there: they are not cleared, and add up" if left else ""
        checks.append(Check("gradient", name, wanted, f"norm {left:.3g}", left == 0.0, text))
    passes = sum(step.finished for step in update.micro_steps)
    if passes:
        name, wanted = "backward passes of an update", f"{declared.micro_steps}"
        text = f"the optimizer steps after {passes} backward passes, declared are {declared.micro_steps} micro steps"
        fine = passes == declared.micro_steps
        checks.append(Check("gradient", name, wanted, str(passes), fine, text))
    checks += _between_micro_steps(update)
    step = update.optimizer_step
    last = update.micro_steps[-1].gradient_after if update.micro_steps else None
    if step is None:
        return [*checks, not_observed("gradient", "gradient at the step", "that of the backward passes", "no step was made")]
    if last is None:
        text = "the optimizer made a step without a backward pass"
        return [*checks, Check("gradient", "gradient at the step", "that of the backward passes", "none", False, text)]
    accumulated = (last if mean_gradient is None else mean_gradient) / loss_scale
    return [*checks, *_at_the_step(step, accumulated, declared, update.told_norm)]


def _between_micro_steps(update: Update) -> list[Check]:
    name, wanted = "gradients between micro steps", "unchanged until the last one"
    pairs = list(zip(update.micro_steps[:-1], update.micro_steps[1:]))
    pairs = [(before, after) for before, after in pairs if before.gradient_after is not None and "network" in after.calls]
    known = [(before.gradient_after, after.gradient_before) for before, after in pairs]
    if not known:
        return []
    for before, after in known:
        if not (torch.isfinite(before).all() and (after is None or torch.isfinite(after).all())):
            return [not_observed("gradient", name, wanted, "gradients are not finite")]
        if after is None or not after.any():
            if before.any():
                text = "gradients are cleared between the micro steps of an update: only the last one counts"
                return [Check("gradient", name, wanted, "cleared", False, text)]
        elif not torch.allclose(before, after, rtol=1e-6, atol=0.0):
            factor = float((before * after).sum() / (before * before).sum())
            text = (
                f"gradients are changed between the micro steps of an update (times {factor:.3g}): clipped or scaled each time?"
            )
            return [Check("gradient", name, wanted, f"times {factor:.3g}", False, text)]
    return [Check("gradient", name, wanted, "unchanged", True)]


def _at_the_step(step: Step, accumulated: torch.Tensor, declared: Declared, told: torch.Tensor | None) -> list[Check]:
    limit = declared.optimizer.max_grad_norm
    clipping = f"{limit:.4g} over the joint norm, at most 1" if limit else "none"
    name, wanted = "gradient at the step over that of the backward passes", f"one factor for all: {clipping}"
    a, g = accumulated.double(), step.gradient.double()
    if not (torch.isfinite(a).all() and torch.isfinite(g).all()):
        return [not_observed("gradient", name, wanted, "gradients are not finite")]
    if not a.any():
        return [not_observed("gradient", name, wanted, "gradients are zero")]
    factor = float((a * g).sum() / (a * a).sum())
    residual = float((g - factor * a).norm() / g.norm().clamp(min=1e-300)) if g.any() else 1.0
    norm = float(step.gradient_norm)
    observed = f"{factor:.4g}, norm {norm:.3g} at the step"
    if residual > 1e-4:
        text = _explain_gradient(a, g, factor, residual)
        return [Check("gradient", name, wanted, f"{observed}, residual {residual:.1e}", False, text)]
    before = norm / abs(factor) if factor else math.inf
    expected = min(1.0, limit / (before + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
    fine = abs(factor / expected - 1) < SMALL
    text = _explain_factor(factor, before, norm, limit)
    checks = [Check("gradient", name, wanted, observed, fine, text)]
    if told is not None and factor:
        off = abs(float(told) / before - 1) if before else abs(float(told))
        text = f"the gradient's norm is {before:.4g} before it is clipped, and {float(told):.4g} is taken for it"
        checks.append(Check("gradient", "norm before clipping", f"{before:.4g}", f"{float(told):.4g}", off < SMALL, text))
    return checks


def _explain_factor(factor: float, before: float, norm: float, limit: float | None) -> str:
    if factor < 0:
        return f"the gradient changes its sign before the step (times {factor:.3g})"
    if limit and before > limit and abs(factor - 1) < SMALL:
        return f"the gradient is not clipped: its norm is {norm:.3g}, declared is a limit of {limit:g}"
    if limit and before <= limit * (1 + SMALL):
        said = f"the gradient is {simple(factor)} times what the backward passes left"
        return f"{said}, though its norm {before:.3g} is below {limit:g}"
    if limit:
        return f"the gradient is clipped to a norm of {norm:.3g}, declared {limit:g}"
    return f"the gradient is {simple(factor)} times what the backward passes left, and no clipping is declared"


def _explain_gradient(a: torch.Tensor, g: torch.Tensor, factor: float, residual: float) -> str:
    highest = float(g.abs().max())
    at_limit = (g.abs() > highest * (1 - 1e-5)).double().mean()
    if highest and torch.allclose(g, a.clamp(-highest, highest), rtol=1e-4, atol=1e-12) and at_limit * len(g) >= 2:
        return f"each element of the gradient is clipped to {highest:.3g} by itself, not the joint norm"
    lost = (a != 0) & (g == 0)
    if float(lost.double().mean()) > 1e-3 and torch.allclose(g[~lost], a[~lost] * factor, rtol=0.1):
        return f"{float(lost.double().mean()):.0%} of the gradient is set to zero before the step"
    return (
        f"the gradient at the step is not that of the backward passes: {residual:.0%} of it is something else "
        "(changed per layer, mixed with another, not averaged over processes, or noise added)"
    )


def check_optimizer(update: Update, declared: Declared, observer: Observer, skipped: bool = False) -> list[Check]:
    """Checks of the optimizer's step against torch's own optimizer in float64 with the declared settings."""
    step, wanted = update.optimizer_step, declared.optimizer
    if skipped:
        same = step is None or step.after is None or torch.equal(step.before, step.after)
        text = "the gradient is not finite, and the weights change all the same"
        return [Check("optimizer", "step of a skipped update", "none", "none" if same else "one", same, text)]
    if step is None or step.after is None:
        text = "the optimizer made no step in this update"
        return [Check("optimizer", "step", f"{wanted.name}, once per update", "none", False, text)]
    checks = [_once(step), _groups(step, observer), *_learning_rates(step, wanted, update.step)]
    if wanted.name in NAMES and step.optimizer.lower() != wanted.name:
        text = f"the optimizer is {step.optimizer}, declared {wanted.name}"
        return [*checks, Check("optimizer", "kind", wanted.name, step.optimizer, False, text)]
    if wanted.name not in NAMES:
        return [*checks, not_observed("optimizer", "recursions", wanted.name, "torch has no such optimizer to compare with")]
    decayed = observer.sample.per_element(len(shape) > 1 for shape in observer.sample.shapes).bool()
    return [*checks, *_recursions(step, wanted, update.step, decayed)]


def _once(step: Step) -> Check:
    text = f"the optimizer steps {step.steps} times in one update"
    return Check("optimizer", "steps per update", "1", str(step.steps), step.steps == 1, text)


def _groups(step: Step, observer: Observer) -> Check:
    """Whether all trained parameters are the optimizer's."""
    starts, missing, position = [], [], 0
    for name, count in zip(observer.sample.names, observer.sample.counts):
        starts.append(position)
        if int(step.group_of[position]) < 0:
            missing.append(name)
        position += count
    total = len(observer.sample.names)
    text = f"{len(missing)} of {total} parameters are not in the optimizer, such as {missing[0]}" if missing else ""
    found = f"{total - len(missing)} of {total}"
    return Check("optimizer", "parameters in the optimizer", f"all {total}", found, not missing, text)


def _learning_rates(step: Step, wanted: DeclaredOptimizer, finished: int) -> list[Check]:
    rates = sorted({float(group["lr"]) for group in step.groups})
    return [check_learning_rate(rates, wanted, finished)]


def check_learning_rate(rates: list[float], wanted: DeclaredOptimizer, finished: int) -> Check:
    """Whether the rates of all parameter groups are the declared one of the update after `finished` ones."""
    rate = wanted.learning_rate(finished)
    name, found = "learning rate", ", ".join(f"{r:.6g}" for r in rates)
    if all(abs(r - rate) <= 1e-6 * abs(rate) + 1e-15 for r in rates):
        return Check("learning_rate", name, f"{rate:.6g}", found, True)
    text = f"update {finished + 1} has the learning rate {found}, declared {rate:.6g}"
    if len(rates) == 1:
        shifts = {f"that of {shift:+d} updates": wanted.learning_rate(max(finished + shift, 0)) for shift in (1, -1, 2, -2)}
        shifts |= {
            f"that of update {finished * k + 1} (stepped {k} times per update)": wanted.learning_rate(finished * k)
            for k in (2, 3, 4, 8)
        }
        shifts |= {
            f"that of update {finished // k + 1} (stepped every {k} updates)": wanted.learning_rate(finished // k)
            for k in (2, 3, 4, 8)
        }
        for said, other in shifts.items():
            if other and abs(rates[0] / other - 1) < 1e-6:
                text += f": {said}"
                break
        else:
            text += f": {simple(rates[0] / rate)} times it" if rate else ""
    else:
        text += ": the parameter groups differ"
    return Check("learning_rate", name, f"{rate:.6g}", found, False, text)


def _recursions(step: Step, wanted: DeclaredOptimizer, finished: int, decayed: torch.Tensor) -> list[Check]:
    """The whole step against torch's, from the state and the gradient that were there; then, where it differs, part by part."""
    rate = float(step.groups[0]["lr"])
    inside = step.group_of >= 0
    before, gradient = step.before.double(), step.gradient.double()
    expected, moments = _by_torch(step, wanted, rate, decayed)
    change, should = step.after.double() - before, expected - before
    rounding = ROUNDING * float(before[inside].norm()) * 1.5 + 1e-30
    distance = float((change - should)[inside].norm())
    size = float(should[inside].norm())
    name, declared = "change of the weights", f"{NAMES[wanted.name]}'s"
    checks = _moments(step, wanted, moments, gradient, inside)
    checks += _counts(step, finished)
    if rate == 0.0:
        still = float(change.norm()) <= rounding
        text = "" if still else "the weights change though the learning rate is 0"
        return [*checks, Check("optimizer", name, "none, at a learning rate of 0", f"{float(change.norm()):.1e}", still, text)]
    off = distance / size if size else math.inf
    observed = f"off by {off:.1e} of it (rounding {rounding / size if size else 0:.1e})"
    if distance <= 5 * rounding + SMALL * size:
        if size < 5 * rounding:
            return [*checks, not_observed("optimizer", name, declared, "the change drowns in the weights' own rounding")]
        return [*checks, Check("optimizer", name, declared, observed, True)]
    text = _explain_step(step, wanted, change, should, before, gradient, inside, decayed, rate)
    return [*checks, Check("optimizer", name, declared, observed, False, text)]


def _by_torch(step: Step, wanted: DeclaredOptimizer, rate: float, decayed: torch.Tensor):
    """(weights after the step, {state's name: after the step}), float64 [n], by torch's own optimizer."""
    device, parts = step.before.device, [decayed, ~decayed]
    parameters = [torch.nn.Parameter(step.before.double()[part].clone()) for part in parts]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (wanted.weight_decay, 0.0))]
    if wanted.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if wanted.name == "adamw" else torch.optim.Adam
        judge = kind(groups, lr=rate, betas=(wanted.beta1, wanted.beta2), eps=wanted.epsilon, foreach=False)
    elif wanted.name == "rmsprop":
        judge = torch.optim.RMSprop(groups, lr=rate, momentum=wanted.momentum, eps=wanted.epsilon, foreach=False)
    else:
        judge = torch.optim.SGD(groups, lr=rate, momentum=wanted.momentum, foreach=False)
    for parameter, part in zip(parameters, parts):
        parameter.grad = step.gradient.double()[part]
        state = {name: value.double()[part].clone() for name, value in step.state_before.items() if name != "step"}
        if state and part.any():
            counted = step.state_before.get("step")
            if counted is not None:
                state["step"] = counted[part][0].float().cpu().clone()
            judge.state[parameter] = state
    judge.step()
    result = torch.empty(len(decayed), dtype=torch.float64, device=device)
    moments: dict[str, torch.Tensor] = {}
    for parameter, part in zip(parameters, parts):
        result[part] = parameter.detach()
        for name, value in judge.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                moments.setdefault(name, torch.zeros(len(decayed), dtype=torch.float64, device=device))[part] = value
    return result, moments


def _counts(step: Step, finished: int) -> list[Check]:
    after = step.state_after.get("step")
    if after is None:
        return []
    inside = step.group_of >= 0
    counts = sorted({int(value) for value in after[inside].unique()})
    before = step.state_before.get("step")
    advanced = 1 if before is None else int((after - before)[inside].max()) if inside.any() else 1
    fine = advanced == 1 and 1 <= counts[-1] <= finished + 1
    name, wanted = "steps that the optimizer has counted", f"one more each update, at most {finished + 1}"
    text = (
        ""
        if fine
        else f"after update {finished + 1} the optimizer has counted {counts[-1]} steps, {advanced} of them in this update"
    )
    return [Check("optimizer", name, wanted, ", ".join(map(str, counts[:3])), fine, text)]


def _moments(step, wanted, expected, gradient, inside) -> list[Check]:
    checks = []
    for name, value in expected.items():
        seen = step.state_after.get(name)
        if seen is None:
            continue
        seen, value = seen.double()[inside], value[inside]
        size = float(value.norm())
        off = float((seen - value).norm()) / size if size else float(seen.norm())
        fine = off < 1e-4
        text = ""
        if not fine and name in ("exp_avg", "exp_avg_sq"):
            declared = wanted.beta1 if name == "exp_avg" else wanted.beta2
            old = step.state_before.get(name)
            new = gradient[inside] if name == "exp_avg" else gradient[inside] ** 2
            beta = _beta(seen, None if old is None else old.double()[inside], new)
            moment = "first" if name == "exp_avg" else "second"
            text = f"Adam's {moment} moment is not that of the declared beta {declared:g}: it follows the gradient with {beta}"
        elif not fine:
            text = f"the optimizer's {name} is off by {off:.0%}"
        checks.append(Check("optimizer", f"state: {name}", "torch's", f"off by {off:.1e}", fine, text))
    return checks


def _beta(after: torch.Tensor, before: torch.Tensor | None, new: torch.Tensor) -> str:
    """That of after = beta before + (1 - beta) new, by least squares."""
    before = torch.zeros_like(after) if before is None else before
    base, moved = before - new, after - new
    size = float((base * base).sum())
    beta = float((base * moved).sum()) / size if size else math.nan
    left = float((moved - beta * base).norm() / after.norm().clamp(min=1e-300))
    return f"{beta:.4g}" if left < 1e-2 else f"something else ({left:.0%} of it)"


def _explain_step(step, wanted, change, should, before, gradient, inside, decayed, rate) -> str:
    if not bool(change.any()):
        return "the weights do not change, though the optimizer makes a step"
    parts = [should[inside & decayed], should[inside & ~decayed]]
    found = [change[inside & decayed], change[inside & ~decayed]]
    ratios = [float((s * f).sum() / (s * s).sum()) if s.any() else math.nan for s, f in zip(parts, found)]
    lefts = [
        float((f - r * s).norm() / f.norm().clamp(min=1e-300)) if s.any() else 0.0 for s, f, r in zip(parts, found, ratios)
    ]
    if max(lefts) < 1e-2:
        said = [simple(ratio) for ratio in ratios if not math.isnan(ratio)]
        if len(set(said)) == 1:
            return f"the weights change by {said[0]} times what {NAMES[wanted.name]} gives at the learning rate {rate:.3g}"
        return f"matrices change by {said[0]} times, biases and norms by {said[1]} times what {NAMES[wanted.name]} gives"
    if wanted.name in ("adamw", "adam") and {"exp_avg", "exp_avg_sq", "step"} <= step.state_after.keys():
        return _explain_adam(step, wanted, change, before, inside, decayed, rate)
    return f"the weights' change is not what {NAMES[wanted.name]} gives: {max(lefts):.0%} of it is something else"


def _explain_adam(step, wanted, change, before, inside, decayed, rate) -> str:
    """Learning rate, epsilon and decay that explain the change best, from the moments as they are."""
    count = step.state_after["step"].double()
    m = step.state_after["exp_avg"].double() / (1 - wanted.beta1**count)
    v = (step.state_after["exp_avg_sq"].double() / (1 - wanted.beta2**count)).clamp(min=0).sqrt()
    best, settings = math.inf, (wanted.epsilon, 1.0, 0.0, 0.0)
    for epsilon in dict.fromkeys((wanted.epsilon, *(10.0**-k for k in range(1, 13)))):
        direction = -m / (v + epsilon)
        columns = torch.stack([direction, -before * decayed, -before * ~decayed], 1)[inside]
        sizes = columns.norm(dim=0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(columns / sizes, change[inside, None]).solution[:, 0] / sizes
        left = float((columns @ solution - change[inside]).norm() / change[inside].norm())
        if left < best * 0.9:
            best, settings = left, (epsilon, *(float(x) for x in solution))
    epsilon, speed, decay, spared = settings
    if best > 0.05:
        return f"the weights' change is not Adam's: {best:.0%} of it is something else"
    said = []
    if abs(speed / rate - 1) > 5e-3:
        said.append(f"a learning rate of {speed:.4g} in place of {rate:.4g}")
    if not 0.5 < epsilon / wanted.epsilon < 2:
        said.append(f"an epsilon of {epsilon:.0e} in place of {wanted.epsilon:.0e}")
    decay, spared = decay / rate, spared / rate
    if abs(decay - wanted.weight_decay) > 0.02 * max(wanted.weight_decay, 1e-3):
        said.append(f"a weight decay of {decay:.3g} in place of {wanted.weight_decay:g}")
    if abs(spared) > 1e-3 + 0.02 * wanted.weight_decay:
        said.append(f"biases and norms decay by {spared:.3g}, which should be spared")
    return (
        "the weights change as with " + ", ".join(said) if said else "the weights' change is not that of the declared settings"
    )


def check_averages(update: Update, declared: Declared, observer: Observer, skipped: bool = False) -> list[Check]:
    """Whether each average has all parameters of the network that is averaged ("unet" where there is one), and moved as
    declared: e' = d e + (1 - d) w with the weights after the step."""
    checks = []
    averaged = observer.modules.get("unet", observer.modules["network"])
    wanted = {id(p) for p in averaged.parameters()}
    names = [name for name, p in observer.parameters.items() if id(p) in wanted]
    for name, decay_at in declared.averages.items():
        said = "e' = d e + (1 - d) w"
        old, new = update.averages_before.get(name), update.averages.get(name)
        if old is None or new is None or update.weights is None or skipped:
            checks.append(not_observed("ema", name, said, "no update of it was seen"))
            continue
        missing = [parameter for parameter in names if parameter not in observer.averages[name]]
        text = f"{name} lacks {len(missing)} of {len(names)} parameters, such as {missing[0]}" if missing else ""
        found = f"{len(names) - len(missing)} of {len(names)}"
        checks.append(Check("ema", f"{name}: parameters", f"all {len(names)}", found, not missing, text))
        mask = observer.averaged(name)
        masked = [v.double()[mask] for v in (old, new, update.weights)]
        before = update.optimizer_step.before.double()[mask] if update.optimizer_step is not None else None
        checks.append(_average(name, masked[0], masked[1], masked[2], before, decay_at, update.step + 1, declared))
    return checks


def _average(name, old, new, weights, before_step, decay_at, number: int, declared: Declared) -> Check:
    decay = decay_at(number)
    wanted = f"decay {decay:.6g} at update {number}"
    expected = decay * old + (1 - decay) * weights
    rounding = 2 * ROUNDING * float(torch.maximum(old.abs(), weights.abs()).norm()) + 1e-30
    distance, gap = float((new - expected).norm()), float((weights - old).norm())
    moved = _slope(weights - old, new - old)
    if (1 - decay) * gap < 4 * rounding:
        return not_observed("ema", name, wanted, "its change drowns in its own rounding")
    observed = f"decay {1 - moved:.6g}" if moved is not None else "no difference between average and weights"
    if distance <= 2 * rounding + SMALL * (1 - decay) * gap:
        return Check("ema", name, wanted, observed, True)
    text = _explain_average(old, new, weights, before_step, decay_at, number, declared)
    return Check("ema", name, wanted, observed, False, f"{name}: {text}")


def _slope(x: torch.Tensor, y: torch.Tensor) -> float | None:
    size = float((x * x).sum())
    return float((x * y).sum()) / size if size else None


def _explain_average(old, new, weights, before_step, decay_at, number, declared) -> str:
    decay, moved = decay_at(number), _slope(weights - old, new - old)
    left = float((new - old - (moved or 0.0) * (weights - old)).norm()) / max(float((new - old).norm()), 1e-300)
    rounding = 2 * ROUNDING * float(torch.maximum(old.abs(), weights.abs()).norm())
    if torch.equal(old, new):
        return f"it does not move in this update, declared is a decay of {decay:.6g}"
    if moved is not None and moved < 0 and left < 0.05:
        return f"it moves away from the weights (decay {1 - moved:.4g}): a wrong sign"
    if moved is not None and left < 0.02 + 4 * rounding / max(float((new - old).norm()), 1e-300):
        seen = 1 - moved
        shapes = {f"it is updated {k} times in this update": decay**k for k in (2, 3, 4, 8)}
        shapes |= {"the weights and the average are exchanged: decay and 1 - decay": 1 - decay}
        shapes |= {
            f"it has the decay of update {n}": decay_at(n)
            for n in (number - 1, number + 1, 2 * number, max(number // 2, 1))
            if n > 0
        }
        if declared.micro_steps > 1:
            shapes |= {"it is updated in each micro step": decay**declared.micro_steps}
        tolerance = max(2e-3 * (1 - decay), 1e-7)
        for text, value in shapes.items():
            if value != decay and abs(seen - value) < tolerance:
                return f"{text} (decay {seen:.6g}, declared {decay:.6g})"
        if abs(seen) < 1e-6:
            return f"it is a copy of the weights, declared is a decay of {decay:.6g}"
        return f"its decay is {seen:.6g}, declared {decay:.6g}"
    if before_step is not None:
        stale = decay * old + (1 - decay) * before_step
        if float((new - stale).norm()) <= 2 * rounding + 0.02 * (1 - decay) * float((before_step - old).norm()):
            return "it takes the weights before the optimizer's step, not after it"
    untouched = (new == old) & (weights != old)
    if 0.001 < float(untouched.double().mean()) < 0.999:
        return f"{float(untouched.double().mean()):.0%} of it does not move: some parameters or buffers are left out"
    return f"it moves towards other weights than those of this network ({left:.0%} of its change is something else)"


def check_state(update: Update, declared: Declared, observer: Observer) -> list[Check]:
    """Whether nothing but the optimizer's step, and forced weight normalization where it is declared, changes the weights."""
    moments = (
        ("weights at the forward pass", "those that the update began with", update.digest_begun, update.digest_first),
        ("weights at the step", "those of the forward pass", update.digest_first, update.digest_step),
        ("weights at the end of the update", "those that the step left", update.digest_stepped, update.digest_last),
    )
    checks = []
    for name, wanted, before, after in moments:
        if before is not None and after is not None:
            same = bool(before == after)
            text = f"the {name} are not {wanted}: something else than the optimizer changes them"
            checks.append(Check("state", name, wanted, "the same" if same else "others", same, text))
    forced = declared.denoising is not None and declared.denoising.force_weight_norm
    step = update.optimizer_step
    if forced and update.row_sizes is not None:
        off = float((update.row_sizes - 1).abs().max())
        text = f"rows of the weights have root mean squares that are {off:.2g} off 1: they are not normalized after the step"
        found = f"within {off:.1e} of 1"
        checks.append(Check("optimizer", "forced weight norm", "rows of root mean square 1", found, off < 1e-3, text))
    elif step is not None and step.after is not None and update.weights is not None:
        same = torch.equal(step.after, update.weights)
        text = "the weights change after the optimizer's step, before the update is over"
        checks.append(
            Check("state", "weights after the step", "those of the step", "the same" if same else "others", same, text)
        )
    return checks


def check_network(update: Update, observer: Observer, declared: Declared) -> list[Check]:
    """Mode, gradients, dtypes of the network in its forward passes."""
    calls = [step.calls["network"] for step in update.micro_steps if "network" in step.calls]
    total = len(observer.parameters) + len(observer.frozen)
    text = f"{len(observer.frozen)} of {total} parameters are frozen, such as {observer.frozen[0]}" if observer.frozen else ""
    found = f"{len(observer.parameters)} of {total}"
    checks = [Check("network", "trained parameters", f"all {total}", found, not observer.frozen, text)]
    if calls:
        training = all(call.training for call in calls)
        text = "the network is in evaluation mode: dropout is off while it trains"
        checks.append(Check("network", "mode", "training", "training" if training else "evaluation", training, text))
        dtype = next((call.autocast for call in calls), None)
        said = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        fine = dtype == declared.autocast
        text = f"layers compute in {said.get(dtype, dtype)}, declared is {said[declared.autocast]}"
        checks.append(
            Check("network", "precision of the layers", said[declared.autocast], said.get(dtype, str(dtype)), fine, text)
        )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in observer.parameters.values()}
    fine = dtypes == {"float32"}
    text = f"weights are kept in {', '.join(sorted(dtypes))}: updates below its rounding are lost"
    checks.append(Check("network", "precision of the weights", "float32", ", ".join(sorted(dtypes)), fine, text))
    return checks
