"""A script's optimizer step against torch's own optimizer of that class with the settings of the script's groups."""

import inspect
import math

import torch

from utils.diagnostics.audit.fitting import ROUNDING, simple
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed

SMALL = 1e-3
MOST_CHANGE = 0.5  # of the size of the weights, in one update
HIGH = 0.02  # learning rate of Adam's kind; 0.01 is that of EDM2, which normalizes its weights
NORMALIZED = 0.05  # how far rows of weights are from one size where each update normalizes them
SHORTEST = 0.5  # second beta; 0.95 to 0.999 are usual
LARGE_EPSILON, MOST_BELOW_EPSILON = 1e-5, 0.9  # 1e-8 is usual, and 1e-6 in half precision
MOST_DECAY = 3e-3  # of the weights, in one update: half of them in 230
KNOWN = ("AdamW", "Adam", "SGD", "RMSprop", "RAdam", "Adamax", "Adagrad")


def check_step(update: Update, observer: Observer, known: bool) -> list[Check]:
    """`known`: it is torch's own optimizer, not another one of its name."""
    step = update.optimizer_step
    if step is None or step.after is None:
        return [not_observed("optimizer", "step", "one per update", "no step was seen")]
    text = f"the optimizer steps {step.steps} times in one update"
    checks = [Check("optimizer", "steps per update", "1", str(step.steps), step.steps == 1, text)]
    checks += [_members(update, observer), _size_of_step(update, observer), *_betas(step.groups)]
    checks += [*_epsilon(update), *_rates(step.optimizer, step.groups, update)]
    checks += _decay(step.groups) if step.optimizer in ("AdamW", "SGD") else []  # others scale it with the gradient
    if step.optimizer not in KNOWN or not known:
        why = f"torch has no optimizer {step.optimizer} to compare with"
        return [*checks, not_observed("optimizer", "change of the weights", step.optimizer, why)]
    if min(rates_of(step.groups), default=0.0) < 0:  # which torch's optimizers refuse
        return [*checks, not_observed("optimizer", "change of the weights", step.optimizer, "its learning rate is negative")]
    return [*checks, *_recursions(update, observer)]


def _members(update: Update, observer: Observer) -> Check:
    """Whether all parameters that get a gradient are the optimizer's."""
    step = update.optimizer_step
    gradient = update.micro_steps[-1].gradient_after if update.micro_steps else None
    missing, position = [], 0
    for name, count in zip(observer.sample.names, observer.sample.counts):
        part = slice(position, position + count)
        if step is not None and int(step.group_of[position]) < 0 and gradient is not None and bool(gradient[part].any()):
            missing.append(name)
        position += count
    total = len(observer.sample.names)
    text = f"{len(missing)} of {total} parameters get gradients and are not in the optimizer" if missing else ""
    text += f", such as {missing[0]}" if missing else ""
    name, wanted = "parameters in the optimizer", "all that get gradients"
    return Check("optimizer", name, wanted, f"{total - len(missing)} of {total}", not missing, text)


