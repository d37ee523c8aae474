"""A part of benchmarks/doctor/diagnosis.py: real runs with a fault each, and healthy ones, of which the doctor is not told."""

import pytest

from benchmarks.doctor import diagnosis

FAULTS = (
    "normalized twice",
    "learning rate x 100",
    "timestep cut off",
    "betas too small",
    "block without gradient",
    "EMA frozen",
    "noise shared",
    "optimizer without parameters",
)
HEALTHY = 3
SHORT = {"max_train_steps": 96, "validation_steps": 96, "save_images_steps": 96}


@pytest.mark.slow
def test_the_doctor_names_the_faults_and_finds_none_in_healthy_runs():
    """The seed, which is the fault's variant, and the data set differ from one fault to the next."""
    chosen = []
    for number, fault in enumerate(FAULTS):
        dataset = list(diagnosis.DATASETS)[number % 2]
        chosen += diagnosis.cases([fault], 0, [number % 3], [dataset])
    chosen += diagnosis.cases([], HEALTHY, [], list(diagnosis.DATASETS))
    for case in chosen:
        case.flags.update(SHORT)
    results = diagnosis.run_cases(chosen)
    assert [diagnosis.line(result) for result in results if not result.right] == []


def test_a_third_is_held_out_and_the_choice_is_fixed():
    everything = diagnosis.cases(list(diagnosis.FAULTS), 99, [0], list(diagnosis.DATASETS))
    first = [case for case in everything if case.part != "later"]
    faulty = [case.part == "held_out" for case in first if case.fault != "none"]
    healthy = [case.part == "held_out" for case in first if case.fault == "none"]
    assert 0.25 < sum(faulty) / len(faulty) < 0.4 and 0.25 < sum(healthy) / len(healthy) < 0.4
    assert len(diagnosis.FIRST_FAULTS) >= 22 and len(healthy) >= 30
