"""The data set as it is stored: how many rows it has, and the image and the class of each, read once more.

Shares no code with any trainer's own choice of columns, of labels and of rows: `datasets`, pyarrow, numpy and h5py read, and
the digits come from scikit-learn.
"""

import base64
import contextlib
import decimal
import io
import itertools
import os
import re
import urllib.parse
import urllib.request
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from steady_doctor.data.declared import Source

_IMAGES = ("image", "img", "images", "pixels", "picture", "photo", "jpg", "png", "webp")  # usual names of columns
_PLACES = ("image_path", "image_url", "url")
_LABELS = ("label", "labels", "fine_label", "coarse_label", "class", "class_id", "cls", "target", "category")
_FIRST = 1024  # rows in which a text is looked for
_SEARCHED = 2**32  # bytes of a tar that is searched for an image, at most
_LARGEST = 32 * 2**20  # bytes of a row group: one is read for each image that is looked at
_HDF5 = (".h5", ".hdf5")

Read = Callable[[str, list[int] | None], Any]  # (column, rows or all of them) -> values, of pyarrow or numpy


class Table:
    """`features`: of each column, as `datasets` has them. `count`: rows that are stored."""

    def __init__(self, read: Read, features: dict[str, Any], count: int, source: Source):
        self._read, self._features, self._source = read, features, source
        self._count = min(count, source.first or count)

    def __len__(self) -> int:
        """Of the rows that are declared to be used: the first ones."""
        return self._count

    def images(self, rows: list[int]) -> list[Any]:
        """The encoded image of each row, its path, or its array."""
        if len(self._image_columns) > 1:
            pixels = np.stack([self._read(name, rows).to_numpy() for name in self._image_columns], axis=-1)
            return [_square(row) for row in pixels]
        (name,) = self._image_columns
        values = self._read(name, rows)
        if isinstance(values, np.ndarray):
            return list(values)
        feature, leaf = self._features[name], values.type
        while hasattr(leaf, "value_type") and "dictionary" not in str(leaf):
            leaf = leaf.value_type
        dtype = getattr(feature, "dtype", None) if type(feature).__name__.startswith("Array") else str(leaf)
        files = [image_of(value, dtype) for value in values.to_pylist()]
        return [self._whole(file) if isinstance(file, str) else file for file in files]

    def _whole(self, path: str) -> str:
        """A path in a file or folder begins at it; in a folder of several, at the working directory, or it is not found."""
        if "::" in path:  # in an archive, such as zip://cats/1.png::/data/photos.zip; large tar files are far to search
            return "" if path.startswith("tar") and os.path.getsize(path.rpartition("::")[2]) > _SEARCHED else path
        name = self._source.name or ""
        beside = os.path.join(name if os.path.isdir(name) else os.path.dirname(name), path)
        return beside if os.path.isfile(beside) else path

    @cached_property
    def _image_columns(self) -> list[str]:
        """The one asked for; else the first of images, of encoded bytes, of arrays, of anything else under a usual name, of
        bytes in lists or structs, of images or paths as text; else those of one pixel each."""
        features = self._features
        if self._source.image_column is not None:
            return [self._source.image_column]
        usual = [
            name
            for name in features
            if name.lower() in (*_IMAGES, *_PLACES) and _may_hold(features[name], "binary|string|list")
        ]
        pictures = [name for name in features if type(features[name]).__name__ == "Image"]
        plain = [name for name in features if _is_file(features[name])]
        arrays = [name for name in features if type(features[name]).__name__ in ("Array2D", "Array3D")]
        wrapped = [name for name in features if _may_hold(features[name], "binary")]
        texts = (name for name in features if "string" in self._type(name) and _is_picture(self._first_image(name)))
        found = itertools.chain(pictures, (n for n in plain if n in usual), plain, arrays, usual, wrapped, texts)
        return [first] if (first := next(found, None)) else self._pixel_columns()

    def _first_image(self, name: str) -> Any:
        cells = (self._read(name, [row]).to_pylist()[0] for row in range(min(len(self), _FIRST)))
        return next((image_of(cell) for cell in cells if cell), None)

    def _pixel_columns(self) -> list[str]:
        """The largest group of columns of numbers that are called alike, in the order of their one number, or of the table."""
        groups: dict[str, list[str]] = {}
        for name in self._features:
            if not hasattr(self._features[name], "feature") and self._type(name).startswith(("int", "uint", "float")):
                groups.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
        group = max((names for alike, names in groups.items() if alike not in _LABELS), key=len)
        ranks = [[int(number) for number in re.findall("[0-9]+", name)] for name in group]
        return [name for _, name in sorted(zip(ranks, group))] if {len(rank) for rank in ranks} == {1} else group

    @cached_property
    def _label_column(self) -> str | None:
        """The one asked for; else the first that has classes: declared ones, integers under a usual name, strings that repeat,
        other numbers, booleans."""
        if self._source.label_column is not None:
            return self._source.label_column
        classes = [name for name in self._features if type(self._features[name]).__name__ == "ClassLabel"]
        usual = [name for label in _LABELS for name in self._features if name.lower() == label]
        integers = [name for name in usual if "int" in self._type(name) and not hasattr(self._features[name], "feature")]
        words = [name for name in usual if "string" in self._type(name)]
        plain = [name for name in words if not hasattr(self._features[name], "feature")]
        repeated = (name for name in plain if self._repeats(self._read(name, None).to_pylist()[: len(self)]))
        others = [name for name in usual if name not in integers and re.search("int|float|decimal", self._type(name))]
        truths = [name for name in usual if self._type(name) == "bool"]
        lists = [name for name in usual if hasattr(self._features[name], "feature")]
        asked = itertools.chain(classes, integers, repeated, others, truths, lists)
        return next((name for name in asked if self._labels_of(name) is not None), None)

    @staticmethod
    def _repeats(cells: list[str | None]) -> bool:
        words = [cell.strip() for cell in cells if cell and cell.strip()]
        return 0 < 2 * len(set(words)) <= len(words)

    def _type(self, name: str) -> str:
        """Of its values, or of those in its lists."""
        feature = self._features.get(name)
        return str(getattr(getattr(feature, "feature", feature), "dtype", ""))

    @cached_property
    def labels(self) -> np.ndarray | None:
        """The class of each row, int64, -1 for none: as it is declared, else the place of its value among those that occur.
        None where the data has no classes."""
        return None if self._label_column is None else self._labels_of(self._label_column)

    def _labels_of(self, name: str) -> np.ndarray | None:
        cells = self._read(name, None)
        if cells is None:
            return None
        try:
            cells = cells.to_pylist() if hasattr(cells, "to_pylist") else np.asarray(cells).tolist()
            values = [_value(cell) for cell in cells[: len(self)]]
            feature = self._features.get(name)
            if hasattr(getattr(feature, "feature", feature), "names"):
                return np.array([-1 if value is None else value for value in values], np.int64)
            place_of = {value: place for place, value in enumerate(sorted({value for value in values if value is not None}))}
        except (TypeError, ValueError):  # of several kinds, or no classes
            return None
        return np.array([place_of.get(value, -1) for value in values], np.int64) if place_of else None

    @property
    def num_classes(self) -> int:
        """0 without labels."""
        names = getattr(self._features.get(self._label_column or ""), "names", ())
        return 0 if self.labels is None else max(int(self.labels.max()) + 1, len(names))


