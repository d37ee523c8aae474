"""The processors that this process may use. Imports no torch."""

import contextlib
import os

from utils.core.control_groups import own_groups


def usable_cores() -> int:
    """Counts the cores that this process can keep busy: those that it may run on, which a container or `taskset` can make fewer
    than the machine's, and no more than its control group's share of time, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def processor_limit() -> float | None:
    """Returns how many processors' time the control groups of this process may use (`docker run --cpus 1.5`); None where they
    have no limit."""
    limits = []
    for version, group in own_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # not seen, or "max"
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            if quota > 0:  # version 1 has -1 without a limit
                limits.append(quota / period)
    return min(limits, default=None)
