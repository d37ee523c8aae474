"""From recorded figures to findings: pure functions of a `RunRecord`, one rule per symptom, in `rules/`.

Each rule looks for the trace that one cause leaves where no healthy run has it, and says in a comment why its threshold stands
where it does. What is told by the data, the options or the schedule alone comes first, because it explains the rest; among
findings of one severity that order is kept.
"""

from collections.abc import Callable

from utils.diagnostics.finding import SEVERITIES, Finding, Found
from utils.diagnostics.rules.audit import step_deviates
from utils.diagnostics.rules.data import (
    class_empty,
    class_imbalance,
    data_alike,
    data_blank,
    data_checks,
    data_damaged,
    data_enlarged,
    data_range,
    data_starved,
)
from utils.diagnostics.rules.loss import edm2_denoiser, error_impossible, not_learning, overfitting
from utils.diagnostics.rules.network import batch_leak, network_amiss, no_gradient, timestep_ignored, train_eval_gap
from utils.diagnostics.rules.optimizer import (
    clip_too_tight,
    ema_too_long,
    fp16_scale,
    gradients_exploding,
    learning_rate,
    non_finite,
    weights_shrinking,
)
from utils.diagnostics.rules.options import options_amiss
from utils.diagnostics.rules.process import sampler_mismatch, schedule
from utils.diagnostics.rules.ranks import device_errs, slow_rank
from utils.diagnostics.rules.samples import (
    evaluated_samples,
    previewed_samples,
    saturated_samples,
    separately_evaluated_samples,
)
from utils.runs.record import RunRecord


def diagnose(record: RunRecord) -> list[Finding]:
    """Returns what is wrong with the run, the most severe first; empty for a healthy one. Works on a run of any length."""
    return judge(record)[0]


def judge(record: RunRecord) -> tuple[list[Finding], set[str]]:
    """(what `diagnose` gives, codes of all findings that there was enough recorded to judge).

    A rule that fails is left out, and said to be: it must not end the training that it watches.
    """
    given: list[str | Finding] = []
    for rule in RULES:
        try:
            given += list(rule(record))
        except Exception as error:
            given.append(Finding("rule-failed", "info", f"{rule.__name__}: {type(error).__name__}: {error}"))
    findings = [item for item in given if isinstance(item, Finding)]
    judged = {item for item in given if isinstance(item, str)}
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)), judged  # stable: the rules' order stays


# Causes before what can follow from them: a learning rate that tears the network apart leaves it blind to the timestep, without
# gradients, or with NaN.
RULES: tuple[Callable[[RunRecord], Found], ...] = (
    step_deviates,
    *(data_range, schedule, options_amiss, network_amiss, sampler_mismatch, weights_shrinking, learning_rate),
    *(batch_leak, timestep_ignored, no_gradient, fp16_scale, non_finite, clip_too_tight, ema_too_long),
    *(data_damaged, data_blank, data_alike, data_checks, overfitting, class_empty, class_imbalance),
    *(error_impossible, not_learning, edm2_denoiser),
    *(
        train_eval_gap,
        evaluated_samples,
        separately_evaluated_samples,
        previewed_samples,
        saturated_samples,
        gradients_exploding,
        data_starved,
        data_enlarged,
        slow_rank,
        device_errs,
    ),
)
