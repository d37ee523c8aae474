"""Findings about the diffusion process: its noise schedule, and what the network's output is taken for."""

import math
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.diagnostics.rules.audit import measured
from utils.runs.record import RunRecord


def schedule(record: RunRecord) -> Found:
    alphas_cumprod = record.alphas_cumprod
    if alphas_cumprod is None:
        return
    yield from ("schedule-leaves-signal", "schedule-destroys-early")
    signal = math.sqrt(alphas_cumprod[-1])
    # Stable Diffusion's leftover of 0.068 already shows in its samples (Lin et al. 2023, table 1); 0.1 is beyond any in use.
    if signal > 0.05:
        what = f"{signal:.1%} of the image is left at the last timestep"
        yield Finding("schedule-leaves-signal", "critical" if signal > 0.1 else "info", what, None)
    # Below an SNR of 1e-4 nothing can be learned but the mean; the linear schedule spends 5 % there, the cosine one 1 %.
    lost = sum(a / max(1.0 - a, 1e-12) < 1e-4 for a in alphas_cumprod) / len(alphas_cumprod)
    if lost > 0.3:
        yield Finding("schedule-destroys-early", "critical", f"{lost:.0%} of the timesteps have an SNR below 1e-4", None)


def sampler_mismatch(record: RunRecord) -> Found:
    """Of a pipeline, whose training nobody saw. Of a run the doctor knows the target, and a network that has learned little
    may be better read as something else, where some noise levels hardly count in the loss."""
    if "target" in measured(record):
        yield "sampler-mismatch"
        return
    for step, probe in record.known("probe")[-1:]:
        errors, claimed = probe.get("errors_as", {}), probe.get("prediction_type")
        if not errors.get(claimed):
            return
        yield "sampler-mismatch"
        for name, by_level in errors.items():
            levels = [(by_level[t], errors[claimed][t]) for t in by_level if by_level[t] > 0 and t in errors[claimed]]
            if name == claimed or not levels:
                continue
            learned = median(error for error, _ in levels)
            # What a network was trained to predict it predicts best at some noise level at least; this one is better read as
            # something else at all of them (but for rounding), half as wrong at the typical one, and better than zeros (1).
            worse = median(as_claimed / error for error, as_claimed in levels)
            if learned < 0.8 and worse > 1.5 and all(as_claimed > 0.98 * error for error, as_claimed in levels):
                what = f"as {name} the output has a relative error of {learned:.2g}, as {claimed} {worse:.2g} times that"
                yield Finding("sampler-mismatch", "critical", what, step)
                return
