"""Memory that a process can still get on its device."""

import contextlib
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")  # lines of number:controllers:path; version 2 has the number 0 and no controllers
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
    return min([psutil.virtual_memory().available, *_left_in_cgroups()]) // local_processes


def _left_in_cgroups() -> list[int]:
    """Bytes that each control group with a limit has left, of those that this process is in and sees.

    All above its own count, for the tightest decides. In a container the path may be the host's, of which only the container's
    own group is there, as the root.
    """
    left = []
    with contextlib.suppress(OSError):  # not Linux
        for line in OWN_CGROUPS.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, names = CGROUPS / "memory", V1
            elif number == "0":
                root, names = CGROUPS, V2
            else:
                continue
            own = Path(path.lstrip("/"))
            left += [_left(root / group, *names) for group in (own, *own.parents)]
    return [size for size in left if size is not None]


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
