"""Whether the images that a dataset keeps in memory change while it is read, as an augmentation in place changes them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

ROWS, VALUES = 32, 256  # that are compared, and of each row
MOST_BYTES = 1 << 28  # of the images: their sum is compared, too
MOST_PARTS = 64  # of an object that holds a dataset's images
ALIKE = 0.9  # correlation of an image with itself after a change of its contrast
DEEP = 3  # datasets within datasets


class StoredImages:
    """What a dataset had when its second pass began: then all of it was read once, and whatever it keeps was filled."""

    def __init__(self, dataset: Any):
        self._kept = [(images, _sample(images), _sum(images)) for images in _images_of(dataset)]

    def changed(self) -> bool:
        """Whether most rows have other values, which are not those of other rows: a set may be put into another order."""
        for images, before, total in self._kept:
            now = _sample(images)
            filled = before.any(1)  # else it was empty
            others = (now != before).any(1) & filled
            mended = 2 * others.sum() > filled.sum() and not np.isclose(_sum(images), total, 1e-9, 0)
            if mended and 2 * _follow(before[others], now[others]).sum() > others.sum():
                return True
        return False


def _follow(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Which rows are still what they were, but for contrast and brightness, bool [rows]: others are made anew on purpose."""
    parts = [values - values.mean(1, keepdims=True) for values in (before, now)]
    sizes = np.prod([np.linalg.norm(part, axis=1) for part in parts], axis=0)
    return (parts[0] * parts[1]).sum(1) > ALIKE * sizes


def _images_of(dataset: Any, deep: int = DEEP) -> Iterator[Any]:
    """Arrays, tensors and lists of them with a row for each image: of its attributes, and of what its functions refer to."""
    try:
        count = len(dataset)
    except TypeError:
        return
    cells = getattr(getattr(type(dataset), "__getitem__", None), "__closure__", None) or ()
    values = [*getattr(dataset, "__dict__", {}).values(), *(cell.cell_contents for cell in cells)]
    for value in values[:MOST_PARTS]:
        for part in value if isinstance(value, tuple) and len(value) < MOST_PARTS else (value,):
            if _has_rows(part, count):
                yield part
            elif deep and hasattr(part, "__getitem__") and hasattr(part, "__len__") and hasattr(part, "__dict__"):
                yield from _images_of(part, deep - 1)


def _has_rows(value: Any, count: int) -> bool:
    """Whether these are the images themselves, and not too many to sum them up."""
    if not isinstance(value, (list, np.ndarray, torch.Tensor)) or isinstance(value, np.memmap) or count < 2:
        return False
    if getattr(value, "ndim", 1) == 0 or len(value) != count:
        return False
    first = value[0]
    return isinstance(first, (np.ndarray, torch.Tensor)) and first.ndim > 1 and count * first.nbytes < MOST_BYTES


def _sample(images: Any) -> np.ndarray:
    """[rows, values], of rows that are spread over all."""
    places = np.linspace(0, len(images) - 1, ROWS).astype(int)
    rows = [np.asarray(images[int(place)], dtype=np.float64).reshape(-1) for place in places]
    size = min(VALUES, min(map(len, rows)))
    return np.stack([row[np.linspace(0, len(row) - 1, size).astype(int)] for row in rows])


def _sum(images: Any) -> float:
    parts = images if isinstance(images, list) else [images]
    return float(sum(np.asarray(part).sum(dtype=np.float64) for part in parts))
