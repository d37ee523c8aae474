"""Images from one file of arrays: `.npy`, `.npz` or HDF5.

    images    [N, H, W, C] or [N, H, W], any type of numbers; all of a .npy file, else under this name or --image_column, or the
              only array
    labels    [N], whole numbers or words, or one-hot; under this name or --label_column; may be missing

A `.npy` file is mapped into memory and HDF5 read row by row, so that both may be larger than memory; a `.npz` file is read as a
whole.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from utils.core.errors import UserError, one_line
from utils.data.columns import classes_of, whole_numbers
from utils.data.decode import ImageFile, Range
from utils.options.flags import DataOptions

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5")
_KNOWN_RANGES = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "bool": (0.0, 1.0)}
_LOOKED_AT = 64  # images whose range a message tells


def is_array_file(name: str | None) -> bool:
    """Returns whether `name` is a file on this machine that holds arrays."""
    return name is not None and Path(name).suffix.lower() in SUFFIXES and Path(name).is_file()


class OtherChannels(UserError):
    """Arrays have other channels than `image_channels`."""


class ArrayImages:
    """The images of such a file by row, the counterpart of `image_column.EncodedImages`; a pickled copy opens the file again.

    Attributes:
        labels: int64 [N], or None; class_names: of them, or None; see `columns.classes_of`.

    Raises UserError where the file cannot be read or its arrays have no usable shape.
    """

    def __init__(self, options: DataOptions):
        self._path, self._name = Path(str(options.dataset_name)), options.image_column or "images"
        self._asked = options.image_column is not None
        self._opened: tuple[int, Any] = (-1, None)
        with self._reading():
            images, content = self._open()
            name = options.label_column or "labels"
            labels = np.asarray(content[name]) if name in content else None
        if labels is None and options.label_column is not None:
            raise UserError(f"{self._path} has no labels {name!r}\nset another --label_column, or leave it out")
        if images.ndim not in (3, 4) or 0 in images.shape:
            raise UserError(f"the images of {self._path} are {list(images.shape)}\nthey must be [N, H, W, C] or [N, H, W]")
        if images.dtype.kind not in "biuf":
            raise UserError(f"the images of {self._path} are {images.dtype}\nthey must be whole numbers, floats or booleans")
        self.shape, self.dtype = images.shape, images.dtype
        self._length = min(options.max_train_images or len(images), len(images))
        self.labels: np.ndarray | None = None
        self.class_names: list[str] | None = None
        if labels is not None:
            self.labels, self.class_names = self._classes(labels, len(images))

    def _classes(self, labels: np.ndarray, count: int) -> tuple[np.ndarray, list[str] | None]:
        """As `columns.classes_of`, of an array as of a column."""
        try:
            if len(labels) != count or labels.ndim > 2 or labels.dtype.kind not in "biufSU":
                raise ValueError("they must be one number or word for each image, or one-hot")
            values = labels[: self._length]
            is_text = values.dtype.kind in "bSU" and values.ndim == 1
            values = values.astype(str) if is_text else whole_numbers(values.tolist())
            if not (known := np.ones(len(values), bool) if is_text else values != -1).any():
                raise ValueError("no image has one")
        except ValueError as error:
            what = f"the labels of {self._path} are {labels.dtype} {list(labels.shape)}, for {count} images"
            raise UserError(f"{what}\n{error} (-1 means no class)") from None
        return classes_of(values, known)

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_opened": (-1, None)}

    def between(self, start: int, stop: int) -> list[ImageFile]:
        """Returns the images of rows [start, stop)."""
        return self.at(list(range(start, stop)))

    def at(self, rows: list[int]) -> list[ImageFile]:
        """Returns the images of any rows, in that order."""
        if self._opened[0] != os.getpid():  # an HDF5 file is not shared with a forked process
            with self._reading():
                self._opened = os.getpid(), self._open()[0]
        return [ImageFile(None, None, f"row {row} of {self._path}", np.asarray(self._opened[1][row])) for row in rows]

    def _content(self) -> Any:
        """What the file holds, by name; of a .npy file one array."""
        if self._path.suffix.lower() in (".npy", ".npz"):
            return np.load(self._path, mmap_mode="r", allow_pickle=False)
        try:
            import h5py  # type: ignore[import-not-found]
        except ImportError:
            raise UserError(f"{self._path}: HDF5 needs h5py\npip install h5py, or save the arrays as .npz") from None
        return h5py.File(self._path, "r")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            problem = one_line(error)
            if "pickle" in problem or "Python objects" in problem:  # numpy's advice is to run what is in the file
                problem = "it is no file of arrays, or its arrays hold objects instead of numbers"
            raise UserError(f"cannot read {self._path}: {problem}\nmake the file again") from error

    def _open(self) -> tuple[Any, Any]:
        """The images; and what else the file holds, by name."""
        content = self._content()
        if isinstance(content, np.ndarray):
            return content, {}
        lone = next(iter(content)) if len(content) == 1 and not self._asked else self._name
        found = content.get(lone)
        if not hasattr(found, "ndim"):  # a group of HDF5
            raise UserError(
                f"{self._path} has no {self._name!r}; it has {', '.join(content)}\nset --image_column to the name of the images"
            )
        return found, content


def range_of(files: Any, shape: tuple[int, ...], options: DataOptions) -> Range:
    """Returns the values of black and white of `files` (with `dtype`), images of `shape`, [H, W, C] or [H, W].

    Raises OtherChannels where they have other channels than the options say, and UserError where the range is not known.
    """
    channels, known = 1 if len(shape) == 2 else shape[-1], _KNOWN_RANGES.get(str(files.dtype))
    if channels != options.image_channels:
        hint = f"set --image_channels {channels}"
        if len(shape) == 3 and shape[0] == options.image_channels:
            hint = "move the channels to the end: np.moveaxis(image, 0, -1)"
        raise OtherChannels(
            f"the images of {options.dataset_name} are {list(shape)}, which is {channels} channels ([H, W, C]), and "
            f"--image_channels is {options.image_channels}\n{hint}"
        )
    if given := options.data_range:
        if len(given) != 2 or given[0] >= given[1]:
            raise UserError(f"--data_range is {' '.join(map(str, given))}\nset two numbers, the lower one first")
        return given[0], given[1]
    if known is None:
        seen = np.stack([file.array for file in files.between(0, min(len(files), _LOOKED_AT)) if file.array is not None])
        example = " (0 255 for bytes)" if seen.dtype.kind in "iu" and 1 < seen.max() <= 255 else ""
        raise UserError(
            f"{options.dataset_name} holds {files.dtype}, whose range is not known (the first {len(seen)} images have values "
            f"from {np.nanmin(seen):g} to {np.nanmax(seen):g})\nset --data_range LOW HIGH{example}"
        )
    return known
