"""Finds the image and the label column of a `datasets.Dataset` from its features, and reads them without decoding."""

import contextlib
import hashlib
import itertools
import os
import posixpath
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.core.errors import UserError
from utils.data.decode import ImageFile
from utils.data.stored_files import is_address

if TYPE_CHECKING:
    from datasets import Dataset

_IMAGE_NAMES = ("image", "img", "images", "pixels", "picture", "photo", "jpg", "png", "webp", "image_path", "image_url", "url")
LABEL_NAMES = ("label", "labels", "fine_label", "coarse_label", "class", "class_id", "cls", "target", "category")

_ROWS = 1024  # read at a time
_FEW = 5  # images of a class, below which a user is warned
_SEVERAL = 10  # classes, up to which there may be that few


def describe_columns(dataset: "Dataset") -> str:
    """ "image (Image), label (ClassLabel of 10)", for error messages."""
    return ", ".join(f"{name} ({_type_name(feature)})" for name, feature in dataset.features.items())


def _type_name(feature: object) -> str:
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return f"ClassLabel of {feature.num_classes}"
    if isinstance(feature, datasets.Value):
        return feature.dtype
    return type(feature).__name__


def _is_text(feature: object) -> bool:
    import datasets

    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def holds_arrays(feature: object) -> bool:
    """Whether values are images as arrays [H, W, C] or [H, W]."""
    import datasets

    return isinstance(feature, (datasets.Array2D, datasets.Array3D))


def _holds_files(feature: object) -> bool:
    """Whether values are encoded images as bytes, or as a struct of bytes and path."""
    import datasets

    if isinstance(feature, datasets.Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, dict) and set(feature) == {"bytes", "path"}


def find_image_column(dataset: "Dataset", requested: str | None = None) -> tuple[str, list[str]]:
    """Returns the name of the image column, and notes on the choice.

    A column of the type `Image` comes first, then one that holds encoded bytes, then one of arrays, then one of strings (paths)
    with a usual name. Any of these may be requested by name.

    Raises:
        UserError: no such column, or none that can hold images; it lists the columns with their types.
    """
    import datasets

    features = dataset.features
    if requested is not None:
        if requested not in features:
            raise UserError(
                f"--image_column {requested}: the dataset has no such column\nits columns: {describe_columns(dataset)}"
            )
        feature = features[requested]
        if not (isinstance(feature, datasets.Image) or _holds_files(feature) or holds_arrays(feature) or _is_text(feature)):
            raise UserError(f"--image_column {requested}: this column has no images\nthe columns: {describe_columns(dataset)}")
        return requested, []
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not found:
        found = [name for name, feature in features.items() if _holds_files(feature)]
        found.sort(key=lambda name: name.lower() not in _IMAGE_NAMES)
    if not found:
        found = [name for name, feature in features.items() if holds_arrays(feature)]
    if not found:
        found = [name for name, feature in features.items() if name.lower() in _IMAGE_NAMES and _is_text(feature)]
    if not found:
        raise UserError(
            "the dataset has no column that looks like images\n"
            f"set --image_column to one of its columns: {describe_columns(dataset)}"
        )
    if len(found) == 1:
        return found[0], []
    return found[0], [f"image columns {', '.join(found)}: {found[0]} is used (--image_column chooses)"]


