"""Whether the optimizer has the network's parameters, keeps its state, steps once in an update, and with settings of use."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from steady_doctor.found import Found
from steady_doctor.seen import Seen

SHORTEST = 0.5  # Adam's second beta; 0.9 to 0.9999 are usual
STRONGEST = 3e-3  # weight decay of one update: half of the weights are gone in 230
HIGHEST_DECAY = 2.0  # usual are 0 to 0.1
LARGE_EPSILON = 1e-5  # 1e-8 is usual, and 1e-6 in half precision
MOSTLY = 0.9
LATE = 3  # recorded updates, up to the newest
OFTEN = 0.25  # of the updates
DECOUPLED = ("AdamW", "SGD")  # whose decay times the learning rate is what the weights lose
STUCK = 0.05  # of the weights in half precision; rounding up or down by chance looks the same


def others(seen: Seen) -> Iterator[Found]:
    """Parameters that get a gradient and that no optimizer has; from some update on, as after a resume with a new network."""
    known = seen.recorded()
    late = list(takewhile(lambda update: update.gradient.unowned, reversed(known)))[::-1]
    if len(late) < (2 if late == known else LATE):
        return
    known, gradients = late, [update.gradient for update in late]
    figures = {"count": gradients[0].unowned, "has": gradients[0].parameters}
    if len({update.network for update in known}) > 1 and gradients[0].copies:
        return  # the script writes to them itself, from copies that are trained
    if all(len(gradient.unread) == gradient.wanted for gradient in gradients):
        yield Found("optimizer-of-a-copy", known[0].number, figures)
    elif not any(gradient.by_hand for gradient in gradients):
        yield Found("optimizer-lacks-parameters", known[0].number, figures)


def nothing(seen: Seen) -> Iterator[Found]:
    """No step of any optimizer finds a gradient, and no backward pass gives it one, which could be cleared before the step."""
    has_passes = any(update.gradient.passes for update in seen.recorded())
    if seen.updates >= LATE and not seen.history.got_any and not has_passes:
        yield Found("optimizer-without-gradient", 1, {"updates": seen.updates})


def again(seen: Seen) -> Iterator[Found]:
    """One step for each gradient, by one optimizer, which keeps what it has gathered."""
    history = seen.history
    twice = history.without_pass
    if len(twice) > 1 and len(twice) >= OFTEN * seen.updates and len(twice) < MOSTLY * seen.updates:
        yield Found("optimizer-stepped-again", twice[0], {"count": len(twice), "updates": seen.updates})
    if len(history.remade) > 1 and len(history.remade) >= history.epochs - 1:  # else another part of the training begins
        yield Found("optimizer-made-anew", history.remade[0], {"count": len(history.remade)})
    if history.lost:
        yield Found("optimizer-state-lost", history.lost[0], {"count": len(history.lost)})


def settings(seen: Seen) -> Iterator[Found]:
    for update in seen.recorded():
        if update.optimized is None:
            continue
        for group in update.optimized.settings:
            yield from _betas(update.number, group)
            yield from _decay(update.number, update.optimized.kind, group)


def _betas(update: int, group: dict[str, Any]) -> Iterator[Found]:
    betas = group.get("betas")
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(isinstance(beta, float) for beta in betas)
    if betas is not None and is_pair and (betas[0] > betas[1] or betas[1] < SHORTEST):
        yield Found("optimizer-betas", update, {"first": betas[0], "second": betas[1]})


def _decay(update: int, kind: str, group: dict[str, Any]) -> Iterator[Found]:
    decay, rate = group.get("weight_decay"), group.get("lr")
    if kind not in DECOUPLED or not isinstance(decay, (int, float)) or not isinstance(rate, (int, float)):
        return
    if decay * rate > STRONGEST or (kind == "AdamW" and decay >= HIGHEST_DECAY):
        yield Found("optimizer-decay", update, {"decay": decay, "each": decay * rate})


def epsilon(seen: Seen) -> Iterator[Found]:
    found = []
    for update in seen.recorded(3):
        if update.optimized is not None and update.gradient.small is not None:
            smallest = float(min(group.get("eps", 0.0) for group in update.optimized.settings))
            if smallest >= LARGE_EPSILON:
                found.append((update.number, update.gradient.small, smallest))
    if len(found) > 1 and all(share > MOSTLY for _, share, _ in found):
        yield Found("optimizer-epsilon", found[0][0], {"epsilon": found[0][2], "share": found[0][1]})


def half(seen: Seen) -> Iterator[Found]:
    """Steps that are lost in the rounding of the weights."""
    stuck = [(update.number, update.optimized.stuck) for update in seen.recorded() if update.optimized is not None]
    known = [(number, share) for number, share in stuck if share is not None]
    if len(known) > 1 and all(share > STUCK for _, share in known):
        yield Found("optimizer-half-precision", known[0][0], {"share": known[0][1]})


LAWS = (others, nothing, again, settings, epsilon, half)