def _is_picture(content: Any) -> bool:
    return isinstance(content, bytes) or os.path.splitext(str(content))[1].lower() in Image.registered_extensions()


def _is_file(feature: Any) -> bool:
    """Whether it is encoded bytes, alone or beside their path."""
    if isinstance(feature, dict):
        return sorted(feature) == ["bytes", "path"]
    return "binary" in str(getattr(feature, "dtype", "")) and "fixed" not in feature.dtype


def _may_hold(feature: Any, kinds: str) -> bool:
    """Whether one of `kinds`, an expression of names of types, is in it; bytes also as an image. A list counts as one."""
    if isinstance(feature, dict):
        return any(_may_hold(part, kinds) for part in feature.values())
    if hasattr(feature, "feature"):
        return "list" in kinds or _may_hold(feature.feature, kinds)
    is_image = type(feature).__name__ == "Image"
    return is_image or bool(re.search(kinds, str(getattr(feature, "dtype", ""))))


def image_of(cell: Any, dtype: str | None = None) -> Any:
    """Bytes, a path or an array of what a cell holds in a list of one, a struct, or a text; numbers are of `dtype`."""
    if isinstance(cell, dict):
        inner = cell.get("bytes") or cell.get("path")
        return image_of(inner or next((part for part in cell.values() if isinstance(part, (bytes, dict, list))), None), dtype)
    if isinstance(cell, list):
        flat = cell
        while isinstance(flat, list) and flat:
            flat = flat[0]
        if cell[:4] in ([137, 80, 78, 71], [*b"GIF8"], [*b"RIFF"]) or (cell[:3] == [255, 216, 255] and len(cell) > 3):
            return bytes(cell)  # of a file
        if not isinstance(flat, (bytes, str, dict)):
            return _square(
                np.array(cell, {"float": "float32", "double": "float64", "halffloat": "float16"}.get(dtype or "", dtype))
            )
        return image_of(cell[0], dtype)
    if isinstance(cell, bytes) and re.fullmatch(rb"[\w+/-]{16}", cell[:16]):
        return found if isinstance(found := _of_text(cell.decode("latin-1")), bytes) else cell
    return _of_text(cell) if isinstance(cell, str) else cell


