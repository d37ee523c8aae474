"""The schedules of learning rates, and the decay of averages whose length grows with the run: formulas written once more."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from steady_doctor.declare.processes import power_exponent


@dataclass(frozen=True)
class Schedule:
    """The learning rate of the n-th update, by diffusers' names of the schedules. All lengths are in updates."""

    kind: str
    peak: float
    total: int
    warmup: int = 0
    floor: float = 0.0  # share of the peak that is left at the end
    power: float = 1.0  # of the polynomial one
    cycles: float = 1.0
    reference: int | None = None  # of the inverse square root, up to which the rate is constant; None: the warm-up

    def __call__(self, update: int) -> float:
        step, warmup = update - 1, self.warmup
        if self.kind == "constant":
            return self.peak
        ramp = 1.0 if warmup == 0 else min(1.0, step / warmup)
        if self.kind == "inverse_sqrt":
            reference = self.reference or warmup or 1
            return self.peak * ramp * min(1.0, (reference / step) ** 0.5 if step else 1.0)
        if ramp < 1.0 or self.kind == "constant_with_warmup":
            return self.peak * ramp
        left = self.total - warmup
        done = min((step - warmup) / left, 1.0) if left > 0 else min(1.0, float(step - warmup))
        cycle = math.modf(done * self.cycles)[0]
        share = {
            "linear": 1 - done,
            "polynomial": (1 - done) ** self.power,
            "cosine": math.cos(math.pi * done / 2) ** 2,
            "cosine_with_restarts": math.cos(math.pi * cycle / 2) ** 2 if done < 1 else 0.0,
            "cyclic": abs(2 * cycle - 1),
        }[self.kind]
        return self.peak * (self.floor + (1 - self.floor) * share)


def power_decay(width: float) -> Callable[[int], float]:
    """Returns the decay of the n-th update of the average with this relative width, see `power_exponent`."""
    exponent = power_exponent(width)
    return lambda update: (1 - 1 / update) ** (exponent + 1)
