"""The doctor's rules: each fires on its trace and is silent just on the healthy side of it, on made-up records."""

import copy
import math
import random
import time
from pathlib import Path

import pytest
from made_up_runs import (
    BAD_FILE,
    EVERY,
    bins,
    by_level,
    copies,
    distance,
    evaluated,
    layers,
    linear_schedule,
    report,
    rise,
    run,
    sizes,
    updates,
)

from steady_doctor import words
from steady_doctor.found import Found
from utils.diagnostics.data_checks.checks import CHECKS
from utils.diagnostics.diagnose import RULES, diagnose, judge
from utils.diagnostics.finding import CATALOG
from utils.diagnostics.rules.options import ROWS
from utils.diagnostics.rules.training import measured, recorded_updates
from utils.runs.record import RunRecord


def codes(record: RunRecord) -> list[str]:
    return [finding.code for finding in diagnose(record)]


def looked_at(code: str, found: bool) -> RunRecord:
    """A healthy run whose check of the images judged `code`."""
    findings = [{"code": code, "severity": "warning", "evidence": "seen", "picture": ""}]
    seen = {"judged": [code], "failed": [], "findings": findings if found else []}
    record = run()
    record.history.append({"step": 0, "data_checks": seen})
    return record


def ranks(compute: list[float], data_of_the_first: float) -> RunRecord:
    """A run on several processes, with the seconds that each computes, and the first waits for data."""
    times = {"compute": compute, "data": [data_of_the_first] + [0.01] * (len(compute) - 1), "collectives": [0.0] * len(compute)}
    record = run(lambda n: {"ranks": times})
    record.resolved["num_processes"] = len(compute)
    return record


SAME = {"outcome": "same", "stage": "weights", "ranks": [0]}


PENALTY = Found("gradient-penalty", 2, {"count": 7, "factor": 0.5})


def audited(found: tuple[Found, ...] = (), stages: tuple[str, ...] = (), **more) -> RunRecord:
    """A healthy run in which the doctor measured these stages in the first two updates, and found that in the second."""
    record = run()
    for step, said in ((1, ()), (2, found)):
        audit = {"found": [words.finding(one).to_json() for one in said], "measured": list(stages)}
        record.history.append({"step": step, "audit": audit | more})
    record.history.sort(key=lambda line: line["step"])
    return record


def alike(**copies) -> RunRecord:
    return run(data={"images_read": 1000, "copies": copies})


def largest(share: float, number: int = 10, **options) -> RunRecord:
    """A run whose largest class has this share."""
    return run(data={"classes": {"number": number, "largest_share": share}}, options=options)


def counted(**counts: int) -> RunRecord:
    return run(data={"classes": {"number": len(counts), "empty": [*counts.values()].count(0), "counts": counts}})


def held_out(**more) -> RunRecord:
    """A run whose network errs twice as much on held-out images as on those of the training."""
    return run(probe={"held_out_error": {"100": 0.4, "500": 0.2, "900": 0.05}, **more})


def pipeline(**errors) -> RunRecord:
    """One whose network errs so much at two noise levels, where its scaled input errs by 1 and by 0.5."""
    probe = {"error": errors["error"], "linear_error": {"100": 1.0, "900": 0.5}} | errors
    return RunRecord(Path(), options={}, resolved={}, history=[{"step": 0, "probe": probe}])


RISING = (0.5, 0.3, 0.25, 0.3, 0.4)  # the losses of validations

