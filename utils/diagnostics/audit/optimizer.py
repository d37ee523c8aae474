"""The optimizer's step: its settings, its state and the change of the weights, against torch's own optimizer in float64."""

import math
from collections.abc import Iterable

import torch

from utils.diagnostics.audit.declared import Declared, DeclaredOptimizer
from utils.diagnostics.audit.fitting import ROUNDING, SMALL, named, simple, slope
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Step, Update
from utils.diagnostics.audit.verdict import Check, not_observed

NAMES = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}


def check_optimizer(update: Update, declared: Declared, observer: Observer, skipped: bool = False) -> list[Check]:
    """Checks of the optimizer's step. `skipped`: its gradient is not finite, and no step is declared."""
    step, wanted = update.optimizer_step, declared.optimizer
    if skipped:
        same = step is None or step.after is None or torch.equal(step.before, step.after)
        text = "the gradient is not finite, and the weights change all the same"
        return [Check("optimizer", "step of a skipped update", "none", "none" if same else "one", same, text)]
    if step is None or step.after is None:
        text = "the optimizer made no step in this update"
        return [Check("optimizer", "step", f"{wanted.name}, once per update", "none", False, text)]
    text = f"the optimizer steps {step.steps} times in one update"
    checks = [
        Check("optimizer", "steps per update", "1", str(step.steps), step.steps == 1, text),
        _members(step, observer),
        check_learning_rate(sorted({float(group["lr"]) for group in step.groups}), wanted, update.step),
    ]
    if wanted.name not in NAMES:
        return [*checks, not_observed("optimizer", "recursions", wanted.name, "torch has no such optimizer to compare with")]
    if step.optimizer.lower() != wanted.name:
        text = f"the optimizer is {step.optimizer}, declared {wanted.name}"
        return [*checks, Check("optimizer", "kind", wanted.name, step.optimizer, False, text)]
    decayed = observer.sample.per_element(len(shape) > 1 for shape in observer.sample.shapes).bool()
    expected, state = _by_torch(step, wanted, decayed)
    return [*checks, *_state(step, wanted, state), *_counts(step, update.step), _change(step, wanted, expected, decayed)]


def _members(step: Step, observer: Observer) -> Check:
    """Whether all trained parameters are the optimizer's."""
    names, counts = observer.sample.names, torch.tensor(observer.sample.counts)
    groups = step.group_of.cpu()[(counts.cumsum(0) - counts).clamp(max=len(step.group_of) - 1)]  # of the first element of each
    missing = [name for name, group in zip(names, groups.tolist()) if group < 0]
    text = f"{len(missing)} of {len(names)} parameters are not in the optimizer, such as {missing[0]}" if missing else ""
    found = f"{len(names) - len(missing)} of {len(names)}"
    return Check("optimizer", "parameters in the optimizer", f"all {len(names)}", found, not missing, text)


def has_learning_rate(rates: Iterable[float], rate: float) -> bool:
    return all(abs(r - rate) <= 1e-6 * abs(rate) + 1e-15 for r in rates)


