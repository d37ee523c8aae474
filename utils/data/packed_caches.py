"""The packed caches of a machine and the decoded blocks of its streamed datasets: what they hold, how large they are, when they
were last used, and the removal of old ones.

Beside the files of a cache (see `cache`), about.json says what was packed. Its time is that of the last use. A process that
uses a cache holds a shared lock on it, so that no other one removes it.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.core.files import read_json, write_json

_ABOUT = "about.json"
PACKED = "images.bin"
STREAMED_BLOCKS = Path("streams", "blocks")  # below the folder of the packed caches; a folder for each streamed dataset
BLOCK_LOCKS = "locks"  # one folder beside those
_UNFINISHED = ".tmp"  # suffix of a cache that is being packed, or whose packer was killed
_DAY = 86400.0  # seconds


@dataclasses.dataclass(frozen=True)
class PackedCache:
    """`size` in bytes; `last_use` in seconds since the epoch; `about` is for people."""

    folder: Path
    about: str
    size: int
    last_use: float
    in_use: bool

    @property
    def days_unused(self) -> float:
        return (time.time() - self.last_use) / _DAY


def describe_size(size: int) -> str:
    if size < 1e5:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def mark_used(folder: Path, about: dict[str, str]) -> IO | None:
    """Notes what a cache holds and that it is used now. It counts as in use until the file that is returned is closed.

    None where the disk cannot be written or knows no locks.
    """
    path = folder / _ABOUT
    try:
        if not path.exists():
            write_json(path, about, shared=True)
        file = open(path)  # noqa: SIM115 - held open
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(path)
        return file
    except OSError:
        return None


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it went just now
            total += path.stat().st_size
    return total


def list_caches(root: Path) -> list[PackedCache]:
    """Returns the caches below `root`, the longest unused first; those whose packing was cut short are among them."""
    complete = {path.parent for name in (PACKED, "meta.json") for path in root.glob(f"*/{name}")}  # of images, and of latents
    packed = [folder for folder in root.glob("*") if folder in complete or folder.suffix == _UNFINISHED]
    streamed = [folder for folder in (root / STREAMED_BLOCKS).glob("*") if folder.name != BLOCK_LOCKS]
    found = []
    for folder in filter(Path.is_dir, packed + streamed):
        path = folder / _ABOUT
        with contextlib.suppress(OSError):  # removed meanwhile
            last_use = (path if path.exists() else folder).stat().st_mtime
            with _locked(folder) as free:
                about = "not packed to its end" if folder.suffix == _UNFINISHED else "; ".join(read_json(path).values())
                found.append(PackedCache(folder, about or "not known", size_of(folder), last_use, not free))
    return sorted(found, key=lambda cache: cache.last_use)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether nobody packs or uses the cache, which nobody begins to within the block."""
    with contextlib.ExitStack() as stack:
        name = folder.with_suffix("") if folder.suffix == _UNFINISHED else folder
        try:
            for path in (Path(f"{name}.lock"), folder / _ABOUT):
                if path.exists():
                    file = stack.enter_context(open(path, "r+"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free


def prune_caches(root: Path, days: float) -> list[PackedCache]:
    """Removes the caches below `root` that nobody uses and nobody used in the last `days`; returns those removed.

    Raises OSError where the disk cannot be written.
    """
    removed = []
    for cache in list_caches(root):
        with _locked(cache.folder) as free:
            if free and cache.days_unused >= days:
                doomed = cache.folder.with_name(f"{cache.folder.name}.removed{_UNFINISHED}")
                os.rename(cache.folder, doomed)  # a kill leaves no half of it under its name
                shutil.rmtree(doomed)
                removed.append(cache)
    return removed
