"""What chance can do: the audit calls a fault only what chance alone would do less than once in a billion runs."""

import math

IMPOSSIBLE = 1e-9  # as a probability


def at_least(count: int, trials: int, rate: float) -> float:
    """Probability of `count` or more successes among `trials` that succeed at `rate` each."""
    if count <= 0 or rate >= 1:
        return 1.0
    if rate <= 0 or count > trials:
        return 0.0
    ways, total = math.lgamma(trials + 1), 0.0
    for k in range(count, trials + 1):
        chances = ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        part = math.exp(chances + k * math.log(rate) + (trials - k) * math.log1p(-rate))
        total += part
        if k > trials * rate and part <= 1e-17 * total:  # from here on they fall, ever faster
            break
    return min(1.0, total)


def agrees(count: int, trials: int, rate: float) -> bool:
    """Whether `count` successes among `trials` can be chance at `rate`: two-sided."""
    return 2 * min(at_least(count, trials, rate), at_least(trials - count, trials, 1 - rate)) >= IMPOSSIBLE