def check_learning_rate(rates: list[float], wanted: DeclaredOptimizer, finished: int) -> Check:
    """Whether the rates of all parameter groups are the declared one of the update after `finished` ones."""
    rate = wanted.learning_rate(finished)
    name, found = "learning rate", ", ".join(f"{r:.6g}" for r in rates)
    if has_learning_rate(rates, rate):
        return Check("learning_rate", name, f"{rate:.6g}", found, True)
    text = f"update {finished + 1} has the learning rate {found}, declared {rate:.6g}"
    if len(rates) > 1:
        return Check("learning_rate", name, f"{rate:.6g}", found, False, f"{text}: the parameter groups differ")
    others = {f"that of {shift:+d} updates": max(finished + shift, 0) for shift in (1, -1, 2, -2)}
    others |= {f"that of update {finished * k + 1} (stepped {k} times per update)": finished * k for k in (2, 3, 4, 8)}
    others |= {f"that of update {finished // k + 1} (stepped every {k} updates)": finished // k for k in (2, 3, 4, 8)}
    known = {said: wanted.learning_rate(number) for said, number in others.items()}
    if said := named(rates[0], {said: other for said, other in known.items() if other}, 0.0, share=1e-6):
        text += f": {said}"
    elif rate:
        text += f": {simple(rates[0] / rate)} times it"
    return Check("learning_rate", name, f"{rate:.6g}", found, False, text)


def _torchs(wanted: DeclaredOptimizer, parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Of matrices and of biases and norms, in this order."""
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (wanted.weight_decay, 0.0))]
    if wanted.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if wanted.name == "adamw" else torch.optim.Adam
        return kind(groups, lr=rate, betas=(wanted.beta1, wanted.beta2), eps=wanted.epsilon, foreach=False)
    if wanted.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=rate, momentum=wanted.momentum, eps=wanted.epsilon, foreach=False)
    return torch.optim.SGD(groups, lr=rate, momentum=wanted.momentum, foreach=False)


def _kept(wanted: DeclaredOptimizer) -> list[str]:
    """Names of the tensors that the declared optimizer keeps of each weight."""
    one = torch.nn.Parameter(torch.ones(1))
    one.grad = torch.ones(1)
    judge = _torchs(wanted, [one], 0.0)
    judge.step()
    return [name for name, value in judge.state[one].items() if isinstance(value, torch.Tensor) and name != "step"]


def _by_torch(step: Step, wanted: DeclaredOptimizer, decayed: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(weights, {state's name: value}) after the step that torch's own optimizer makes of the same state, float64 [n]."""
    parts = [which.nonzero()[:, 0] for which in (decayed, ~decayed)]
    parameters = [torch.nn.Parameter(step.before[part].double()) for part in parts]
    judge = _torchs(wanted, parameters, step.rate)
    kept = dict.fromkeys(_kept(wanted), torch.zeros_like(step.before))
    for parameter, part in zip(parameters, parts):
        parameter.grad = step.gradient[part].double()
        known = {name: value for name, value in step.state_before.items() if name != "step"}
        state = {name: value[part].double() for name, value in (kept | known).items()} if known else {}
        if state and len(part):
            counted = step.state_before.get("step")
            if counted is not None:
                state["step"] = counted[part][0].float().cpu().clone()
            judge.state[parameter] = state
    judge.step()
    weights = torch.zeros_like(decayed, dtype=torch.float64)
    states: dict[str, torch.Tensor] = {}
    for parameter, part in zip(parameters, parts):
        weights[part] = parameter.detach()
        for name, value in judge.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                states.setdefault(name, torch.zeros_like(weights))[part] = value
    return weights, states


def _state(step: Step, wanted: DeclaredOptimizer, expected: dict[str, torch.Tensor]) -> list[Check]:
    kept, found = (sorted(set(names) - {"step"}) for names in (_kept(wanted), step.state_after))
    declared, said = (", ".join(names) or "nothing" for names in (kept, found))
    text = f"the optimizer keeps {said} of each weight, and {NAMES[wanted.name]} with the declared settings {declared}"
    # A resume that sets --momentum to 0 leaves a buffer that nothing moves.
    unused = {name for name, value in step.state_before.items() if torch.equal(value, step.state_after.get(name, value[:0]))}
    healthy = {*kept} <= {*found} and {*found} - {*kept} <= unused
    checks = [Check("optimizer", "what is kept of each weight", declared, said, healthy, text)]
    for name in [name for name in expected if name in step.state_after]:
        seen, value = (state[name].double()[step.inside] for state in (step.state_after, expected))
        off = float((seen - value).norm()) / (float(value.norm()) or 1.0)
        text = f"the optimizer's {name} is off by {off:.0%}"
        if name in ("exp_avg", "exp_avg_sq"):
            moment, power, beta = ("first", 1, wanted.beta1) if name == "exp_avg" else ("second", 2, wanted.beta2)
            # after = beta before + (1 - beta) new
            old = step.state_before.get(name, torch.zeros_like(step.before)).double()[step.inside]
            new = step.gradient.double()[step.inside] ** power
            seen_beta, _ = slope(old - new, seen - new)
            left = float((seen - new - seen_beta * (old - new)).norm() / seen.norm().clamp(min=1e-300))
            follows = f"{seen_beta:.4g}" if left < 1e-2 else f"something else ({left:.0%} of it)"
            text = f"Adam's {moment} moment is not that of the declared beta {beta:g}: it follows the gradient with {follows}"
        checks.append(Check("optimizer", f"state: {name}", "torch's", f"off by {off:.1e}", off < 1e-4, text))
    return checks


def _counts(step: Step, finished: int) -> list[Check]:
    after, before = (None if "step" not in s else s["step"][step.inside] for s in (step.state_after, step.state_before))
    if after is None or not after.numel():
        return []
    counts = sorted({int(value) for value in after.unique_consecutive()})
    advanced = 1 if before is None else int((after - before).max())
    fine = advanced == 1 and 1 <= counts[-1] <= finished + 1
    name, wanted = "steps that the optimizer has counted", f"one more each update, at most {finished + 1}"
    text = f"after update {finished + 1} the optimizer has counted {counts[-1]} steps, {advanced} of them in this update"
    return [Check("optimizer", name, wanted, ", ".join(map(str, counts[:3])), fine, text)]


def check_memory(step: Step, counted: torch.Tensor, between: int) -> list[Check]:
    """Whether the optimizer has counted one step for each update since it was looked at last.

    Args:
        counted: float [n], what it had counted after the last look, of each element; 0 where it counts nothing.
        between: updates since then, without those that were turned down.
    """
    if not counted.any():
        return []
    now = step.state_before.get("step", torch.zeros_like(counted))
    known = counted > 0
    lost = known & (now != counted + between)
    name, wanted = "steps counted between two looks", str(between)
    if not lost.any():
        return [Check("optimizer", name, wanted, wanted, True)]
    found = sorted({int(value) for value in (now - counted)[lost]})
    text = f"between two looks {between} updates were made, and the optimizer has counted {found[0]} steps"
    if bool((now[lost] < counted[lost]).any()):
        text = (
            f"the optimizer had counted {int(counted[lost].max())} steps, and later {int(now[lost].min())}: it lost its state"
        )
    return [Check("optimizer", name, wanted, ", ".join(map(str, found[:3])), False, text)]


def _change(step: Step, wanted: DeclaredOptimizer, expected: torch.Tensor, decayed: torch.Tensor) -> Check:
    """`expected`: the weights after the step, by torch."""
    before = step.before.double()
    change, should = ((after.double() - before)[step.inside] for after in (step.after, expected))
    rounding = ROUNDING * float(before[step.inside].norm()) * 1.5 + 1e-30
    distance, size = float((change - should).norm()), float(should.norm())
    name, declared = "change of the weights", f"{NAMES[wanted.name]}'s"
    if step.rate == 0.0:
        moved = float(change.norm())
        text = "the weights change though the learning rate is 0"
        return Check("optimizer", name, "none, at a learning rate of 0", f"{moved:.1e}", moved <= rounding, text)
    off, lost = (part / size if size else math.inf for part in (distance, rounding))
    observed = f"off by {off:.1e} of it (rounding {lost:.1e})"
    fine = distance <= 5 * rounding + SMALL * size
    if fine and size < 5 * rounding:
        return not_observed("optimizer", name, declared, "the change is smaller than the rounding error of the weights")
    text = "" if fine else _explain_change(step, wanted, change, should, decayed[step.inside])
    return Check("optimizer", name, declared, observed, fine, text)


def _explain_change(
    step: Step, wanted: DeclaredOptimizer, change: torch.Tensor, should: torch.Tensor, decayed: torch.Tensor
) -> str:
    """Of the weights that the optimizer has; `decayed`: those of matrices."""
    if not bool(change.any()):
        return "the weights do not change, though the optimizer makes a step"
    gives = f"what {NAMES[wanted.name]} gives"
    slopes = [slope(should[part], change[part]) for part in (decayed, ~decayed) if should[part].any()]
    left = max((left for _, left in slopes), default=1.0)
    if left < 1e-2:
        said = [simple(factor) for factor, _ in slopes]
        if len(set(said)) == 1:
            return f"the weights change by {said[0]} times {gives} at the learning rate {step.rate:.3g}"
        return f"matrices change by {said[0]} times, biases and norms by {said[1]} times {gives}"
    if wanted.name in ("adamw", "adam") and {"exp_avg", "exp_avg_sq", "step"} <= step.state_after.keys():
        return _explain_adam(step, wanted, change, decayed)
    return f"the weights' change is not {gives}: {left:.0%} of it is something else"


def _explain_adam(step: Step, wanted: DeclaredOptimizer, change: torch.Tensor, decayed: torch.Tensor) -> str:
    """Learning rate, epsilon and decay that explain the change best, from the moments as they are."""
    before = step.before.double()[step.inside]
    count, m, v = (step.state_after[name].double()[step.inside] for name in ("step", "exp_avg", "exp_avg_sq"))
    m, v = m / (1 - wanted.beta1**count), (v / (1 - wanted.beta2**count)).clamp(min=0).sqrt()
    best, settings = math.inf, (wanted.epsilon, 1.0, 0.0, 0.0)
    for epsilon in dict.fromkeys((wanted.epsilon, *(10.0**-k for k in range(1, 13)))):
        columns = torch.stack([-m / (v + epsilon), -before * decayed, -before * ~decayed], 1)
        sizes = columns.norm(dim=0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(columns / sizes, change[:, None]).solution[:, 0] / sizes
        left = float((columns @ solution - change).norm() / change.norm())
        if left < best * 0.9:
            best, settings = left, (epsilon, *solution.tolist())
    if best > 0.05:
        return f"the weights' change is not Adam's: {best:.0%} of it is something else"
    epsilon, speed, decay, spared = settings
    decay, spared = decay / step.rate, spared / step.rate
    said = []
    if abs(speed / step.rate - 1) > 5e-3:
        said.append(f"a learning rate of {speed:.4g} instead of {step.rate:.4g}")
    if not 0.5 < epsilon / wanted.epsilon < 2:
        said.append(f"an epsilon of {epsilon:.0e} instead of {wanted.epsilon:.0e}")
    if abs(decay - wanted.weight_decay) > 0.02 * max(wanted.weight_decay, 1e-3):
        said.append(f"a weight decay of {decay:.3g} instead of {wanted.weight_decay:g}")
    if abs(spared) > 1e-3 + 0.02 * wanted.weight_decay:
        said.append(f"biases and norms decay by {spared:.3g}, which should be spared")
    if not said:
        return "the weights' change is not that of the declared settings"
    return "the weights change as with " + ", ".join(said)
