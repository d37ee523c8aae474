"""How many threads a run has where a control group allows less than the machine."""

import pytest

from utils.core import limits


@pytest.mark.parametrize(
    ("own", "groups", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/job\n", {"cpu.max": "400000 100000", "job/cpu.max": "max 100000"}, 4.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/\n", {}, None),
    ],
)
def test_the_limit_of_control_groups(own, groups, limit, monkeypatch, tmp_path):
    for name, text in groups.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")
    assert limits.processor_limit() == limit


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (0.5, 1), (1.5, 1), (3.9, 3), (64.0, 8)])
def test_a_run_has_no_more_threads_than_its_control_group_lets_run(limit, cores, monkeypatch):
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(limits, "processor_limit", lambda: limit)
    assert limits.usable_cores() == cores