# code -> (a run that must show it, one that just must not)
CASES = {
    "data-range": [
        (run(lambda n: {"data/max": 255.0}), run(lambda n: {"data/max": 1.01})),
        (run(lambda n: {"data/min": -3.0}), run(lambda n: {"data/min": -1.01})),
    ],
    "data-alike": [
        (run(data={"copies": {"share": 0.9}}), run(data={"copies": {"share": 0.09}})),
        (run(data={"near_copies": {"share": 0.4}}), run(data={"near_copies": {"share": 0.29}})),
        (run(data={"near_copies": {"share": 0.4}}), run(data={"near_copies": None})),
        (alike(following=11), alike(following=11, following_by_chance=1.0)),
        (alike(repeated=21), alike(repeated=20)),
    ],
    "data-blank": [(run(data={"constant_share": 0.001, "constant_rows": [7]}), run())],
    "data-damaged": [(run(data={"damaged": {"images": 1, "share": 0.001, "files": [BAD_FILE]}}), run())],
    "data-enlarged": [(run(data={"sizes": {"enlarged_share": 0.01, "shorter_side_min": 8}}), run(data={"sizes": None}))],
    **{code: [(looked_at(code, True), looked_at(code, False))] for code in sorted({*CHECKS.values()})},
    "class-empty": [(counted(a=9, b=0), run(data={"classes": {"empty": 0}})), (counted(a=99, b=2, c=99), counted(a=3))],
    "class-imbalance": [
        (largest(0.95), largest(0.7)),
        (largest(190 / 200, 2), largest(0.94, 2)),
        (largest(0.95), largest(0.95, balanced_sampling=True)),
    ],
    "schedule-leaves-signal": [(run(schedule=linear_schedule(2.0)), run(schedule=linear_schedule(7.0)))],
    "schedule-destroys-early": [(run(schedule=linear_schedule(100.0)), run(schedule=linear_schedule(15.0)))],
    "sampler-mismatch": [
        (
            run(probe={"errors_as": {"epsilon": by_level(0.9, 1.2), "v_prediction": by_level(0.9, 0.3)}}),
            run(probe={"errors_as": {"epsilon": by_level(0.5, 1.2), "v_prediction": by_level(0.9, 0.3)}}),
        ),
    ],
    "learned-nothing": [
        (pipeline(error={"100": 1.1, "900": 0.6}), pipeline(error={"100": 0.9, "900": 0.6})),
        (pipeline(error={"100": 1.1, "900": 0.6}), pipeline(error={"100": 1.1, "900": 0.6}, linear_error={})),
    ],
    "batch-norm": [(run(network={"batch_norms": ["norm"]}), run())],
    "attention-missing": [(run(network={"attention": 0}), run(network={"attention": 0, "attention_declared": False}))],
    "dropout-with-spectral-norm": [
        (run(network={"spectral_norm": True}), run(network={"spectral_norm": True, "dropout": 0.0}))
    ],
    "inputs-zero": [(run(network={"zero_inputs": {"conv": 0.33}}), run(network={"zero_inputs": {"conv": 0.1}}))],
    "layers-idle": [(run(network={"idle": ["conv"]}), run())],
    "time-embedding": [
        (run(network={"received": 450_000.0}), run(network={"received": 450.5})),
        (run(network={"received": 0.45}), run(network={"received": None})),
    ],
    "timestep-ignored": [
        (run(probe={"timestep_response": 0.0}), run(probe={"timestep_response": 1e-3})),
        (run(probe={"timestep_response": 1e-7}), run(probe={"timestep_response": 5e-6})),  # EDM2 in a long warm-up
    ],
    "weights-shrinking": [(run(sizes(0.01)), run(sizes(0.05)))],
    "loss-unstable": [
        (run(rise(4.0)), run(rise(2.5))),
        (run(rise(4.0, quartiles=(1, 2, 4))), run(rise(4.0, quartiles=(1, 2)))),
    ],
    "batch-leak": [(run(probe={"batch_response": 0.3}), run(probe={"batch_response": 1e-3}))],
    "no-gradient": [(run(network={"cut": ["conv"]}), run())],
    "non-finite": [
        (run(lambda n: {"train/skipped_updates": float(n > 5)}), run()),
        (run(lambda n: {"train/skipped_updates": 40.0 * n, "train/bad_updates_in_a_row": 9.0}), run()),
    ],
    "fp16-scale-collapse": [(run(lambda n: {"train/loss_scale": 2.0 ** (16 - n)}), run(lambda n: {"train/loss_scale": 64.0}))],
    "gradients-exploding": [(run(lambda n: {"train/grad_norm": 1.6**n}), run(lambda n: {"train/grad_norm": 1.1**n}))],
    "lr-too-high": [(run(updates(0.5)), run(updates(0.02)))],
    "lr-too-low": [(run(updates(1e-6)), run(updates(1e-4)))],
    "overfitting": [
        (run(validation=RISING), run(validation=(0.5, 0.3, 0.25, 0.252, 0.255))),
        (run(validation=RISING), run(validation=RISING, probe={"held_out_error": {"100": 0.2, "500": 0.1, "900": 0.05}})),
        (held_out(), run(probe={"held_out_error": {}})),
        (held_out(images=16), held_out(held_out_images=15)),
        (held_out(held_out_images=16), held_out(images=1)),
    ],
    "samples-alike": [
        (run(evaluated(variance_ratio=1e-3)), run(evaluated(variance_ratio=0.9))),
        (run(samples=distance("raw", 0.1)), run(samples=distance("raw", 0.13))),
        (run(samples=distance("ema", 0.1)), run(samples=distance("ema", 0.1) | distance("data", 0.1))),
    ],
    "samples-copied": [
        (run(evaluated(memorisation=copies(0.2, 0.01))), run(evaluated(memorisation=copies(0.03, 0.0)))),
        (run(evaluated(memorisation=copies(0.6, 0.1))), run(evaluated(memorisation=copies(0.2, 0.1)))),  # data full of copies
    ],
    "samples-unlike-data": [(run(evaluated(precision=0.2)), run(evaluated(precision=0.6)))],
    "samples-lack-variety": [(run(evaluated(variance_ratio=0.5)), run(evaluated(variance_ratio=0.8)))],
    "modes-missing": [
        (run(evaluated(modes=bins([0, 120, 120, 160]))), run(evaluated(modes=bins([60, 120, 120, 100])))),
        (run(evaluated(classes=bins([0, 120, 120, 160], 0.9))), run(evaluated(classes=bins([0, 120, 120, 160], 0.5)))),
    ],
    "mode-dominates": [
        (run(evaluated(modes=bins([280, 40, 40, 40]))), run(evaluated(modes=bins([130, 90, 90, 90])))),
        (run(evaluated(modes=bins([130, 90, 90, 90]) | {"number": 20, "different": 10})), run(evaluated())),
    ],
    "rule-failed": [(run(schedule={"alphas_cumprod": ["?"]}), run())],
    "slow-rank": [
        (ranks([1.0, 1.0, 1.8, 1.1], 0.0), ranks([1.0, 1.0, 1.3, 1.1], 0.0)),
        (ranks([1.0, 1.0], 0.9), ranks([1.0, 1.0], 0.3)),
    ],
    "device-errs": [
        (run(lambda n: {"rerun": SAME | {"outcome": "wrong"}}), run(lambda n: {"rerun": SAME})),
    ],
    "update-not-repeatable": [(run(lambda n: {"rerun": SAME | {"outcome": "not repeatable"}}), run(lambda n: {"rerun": SAME}))],
    "data-starved": [(run(lambda n: {"perf/data_wait": 0.7}), run(lambda n: {"perf/data_wait": 0.15}))],
}


