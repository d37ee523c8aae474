"""Findings about the diffusion process: its schedule, its noise, its timesteps, and the process that is sampled."""

import math
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.runs.record import RunRecord


def schedule(record: RunRecord) -> Found:
    alphas_cumprod = record.alphas_cumprod
    if alphas_cumprod is None:
        return
    yield from ("schedule-leaves-signal", "schedule-destroys-early")
    signal = math.sqrt(alphas_cumprod[-1])
    # Stable Diffusion's leftover of 0.068 already shows in its samples (Lin et al. 2023, table 1); 0.1 is beyond any in use.
    if signal > 0.1:
        yield Finding("schedule-leaves-signal", "critical", f"{signal:.1%} of the image is left at the last timestep", None)
    # Below an SNR of 1e-4 nothing can be learned but the mean; the linear schedule spends 5 % there, the cosine one 1 %.
    lost = sum(a / max(1.0 - a, 1e-12) < 1e-4 for a in alphas_cumprod) / len(alphas_cumprod)
    if lost > 0.3:
        yield Finding("schedule-destroys-early", "critical", f"{lost:.0%} of the timesteps have an SNR below 1e-4", None)


def timesteps_uneven(record: RunRecord) -> Found:
    shares, seen, last = _timesteps_drawn(record)
    levels = record.options.get("ddpm_num_steps") or 1000
    if seen < 400 or levels < 10:  # of a uniform 400, fewer than 8 fall into a tenth with a probability below 1e-9
        return
    yield "timesteps-uneven"
    if min(shares) < 0.02:
        what = "shares of the ten tenths: " + ", ".join(f"{share:.2f}" for share in shares)
        yield Finding("timesteps-uneven", "critical", what, last)


def _timesteps_drawn(record: RunRecord) -> tuple[list[float], float, int | None]:
    """(shares of the ten tenths of the timesteps in all reports together, of how many timesteps, the last of these reports)."""
    tags = ("train/timesteps_drawn", *(f"train/timestep_share_{i}" for i in range(1, 11)))
    lines = (line for line in record.history if tags[0] in line)
    known: list[tuple[int, list]] = [(line["step"], [line.get(tag) for tag in tags]) for line in lines]
    known = [(step, row) for step, row in known if all(value is not None and math.isfinite(value) for value in row)]
    seen = sum(drawn for _, (drawn, *_) in known)
    if not seen > 0:
        return [], 0.0, None
    shares = [sum(row[0] * row[i] for _, row in known) / seen for i in range(1, 11)]
    return shares, seen, known[-1][0]


def noise_wrong(record: RunRecord) -> Found:
    """Medians of what utils/diagnostics/noise_check.py saw, far from what independent standard normal noise gives."""
    if record.alphas_cumprod is None:  # the figures assume a^2 + b^2 = 1
        return
    # Offset noise (0.1 per channel) adds a hundredth to the variance and to the correlations. The least that was seen of a
    # fault is a variance of 1/3 (uniform in [-1, 1]) or 3 (the same with too much of it), a kurtosis of 1.8, a correlation of
    # a half; chance moves a report on one 8x8 image by a fifth, and there are several reports.
    healthy = {
        "variance": (0.75, 1.33, "its variance is {:.2f}, not 1"),
        "kurtosis": (2.4, 4.5, "its kurtosis is {:.2f}, not the 3 of a Gaussian"),
        "between_images": (-0.5, 0.2, "the images of a batch share it (correlation {:.2f})"),
        "within_images": (0.0, 0.25, "neighboring pixels or channels share it (correlation {:.2f})"),
        "repeated": (-0.4, 0.4, "it is the same in one update as in another (correlation {:.2f})"),
    }
    said, last, judged = [], None, False
    for name, (low, high, words) in healthy.items():
        steps, values = record.finite(f"noise/{name}")
        judged |= len(values) >= 3
        if len(values) >= 3 and not low <= median(values) <= high:
            said.append(words.format(median(values)))
            last = steps[-1]
    if judged:
        yield "noise-wrong"
    if said:
        yield Finding("noise-wrong", "critical", "; ".join(said), last)


def timestep_mismatch(record: RunRecord) -> Found:
    alphas_cumprod = record.alphas_cumprod
    shares, seen, _ = _timesteps_drawn(record)
    if alphas_cumprod is None or not seen:
        return
    steps, orders = record.finite("noise/timestep_order")
    clear = sum(a > 0.01 for a in alphas_cumprod) / len(alphas_cumprod)
    # Where timesteps come from all of a schedule, half of which leaves something of the image to tell them by, the rank
    # correlation is above 0.8; timesteps of other images give 0, reversed ones -1.
    ordered = len(orders) >= 3 and clear > 0.5 and min(shares) > 0
    if ordered:
        yield "timestep-mismatch"
    if ordered and median(orders) < 0.5:
        what = f"the rank correlation of timestep and noise in the images is {median(orders):.2f}, not nearly 1"
        yield Finding("timestep-mismatch", "critical", what, steps[-1])
        return
    steps, told = record.finite("noise/timestep_mean")
    batch = (record.resolved.get("global_batch_size") or 0) // (record.resolved.get("num_processes") or 1)
    drawn = sum(share * (i + 0.5) / 10 for i, share in enumerate(shares)) * (record.options.get("ddpm_num_steps") or 1000)
    # The mean of 64 of a uniform thousand is 500 with a standard error of 36; fractions make it 0.5.
    if len(told) * batch >= 64 and drawn > 0 and not 0.5 < sum(told) / len(told) / drawn < 2.0:
        what = f"the network is told timesteps around {sum(told) / len(told):.3g}, while those drawn lie around {drawn:.3g}"
        yield Finding("timestep-mismatch", "critical", what, steps[-1])


def sampler_mismatch(record: RunRecord) -> Found:
    compared = ("prediction_type", "beta_schedule", "num_train_timesteps", "rescale_betas_zero_snr")
    for step, samples in record.known("samples")[-1:]:
        sampler, trained = samples.get("sampler", {}), samples.get("trained", {})
        known = [name for name in compared if sampler.get(name) is not None and trained.get(name) is not None]
        different = [name for name in known if sampler[name] != trained[name]]
        if known:
            yield "sampler-mismatch"
        if different:
            what = ", ".join(f"{name} {sampler[name]} instead of {trained[name]}" for name in different)
            yield Finding("sampler-mismatch", "critical", what, step)
            return
    for step, probe in record.known("probe")[-1:]:
        errors, claimed = probe.get("errors_as", {}), probe.get("prediction_type")
        others = [(name, by_level) for name, by_level in errors.items() if name != claimed]
        for name, by_level in others if claimed in errors else ():
            levels = [(by_level[t], errors[claimed][t]) for t in by_level if by_level[t] > 0 and t in errors[claimed]]
            if not levels:
                continue
            learned = median(error for error, _ in levels)
            # What a network was trained to predict it predicts best at some noise level at least; this one is better read as
            # something else at all of them (but for rounding), half as wrong at the typical one, and better than zeros (1).
            worse = median(as_claimed / error for error, as_claimed in levels)
            if learned < 0.8 and worse > 1.5 and all(as_claimed > 0.98 * error for error, as_claimed in levels):
                what = f"as {name} the output has a relative error of {learned:.2g}, as {claimed} {worse:.2g} times that"
                yield Finding("sampler-mismatch", "critical", what, step)
                return
