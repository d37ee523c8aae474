"""The images and labels of a file of arrays, read once more for the step audit: numpy and h5py alone."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from utils.options.flags import DataOptions


class ArrayTable:
    """As `table.Table`, of the file that --dataset_name names."""

    def __init__(self, options: DataOptions):
        self._options, self._path = options, Path(options.dataset_name or "")

    @staticmethod
    def reads(options: DataOptions) -> bool:
        """Whether the options name such a file."""
        return Path(options.dataset_name or "").suffix.lower() in (".npy", ".npz", ".h5", ".hdf5")

    def _read(self, name: str) -> Any:
        if self._path.suffix.lower() in (".h5", ".hdf5"):
            import h5py  # type: ignore[import-not-found]

            content = h5py.File(self._path)
        else:
            content = np.load(self._path, mmap_mode="r")
        if isinstance(content, np.ndarray):
            return content if name == self._image_name else None
        return content.get(name)

    @property
    def _image_name(self) -> str:
        return self._options.image_column or "images"

    @cached_property
    def _images(self) -> Any:
        return self._read(self._image_name)

    @property
    def stored(self) -> int:
        return len(self._images)

    def __len__(self) -> int:
        return min(self.stored, self._options.max_train_images or self.stored)

    def images(self, rows: list[int]) -> list[np.ndarray]:
        return [np.array(self._images[row]) for row in rows]

    @cached_property
    def labels(self) -> np.ndarray | None:
        found = self._read(self._options.label_column or "labels")
        return None if found is None else np.array(found[: len(self)], np.int64)

    @property
    def num_classes(self) -> int:
        return 0 if self.labels is None else int(self.labels.max()) + 1
