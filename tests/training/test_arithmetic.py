"""perf/tflops and perf/mfu: what a run says of its own speed."""

import json

import pytest

from utils.training.memory_estimate import Arithmetic, peak_tflops


@pytest.mark.slow
def test_the_speed_is_compared_with_the_peak(train, tiny_flags, tmp_path):
    flags = ["--max_train_steps", 9, "--peak_tflops", 0.5, "--logging_steps", 2, "--output_dir", tmp_path]
    assert train([*tiny_flags, *flags]) == 0
    records = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    reports = [record for record in records if "perf/tflops" in record]
    per_image = {round(1e12 * report["perf/tflops"] / report["perf/images_per_second"]) for report in reports}
    assert len(reports) >= 4 and len(per_image) == 1
    assert all(report["perf/mfu"] == pytest.approx(report["perf/tflops"] / 0.5) for report in reports)
    assert "Use of the device" in (tmp_path / "report.html").read_text()


def test_the_peak_is_that_of_the_device_and_precision():
    assert peak_tflops("NVIDIA H100 PCIe", "fp16", True) == 756.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "no", True) == 156.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "no", False) == 19.5
    assert peak_tflops("Tesla V100-SXM2-16GB", "no", True) == 15.7  # it has no TF32
    assert peak_tflops("NVIDIA L40S", "bf16", True) == 362.0 and peak_tflops("NVIDIA L4", "bf16", True) == 121.0
    assert peak_tflops("another device", "bf16", True) is None


def test_without_a_peak_there_is_no_share_of_it():
    assert Arithmetic(2_000_000, None).figures(1e6) == {"perf/tflops": 2.0}
    assert Arithmetic(2_000_000, 8.0).figures(1e6) == {"perf/tflops": 2.0, "perf/mfu": 0.25}
