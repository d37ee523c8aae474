"""--profile, perf/tflops and perf/mfu: what a run says of its own speed."""

import gzip
import json

import pytest

from utils.training.arithmetic import Arithmetic, peak_tflops


@pytest.mark.slow
def test_updates_are_profiled_and_compared_with_the_peak(train, tiny_flags, tmp_path, capsys):
    flags = [
        "--max_train_steps",
        9,
        "--profile",
        3,
        "--peak_tflops",
        0.5,
        "--logging_steps",
        2,
        "--output_dir",
        tmp_path / "run",
    ]
    assert train([*tiny_flags, *flags]) == 0
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "updates-6-8.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = sum(event["name"].startswith("Optimizer.step#") and event["cat"] == "user_annotation" for event in events)
    assert steps >= 3
    records = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    (profile,) = (record["profile"] for record in records if "profile" in record)
    assert profile["updates"] == 3 and len(profile["rows"]) == 20
    assert any("convolution" in row["name"] for row in profile["rows"])
    seconds = [row["seconds"] for row in profile["rows"]]
    assert seconds == sorted(seconds, reverse=True) and 0 < sum(row["share"] for row in profile["rows"]) <= 1
    reports = [record for record in records if "perf/tflops" in record]
    per_image = {round(1e12 * report["perf/tflops"] / report["perf/images_per_second"]) for report in reports}
    assert len(reports) >= 4 and len(per_image) == 1
    for report in reports:
        assert report["perf/mfu"] == pytest.approx(report["perf/tflops"] / 0.5)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The longest operations" in page and "Use of the device" in page
    assert str(trace) in capsys.readouterr().out


def test_the_peak_is_that_of_the_device_and_precision():
    assert peak_tflops("NVIDIA H200", "bf16", True) == 989.0
    assert peak_tflops("NVIDIA H100 PCIe", "fp16", True) == 756.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "no", True) == 156.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "no", False) == 19.5
    assert peak_tflops("Tesla V100-SXM2-16GB", "no", True) == 15.7  # it has no TF32
    assert peak_tflops("NVIDIA L40S", "bf16", True) == 362.0 and peak_tflops("NVIDIA L4", "bf16", True) == 121.0
    assert peak_tflops("another device", "bf16", True) is None


def test_without_a_peak_there_is_no_share_of_it():
    assert Arithmetic(2_000_000, None).figures(1e6) == {"perf/tflops": 2.0}
    assert Arithmetic(2_000_000, 8.0).figures(1e6) == {"perf/tflops": 2.0, "perf/mfu": 0.25}
