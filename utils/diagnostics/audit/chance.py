"""What chance can do: the audit calls a fault only what chance alone would do less than once in a billion runs."""

import math

IMPOSSIBLE = 1e-9  # as a probability


def at_least(count: int, trials: int, rate: float) -> float:
    """Probability of `count` or more successes among `trials` that succeed at `rate` each."""
    if count <= 0 or rate >= 1:
        return 1.0
    if rate <= 0 or count > trials:
        return 0.0
    ways = math.lgamma(trials + 1)
    logs = [
        ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(count, trials + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def agrees(count: int, trials: int, rate: float) -> bool:
    """Whether `count` successes among `trials` can be chance at `rate`: two-sided."""
    return 2 * min(at_least(count, trials, rate), at_least(trials - count, trials, 1 - rate)) >= IMPOSSIBLE
