"""A packed cache: every image decoded once into one flat file that later runs map into memory.

    <folder>/images.bin    values of the images, one after the other, each [channels, height, width]; the first value of each,
                           int64 [images]; heights and widths, int32 [images, 2]; a description in JSON; its length in 8 bytes

The file is whole or absent, and one that does not have the size that it states is made again. A file lock, which the system
frees when its holder dies, lets one process pack while the others wait. While packing, memory holds a few MB per core, and 8
bytes of each image.

For people, about.json beside the file says what was packed. The time of the folder is that of the last use.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import json
import math
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO

import numpy as np
from filelock import FileLock

from utils.core.errors import UserError, explained
from utils.core.files import whole_file, write_json
from utils.core.launcher import end_with_parent
from utils.core.limits import usable_cores
from utils.core.signals import signals_held
from utils.core.size import Size, describe_size
from utils.data.bad_images import BadImage, BadImages
from utils.data.decode import ImageFile, ImagePreparation, Prepared, cut, prepared
from utils.data.stored_files import is_remote

PACKED = "images.bin"
PACKING_VERSION = 1  # part of a cache's fingerprint: raise it when the same options give other files
_FIRST_CHUNK, _LARGEST_CHUNK = 16, 256  # images of a task
_LARGEST_READ = 64  # images of a task whose files are read for it: the next ones may be much larger
_CHUNK_BYTES = 2**20  # of a task's images, about
_WORTH_PROCESSES = 2000  # images: fewer are decoded in threads
_REMOTE_WORKERS = 16  # threads that wait for a network
DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError)  # or missing
_KEEP_MAPPED_BYTES = 256 * 2**20  # resident memory of a larger file stays that of one batch

ReadFiles = Callable[[int, int], list[ImageFile]]  # start, stop -> the files of rows [start, stop)
Progress = Callable[[int, int], None]  # of (done, total)


class MappedFile:
    """A file, mapped when first used; a pickled copy maps it again instead of carrying it."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def data(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, dtype: np.dtype | type, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Returns a read-only array of what stands from byte `offset` on."""
        return np.frombuffer(self.data, dtype, math.prod(shape), offset).reshape(shape)

    def forget_pages(self) -> None:
        """Drops the pages of a large file from this process, not from the system's cache, so that they do not add up."""
        if len(self.data) > _KEEP_MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "data"}


class PackedFile(MappedFile):
    """The images of a file.

    Attributes:
        shape: (channels, height, width) of all images; None where their sizes differ.
        remarks: how many images each key of `decode.REMARKS` applies to.
        bad: number of an image that cannot be decoded, which is blank here -> what is known of it.

    Raises one of `DAMAGED` where it is missing or damaged.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        text = len(self.data) - 8
        start = text - int.from_bytes(self.data[text:], "little")
        about = json.loads(self.data[start:text] if start >= 0 else b"")
        self._length, self.channels, self._dtype = about["images"], about["channels"], np.dtype(about["dtype"])
        self._end = about["values"] * self._dtype.itemsize
        if self._end + 16 * self._length != start:
            raise ValueError(f"{path} is damaged")
        self.shape = tuple(about["shape"]) if about["shape"] else None
        self.remarks: dict[str, int] = about["remarks"]
        self.bad = {bad["row"]: BadImage(**bad) for bad in about["bad_images"]}

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """Those of all images, one after the other."""
        return self.array(self._dtype, (self._end // self._dtype.itemsize,))

    def at(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Returns pixels [channels, height, width] of each of `numbers` int64 [n]."""
        starts = self.array(np.int64, (self._length,), self._end)[numbers]
        sizes = self.array(np.int32, (self._length, 2), self._end + 8 * self._length)[numbers]
        values, channels = self.values, self.channels
        return [
            values[start : start + channels * height * width].reshape(channels, height, width)
            for start, (height, width) in zip(starts.tolist(), sizes.tolist())
        ]


def write_packed(
    file: IO[bytes],
    prepare: ImagePreparation,
    chunks: Iterable[Prepared],
    bad_images: BadImages,
    tell: Callable[[int], None] = lambda done: None,
) -> None:
    """Writes the images of all chunks. Memory holds one chunk, and 8 bytes of each image; `tell` gets the number of those done.

    Those that cannot be decoded are added to `bad_images`, by their numbers; raises what its `learn` raises.
    """
    parts: list[np.ndarray] = []  # of heights and widths
    remarks: collections.Counter[str] = collections.Counter()
    done = 0
    for images, remarked, errors in chunks:
        bad_images.learn(BadImage(done + number, *error) for number, error in errors)
        for pixels in images:
            file.write(pixels.data)
        parts.append(np.array([pixels.shape[1:] for pixels in images], np.int32))
        remarks.update(remarked)
        done += len(images)
        tell(done)
    all_sizes, blank = np.concatenate(parts), prepare.blank()
    lengths = all_sizes.prod(1, dtype=np.int64) * len(blank)
    about = {
        "images": done,
        "channels": len(blank),
        "dtype": str(blank.dtype),
        "values": int(lengths.sum()),
        "shape": [len(blank), *all_sizes[0].tolist()] if (all_sizes == all_sizes[0]).all() else None,
        "remarks": remarks,
        "bad_images": [dataclasses.asdict(bad) for bad in bad_images.values()],
    }
    text = json.dumps(about).encode()
    starts = np.cumsum(lengths) - lengths
    file.write(starts.tobytes() + all_sizes.tobytes() + text + len(text).to_bytes(8, "little"))


