"""Findings about what the network does with its input, and what reaches its layers."""

from utils.diagnostics.finding import Finding, Found
from utils.diagnostics.rules.loss import errors_of_a_constant
from utils.runs.record import RunRecord


def timestep_ignored(record: RunRecord) -> Found:
    for step, probe in record.known("probe")[-1:]:
        response = probe.get("timestep_response")
        # EDM2 starts with gains of zero before all that is told, and these move by the learning rate: the response was a tenth
        # of the sum of the rates, and more. Other networks that see it gave 1e-2 to 0.8. Rounding gives 1e-7.
        if response is None or (step and _sum_of_rates(record, step) < 1e-4):  # step 0: a pipeline
            continue
        yield "timestep-ignored"
        if response < 1e-6:
            yield Finding("timestep-ignored", "critical", f"another timestep changes the output by {response:.1e} of it", step)


def _sum_of_rates(record: RunRecord, last: int) -> float:
    """Of the learning rates of all updates until `last`, about."""
    total, before = 0.0, 0
    for step, rate in zip(*record.finite("train/lr")):
        if step <= last:
            total, before = total + rate * (step - before), step
    return total


def train_eval_gap(record: RunRecord) -> Found:
    """A network that does something else in training mode than when it samples."""
    dropout = record.options.get("dropout") or 0.0
    # Published diffusion U-Nets take 0 to 0.3 (Ho et al. 2020, appendix B: 0.1 on CIFAR-10).
    said, last, severity = ([f"--dropout {dropout:g}"] if dropout >= 0.5 else []), None, "warning"
    for (step, probe), (_, all_of_it) in list(zip(record.known("probe"), record.records("probe")))[-1:]:
        levels = list(all_of_it.get("error") or {})
        errors, training = probe.get("error") or {}, probe.get("training_error")
        middle = errors.get(levels[len(levels) // 2]) if levels else None
        if training is not None and middle:
            yield "train-eval-gap"
        # Such dropout adds a tenth or so; what normalizes with figures of the batch may also make training look better.
        if training is not None and middle and not 0.5 < training / middle < 2.0:
            said += [f"the error in training mode is {training / middle:.2g} times that in evaluation mode, on the same images"]
            last = step
        losses: list = [_loss_before(record, quartile, step) for quartile in (2, 3)]
        # The middle timestep lies between the second and the third quartile, and so does its error: healthy runs had 0.6 to
        # 1.05 of the larger of their losses, in the same weights on images of the same set.
        if middle and all(losses) and {2, 3} <= errors_of_a_constant(record).keys() and middle > 1.6 * max(losses):
            said += [f"the error on real images is {middle / max(losses):.2g} times the training loss of their noise levels"]
            last = step
            severity = "critical" if middle > 3.0 * max(losses) else severity
    if said:
        yield Finding("train-eval-gap", severity, "; ".join(said), last)


def _loss_before(record: RunRecord, quartile: int, step: int) -> float | None:
    """Mean of the last three reports up to `step`; None for fewer."""
    steps, losses = record.finite(f"train/loss_timestep_quartile_{quartile}")
    newest = [loss for when, loss in zip(steps, losses) if when <= step][-3:]
    return sum(newest) / 3 if len(newest) == 3 else None


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
