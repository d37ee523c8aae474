"""What this process may use of its machine, where a container, a job of a cluster or `taskset` gives it less. No torch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of number:controllers:path; version 2 has the number 0 and no controllers
# By the version of control groups: the limit, what is used, and of the statistics the files that nobody has read again lately.
MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def own_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) of the control groups of that `controller`, which Linux alone has, that this process is in: its
    own, and all above it, for the tightest limit decides. In a container the path may be the host's, of which only the root is
    there."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            version, root = 1, ROOT / controller
        elif number == "0":
            version, root = 2, ROOT
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            yield version, root / group


def usable_cores() -> int:
    """Counts the cores that this process may run on, but no more than its share of time in its control groups, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def processor_limit() -> float | None:
    """Returns how many processors' time this process may use (`docker run --cpus 1.5`); None without a limit."""
    limits = []
    for version, group in own_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # not seen, or "max"
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            if quota > 0:  # version 1 has -1 without a limit
                limits.append(quota / period)
    return min(limits, default=None)


def free_ram() -> int:
    """Returns the bytes that the machine, or the tightest control group, has left. As Kubernetes counts them, files that
    nobody has read again lately are not used memory."""
    left = [psutil.virtual_memory().available]
    for version, group in own_groups("memory"):
        limit, usage, cache = MEMORY[version]
        with contextlib.suppress(OSError, ValueError):  # not seen, or "max"
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            with contextlib.suppress(OSError, KeyError):  # no statistics
                used -= int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[cache])
            left.append(max(most - max(used, 0), 0))
    return min(left)
