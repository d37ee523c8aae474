"""The data set as it is stored: how many rows it has, and the image and the class of each, read once more.

Shares no code with the training's own choice of columns, of labels and of rows. `datasets` and pyarrow read the columns; a
folder's classes are the names of its folders, also in an archive of one, and the digits come from scikit-learn.
"""

import io
import json
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from utils.diagnostics.audit.archives import images_at, names_in
from utils.options.flags import DataOptions

_IMAGES = ("image", "img", "images", "pixels", "picture", "photo", "jpg", "png", "webp")  # usual names of columns
_LABELS = ("label", "labels", "fine_label", "coarse_label", "class", "class_id", "cls", "target", "category")
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4"}
_DOUBTFUL = {".bufr", ".emf", ".eps", ".grib", ".h5", ".hdf", ".heic", ".heif", ".mpeg", ".mpg", ".pdf", ".ps", ".wmf"}
_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}  # folders
_MEMBER = r"^(?:zip|tar)://(.+)::([^:]+)\.[^./]+$"  # of an archive, which counts as a folder of its name
_FOLDER = r"(?P<folder>[^/\\]+)[/\\][^/\\]+$"  # of a file's path


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


class Table:
    """Of the `datasets.Dataset` that the options name, as it was opened."""

    def __init__(self, dataset: Any, options: DataOptions):
        self._options, self._digits = options, options.dataset_name == "digits"
        self._dataset = dataset.with_format("arrow")
        self._features = dataset.features

    def __len__(self) -> int:
        """Of the rows that are declared to be used: the first ones."""
        return min(len(self._dataset), self._options.max_train_images or len(self._dataset))

    @cached_property
    def stored(self) -> int | None:
        """How many rows the files have; None where that is not known without reading them all."""
        name, split = self._options.dataset_name, self._options.dataset_split
        if self._digits:
            return len(_digits()[1])
        if name is None:
            return _images_below(str(self._options.train_data_dir)) if split == "train" else None
        for folder in (Path(name), Path(name, split)):
            if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
                return _rows_of(folder)
        known = self._dataset.info.splits or {}
        return int(known[split].num_examples) if split in dict(known) else None

    def _column(self, name: str) -> pa.ChunkedArray:
        return self._dataset.select_columns([name])[: len(self)].column(name)

    def images(self, rows: list[int]) -> list[Any]:
        """The encoded image of each row, its path, or its array."""
        if self._digits:
            return [_png(_digits()[0][row]) for row in rows]
        name = self._image_column
        values = self._dataset.select_columns([name])[rows].column(name).to_pylist()
        if type(feature := self._features[name]).__name__ in ("Array2D", "Array3D"):
            return [np.array(value, feature.dtype) for value in values]
        files = [(value["bytes"] or value["path"]) if isinstance(value, dict) else value for value in values]
        inside = images_at([file for file in files if isinstance(file, str)])
        return [inside.get(file, self._whole(file)) if isinstance(file, str) else file for file in files]

    def _whole(self, path: str) -> str:
        """A path in a file or folder begins at it; in a folder of several, at the working directory, or it is not found."""
        name = self._options.dataset_name or ""
        beside = os.path.join(name if os.path.isdir(name) else os.path.dirname(name), path)
        return beside if os.path.isfile(beside) else path

    @property
    def _image_column(self) -> str:
        """The one asked for; else the first of images, of encoded bytes, or of paths under a usual name."""
        if self._options.image_column is not None:
            return self._options.image_column
        kinds = {name: str(getattr(feature, "dtype", "struct")) for name, feature in self._features.items()}
        usual = [name for name in kinds if name.lower() in _IMAGES]
        pictures = [name for name, feature in self._features.items() if type(feature).__name__ == "Image"]
        structs = [name for name, feature in self._features.items() if isinstance(feature, dict) and "bytes" in feature]
        encoded = [name for name in kinds if "binary" in kinds[name] or name in structs]
        arrays = [name for name, feature in self._features.items() if type(feature).__name__ in ("Array2D", "Array3D")]
        return next(iter([*pictures, *(name for name in encoded if name in usual), *encoded, *arrays, *usual]))

    @cached_property
    def labels(self) -> np.ndarray | None:
        """The class of each row, int64; None where the data has none."""
        name = self._label_column
        if name is None:
            return None
        if self._digits and name == "label":
            return _digits()[1][: len(self)].astype(np.int64)
        column, feature = self._column(name), self._features[name]
        if column.null_count:
            return None
        if self._named_by_folders(name):
            paths = pc.struct_field(self._column(self._image_column), "path")
            paths = pc.replace_substring_regex(paths, pattern=_MEMBER, replacement=r"\2/\1")
            folders = pc.struct_field(pc.extract_regex(paths, pattern=_FOLDER), "folder").to_pylist()
            number = {folder: number for number, folder in enumerate(sorted(feature.names))}
            return np.array([number.get(folder, -2) for folder in folders], np.int64)
        if pa.types.is_integer(column.type):
            values = column.to_numpy().astype(np.int64)
            return values if values.min() >= 0 else None
        classes = sorted(pc.unique(column).to_pylist())
        return np.searchsorted(np.array(classes), np.array(column.to_pylist())).astype(np.int64)

    @property
    def _label_column(self) -> str | None:
        """The one asked for; else the first of classes, else of integers under a usual name, else of strings that repeat."""
        if self._options.label_column is not None:
            return self._options.label_column
        classes = [name for name, feature in self._features.items() if type(feature).__name__ == "ClassLabel"]
        kinds = {name: str(getattr(self._features.get(name), "dtype", "")) for name in _LABELS}
        usual = [name for name in _LABELS if "int" in kinds[name]]
        words = [name for name in _LABELS if "string" in kinds[name]] if not classes + usual else []
        repeated = [name for name in words if 2 * len(pc.unique(self._column(name))) <= len(self)]
        return next(iter([*classes, *usual, *repeated]), None)

    def _named_by_folders(self, name: str) -> bool:
        """Whether this column was made of the folders' names: of --train_data_dir without a list of its own."""
        folder = self._options.train_data_dir if self._options.dataset_name is None else None
        made = name == "label" and self._image_column == "image" and hasattr(self._features[name], "names")
        return made and folder is not None and not _lists(_names_below(folder))

    @property
    def num_classes(self) -> int:
        """0 without labels."""
        if self.labels is None:
            return 0
        names = getattr(self._features[self._label_column], "names", ())
        return max(int(self.labels.max()) + 1, len(names))