def find_labels(dataset: "Dataset", requested: str | None = None) -> tuple[np.ndarray | None, list[str] | None, list[str]]:
    """Returns labels int64 [rows] or None, names of the classes or None, and notes. Labels are -1 for no class, else from 0 on.

    Without a request the first of these is taken that has classes: a `ClassLabel` column, integers with a usual name, strings
    with a usual name where each class has two images on average, other numbers with a usual name. The classes are the sorted
    distinct values, which are their names where they are not 0, 1, 2 and so on; of one-hot rows the places. A requested column
    may also hold booleans.

    Raises:
        UserError: no such column, or a requested one that has no usable labels.
    """
    import datasets

    features = dataset.features
    if requested is not None and requested not in features:
        raise UserError(f"--label_column {requested}: the dataset has no such column\nits columns: {describe_columns(dataset)}")
    if requested is not None:
        groups = [[requested]]
    else:
        usual = [name for name in LABEL_NAMES if name in features]
        groups = [
            [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)],
            [name for name in usual if is_number(features[name]) and "int" in str(getattr(features[name], "dtype", ""))],
            [name for name in usual if _repeats(dataset, name)],
            [name for name in usual if is_number(features[name]) and "int" not in str(getattr(features[name], "dtype", ""))],
        ]
    notes: list[str] = []
    for group in groups:
        for name in group:
            column = dataset.select_columns([name]).with_format("arrow")[:].column(name)
            try:
                labels, class_names = _classes_of(column, features[name])
            except ValueError as error:
                if requested is not None:
                    raise UserError(f"--label_column {name}: {error}\nthe columns: {describe_columns(dataset)}") from None
                notes.append(f"label column {name!r} is not used: {error}")
                continue
            if len(group) > 1:
                notes.append(f"label columns {', '.join(group)}: {name} is used (--label_column chooses)")
            return labels, class_names, [*notes, *_about(labels, class_names, name, features[name], requested)]
    return None, None, notes


def _about(labels: np.ndarray, class_names: list[str] | None, name: str, feature: object, requested: str | None) -> list[str]:
    """What a user should know of the classes of a column."""
    import datasets

    notes = []
    without, classes = int((labels < 0).sum()), len(np.unique(labels[labels >= 0]))
    if without:
        notes.append(f"{without:,} of {len(labels):,} images have no label, and are trained without a class")
    if class_names is not None and not isinstance(feature, datasets.ClassLabel) and (requested is None or is_number(feature)):
        choice = "" if requested is not None else " (--label_column chooses)"
        notes.append(f"the {len(class_names):,} values of the column {name!r} become classes{choice}")
    if classes > _SEVERAL and classes * _FEW > len(labels) - without:
        notes.append(
            f"warning: {classes:,} classes for {len(labels) - without:,} images: few can be learned of so few images each"
        )
    return notes


def is_number(feature: object) -> bool:
    """Whether values are numbers, or lists of them."""
    import datasets

    if isinstance(feature, (datasets.List, datasets.LargeList)):
        feature = feature.feature
    return isinstance(feature, datasets.Value) and ("int" in feature.dtype or "float" in feature.dtype)


def _classes_of(column: Any, feature: object) -> tuple[np.ndarray, list[str] | None]:
    """Labels and names of classes as `find_labels` returns them. Raises ValueError, saying why they are none."""
    import datasets

    if is_number(feature) or isinstance(feature, datasets.ClassLabel):
        cells: list[Any] = column.to_pylist()
        cells = _of_lists(cells) if isinstance(feature, (datasets.List, datasets.LargeList)) else cells
        cells = [-1 if cell is None or cell != cell else cell for cell in cells]  # NaN is not itself
        if (odd := next((cell for cell in cells if cell != int(cell)), None)) is not None:
            raise ValueError(f"{odd:g} is no class (whole numbers are)")
        values = np.array(cells, np.int64)
        known = values != -1
    elif _is_text(feature) or (isinstance(feature, datasets.Value) and feature.dtype == "bool"):
        cells = column.to_pylist()
        known = np.array([cell is not None for cell in cells])
        values = np.array([str(cell) for cell in cells])
    else:
        raise ValueError(f"{_type_name(feature)} values cannot be labels (numbers, strings and booleans can)")
    if not known.any():
        raise ValueError("no row has a label")
    if isinstance(feature, datasets.ClassLabel):
        return np.where(known, values, -1).astype(np.int64), list(feature.names)
    return classes_of(values, known)


