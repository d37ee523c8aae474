"""The variational bound of networks that tell a variance too: what it counts beside the squared error of the noise."""

import math

import torch

from utils.diagnostics.audit.fitting import constant, fit, flat
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.levels import Levels

MOST = 30.0  # times what is usual: the mean over all pixels, in bits, times steps / 1000
SMALL = 2e-2


def check_bound(levels: Levels, table: torch.Tensor, weights: torch.Tensor) -> Check | None:
    """Of an output of noise and, in as many channels more, of where the variance's logarithm lies between its two bounds, from
    -1 to 1. None where the loss has no such bound.

    Args:
        table: alphas_cumprod [T].
        weights: what each sample's mean squared error counts, [B].
    """
    channels = levels.looks[0].x.shape[1]
    if any(look.output.shape[1] != 2 * channels or look.gradient is None for look in levels.looks):
        return None
    noise, variance = (torch.cat([flat(look.output[:, part]) for look in levels.looks]) for part in _halves(channels))
    gradient = torch.cat([flat(look.gradient[:, channels:]) for look in levels.looks if look.gradient is not None])
    alphas = table.to(levels.a)
    t = (alphas[None] - levels.a[:, None] ** 2).abs().argmin(1)
    used = (t > 0) & (gradient.norm(dim=1) > 0)  # the first step has another bound
    if int(used.sum()) < 2 or not torch.isfinite(gradient).all():
        return None
    now, before = alphas[t][:, None], alphas[(t - 1).clamp(min=0)][:, None]
    beta = 1 - now / before
    low, high = (beta * (1 - before) / (1 - now)).log(), beta.log()
    log_variance = low + (variance + 1) / 2 * (high - low)
    clean = (levels.x - (1 - now).sqrt() * noise) / now.sqrt()
    apart = beta * before.sqrt() / (1 - now) * (levels.clean - clean)  # of the means of the step back
    slopes = (1 - ((low.exp() + apart**2) / log_variance.exp())) * (high - low) / 4 / math.log(2)
    counts, left = fit(gradient, slopes)
    clear = used & (left < SMALL)  # at late steps both bounds are nearly one, and their difference is rounded
    share = (counts[:, 0] * levels.pixels * levels.sizes / weights).abs()
    times = constant(share[clear], SMALL) if 2 * int(clear.sum()) > int(used.sum()) else None
    if times is None:
        return None
    text = (
        f"the bound of the variances counts {times:.4g} times its mean over the pixels, beside the squared error of the noise: "
        "is it not divided by 1000?"
    )
    wanted = f"{len(table) / 1000:g} times its mean"
    fine = times < MOST * max(len(table) / 1000, 1)
    return Check("weight", "weight of the variances' bound", wanted, f"{times:.4g} times", fine, text, "warning")


def _halves(channels: int) -> tuple[slice, slice]:
    return slice(channels), slice(channels, 2 * channels)
