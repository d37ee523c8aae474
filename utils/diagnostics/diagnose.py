"""From recorded figures to findings: pure functions of a `RunRecord`, one rule per symptom, in `rules/`.

Each rule looks for the trace that one cause leaves where no healthy run has it, and says in a comment why its threshold stands
where it does. What is told by the data, the options or the schedule alone comes first, because it explains the rest; among
findings of one severity that order is kept.
"""

from collections.abc import Callable

from utils.diagnostics.finding import SEVERITIES, Finding, Found
from utils.diagnostics.rules import data, network, options, samples, training
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
    *(training.step_deviates, data.data_range, network.schedule, options.options_amiss, network.network_amiss),
    *(network.sampler_mismatch, network.learned_nothing, training.weights_shrinking, training.learning_rate),
    *(network.batch_leak, network.timestep_ignored),
    *(training.fp16_scale, training.non_finite, data.data_damaged, data.data_blank, data.data_alike, data.data_checks),
    *(training.overfitting, data.class_empty, data.class_imbalance),
    *(samples.evaluated_samples, samples.separately_evaluated_samples, samples.previewed_samples),
    *(training.gradients_exploding, data.data_starved, data.data_enlarged, training.slow_rank, training.device_errs),
)