def _square(values: np.ndarray) -> np.ndarray:
    """Of a row of pixels, and without axes of one before an image."""
    side = round(values.size**0.5)
    return values.reshape(side, side) if values.ndim == 1 else values.reshape(values.shape[-3:])


def _of_text(text: str) -> Any:
    """Bytes of base64, of hex or of a data URI, an array of numbers, a path, or what HTML or Markdown shows."""
    if text.startswith("file:"):
        return urllib.request.url2pathname(urllib.parse.urlparse(text).path)
    if found := re.search(r"""<img\b[^>]*?src\s*=\s*["'](.*?)["']|^!\[.*?\]\((.*)\)$""", text, re.DOTALL):
        return _of_text(found[1] or found[2])
    numbers = re.sub(r"[\[\](),;]", " ", text).split()
    if len(numbers) > 1 and all(number.isdecimal() for number in numbers):
        values, marks = np.array([int(number) for number in numbers]), re.sub(r"[^\[]+", " ", text).split()
        sizes = {2: [len(marks)], 3: [sum(len(mark) > 1 for mark in marks), -1, len(numbers) // max(len(marks), 1)]}
        shape = sizes.get(len(marks[0]) if marks else 0)
        return _square(values) if shape is None else values.reshape(*shape, *[-1] * (len(shape) == 1))
    with contextlib.suppress(ValueError, OSError):
        data = bytes.fromhex(re.sub(r"^(0x|\\x)", "", text))
        Image.open(io.BytesIO(data))
        return data
    code = re.sub(r"\s", "", urllib.parse.unquote(text.partition("base64,")[2] or text)).rstrip("=")
    with contextlib.suppress(ValueError, OSError):
        data = base64.b64decode(code.replace("-", "+").replace("_", "/") + "=" * (-len(code) % 4), validate=True)
        Image.open(io.BytesIO(data))
        return data
    return text.replace("\\", "/")


def _value(cell: Any) -> Any:
    """What a cell says: itself, what a list of one has, or the place of the 1 in a one-hot list; None: no class. Raises
    ValueError where it is none of these."""
    if isinstance(cell, list):
        if len(cell) > 1 and sorted(cell)[:-1] != [0] * (len(cell) - 1):
            raise ValueError
        cell = cell[0] if len(cell) == 1 else cell.index(1) if any(cell) else None
    cell = float(cell) if isinstance(cell, decimal.Decimal) else cell
    if isinstance(cell, float) and cell == cell:
        if not cell.is_integer():
            raise ValueError
        cell = int(cell)
    if isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, str):
        return cell.strip() or None
    return None if cell != cell or cell == -1 else cell


def open_table(source: Source, dataset: Any) -> Table | None:
    """`dataset`: a `datasets.Dataset` that the trainer opened, where there is one. None where the files cannot be read once
    more: shards elsewhere, in tar files, or with large row groups."""
    path = Path(source.name or "")
    if source.name == "digits":
        columns = _digits()
        source = replace(source, image_column="image", label_column="label")
        return Table(lambda name, rows: columns[name][rows or slice(None)], {}, len(columns["label"]), source)
    if path.suffix.lower() in (".npy", ".npz", *_HDF5):
        name = source.image_column or _lone_array(path) or "images"
        source = replace(source, image_column=name, label_column=source.label_column or "labels")
        return Table(read := _of_arrays(path, name), {}, len(read(name, None)), source)
    if source.streamed:
        import datasets

        several = (path / "dataset_dict.json").is_file()
        if not several and not (path / "state.json").is_file():
            return _of_shards(source, path)
        dataset = datasets.load_from_disk(str(path / source.split if several else path))
    if dataset is None:
        return None
    arrow = dataset.with_format("arrow")
    count = min(len(dataset), source.first or len(dataset))
    return Table(
        lambda name, rows: arrow.select_columns([name])[slice(count) if rows is None else rows].column(name),
        *(dataset.features, len(dataset), source),
    )


@cache
def _digits() -> dict[str, np.ndarray]:
    """Scans of 8 x 8 with values from 0 to 16, as PNG files."""
    from sklearn.datasets import load_digits

    (scans, labels), files = load_digits(return_X_y=True), []
    for scan in np.floor(scans.reshape(-1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8):
        Image.fromarray(scan).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    return {"image": np.array(files, object), "label": labels}


def _lone_array(path: Path) -> str | None:
    """The name of the only array of a file that has names."""
    if path.suffix.lower() == ".npz":
        names = list(np.load(path, mmap_mode="r"))
    elif path.suffix.lower() in _HDF5:
        import h5py  # type: ignore[import-not-found]

        names = list(h5py.File(path))
    else:
        return None
    return names[0] if len(names) == 1 else None


def _of_arrays(path: Path, lone: str) -> Read:
    """`lone`: what the array of a file of one is called."""

    @cache
    def content(name: str) -> Any:
        if path.suffix.lower() in _HDF5:
            import h5py  # type: ignore[import-not-found]

            return h5py.File(path).get(name)
        arrays = np.load(path, mmap_mode="r")
        return arrays.get(name) if not isinstance(arrays, np.ndarray) else arrays if name == lone else None

    def read(name: str, rows: list[int] | None) -> Any:
        return content(name) if rows is None else np.stack([np.array(content(name)[row]) for row in rows])

    return read


def _of_shards(source: Source, path: Path) -> Table | None:
    """Of parquet files: `datasets` says which of them a split consists of, and pyarrow reads them."""
    import datasets
    import pyarrow.dataset

    if not path.exists():
        return None
    split = source.split
    files = [path] if path.is_file() else datasets.load_dataset_builder(str(path), source.config).config.data_files[split]
    files = [str(file) for file in files]
    if not all(file.endswith(".parquet") and os.path.isfile(file) for file in files):
        return None
    stored = pyarrow.dataset.dataset(files)
    groups = [group for fragment in stored.get_fragments() for group in fragment.split_by_row_group()]
    ends = list(accumulate((group.row_groups[0].num_rows for group in groups), initial=0))
    if any(group.row_groups[0].total_byte_size > _LARGEST for group in groups):
        return None

    def read(name: str, rows: list[int] | None) -> Any:
        if rows is None:
            return stored.to_table([name]).column(name)
        places = [bisect_right(ends, row) - 1 for row in rows]
        parts = [groups[place].to_table(columns=[name]).slice(row - ends[place], 1) for place, row in zip(places, rows)]
        return pyarrow.concat_tables(parts).column(name)

    return Table(read, datasets.Features.from_arrow_schema(stored.schema), ends[-1], source)
