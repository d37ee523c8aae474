"""What a process can still get, in made-up control groups."""

from types import SimpleNamespace

import pytest
import torch

from utils.core import limits
from utils.training.memory_plan import free_memory

CPU = torch.device("cpu")
AVAILABLE = 10_000  # bytes in the whole machine


@pytest.fixture
def free_in(monkeypatch, tmp_path):
    """Free bytes of one of some processes on a machine with these control groups: {folder: (limit, usage, statistics)}."""

    def find(own: str, groups: dict[str, tuple], names=("memory.max", "memory.current"), local_processes: int = 1) -> int:
        root = tmp_path / "cgroup"
        for folder, (limit, usage, statistics) in groups.items():
            (root / folder).mkdir(parents=True)
            (root / folder / names[0]).write_text(f"{limit}\n")
            (root / folder / names[1]).write_text(f"{usage}\n")
            (root / folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in statistics.items()))
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(limits, "ROOT", root)
        monkeypatch.setattr(limits, "OWN", tmp_path / "own")
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))
        return free_memory(CPU, local_processes)

    return find


CACHE = {"file": 400, "inactive_file": 300, "active_file": 100}


def test_files_that_can_go_are_not_used_memory(free_in):
    assert free_in("0::/\n", {"": (1000, 900, CACHE)}) == 1000 - (900 - 300)


@pytest.mark.parametrize(("limits", "expected"), [((2000, 1000), 400), ((1000, 2000), 400), (("max", 2000), 1400)])
def test_the_tightest_of_the_own_group_and_those_above_decides(free_in, limits, expected):
    above, own = limits
    groups = {"jobs": (above, 900, CACHE), "jobs/mine": (own, 900, CACHE), "jobs/other": (700, 650, CACHE)}
    assert free_in("0::/jobs/mine\n", groups) == expected


def test_version_1(free_in):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    statistics = {"inactive_file": 50, "total_inactive_file": 300}
    unlimited = (2**63 - 4096, 5000, statistics)
    groups = {"memory": unlimited, "memory/mine": (1000, 900, statistics), "unified": (10, 5, {})}
    assert free_in("5:cpu,cpuacct:/other\n4:memory:/mine\n1:name=systemd:/\n0::/\n", groups, names) == 400


def test_without_a_limit_it_is_the_machine_s(free_in):
    assert free_in("0::/\n", {"": ("max", 900, CACHE)}) == AVAILABLE
    assert free_in("", {}) == AVAILABLE
    limits.OWN.unlink()
    assert free_memory(CPU) == AVAILABLE


def test_nothing_is_left_of_a_group_beyond_its_limit(free_in):
    assert free_in("0::/\n", {"": (1000, 1100, {})}) == 0


def test_processes_of_a_machine_share_its_memory(free_in):
    assert free_in("0::/\n", {"": (1000, 900, CACHE)}, local_processes=4) == 100
