"""A packed cache: every image decoded once into one flat file that later runs map into memory.

    <folder>/pixels.bin     uint8 or uint16, image after image, each [channels, height, width]
    <folder>/offsets.bin    int64 [images], the first value of each image in pixels.bin
    <folder>/sizes.bin      int32 [images, 2], height and width
    <folder>/meta.json      shape, remarks, images that cannot be decoded, and the size of each file; written last

The folder appears under its name complete or not at all (written aside, then renamed), and one whose files do not
have the sizes that meta.json states is made again. A file lock, which the system frees when its holder dies, lets one
process pack while the others wait. While packing, memory holds a few MB per core, however many images there are.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from utils.core.errors import UserError
from utils.core.launcher import PR_SET_PDEATHSIG
from utils.core.limits import usable_cores
from utils.core.signals import signals_held
from utils.core.size import Size
from utils.data.bad_images import BadImage, BadImages, UndecodableImage
from utils.data.decode import ImageFile, ImagePreparation, cut
from utils.data.stored_files import is_remote

PACKING_VERSION = 1  # part of a cache's fingerprint: raise it when the same options give other files
_KEEP_MAPPED_BYTES = 256 * 2**20  # resident memory of a larger file stays that of one batch
_FIRST_CHUNK, _LARGEST_CHUNK = 16, 256  # images of a task
_LARGEST_READ = 64  # images of a task whose files are read for it: the next ones may be much larger
_CHUNK_BYTES = 2**20  # of a task's images, about
_WORTH_PROCESSES = 2000  # images: fewer are decoded in threads
_REMOTE_WORKERS = 16  # threads that wait for a network

ReadFiles = Callable[[int, int], list[ImageFile]]  # start, stop -> the files of rows [start, stop)
Progress = Callable[[int, int], None]  # of (done, total)


class MappedArray:
    """A file as a read-only array, mapped when first used; a pickled copy maps the file again instead of carrying
    it."""

    def __init__(self, path: Path, dtype: type, shape: tuple[int, ...]):
        self.path, self.dtype, self.shape = path, np.dtype(dtype), shape
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._array = np.frombuffer(self._map, self.dtype).reshape(self.shape)
        return self._array

    def forget_pages(self) -> None:
        """Drops the pages of a large file from this process, not from the system's cache, so that they do not add up."""
        if len(self._map) > _KEEP_MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict:
        return {"path": self.path, "dtype": self.dtype, "shape": self.shape, "_array": None}


