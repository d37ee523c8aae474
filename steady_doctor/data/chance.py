"""What chance can do: a fault is only what chance alone would do less than once in a billion runs."""

from scipy.special import bdtrc

IMPOSSIBLE = 1e-9  # as a probability


def at_least(count: int, trials: int, rate: float) -> float:
    """Probability of `count` or more successes among `trials` that succeed at `rate` each."""
    if count <= 0 or rate >= 1:
        return 1.0
    return 0.0 if rate <= 0 or count > trials else float(bdtrc(count - 1, trials, rate))


def agrees(count: int, trials: int, rate: float) -> bool:
    """Whether `count` successes among `trials` can be chance at `rate`: two-sided."""
    return 2 * min(at_least(count, trials, rate), at_least(trials - count, trials, 1 - rate)) >= IMPOSSIBLE
