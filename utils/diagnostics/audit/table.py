"""The data set as it is stored: how many rows it has, and the image and the class of each, read once more.

Shares no code with the training's own choice of columns, of labels and of rows. `datasets` and pyarrow read the columns; a
folder's classes are the names of its folders, and the digits come from scikit-learn.
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

from utils.options.flags import DataOptions

_IMAGES = ("image", "img", "images", "pixels", "picture", "photo", "jpg", "png", "webp")  # usual names of columns
_LABELS = ("label", "labels", "fine_label", "coarse_label", "class", "class_id", "target", "category")
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4"}
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

    def images(self, rows: list[int]) -> list[bytes | str]:
        """The encoded image of each row, or its path."""
        if self._digits:
            return [_png(_digits()[0][row]) for row in rows]
        name = self._image_column
        values = self._dataset.select_columns([name])[rows].column(name).to_pylist()
        return [(value["bytes"] or value["path"]) if isinstance(value, dict) else value for value in values]

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
        return next(iter([*pictures, *(name for name in encoded if name in usual), *encoded, *usual]))

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
        """The one asked for; else the first of classes, else of integers under a usual name."""
        if self._options.label_column is not None:
            return self._options.label_column
        classes = [name for name, feature in self._features.items() if type(feature).__name__ == "ClassLabel"]
        usual = [name for name in _LABELS if "int" in str(getattr(self._features.get(name), "dtype", ""))]
        return next(iter([*classes, *usual]), None)

    def _named_by_folders(self, name: str) -> bool:
        """Whether `datasets` made this column of the folders' names: of --train_data_dir without a list of its own."""
        folder = self._options.train_data_dir if self._options.dataset_name is None else None
        made = name == "label" and self._image_column == "image" and hasattr(self._features[name], "names")
        return made and folder is not None and not _lists(folder)

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


def _lists(folder: str) -> bool:
    """Whether a list in it says which images count, and what they are."""
    return any(name.startswith("metadata.") for _, _, names in os.walk(folder) for name in names)


def _images_below(folder: str) -> int | None:
    """How many image files are there, none of them hidden; None beside archives, links and lists."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        kinds = [os.path.splitext(name)[1].lower() for name in names if not name.startswith(".")]
        if set(kinds) & _ARCHIVES or any(os.path.islink(os.path.join(place, name)) for name in folders):
            return None
        count += sum(kind in ImageFolder.EXTENSIONS for kind in kinds)
    return None if _lists(folder) else count


def _rows_of(folder: Path) -> int:
    """Of a data set that was saved to a folder."""
    files = json.loads((folder / "state.json").read_text())["_data_files"]
    count = 0
    for file in files:
        with pa.memory_map(str(folder / file["filename"])) as source:
            count += sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    return count