def _png(scan: np.ndarray) -> bytes:
    """A digit's, whose values are 0 to 16."""
    file = io.BytesIO()
    Image.fromarray(np.floor(scan.reshape(8, 8) * (255 / 16) + 0.5).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _names_below(source: str) -> list[str] | None:
    """The files of a folder or an archive; None where others hang on them: links to folders, and archives inside."""
    if not os.path.isdir(source):
        return names_in(source)
    found = []
    for place, folders, names in os.walk(source):
        if any(os.path.islink(os.path.join(place, name)) for name in folders):
            return None
        found += [os.path.relpath(os.path.join(place, name), source) for name in names]
    return None if any(os.path.splitext(name)[1].lower() in _ARCHIVES for name in found) else found


def _lists(names: list[str] | None) -> bool:
    """Whether a list among these files says which images count, and what they are; also where they are not known."""
    return names is None or any(os.path.basename(name).startswith("metadata.") for name in names)


def _images_below(source: str) -> int | None:
    """How many image files are there, none of them hidden; None beside archives, links, lists, and folders that are splits."""
    names = _names_below(source)
    if names is None or _lists(names):
        return None
    parts = [os.path.normpath(name).split(os.sep) for name in names]
    if any(part.lower() in _SPLITS for path in parts for part in path[:-1]):
        return None
    shown = [path for path in parts if not any(part.startswith((".", "__")) for part in path[:-1]) and path[-1][0] != "."]
    suffixes = [os.path.splitext(path[-1])[1].lower() for path in shown]
    Image.init()
    return None if _DOUBTFUL & set(suffixes) else sum(suffix in Image.EXTENSION for suffix in suffixes)


def _rows_of(folder: Path) -> int:
    """Of a data set that was saved to a folder."""
    files = json.loads((folder / "state.json").read_text())["_data_files"]
    count = 0
    for file in files:
        with pa.memory_map(str(folder / file["filename"])) as source:
            count += sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    return count