def classes_of(values: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Labels int64 [N], the place of each of `values` [N] among the distinct ones, -1 where it is not `known`; and names of the
    classes, None where they are 0, 1, 2 and so on."""
    distinct, places = np.unique(values[known], return_inverse=True)
    labels = np.full(len(values), -1)
    labels[known] = places
    is_counted = np.array_equal(distinct, np.arange(len(distinct)))
    return labels, None if is_counted else [str(value) for value in distinct]


def _of_lists(rows: list[list | None]) -> list[float | None]:
    """The number in each list of one, or the place of the 1 in each one-hot list; None where there is none."""
    lengths = {len(row) for row in rows if row} or {1}
    if len(lengths) > 1:
        raise ValueError("its lists have different lengths (one number, or one-hot lists, can be labels)")
    if lengths == {1}:
        return [row[0] if row else None for row in rows]
    filled = np.array([row or [0] * max(lengths) for row in rows], np.float64)
    if not np.isin(filled, (0, 1)).all() or (filled.sum(1) > 1).any():
        raise ValueError("its lists are not one-hot: more than one number is not 0")
    return [float(row.argmax()) if row.any() else None for row in filled]


def _repeats(dataset: "Dataset", name: str) -> bool:
    """Whether a column of strings has at most half as many distinct values as rows."""
    if not _is_text(dataset.features[name]):
        return False
    values = dataset.select_columns([name]).with_format("arrow")[:].column(name).drop_null()
    return 0 < 2 * len(values.unique()) <= len(values)


class EncodedImages:
    """The encoded files of one column, read by row and never decoded here.

    Relative paths begin at `base`, the folder of the file that holds them; earlier releases took the working directory, which
    still counts where the first path leads to a file there and to none at `base`.
    """

    def __init__(self, dataset: "Dataset", column: str, base: str | None = None, first_row: int = 0):
        """`first_row`: the number of the first row, for the names of images."""
        self.column, self._base, self._first_row = column, "", first_row
        self.table = dataset.select_columns([column]).with_format("arrow")
        feature = dataset.features[column]
        self.dtype = np.dtype(feature.dtype) if holds_arrays(feature) else None  # of arrays
        self.shape = tuple(feature.shape) if holds_arrays(feature) else None
        if base is not None and (first := self.between(0, 1)[0]).data is None and first.path and not is_address(first.path):
            self._base = "" if os.path.exists(first.path) and not os.path.exists(_below(base, first.path)) else base

    def __len__(self) -> int:
        return len(self.table)

    def files_key(self) -> str:
        """See `files_key`."""
        edges = [0, *range(1, len(self), _ROWS), len(self)]  # the first row alone: others may hold large images
        return files_key(self.between(start, stop) for start, stop in itertools.pairwise(edges))

    def between(self, start: int, stop: int) -> list[ImageFile]:
        """Returns the files of rows [start, stop)."""
        return self._files(range(start, stop), self.table[start:stop])

    def at(self, rows: list[int]) -> list[ImageFile]:
        """Returns the files of any rows, in that order."""
        return self._files(rows, self.table[rows])

    def _files(self, rows: Iterable[int], table: Any) -> list[ImageFile]:
        files = []
        value: Any
        for row, value in zip(rows, table.column(self.column).to_pylist()):
            row += self._first_row
            if self.dtype is not None:
                name = f"at row {row}, column {self.column!r}"
                files.append(ImageFile(None, None, name, None if value is None else np.array(value, self.dtype)))
                continue
            if isinstance(value, str):
                value = {"bytes": None, "path": value}
            elif not isinstance(value, dict):
                value = {"bytes": value, "path": None}
            path = value["path"]
            if value["bytes"] is None and path and self._base and not is_address(path):
                path = _below(self._base, path)
            place = f"row {row}, column {self.column!r}"
            files.append(ImageFile(value["bytes"], path, f"{path} ({place})" if path else f"at {place}"))
        return files


def files_key(parts: Iterable[list[ImageFile]]) -> str:
    """Returns what changes with the size or the time of change of any file on this machine that the rows name; "" where the
    first row names none."""
    digest = hashlib.sha256()
    for number, files in enumerate(parts):
        first = files[0]
        if number == 0 and (first.path is None or first.data is not None or is_address(first.path)):
            return ""
        for file in files:
            with contextlib.suppress(OSError):  # what is not there shows when it is decoded
                status = os.stat(file.path or "")
                digest.update(f"{file.path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _below(base: str, path: str) -> str:
    return posixpath.join(base, path) if is_address(base) else os.path.join(base, path)