@pytest.mark.parametrize(("weights", "found"), [(1e-3, []), (1e-6, ["lr-too-low"])])
def test_the_learning_rate_is_judged_by_weights_and_not_by_norms(weights, found):
    """Of a network under spectral norm, whose weights have the names that torch's parametrizations give them."""
    size = {"weight": 0.1, "gradient": 1e-3}
    named = {f"{name}.parametrizations.weight.original": size | {"update": weights} for name in ("conv_in", "mid_block")}
    named |= {f"mid_block.{name}.weight": size | {"update": 1e-3 * 1e-6 / weights} for name in ("norm1", "norm2", "norm3")}
    assert codes(run(lambda n: {"layers": named | {"conv_in.weight": {"activation": 1.0}}})) == found


def test_ranks_that_are_slow_in_turn_are_healthy():
    def times(number: int) -> dict:
        own = [1.0 + (number % 2), 2.0 - (number % 2)]
        return {"ranks": {"compute": own, "data": [0.0, 0.0], "collectives": [0.0, 0.0]}}

    record = run(times)
    record.resolved["num_processes"] = 2
    assert codes(record) == []
    slow = ranks([1.0, 1.0, 1.8, 1.1], 0.0)
    assert diagnose(slow)[0].evidence == "rank 2 takes 1.8 times as long as the median of the other ranks, in compute"
    assert "in data" in diagnose(ranks([1.0, 1.0], 0.9))[0].evidence


@pytest.mark.parametrize(("device", "wait", "found"), [("cpu", 0.4, True), ("cuda:0", 0.7, False), ("cuda:0", 0.9, True)])
def test_a_host_that_waits_while_a_gpu_works_is_no_starved_device(device, wait, found):
    record = run(lambda n: {"perf/data_wait": wait})
    record.resolved["device"] = device
    assert codes(record) == ["data-starved"] * found


