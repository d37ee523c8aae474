"""Findings about the noise schedule, what the network does with its input, and what its output is taken for."""

import math
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.diagnostics.rules.training import measured
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


def learned_nothing(record: RunRecord) -> Found:
    """At no noise level the network predicts better than its scaled input does. Of a pipeline: of a run its losses tell."""
    for step, probe in record.known("probe")[-1:]:
        errors, of_input = probe.get("error", {}), probe.get("linear_error", {})
        is_misread = any(isinstance(found, Finding) for found in sampler_mismatch(record))
        if is_misread or not errors or errors.keys() != of_input.keys():
            return
        yield "learned-nothing"
        if step == 0 and all(errors[level] >= of_input[level] for level in errors):
            least = min(errors[level] / max(of_input[level], 1e-12) for level in errors)
            what = f"its error is {least:.2g} times that of its scaled input at the best noise level, and more at the others"
            yield Finding("learned-nothing", "critical", what, step)


def timestep_ignored(record: RunRecord) -> Found:
    for step, probe in record.known("probe")[-1:]:
        response = probe.get("timestep_response")
        # EDM2 starts with gains of zero before all that is told, and these move by the learning rate: the response was a tenth
        # of the sum of the rates, and more. Other networks that see it gave 1e-2 to 0.8. Rounding gives 1e-7.
        if response is None or 0 < step < 10:  # step 0: a pipeline
            continue
        yield "timestep-ignored"
        if response < 1e-6:
            yield Finding("timestep-ignored", "critical", f"another timestep changes the output by {response:.1e} of it", step)


def batch_leak(record: RunRecord) -> Found:
    for step, probe in record.known("probe")[-1:]:
        response = probe.get("batch_response")
        # Other kernels for another batch size change an output by 1e-6 in float32; where they round to TF32, by 1e-3 at most.
        if response is not None:
            yield "batch-leak"
        if response is not None and response > 3e-3:
            what = f"alone in the batch, an image's prediction changes by {response:.1%}"
            yield Finding("batch-leak", "critical", what, step)


def network_amiss(record: RunRecord) -> Found:
    """What a look at the network alone says, before its first update."""
    for step, network in record.known("network")[-1:]:
        if "failed" in network:
            yield Finding("rule-failed", "info", f"the look at the network: {network['failed']}", step)
        yield from _of_modules(network, step)
        yield from _of_flow(network, step)


def _of_modules(network: dict, step: int) -> Found:
    yield from ("batch-norm", "dropout-with-spectral-norm", "attention-missing")
    if norms := network.get("batch_norms"):
        yield Finding("batch-norm", "warning", _listed(norms), step)
    if network.get("dropout", 0.0) > 0 and network.get("spectral_norm"):
        yield Finding("dropout-with-spectral-norm", "info", f"a dropout of {network['dropout']:g}", step)
    if network.get("attention_declared") and network.get("attention") == 0:
        yield Finding("attention-missing", "warning", "its config names blocks with attention, no module of it attends", step)


def _of_flow(network: dict, step: int) -> Found:
    if "idle" not in network:
        return
    yield from ("inputs-zero", "layers-idle", "no-gradient", "time-embedding")
    # No activation but ReLU, which is left out, leaves a channel of zeros; a skip connection is a third or more of all.
    zero = {name: share for name, share in network["zero_inputs"].items() if share > 0.2}
    if zero:
        yield Finding("inputs-zero", "warning", f"{max(zero.values()):.0%} of the channels, of {_listed(list(zero))}", step)
    if network["idle"]:
        yield Finding("layers-idle", "warning", _listed(network["idle"]), step)
    if network["cut"]:
        yield Finding("no-gradient", "warning", f"before the first update: {_listed(network['cut'])}", step)
    told, received = network.get("told"), network.get("received")
    # Rounding of half precision is 1e-3.
    if told is not None and received is not None and abs(received - told) > 0.01 * max(abs(told), abs(received)):
        yield Finding("time-embedding", "warning", f"the network gets {told:.4g}, its embedding gets {received:.4g}", step)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