class PackedImages:
    """The images of one cache folder.

    Args:
        folder: what `pack_once` returned.
        max_bad_images: see `BadImages`.

    Attributes:
        bad_images: all that cannot be decoded; their rows hold blank images, which are not to be shown.

    Raises:
        OSError, ValueError, KeyError: the folder is missing, incomplete or damaged.
        UserError: more images than `max_bad_images` cannot be decoded.
    """

    def __init__(self, folder: Path, max_bad_images: int = 0):
        meta = json.loads((folder / "meta.json").read_text())
        for name, size in meta["file_sizes"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{folder / name} has {(folder / name).stat().st_size} bytes instead of {size}")
        self.length: int = meta["length"]
        self.remarks: dict[str, int] = meta["remarks"]
        self.size = Size.of(meta["resolution"])
        self.channels: int = meta["channels"]
        self.uniform: bool = meta["uniform"]
        self.bad_images = BadImages(max_bad_images)
        self.bad_images.learn(BadImage(**bad) for bad in meta.get("bad_images", ()))  # older caches have none
        dtype = np.uint8 if meta["max_value"] == 255 else np.uint16
        shape = (self.length, self.channels, *self.size) if self.uniform else (-1,)
        self.pixels = MappedArray(folder / "pixels.bin", dtype, shape)
        self.offsets = MappedArray(folder / "offsets.bin", np.int64, (self.length,))
        self.sizes = MappedArray(folder / "sizes.bin", np.int32, (self.length, 2))

    def __len__(self) -> int:
        return self.length

    def fetch(self, rows: np.ndarray, crop: np.ndarray | None) -> np.ndarray:
        """Returns pixels [batch, channels, height, width] of `rows` int64 [batch]; `crop` as in `cut`."""
        if self.uniform:
            batch = self.pixels.array[rows]
        else:
            places = zip(self.offsets.array[rows].tolist(), self.sizes.array[rows].tolist())
            whole = [(self.pixels.array[start : start + self.channels * h * w], h, w) for start, (h, w) in places]
            batch = cut([values.reshape(self.channels, h, w) for values, h, w in whole], self.size, crop)
        self.pixels.forget_pages()
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
    with contextlib.suppress(OSError, ValueError, KeyError):
        return PackedImages(folder, max_bad_images)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return PackedImages(folder, max_bad_images)  # another process made it while this one waited
            unfinished = folder.with_name(f"{folder.name}.tmp")  # ours alone under the lock; a killed packer may have left it
            for leftover in (unfinished, folder):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                unfinished.mkdir()
                _write(unfinished, count, read_files, prepare, progress, max_bad_images)
                os.rename(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            return PackedImages(folder, max_bad_images)
    except OSError as error:
        raise UserError(
            f"cannot write the packed images {folder}: {error.strerror or error}\n"
            "choose another disk with --cache_dir, or set --cache_images no (then each image is decoded when it is needed)"
        ) from error


def free_for(folder: Path, needed: int) -> None:
    """Raises OSError where the disk of `folder` has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{needed / 1e9:.1f} GB needed at least, {free / 1e9:.1f} GB free")


def _write(
    folder: Path, count: int, read_files: ReadFiles, prepare: ImagePreparation, progress: Progress | None, max_bad_images: int
) -> None:
    free_for(folder, count * prepare.blank().nbytes)
    done, values, uniform, bad_images = 0, 0, True, BadImages(max_bad_images)
    remarks: collections.Counter[str] = collections.Counter()
    names = ("pixels.bin", "offsets.bin", "sizes.bin")
    with contextlib.ExitStack() as stack:
        pixels_file, offsets_file, sizes_file = (stack.enter_context(open(folder / name, "wb")) for name in names)
        for chunk in _prepared_in_order(count, read_files, prepare):
            for number, error in chunk.errors:
                bad_images.learn([BadImage(done + number, *error)])
            uniform &= bool((chunk.sizes == prepare.size).all())
            lengths = chunk.sizes.astype(np.int64).prod(axis=1) * prepare.channels
            pixels_file.write(chunk.pixels)
            offsets_file.write((values + np.cumsum(lengths) - lengths).tobytes())
            sizes_file.write(chunk.sizes.tobytes())
            values += int(lengths.sum())
            remarks.update(chunk.remarks)
            done += len(chunk.sizes)
            if progress is not None:
                progress(done, count)
        for file in (pixels_file, offsets_file, sizes_file):
            file.flush()
            os.fsync(file.fileno())
    meta = {
        "length": count,
        "resolution": prepare.size.resolution,
        "channels": prepare.channels,
        "max_value": prepare.max_value,
        "uniform": uniform,
        "remarks": remarks,
        "bad_images": [dataclasses.asdict(bad) for bad in bad_images.values()],
        "file_sizes": {name: (folder / name).stat().st_size for name in names},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


class _Chunk(NamedTuple):
    """Prepared images: their values one after the other, int32 [images, 2] heights and widths, what `prepare` remarked, and
    (number in the chunk, what `BadImage` says of it) of those that are blank because they cannot be decoded."""

    pixels: bytes
    sizes: np.ndarray
    remarks: list[str]
    errors: list[tuple[int, tuple]]


def _prepare_chunk(prepare: ImagePreparation, files: list[ImageFile]) -> _Chunk:
    images, remarks, errors = [], [], []
    for number, file in enumerate(files):
        try:
            pixels, found = prepare(file)
            remarks += found
        except UndecodableImage as error:
            pixels = prepare.blank()
            errors.append((number, error.args))
        images.append(pixels)
    sizes = np.array([pixels.shape[1:] for pixels in images], np.int32)
    return _Chunk(b"".join(pixels.data for pixels in images), sizes, remarks, errors)


def _prepared_in_order(count: int, read_files: ReadFiles, prepare: ImagePreparation) -> Iterator[_Chunk]:
    """All images in the order of the rows. The chunks under way are few."""
    first = read_files(0, min(_FIRST_CHUNK, count))
    remote = any(file.path and file.data is None and is_remote(file.path) for file in first)
    cores = usable_cores()
    workers = min(max(cores, _REMOTE_WORKERS) if remote else cores, -(-count // _FIRST_CHUNK) or 1)
    # Threads wait for each other where images are small, since most of the work is then Python's. Elsewhere than on Linux,
    # libraries that have started threads do not survive a fork.
    in_processes = count >= _WORTH_PROCESSES and not remote and sys.platform == "linux"
    running: collections.deque[Future[_Chunk]] = collections.deque()
    try:
        with _processes(workers) if in_processes else ThreadPoolExecutor(workers) as pool:
            try:
                for files in _chunks(count, read_files, prepare, first):
                    running.append(pool.submit(_prepare_chunk, prepare, files))
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
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _end_with_parent, (os.getpid(),))
    with signals_held():  # which launchers send to the whole process group: this process decides when to stop
        pool.submit(os.getpid).result()  # starts them all
    return pool


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