@pytest.mark.parametrize("sick", [run(evaluated(precision=0.0)), run(samples=distance("raw", 0.01))])
def test_samples_of_a_short_run_and_of_the_first_half_are_not_judged(sick):
    """120 updates of a healthy run leave samples like these."""
    assert len(codes(sick)) == 1
    for total in (2100, 120):
        sick.resolved["max_train_steps"] = total
        assert codes(sick) == []


def of_evaluate(step: int | None, state: str = "", time: float = 1.0, seed: int = 0, **changes) -> dict:
    """A result of evaluate.py, as the record of a run has it."""
    made = {"sampler": "ddim", "num_inference_steps": 50, "features": "randconv", "images": 40, "seed": seed}
    return made | {"state": state, "step": step, "time": time, "figures": evaluated(**changes)(0)["evaluation"]}


def test_what_evaluate_py_measured_is_judged_however_short_the_run_is():
    record = run()
    record.resolved["max_train_steps"], last = 60, record.history[-1]["step"]
    record.evaluations = [of_evaluate(last, precision=0.0)]
    (finding,) = diagnose(record)
    assert (finding.code, finding.severity, finding.step) == ("samples-unlike-data", "critical", last)
    assert finding.source == "evaluate.py"
    assert finding.evidence.endswith("; evaluate.py: 40 samples, ddim 50 steps, randconv")
    assert {"samples-alike", "samples-unlike-data"} <= judge(record)[1]
    record.history.append({"step": last + 500})
    assert diagnose(record)[0].evidence.endswith(f"the run has gone on to update {last + 500} since: evaluate it again")
    record.evaluations = [of_evaluate(20, "checkpoint-20", precision=0.0)]
    assert "; evaluate.py on checkpoint-20: 40 samples" in diagnose(record)[0].evidence


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([of_evaluate(20, "checkpoint-20", 9.0, precision=0.0), of_evaluate(60, time=1.0)], 0),  # the newest state counts
        ([of_evaluate(20, "checkpoint-20", 1.0), of_evaluate(60, time=9.0, precision=0.0)], 1),
        ([of_evaluate(None, time=9.0), of_evaluate(60, "checkpoint-60", 1.0, precision=0.0)], 0),
        ([of_evaluate(60, seed=0), of_evaluate(60, seed=1, precision=0.0)], 1),  # another evaluation
        ([of_evaluate(60, seed=0, precision=0.0), of_evaluate(60, seed=1, precision=0.0)], 1),  # said once
        ([of_evaluate(60) | {"figures": {}}], 0),  # of another version
        ([of_evaluate(60, precision=float("nan"))], 0),
    ],
)
def test_of_evaluations_of_several_states_the_newest_state_counts(results, found):
    record = run()
    record.evaluations = results
    findings = diagnose(record)
    assert [finding.code for finding in findings] == ["samples-unlike-data"] * found
    if len({result["seed"] for result in results}) > 1:
        wrong = sum(result["figures"]["precision"] == 0 for result in results)
        assert f"so in {wrong} of 2 evaluations" in findings[0].evidence


def test_a_network_is_not_called_blind_to_the_timestep_before_it_could_learn_to_see():
    """EDM2 starts blind: gains of zero stand before all that is told, and no gradient comes through them."""
    record = run(probe={"timestep_response": 0.0})
    record.history = [{**line, "step": 5} if "probe" in line else line for line in record.history]
    assert "timestep-ignored" not in codes(record)


def test_a_healthy_run_has_no_finding():
    assert diagnose(run()) == []


@pytest.mark.parametrize(("code", "number"), [(code, i) for code, pairs in CASES.items() for i in range(len(pairs))])
def test_a_rule_fires_on_its_trace_and_not_beside_it(code, number):
    sick, healthy = CASES[code][number]
    assert code in codes(sick)[:2]
    assert code not in codes(healthy)


