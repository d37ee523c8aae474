"""Decoded blocks of streamed datasets on a local disk: of all runs together within a limit, the longest unused go first.

    <root>/<fingerprint>/<block>.bin    pixels, image after image; sizes int32 [images, 2]; a description in JSON; its length

A block appears under its name complete or not at all. Locks let one process make a block while others wait for it. What is
removed while it is read stays until it is closed, and is made again when it is needed again.
"""

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from utils.core.errors import UserError
from utils.core.files import whole_file
from utils.data.bad_images import UndecodableImage
from utils.data.decode import ImageFile, ImagePreparation
from utils.data.packed_caches import BLOCK_LOCKS

_LOCKS = 256  # files that blocks share
_ROOM = 0.9  # share of the limit that is left in use when blocks are removed
_LOOKS = 64  # the size is looked at when a process has written this part of the limit
_SLOW = 10.0  # seconds of waiting for a shard after which it is named
_SAID = 60.0  # seconds in which all processes of a machine say one thing about shards
_ABANDONED = 3600.0  # seconds after which an unfinished file is nobody's

_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError)  # or missing

Make = Callable[[], list[ImageFile]]


class StoredBlock:
    """A decoded block, mapped into memory as long as the object lives.

    Attributes:
        images: each [channels, height, width].
        values: those of all images, one after the other.
        size: bytes.
        sizes: int32 [images, 2], height and width.
        shape: (channels, height, width) of all images; None where their sizes differ, or some could not be decoded.
        bad: number of an image in the block that cannot be decoded -> its name, file, and the reason.
    """

    images: np.ndarray | list[np.ndarray]

    def __init__(self, path: Path):
        """Raises one of `_DAMAGED` where it is missing or damaged."""
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(data)  # bytes
        text = self.size - 8
        start = text - int.from_bytes(data[text:], "little")
        about = json.loads(data[max(start, 0) : text])
        dtype, channels = np.dtype(about["dtype"]), int(about["channels"])
        end = start - 8 * about["images"]  # of the pixels
        self.sizes = np.frombuffer(data, np.int32, 2 * about["images"], max(end, 0)).reshape(-1, 2)
        ends = np.cumsum(self.sizes.prod(1, dtype=np.int64) * channels)
        if ends[-1] * dtype.itemsize != end:
            raise ValueError("damaged")
        values = np.frombuffer(data, dtype, int(ends[-1]))
        self.values = values.data
        self.bad = {int(number): tuple(bad) for number, bad in about["bad"].items()}
        uniform = bool((self.sizes == self.sizes[0]).all()) and not self.bad
        self.shape = (channels, *self.sizes[0].tolist()) if uniform else None
        if self.shape:
            self.images = values.reshape(-1, *self.shape)
        else:
            parts = np.split(values, ends[:-1])
            self.images = [part.reshape(channels, *size) for part, size in zip(parts, self.sizes)]


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (root / BLOCK_LOCKS).mkdir(exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def open(self, block: int, make: Make, shard: str) -> StoredBlock:
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

    def _stored(self, path: Path) -> StoredBlock | None:
        with contextlib.suppress(*_DAMAGED):
            return StoredBlock(path)
        return None

    def _write(self, path: Path, files: list[ImageFile]) -> None:
        sizes, bad = np.empty((len(files), 2), np.int32), {}
        blank = self._prepare.blank()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # where it was pruned meanwhile
            with whole_file(path, shared=True, durable=True) as draft, open(draft, "wb") as file:
                for number, each in enumerate(files):
                    try:
                        pixels = self._prepare(each)[0]
                    except UndecodableImage as error:
                        pixels, bad[number] = blank, error.args
                    sizes[number] = pixels.shape[1:]
                    file.write(pixels.data)
                    files[number] = None  # type: ignore[call-overload]  # its memory
                about = {"images": len(files), "dtype": str(blank.dtype), "channels": len(blank), "bad": bad}
                text = json.dumps(about).encode()
                file.write(sizes.tobytes() + text + len(text).to_bytes(8, "little"))
                self._written += file.tell()
        except OSError as error:
            raise self._unwritable(error) from error
        if self._written * _LOOKS > self.limit:
            self._written = 0
            self.trim()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write decoded blocks to {self.root}: {error.strerror or error}\n"
            "choose another disk with --cache_dir, or set a smaller --cache_limit"
        )

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
