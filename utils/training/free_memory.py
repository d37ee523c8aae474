"""Memory that a process can still get on its device."""

import contextlib
from pathlib import Path

import psutil
import torch

from utils.core.control_groups import own_groups

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device, local_processes: int = 1) -> int:
    """Returns the bytes that this process can still get on `device`.

    On a CPU an even share of what the machine, or the container, has left for all `local_processes` on this machine; a GPU is
    taken to be this process's alone.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = [_left(group, *(V1 if version == 1 else V2)) for version, group in own_groups("memory")]
    return min([psutil.virtual_memory().available, *(size for size in left if size is not None)]) // local_processes


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Bytes up to the limit of a control group; None without one.

    Files that nobody has read again lately make room by themselves, so they do not count as used: the rule of Kubernetes for
    its working set.
    """
    try:
        most, used = (int((group / name).read_text()) for name in (limit, usage))
    except (OSError, ValueError):  # not seen, or "max"
        return None
    with contextlib.suppress(OSError, KeyError):  # no statistics
        used -= int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[cache])
    return max(most - max(used, 0), 0)