def test_what_is_wrong_in_a_step_is_told_first_as_it_was_recorded():
    record = audited((PENALTY,), ("target", "gradient"))
    record.history[-1]["data/max"] = 255.0
    [first, second] = diagnose(record)
    assert (first.code, first.stage, first.severity, first.step) == ("gradient-penalty", "gradient", "critical", 2)
    assert "0.5 times the absolute values of matrices and kernels" in first.declared
    assert first.observed == "another slope by 7 parameters, the output being fixed"
    assert first.evidence == f"{first.observed}; declared: {first.declared}"
    assert first.title and first.cause and first.fixes and first.code not in CATALOG
    assert second.code == "data-range"
    assert recorded_updates(record) == 2 and measured(record) == ["target", "gradient"]
    assert codes(audited((), ("target",))) == [] and recorded_updates(run()) == 0


def test_what_was_found_in_an_update_that_was_made_again_is_withdrawn():
    record = audited((PENALTY,))
    record.history.append({"step": 2, "audit": {"found": [], "withdrawn": ["gradient-penalty"]}})
    assert codes(record) == []


def test_a_look_that_fails_each_time_is_said_once():
    [failed] = diagnose(audited(failed="ValueError: so"))
    assert (failed.code, failed.severity, failed.step) == ("rule-failed", "info", 2)
    assert failed.evidence == "the look at the training step: ValueError: so"


def test_every_finding_of_the_catalog_can_be_made():
    assert set(CASES) | {row.code for row in ROWS} == set(CATALOG)  # for the rows see test_options.py


def test_causes_come_before_what_follows_from_them():
    torn = run(lambda n: {"train/grad_norm": 1.6**n, "layers": layers(update=0.5)})
    assert codes(torn).index("lr-too-high") < codes(torn).index("gradients-exploding")


def test_blanks_weigh_by_their_share():
    shares = (0.009, 0.011, 0.6)
    found = [diagnose(run(data={"constant_share": share, "constant_rows": [7, 9]}))[0] for share in shares]
    assert [finding.severity for finding in found] == ["info", "warning", "critical"]
    assert "rows 7, 9" in found[0].evidence


@pytest.mark.parametrize(("choice", "share", "severity"), [("fail", 0.01, "warning"), ("replace", 0.01, "info")])
def test_damaged_images_are_named_and_no_warning_where_the_user_had_them_replaced(choice, share, severity):
    damaged = {"images": 9, "share": share, "files": [BAD_FILE] * 5}
    (found,) = diagnose(run(data={"damaged": damaged}, options={"on_bad_image": choice}))
    assert found.severity == severity and found.evidence.count("cats/3.png: image file is truncated") == 3
    (found,) = diagnose(run(data={"damaged": damaged | {"share": 0.06}}, options={"on_bad_image": choice}))
    assert found.severity == "warning"


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_record_with_holes_is_no_error_and_no_alarm(seed):
    """As an older version, a full disk or another writer may leave it."""
    chance = random.Random(seed)

    def holes(item):
        if isinstance(item, list):
            return [holes(inner) for inner in item]
        if not isinstance(item, dict):
            return None if chance.random() < 0.05 else item
        return {
            key: holes(value) if key != "step" else value
            for key, value in item.items()
            if chance.random() > 0.05 or key == "step"
        }

    record = run(validation=(0.5, 0.3, 0.25, 0.26))
    record.history, record.options, record.resolved = map(holes, (record.history, record.options, record.resolved))
    found = diagnose(record)
    assert [finding.line for finding in found if finding.severity != "info"] == []


def figures_of(record: dict, names: tuple = ()) -> set[tuple]:
    """The names under which a record holds figures, at any depth."""
    found = set()
    for name, value in record.items():
        if name not in ("step", "time"):
            found |= figures_of(value, (*names, name)) if isinstance(value, dict) else {(*names, name)}
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_figure_that_is_not_finite_is_no_evidence(value):
    """Each in turn, in all of a healthy run's records, and with all updates but the first skipped: no rule may judge by it."""

    def healthy() -> RunRecord:
        record = run(evaluated(), validation=(0.5, 0.3, 0.25, 0.26))
        record.history = copy.deepcopy(record.history)
        record.history[-1]["train/loss_scale"] = 65536.0
        return record

    everything = set().union(*(figures_of(line) for line in healthy().history))
    assert len(everything) > 80
    for *path, last in everything:
        record = healthy()
        for line in record.history:
            for name in path:
                line = line.get(name, {})
            if isinstance(line.get(last), (int, float)):
                line[last] = value
        assert diagnose(record) == [], (*path, last)


