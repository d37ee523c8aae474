"""The control groups of this process, by which a container or a job of a cluster has its limits. Linux alone has them."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of number:controllers:path; version 2 has the number 0 and no controllers


def own_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) of the groups of that `controller` that this process is in: its own, and all above it, for the
    tightest limit decides.

    In a container the path may be the host's, of which only the container's own group is there, as the root.
    """
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