class PackedImages:
    """The images of one cache folder.

    Args:
        folder: what `pack_once` returned.
        size: that all images have once they are cut.
        max_bad_images: see `BadImages`.

    Attributes:
        uniform: whether all of them have it as they are.
        bad_images: all that cannot be decoded; their rows hold blank images, which are not to be shown.

    Raises:
        one of `DAMAGED`: the folder is missing, incomplete or damaged.
        UserError: more images than `max_bad_images` cannot be decoded.
    """

    def __init__(self, folder: Path, size: Size, max_bad_images: int = 0):
        self.packed, self.size = PackedFile(folder / PACKED), size
        self.uniform = self.packed.shape == (self.packed.channels, *size)
        self.bad_images = BadImages(max_bad_images)
        self.bad_images.learn(self.packed.bad.values())

    def __len__(self) -> int:
        return len(self.packed)

    def fetch(self, rows: np.ndarray, crop: np.ndarray | None) -> np.ndarray:
        """Returns pixels [batch, channels, height, width] of `rows` int64 [batch]; `crop` as in `cut`."""
        if self.uniform:
            batch = self.packed.values.reshape(len(self), -1, *self.size)[rows]
        else:
            batch = cut(self.packed.at(rows), self.size, crop)
        self.packed.forget_pages()
        return batch


def pack_once(
    folder: Path,
    count: int,
    read_files: ReadFiles,
    prepare: ImagePreparation,
    progress: Progress | None = None,
    max_bad_images: int = 0,
) -> PackedImages:
    """Returns the cache at `folder`, made first if it is missing or damaged.

    Args:
        folder: final place of the cache; its name must determine data and options.
        count: number of images.
        read_files: gives the files of rows [start, stop).
        prepare: turns a file into pixels; called in threads or, where the images are many, in processes.
        progress: called with (done, count) while packing.
        max_bad_images: how many images may be impossible to decode. A cache without such images serves any limit.

    Raises:
        UserError: an image that cannot be decoded, or more than may be; a disk that is full or not writable.
    """
    with contextlib.suppress(*DAMAGED):
        return PackedImages(folder, prepare.size, max_bad_images)
    advice = "choose another disk with --cache_dir, or set --cache_images no (then each image is decoded when it is needed)"
    with explained(f"cannot write the packed images {folder}", advice, OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            with contextlib.suppress(*DAMAGED):
                return PackedImages(folder, prepare.size, max_bad_images)  # another process made it while this one waited
            _write(folder, count, read_files, prepare, progress, max_bad_images)
            return PackedImages(folder, prepare.size, max_bad_images)


def mark_used(folder: Path, about: dict[str, str]) -> None:
    """Notes what a cache holds and that it is used now, where the disk can be written."""
    with contextlib.suppress(OSError):
        if not (folder / "about.json").exists():
            write_json(folder / "about.json", about, shared=True)
        os.utime(folder)


def free_for(folder: Path, needed: int) -> None:
    """Raises OSError where the disk of `folder` has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{describe_size(needed)} needed at least, {describe_size(free)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}")


def _write(
    folder: Path, count: int, read_files: ReadFiles, prepare: ImagePreparation, progress: Progress | None, max_bad_images: int
) -> None:
    free_for(folder.parent, count * prepare.blank().nbytes)
    folder.mkdir(exist_ok=True)
    chunks, tell = _prepared_in_order(count, read_files, prepare), progress or (lambda done, count: None)
    with whole_file(folder / PACKED, durable=True) as draft, open(draft, "wb") as file:
        write_packed(file, prepare, chunks, BadImages(max_bad_images), lambda done: tell(done, count))


def _prepared_in_order(count: int, read_files: ReadFiles, prepare: ImagePreparation) -> Iterator[Prepared]:
    """All images in the order of the rows. The chunks under way are few."""
    first = read_files(0, min(_FIRST_CHUNK, count))
    remote = any(file.path and file.data is None and is_remote(file.path) for file in first)
    cores = usable_cores()
    workers = min(max(cores, _REMOTE_WORKERS) if remote else cores, -(-count // _FIRST_CHUNK) or 1)
    # Threads wait for each other where images are small, since most of the work is then Python's. Elsewhere than on Linux,
    # libraries that have started threads do not survive a fork.
    in_processes = count >= _WORTH_PROCESSES and not remote and sys.platform == "linux"
    running: collections.deque[Future[Prepared]] = collections.deque()
    try:
        with _processes(workers) if in_processes else ThreadPoolExecutor(workers) as pool:
            try:
                for files in _chunks(count, read_files, prepare, first):
                    running.append(pool.submit(prepared, prepare, files))
                    if len(running) > 2 * workers:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise UserError(
            "the system ended a process that decodes images, probably for lack of memory\nclose other programs, and start again"
        ) from None


def _chunks(count: int, read_files: ReadFiles, prepare: ImagePreparation, first: list[ImageFile]) -> Iterator[list[ImageFile]]:
    """The files of all rows, begun with those of `first`, about `_CHUNK_BYTES` at a time, encoded or decoded. The sizes of the
    next files are not known: each chunk has at most twice as many as the one before."""
    files, start = first, 0
    while files:
        yield files
        start += len(files)
        encoded = sum(len(file.data or b"") + getattr(file.array, "nbytes", 0) for file in files) // len(files)
        rows = max(_CHUNK_BYTES // max(encoded, prepare.blank().nbytes), 1)
        rows = min(rows, 2 * len(files), _LARGEST_READ if encoded else _LARGEST_CHUNK)
        files = read_files(start, min(start + rows, count)) if start < count else []


def _processes(workers: int) -> ProcessPoolExecutor:
    """Processes that end with this one, however it ends: what they inherit includes the lock on the cache."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), end_with_parent, (os.getpid(), signal.SIGKILL))
    with signals_held():  # which launchers send to the whole process group: this process decides when to stop
        pool.submit(os.getpid).result()  # starts them all
    return pool
