"""Packed images in one file that is mapped into memory: a packed cache, or a block of a streamed dataset.

values of the images, one after the other, each [channels, height, width]; the first value of each, int64 [images];
heights and widths, int32 [images, 2]; a description in JSON; its length in 8 bytes
"""

import collections
import dataclasses
import functools
import json
import math
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

from utils.data.bad_images import BadImage, BadImages
from utils.data.decode import ImagePreparation, Prepared

DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError)  # or missing
_KEEP_MAPPED_BYTES = 256 * 2**20  # resident memory of a larger file stays that of one batch


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