def _size_of_step(update: Update, observer: Observer) -> Check:
    """Beside the weights that torch's layers begin with, uniform to 1 / sqrt(fan-in), or their own where these are larger."""
    step, sample, sizes = update.optimizer_step, observer.sample, []
    pieces = zip(sample.shapes, *(v.double().split(sample.counts) for v in (step.before, step.after)))  # type: ignore[union-attr]
    for shape, before, after in pieces:
        if len(shape) > 1 and not torch.equal(before, after):
            own = max(float(before.square().mean()), 1 / (3 * math.prod(shape[1:])))
            sizes.append((float((after - before).square().mean()) / own) ** 0.5)
    size = sorted(sizes)[len(sizes) // 2] if sizes else 0.0
    text = f"one update changes the weights of a typical layer by {size:.0%} of their size: is the learning rate far too high?"
    name = "size of an update beside the weights"
    return Check("learning_rate", name, f"{MOST_CHANGE:g} at most", f"{size:.2g}", size <= MOST_CHANGE, text, "warning")


def rates_of(groups: list[dict]) -> list[float]:
    """Learning rates; none where the optimizer finds its own, as Adafactor may."""
    rates = [group.get("lr") for group in groups]
    return [] if any(rate is None for rate in rates) else [float(rate) for rate in rates]


def betas_of(group: dict) -> tuple[float, float] | None:
    """Those of Adam's kind; other optimizers have three, or one that is not a number."""
    betas = group.get("betas")
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(isinstance(beta, (int, float)) for beta in betas)
    return (betas[0], betas[1]) if pair else None  # type: ignore[index]


def _rates(kind: str, groups: list[dict], update: Update) -> list[Check]:
    """Learning rates that cannot be meant. Networks whose weights are normalized in each update take higher ones."""
    rates = rates_of(groups)
    if not rates:
        return []
    name, found = "learning rate of the step", f"{max(rates, key=abs):.3g}"
    if min(rates) < 0:
        text = f"the learning rate is {min(rates):.3g}: a negative one climbs, away from what the loss asks for"
        return [Check("learning_rate", name, "0 or more", found, False, text)]
    step = update.optimizer_step
    main = max(rates) if step is None else rates[int(step.group_of.clamp(min=0).mode().values)]  # of the most numbers
    high = kind in ("Adam", "AdamW", "NAdam", "RAdam") and main >= HIGH and not is_normalized(update)
    text = f"the learning rate of {kind} is {main:.3g}, where 1e-5 to 1e-3 are usual: is it that of another optimizer?"
    return [Check("learning_rate", name, f"below {HIGH:g}", found, not high, text, "warning")]


def is_normalized(update: Update) -> bool:
    """Whether rows of weights have the size 1, as those of EDM2 have after its forward pass."""
    sizes = update.row_sizes
    return sizes is not None and float(((sizes - 1).abs() < NORMALIZED).double().mean()) > 0.8


def _betas(groups: list[dict]) -> list[Check]:
    """Settings that nobody wants."""
    betas = [pair for group in groups if (pair := betas_of(group)) is not None]
    if not betas:
        return []
    fine, found = all(first <= second for first, second in betas), ", ".join(f"{beta:g}" for beta in betas[0])
    text = f"the betas are {found}: the mean of squares forgets sooner than that of gradients; are they exchanged?"
    if fine and any(second < SHORTEST for _, second in betas):
        fine, text = (
            False,
            f"the betas are {found}: the mean of squares is that of the last update, so that steps are mere signs",
        )
    return [Check("optimizer", "betas", "the second is the longer one", found, fine, text, "warning")]


def _epsilon(update: Update) -> list[Check]:
    """Of Adam's kind: whether it is what gradients are divided by, in place of their own size."""
    step = update.optimizer_step
    if step is None or "exp_avg_sq" not in step.state_before:
        return []
    squares, known = step.state_before["exp_avg_sq"], [group.get("eps") for group in step.groups]
    epsilon = max((each for each in known if isinstance(each, (int, float))), default=0.0)  # Adafactor has two
    if epsilon < LARGE_EPSILON or not squares.any():
        return []
    beta, counts = betas_of(step.groups[0]), step.state_before.get("step", torch.zeros(1))
    grown = 1 - beta[1] ** float(counts.max()) if beta is not None and counts.any() else 1.0
    sizes = (squares[squares > 0].double() / grown).sqrt()
    share = float((sizes < epsilon).double().mean())
    text = f"the epsilon of {epsilon:g} is larger than {share:.0%} of the gradients: it makes their steps far smaller"
    name, found = "gradients that are smaller than epsilon", f"{share:.0%}"
    return [Check("optimizer", name, f"below {MOST_BELOW_EPSILON:.0%}", found, share < MOST_BELOW_EPSILON, text, "warning")]


def _decay(groups: list[dict]) -> list[Check]:
    decay = max(float(group.get("lr") or 0.0) * float(group.get("weight_decay") or 0.0) for group in groups)
    text = f"the weight decay takes {decay:.2g} of the weights in each update: is it far too strong?"
    name, wanted = "weight decay of an update", "far below 1 %"
    return [Check("optimizer", name, wanted, f"{decay:.2g} of the weights", decay <= MOST_DECAY, text, "warning")]


def _recursions(update: Update, observer: Observer) -> list[Check]:
    step = update.optimizer_step
    if step is None or step.after is None:
        return []
    kind = getattr(torch.optim, step.optimizer)
    allowed = inspect.signature(kind).parameters
    before, after = step.before.double(), step.after.double()
    untouched = _untouched(update, observer)
    inside = (step.group_of >= 0) & ~untouched
    expected = before.clone()
    moments: dict[str, torch.Tensor] = {}
    counts = step.state_before.get("step", torch.zeros_like(before))
    for number, group in enumerate(step.groups):
        names = allowed.keys() - {"params", "foreach", "fused", "capturable", "differentiable"}
        settings = {name: value for name, value in group.items() if name in names}
        settings["lr"] = float(group["lr"])
        own = (step.group_of == number) & ~untouched
        for count in counts[own].unique().tolist():  # parameters that had no gradient in some updates have counted fewer
            part = own & (counts == count)
            parameter = torch.nn.Parameter(before[part].cpu().clone())
            judge = kind([parameter], **settings)
            parameter.grad = step.gradient.double()[part].cpu()
            state = {k: v.double()[part].cpu().clone() for k, v in step.state_before.items() if k != "step"}
            if state:
                judge.state[parameter] = state | {"step": torch.tensor(float(count))}
            judge.step()
            expected[part] = parameter.detach().to(before)
            for name, value in judge.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    moments.setdefault(name, torch.zeros_like(before))[part] = value.to(before)
    checks = _counted(update, inside)
    for name, value in moments.items():
        seen = step.state_after.get(name)
        if seen is not None:
            size = float(value[inside].norm())
            off = float((seen.double() - value)[inside].norm()) / size if size else 0.0
            text = f"the optimizer's {name} is not what its own settings give ({off:.0%} off)"
            checks.append(Check("optimizer", f"state: {name}", "torch's", f"off by {off:.1e}", off < 1e-3, text))
    return [*checks, _change(step.optimizer, before, after, expected, inside)]


def _counted(update: Update, inside: torch.Tensor) -> list[Check]:
    """A state that is lost counts fewer steps than were made."""
    step, made = update.optimizer_step, update.step + 1
    counted = step.state_after.get("step")
    if counted is None or not inside.any():
        return []
    most = int(counted[inside].max())
    text = f"after {made} updates the optimizer has counted {most} steps: its state is lost on the way, or it is made anew"
    return [Check("optimizer", "steps that it has counted", f"{made} or more", str(most), most >= made, text)]


def _untouched(update: Update, observer: Observer) -> torch.Tensor:
    """Elements of parameters without a gradient, which torch's optimizers leave alone; bool [n]."""
    step = update.optimizer_step
    pieces = zip(*(v.split(observer.sample.counts) for v in (step.gradient, step.before, step.after)))  # type: ignore[union-attr]
    return observer.sample.per_element(not g.any() and torch.equal(b, a) for g, b, a in pieces).bool()


def _change(kind: str, before: torch.Tensor, after: torch.Tensor, expected: torch.Tensor, inside: torch.Tensor) -> Check:
    change, should = (after - before)[inside], (expected - before)[inside]
    rounding = ROUNDING * float(before[inside].norm()) * 1.5 + 1e-30
    distance, size = float((change - should).norm()), float(should.norm())
    name, wanted = "change of the weights", f"{kind}'s"
    observed = f"off by {distance / size if size else math.inf:.1e} of it"
    if distance <= 5 * rounding + SMALL * size:
        if 0 < size < 5 * rounding:
            return not_observed("optimizer", name, wanted, "the change is smaller than the rounding error of the weights")
        return Check("optimizer", name, wanted, observed if size else "none", True)
    if not change.any():
        return Check("optimizer", name, wanted, "none", False, "the weights do not change, though the optimizer makes a step")
    factor = float((change * should).sum() / (should * should).sum()) if size else math.nan
    left = float((change - factor * should).norm() / change.norm())
    how = f"{simple(factor)} times" if left < 1e-2 else f"not (by {left:.0%})"
    text = f"the weights change {how} what {kind} gives with the settings of its groups"
    return Check("optimizer", name, wanted, observed, False, text)