def test_the_first_bad_update_is_named():
    def change(number):
        return {"train/skipped_updates": float(number >= 2)} | (
            {"train/first_skipped_update": EVERY + 3} if number == 2 else {}
        )

    record = run(change)
    (found,) = diagnose(record)
    assert found.evidence == f"1 of 1000 updates, the first was update {EVERY + 3}" and found.step == EVERY + 3
    for line in record.history:
        line.pop("train/first_skipped_update", None)  # a resume came between the update and the report
    assert diagnose(record)[0].evidence.endswith(f"the first by update {2 * EVERY}")


@pytest.mark.parametrize(
    ("options", "severity"),
    [({}, "warning"), ({"max_train_images": 99}, "info"), ({"max_train_images": 99, "class_conditional": True}, "warning")],
)
def test_classes_that_the_first_images_leave_out_matter_to_a_network_with_classes(options, severity):
    record = counted(a=9, b=0)
    record.options |= options
    assert [finding.severity for finding in diagnose(record) if finding.code == "class-empty"] == [severity]


def test_what_a_whole_run_records_is_enough_to_judge_everything():
    record = run(evaluated(), validation=(0.5, 0.3, 0.25, 0.26))
    record.history[-1]["train/loss_scale"] = 65536.0
    record.history[-1]["audit"] = {"found": [], "measured": ["target"]}
    record.history[-1] |= {"data_checks": {"judged": [*CHECKS.values()]}, "rerun": SAME}
    findings, judged = judge(record)
    assert not findings and set(CATALOG) - judged <= {"rule-failed"} | {row.code for row in ROWS}


def test_too_little_is_not_enough_to_call_a_run_healthy():
    """Two reports, and a learning rate, a loss and a data loader of which nothing can be said yet."""
    record = run()
    record.history = [line for line in record.history if line["step"] <= 2 * EVERY]
    found, judged = judge(record)
    assert found == [] and {"data-alike", "schedule-leaves-signal", "non-finite", "lr-too-high"} <= judged
    late = {"data-starved", "lr-too-low", "loss-unstable", "overfitting"}
    assert judged.isdisjoint(late | {"samples-alike", "timestep-ignored", "sampler-mismatch"})


def test_few_samples_are_not_judged_by_their_variety():
    few = run(evaluated(variance_ratio=0.5, rows=20))
    found, judged = judge(few)
    assert found == [] and "samples-lack-variety" not in judged and "modes-missing" in judged


def test_a_rule_that_fails_hides_no_other_finding_and_is_not_said_to_have_judged():
    found, judged = judge(run(lambda n: {"data/max": 255.0}, schedule={"alphas_cumprod": ["?"]}))
    assert [finding.code for finding in found] == ["data-range", "rule-failed"]  # the most severe first
    assert "schedule-leaves-signal" not in judged and "data-alike" in judged


@pytest.mark.slow
def test_a_million_updates_are_looked_at_in_a_moment():
    """Up to 200 times in a run, between two updates."""
    record = run()
    record.history = [report(number) for number in range(1, 20_001)]
    for number, line in enumerate(record.history):
        if number % 100:  # as the doctor records it
            line.pop("layers")
    start = time.process_time()
    diagnose(record)
    assert time.process_time() - start < 4  # 0.6 s on a quiet core; every window of every series took minutes


def test_a_nan_in_some_reports_hides_nothing_in_the_others():
    def change(number):
        return {"data/min": math.nan, "data/max": math.nan} if number % 2 else {"data/max": 255.0}

    assert codes(run(change)) == ["data-range"]


def test_each_rule_works_alone_on_a_record_without_its_figures():
    for rule in RULES:
        assert list(rule(RunRecord(Path("run")))) == []


def test_the_probe_does_not_judge_a_target_that_the_audit_saw():
    probe = {"errors_as": {"epsilon": by_level(0.9, 1.2), "v_prediction": by_level(0.9, 0.3)}}
    assert codes(run(probe=probe)) == ["sampler-mismatch"]
    for stages, found in ((["target"], []), (["input"], ["sampler-mismatch"])):
        record = run(probe=probe)
        record.history[-1]["audit"] = {"found": [], "measured": stages}
        assert codes(record) == found
