"""Power-function EMA of several lengths at once, and the EMA of any other length made from their snapshots afterwards.

After Karras et al. 2024 (arXiv 2312.02696), section 3 and appendix C. An average of exponent g at time T weighs the weights of
time t <= T by p(t) = (g + 1) t^g / T^(g + 1): its length is always the same share of the training, its relative width
s_rel = std of p / T. t and T are counts of updates.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.core.errors import UserError
from utils.optim.ema import EMA, ema_decay
from utils.options.flags import EMAOptions

WIDEST = 12**-0.5  # s_rel of g = 0, the plain mean
WIDTHS = "power/widths"  # among the tensors of a checkpoint


def exponent_of_width(width: float) -> float:
    """g of a relative width s_rel in (0, 0.2887): the largest real root of g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2) = 0.

    Raises UserError for a width outside that range.
    """
    if not 0.0 < width < WIDEST:
        raise UserError(
            f"an EMA of width {width:g} is not possible\nset a width between 0 and {WIDEST:.4f} (the mean of all updates)"
        )
    inverse = float(width) ** -2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return float(roots.real[np.abs(roots.imag) < 1e-9].max())


def power_decay(step: int, exponent: float) -> float:
    """Returns the decay b in [0, 1) of the `step`-th update (1 for the first): (1 - 1 / step)^(g + 1)."""
    return (1.0 - 1.0 / step) ** (exponent + 1.0)


def inner_products(
    steps_a: Sequence[int], exponents_a: Sequence[float], steps_b: Sequence[int], exponents_b: Sequence[float]
) -> np.ndarray:
    """<p_a, p_b> = integral of p_a(t) p_b(t) dt, float64 [A, B], for profiles of `exponents` that end at `steps`."""
    steps_a, exponents_a = (np.asarray(x, np.float64)[:, None] for x in (steps_a, exponents_a))
    steps_b, exponents_b = (np.asarray(x, np.float64)[None, :] for x in (steps_b, exponents_b))
    later = np.maximum(steps_a, steps_b)
    exponent_of_later = np.where(steps_a <= steps_b, exponents_b, exponents_a)
    ratio = np.minimum(steps_a, steps_b) / later
    scale = (exponents_a + 1.0) * (exponents_b + 1.0) / ((exponents_a + exponents_b + 1.0) * later)
    return scale * ratio**exponent_of_later


def reconstruction_weights(steps: Sequence[int], widths: Sequence[float], step: int, width: float) -> tuple[np.ndarray, float]:
    """(what to weigh each snapshot by, float64 [n], sum 1, so that the sum comes nearest to the EMA of `width` at `step`; how
    far off its profile p is: ||sum of weights p_i - p|| / ||p||).

    Snapshot i has the profile p_i of `widths[i]` up to `steps[i]`. Least squares between the profiles; those of snapshots that
    are nearly alike make the problem nearly singular, hence `lstsq`.
    """
    exponents, wanted = [exponent_of_width(w) for w in widths], ([step], [exponent_of_width(width)])
    gram = inner_products(steps, exponents, steps, exponents)
    target = inner_products(steps, exponents, *wanted)[:, 0]
    weights = np.linalg.lstsq(gram, target, rcond=None)[0]
    weights /= weights.sum()
    size = inner_products(*wanted, *wanted)[0, 0]
    difference = weights @ gram @ weights - 2.0 * weights @ target + size
    return weights, float((max(difference, 0.0) / size) ** 0.5)  # rounding may take it below 0


class PowerEMA(EMA):
    """Averages of several relative widths, updated as one. The first is the one that is validated, sampled and exported."""

    def __init__(self, model: nn.Module, widths: Sequence[float]):
        if len(set(widths)) != len(widths):
            raise UserError(f"--ema_widths {' '.join(map(str, widths))}: a width is there twice\nset each width once")
        self.exponents = [exponent_of_width(width) for width in widths]
        super().__init__(model)
        self._others = [EMA(model) for _ in widths[1:]]
        self.averages = dict(zip(widths, (self, *self._others)))  # width -> EMA
        groups = zip(*(average._averages for average in self.averages.values()))
        self._moved = [average for group in groups for average in group]  # so each tensor is read from memory once
        self._copied = [pair for average in self.averages.values() for pair in average._copied]

    def _rates(self, decay: float) -> list[float]:
        """`decay` is that of the first width, and gives those of the others: b^((g' + 1) / (g + 1))."""
        return [1.0 - decay ** ((exponent + 1.0) / (self.exponents[0] + 1.0)) for exponent in self.exponents]

    def restart(self) -> None:
        """Raises UserError: an average that does not reach back to the first update has another profile than its width's."""
        raise UserError(
            "the checkpoint has no EMA, and --ema_type power needs an average from the first update on\n"
            "use --no-use_ema or --ema_type exponential, or start a new run"
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The first average under the model's own names, the others under `<width>/<name>`, and the widths, float64 [n]."""
        state = self.shadow | {WIDTHS: torch.tensor(list(self.averages), dtype=torch.float64)}
        for width, average in self._named_others():
            state |= {f"{width}/{name}": tensor for name, tensor in average.shadow.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copies `state` in. Raises UserError when it is of another model or of other widths."""
        found = state[WIDTHS].tolist() if WIDTHS in state else []
        if found != list(self.averages):
            was, now = (" ".join(map(str, widths)) or "none" for widths in (found, self.averages))
            raise UserError(
                f"the checkpoint has --ema_widths {was}, not {now}\n"
                "use those; reconstruct_ema.py makes other widths after the training"
            )
        super().load_state_dict({name: tensor for name, tensor in state.items() if "/" not in name})
        for width, average in self._named_others():
            prefix = f"{width}/"
            average.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def _named_others(self) -> list[tuple[str, EMA]]:
        return [(str(width), average) for width, average in self.averages.items() if average is not self]


def make_ema(model: nn.Module, options: EMAOptions) -> tuple[EMA | None, Any]:
    """(EMA, its decay at the n-th update), both None without `use_ema`."""
    if not options.use_ema:
        return None, None
    if options.ema_type == "power":
        ema = PowerEMA(model, options.ema_widths)
        return ema, partial(power_decay, exponent=ema.exponents[0])
    decay = partial(ema_decay, max_decay=options.ema_max_decay, inv_gamma=options.ema_inv_gamma, power=options.ema_power)
    return EMA(model), decay
