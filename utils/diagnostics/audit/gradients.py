"""Gradients, from the first backward pass of an update to the optimizer's step: accumulated, averaged, clipped once."""

import math
from typing import cast

import torch

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.fitting import SMALL, simple, slope
from utils.diagnostics.audit.seen import Step, Update
from utils.diagnostics.audit.verdict import Check, not_observed


def check_gradients(
    update: Update, declared: Declared, loss_scale: float = 1.0, mean_gradient: torch.Tensor | None = None
) -> list[Check]:
    """Checks of the gradients from the first backward pass to the optimizer's step.

    `mean_gradient` [n]: what the backward passes left, sampled, averaged over all processes; None with one process.
    """
    checks = []
    if update.left_over is not None:
        name, wanted = "gradients before the first backward pass", "none left over from the update before"
        left = float(update.left_over)
        text = "gradients of the update before are still there: they are not cleared, and add up"
        checks.append(Check("gradient", name, wanted, f"norm {left:.3g}", left == 0.0, text))
    passes, wanted = sum(step.finished for step in update.micro_steps), str(declared.micro_steps)
    if passes:
        text = f"the optimizer steps after {passes} backward passes; declared: {wanted} micro steps"
        checks.append(Check("gradient", "backward passes of an update", wanted, str(passes), str(passes) == wanted, text))
    checks += _between_micro_steps(update)
    name, wanted = "gradient at the step", "that of the backward passes"
    if update.optimizer_step is None:
        return [*checks, not_observed("gradient", name, wanted, "no step was made")]
    last = update.micro_steps[-1].gradient_after if update.micro_steps else None
    if last is None:
        return [*checks, Check("gradient", name, wanted, "none", False, "the optimizer made a step without a backward pass")]
    accumulated = (last if mean_gradient is None else mean_gradient) / loss_scale
    return [*checks, *_at_the_step(update, accumulated, declared.optimizer.max_grad_norm)]


def _between_micro_steps(update: Update) -> list[Check]:
    name, wanted = "gradients between micro steps", "unchanged until the last one"
    pairs = list(zip(update.micro_steps[:-1], update.micro_steps[1:]))
    known = [
        (before.gradient_after, after.gradient_before)
        for before, after in pairs
        if before.gradient_after is not None and "network" in after.calls
    ]
    for before, after in known:
        after = torch.zeros_like(before) if after is None else after
        if not (torch.isfinite(before).all() and torch.isfinite(after).all()):
            return [not_observed("gradient", name, wanted, "gradients are not finite")]
        if before.any() and not after.any():
            text = "gradients are cleared between the micro steps of an update: only the last one counts"
            return [Check("gradient", name, wanted, "cleared", False, text)]
        if after.any() and not torch.allclose(before, after, rtol=1e-6, atol=0.0):
            times = f"times {slope(before, after)[0]:.3g}"
            text = f"gradients are changed between the micro steps of an update ({times}): clipped or scaled each time?"
            return [Check("gradient", name, wanted, times, False, text)]
    return [Check("gradient", name, wanted, "unchanged", True)] if known else []


def _at_the_step(update: Update, accumulated: torch.Tensor, limit: float | None) -> list[Check]:
    """`limit` of the joint norm. 0: no clipping; None: not known."""
    step = cast(Step, update.optimizer_step)
    clipping = {None: "not known", 0.0: "none"}.get(limit, f"{limit} over the joint norm, at most 1")
    name, wanted = "gradient at the step over that of the backward passes", f"one factor for all: {clipping}"
    a, g = accumulated.double(), step.gradient.double()
    if not (torch.isfinite(a).all() and torch.isfinite(g).all()):
        return [not_observed("gradient", name, wanted, "gradients are not finite")]
    if not a.any():
        return [not_observed("gradient", name, wanted, "gradients are zero")]
    factor, residual = slope(a, g) if g.any() else (0.0, 1.0)
    norm = float(step.gradient_norm)
    observed = f"{factor:.4g}, norm {norm:.3g} at the step"
    if residual > 1e-4:
        text = _explain_gradient(a, g, factor, residual)
        return [Check("gradient", name, wanted, f"{observed}, residual {residual:.1e}", False, text)]
    before = norm / abs(factor) if factor else math.inf
    if limit is None:
        fine = abs(factor - 1) < SMALL if norm < 0.1 * (1 - SMALL) else 0 < factor <= 1 + SMALL and norm < 10 * (1 + SMALL)
    else:
        expected = min(1.0, limit / (before + 1e-6)) if limit else 1.0  # as torch's clip_grad_norm_
        fine = abs(factor / expected - 1) < SMALL
    checks = [Check("gradient", name, wanted, observed, fine, _explain_factor(factor, before, norm, limit))]
    if update.told_norm is not None and factor:
        told = float(update.told_norm)
        off = abs(told / before - 1) if before else abs(told)
        text = f"the gradient's norm is {before:.4g} before it is clipped, and {told:.4g} is taken for it"
        checks.append(Check("gradient", "norm before clipping", f"{before:.4g}", f"{told:.4g}", off < SMALL, text))
    return checks


def _explain_factor(factor: float, before: float, norm: float, limit: float | None) -> str:
    """`before` and `norm`: the joint norm, as the backward passes left it and at the step."""
    if factor < 0:
        return f"the gradient changes its sign before the step (times {factor:.3g})"
    if limit and before > limit and abs(factor - 1) < SMALL:
        return f"the gradient is not clipped: its norm is {norm:.3g}, and the declared limit is {limit:g}"
    said = f"the gradient is {simple(factor)} times what the backward passes left"
    if limit and before <= limit * (1 + SMALL):
        return f"{said}, though its norm {before:.3g} is below {limit:g}"
    if limit:
        return f"the gradient is clipped to a norm of {norm:.3g}, declared {limit:g}"
    return f"{said}, and no clipping is declared"


def _explain_gradient(a: torch.Tensor, g: torch.Tensor, factor: float, residual: float) -> str:
    """Of a gradient g at the step that is not `factor` times the one that the backward passes left, a."""
    highest = float(g.abs().max())
    at_limit = int((g.abs() > highest * (1 - 1e-5)).sum())
    if highest and at_limit >= 2 and torch.allclose(g, a.clamp(-highest, highest), rtol=1e-4, atol=1e-12):
        return f"each element of the gradient is clipped to {highest:.3g} by itself, not the joint norm"
    lost = (a != 0) & (g == 0)
    share = float(lost.double().mean())
    if share > 1e-3 and torch.allclose(g[~lost], a[~lost] * factor, rtol=0.1):
        return f"{share:.0%} of the gradient is set to zero before the step"
    return (
        f"the gradient at the step is not that of the backward passes: {residual:.0%} of it is something else "
        "(changed per layer, mixed with another, not averaged over processes, or noise added)"
    )
