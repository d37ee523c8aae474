"""Decoded blocks of streamed datasets on a local disk: of all runs together within a limit, the longest unused go first.

    <root>/<fingerprint>/<block>.bin    see `cache`

A block appears under its name complete or not at all. Locks let one process make a block while others wait for it. What is
removed while it is read stays until it is closed, and is made again when it is needed again.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from utils.core.errors import explained
from utils.core.files import whole_file
from utils.data.bad_images import BadImages
from utils.data.cache import DAMAGED, PackedFile, write_packed
from utils.data.decode import ImageFile, ImagePreparation, prepared

BLOCK_LOCKS = "locks"  # a folder beside those of the datasets
_LOCKS = 256  # files that blocks share
_ROOM = 0.9  # share of the limit that is left in use when blocks are removed
_LOOKS = 64  # the size is looked at when a process has written this part of the limit
_SLOW = 10.0  # seconds of waiting for a shard after which it is named
_SAID = 60.0  # seconds in which all processes of a machine say one thing about shards
_ABANDONED = 3600.0  # seconds after which an unfinished file is nobody's

Make = Callable[[], list[ImageFile]]


class BlockCache:
    """The blocks of one dataset, prepared in one way.

    Args:
        root: of the blocks of all datasets.
        fingerprint: hex string, names data and preparation.
        limit: bytes of all blocks below `root`, about.
    """

    def __init__(self, root: Path, fingerprint: str, prepare: ImagePreparation, limit: int):
        self.root, self.folder, self.limit, self._prepare = root, root / fingerprint, limit, prepare
        self._written = limit  # so that the first block looks at the size
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            (root / BLOCK_LOCKS).mkdir(exist_ok=True)

    def open(self, block: int, make: Make, shard: str) -> PackedFile:
        """Returns a block; `make` gives its images where it is not there. Raises UserError where the disk cannot be written,
        and what `make` raises."""
        start = time.monotonic()
        path = self._path(block)
        while (stored := self._stored(path)) is None:
            with self._lock(block):
                if self._stored(path) is None:
                    self._write(path, make())
        with contextlib.suppress(OSError):  # removed meanwhile
            os.utime(path)
        if (waited := time.monotonic() - start) > _SLOW:
            self.say(f"waited {waited:.0f} s for the shard {shard}")
        return stored

    def make_if_free(self, block: int, make: Make) -> None:
        """Makes a block unless it is there or another process makes it now. Raises as `open` does."""
        path = self._path(block)
        if path.exists():
            with contextlib.suppress(OSError):
                os.utime(path)  # soon needed: not to be removed now
            return
        with contextlib.suppress(Timeout), self._lock(block, timeout=0):
            if not path.exists():
                self._write(path, make())

    def say(self, text: str) -> None:
        """Prints a line about shards, unless some process of this machine has just said one."""
        said = self.root / "said"
        with contextlib.suppress(OSError):
            if said.exists() and time.time() - said.stat().st_mtime < _SAID:
                return
            said.touch()
        print(text, file=sys.stderr, flush=True)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block}.bin"

    def _lock(self, block: int, timeout: float = -1) -> Any:
        return FileLock(self.root / BLOCK_LOCKS / f"{(int(self.folder.name, 16) + block) % _LOCKS}.lock", timeout=timeout)

    def _stored(self, path: Path) -> PackedFile | None:
        with contextlib.suppress(*DAMAGED):
            return PackedFile(path)
        return None

    def _write(self, path: Path, files: list[ImageFile]) -> None:
        each = (prepared(self._prepare, [files.pop(0)]) for _ in range(len(files)))  # what is done leaves the memory
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)  # where it was removed meanwhile
            with whole_file(path, shared=True, durable=True) as draft, open(draft, "wb") as file:
                write_packed(file, self._prepare, each, BadImages(len(files)))
                self._written += file.tell()
        if self._written * _LOOKS > self.limit:
            self._written = 0
            self.trim()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        advice = "choose another disk with --cache_dir, or set a smaller --cache_limit"
        return explained(f"cannot write decoded blocks to {self.root}", advice, OSError)

    def trim(self) -> None:
        """Removes the longest unused blocks of all datasets once they are larger than the limit together."""
        with contextlib.suppress(Timeout, OSError), FileLock(self.root / BLOCK_LOCKS / "trim.lock", timeout=0):
            found, now = [], time.time()
            for folder in (entry.path for entry in os.scandir(self.root) if entry.is_dir() and entry.name != BLOCK_LOCKS):
                for entry in (each for each in os.scandir(folder) if each.name.endswith((".bin", ".tmp"))):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        status = entry.stat()
                        if entry.name.endswith(".tmp") and now - status.st_mtime > _ABANDONED:
                            os.unlink(entry.path)
                        else:
                            found.append((status.st_mtime, status.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            if total <= self.limit:
                return
            for _, size, path in sorted(found):
                if total <= _ROOM * self.limit:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
