"""The columns of a `datasets.Dataset`, in words, and its labels."""

import re
from collections.abc import Iterable
from typing import Any

import datasets
import numpy as np
from pyarrow import compute

from utils.core.errors import UserError

_SPLIT_NAMES = ("split", "subset", "partition", "fold", "is_train")  # of columns that say what to train on
LABEL_NAMES = ("label", "labels", "fine_label", "coarse_label", "class", "class_id", "cls", "target", "category")

Labels = tuple[np.ndarray | None, list[str] | None, list[str]]  # as `find_labels` returns them
_LISTED = 40  # columns that a message lists
_FEW = 5  # images of a class, below which a user is warned
_SEVERAL = 10  # classes, up to which there may be that few


def describe_columns(dataset: datasets.Dataset) -> str:
    """ "image (Image), label (ClassLabel of 10)", for error messages."""
    listed = [f"{name} ({_type_name(feature)})" for name, feature in list(dataset.features.items())[:_LISTED]]
    return ", ".join(listed) + f", ... ({len(dataset.features):,} columns)" * (len(dataset.features) > _LISTED)


def _type_name(feature: object) -> str:
    if isinstance(feature, datasets.ClassLabel):
        return f"ClassLabel of {feature.num_classes}"
    if isinstance(feature, datasets.Value):
        return feature.dtype
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return f"list of {number_type(feature) or _type_name(feature.feature)}"
    return f"struct of {', '.join(feature)}" if isinstance(feature, dict) else type(feature).__name__


def _is_word(feature: object) -> bool:
    """Whether a cell is one text, number or boolean."""
    return isinstance(feature, (datasets.Value, datasets.ClassLabel)) and "binary" not in str(feature.dtype)


def _is_text(feature: object) -> bool:
    return isinstance(feature, datasets.Value) and "string" in feature.dtype


def find_labels(dataset: datasets.Dataset, requested: str | None = None) -> Labels:
    """Returns labels int64 [rows] or None, names of the classes or None, and notes. Labels are -1 for no class, else from 0 on.

    Without a request the first of these is taken that has classes: a `ClassLabel` column, integers with a usual name, strings
    with a usual name where each class has two images on average, other numbers with a usual name, booleans with one. The
    classes are the sorted distinct values, which are their names where they are not 0, 1, 2 and so on; of one-hot rows the
    places.

    Raises:
        UserError: no such column, or a requested one that has no usable labels.
    """
    features = dataset.features
    if requested is not None and requested not in features:
        raise UserError(f"--label_column {requested}: the dataset has no such column\nits columns: {describe_columns(dataset)}")
    if requested is not None:
        groups = [[requested]]
    else:
        usual = usual_labels(features)
        groups = [
            [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)],
            [name for name in usual if is_number(features[name]) and "int" in str(getattr(features[name], "dtype", ""))],
            [name for name in usual if _repeats(dataset, name)],
            [name for name in usual if is_number(features[name]) and "int" not in str(getattr(features[name], "dtype", ""))],
            [name for name in usual if getattr(features[name], "dtype", "") == "bool"],
        ]
        first = {name for group in groups for name in group}
        groups.append([name for name in usual if name not in first and not isinstance(features[name], datasets.Image)])
    notes: list[str] = []
    for group in groups:
        for name in group:
            column = dataset.select_columns([name]).with_format("arrow")[:].column(name)
            try:
                if requested is None and _is_text(features[name]) and not _repeats(dataset, name):
                    raise ValueError("its words hardly repeat (--label_column uses it)")
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


def about_splits(dataset: datasets.Dataset) -> list[str]:
    """What a user should know of columns that seem to say which rows to train on."""
    features = {name: feature for name, feature in dataset.features.items() if name.lower() in _SPLIT_NAMES}
    usual = dataset.select_columns([name for name in features if _is_word(features[name])]).with_format("arrow")
    several = [name for name in usual.column_names if len(usual[:].column(name).unique()) > 1]
    return [f"the column {name!r} is not used: the rows of all its values are trained on" for name in several]


def usual_labels(features: Iterable[str]) -> list[str]:
    """Returns those names of columns that are usual for labels, in capitals or not, the most usual ones first."""
    return sorted((name for name in features if name.lower() in LABEL_NAMES), key=lambda name: LABEL_NAMES.index(name.lower()))


def _about(labels: np.ndarray, class_names: list[str] | None, name: str, feature: object, requested: str | None) -> list[str]:
    """What a user should know of the classes of a column."""
    notes = []
    without, classes = int((labels < 0).sum()), len(np.unique(labels[labels >= 0]))
    if without:
        notes.append(f"{without:,} of {len(labels):,} images have no label, and are trained without a class")
    if class_names is not None and not isinstance(feature, datasets.ClassLabel) and (requested is None or is_number(feature)):
        choice = "" if requested is not None else " (--label_column chooses)"
        notes.append(f"the {len(class_names):,} values of the column {name!r} become classes{choice}")
    if class_names is not None and 2 * classes < len(class_names):
        notes.append(f"{len(class_names) - classes:,} of the {len(class_names):,} classes of {name!r} have no image")
    if classes > _SEVERAL and classes * _FEW > len(labels) - without:
        notes.append(
            f"warning: {classes:,} classes for {len(labels) - without:,} images: few can be learned of so few images each"
        )
    return notes


def number_type(feature: object) -> str | None:
    """The type of the numbers in lists, lists of lists and so on; None for other features."""
    depth = 0
    while isinstance(feature, (datasets.List, datasets.LargeList)):
        feature, depth = feature.feature, depth + 1
    dtype = feature.dtype if depth and isinstance(feature, datasets.Value) else ""
    return dtype if re.fullmatch(r"u?int\d+|float\d+|bool", dtype) else None


def is_number(feature: object) -> bool:
    """Whether values are numbers, or lists of them or of booleans."""
    kinds = "int|float|decimal"
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        feature, kinds = feature.feature, f"{kinds}|bool"
    return isinstance(feature, datasets.Value) and re.search(kinds, feature.dtype) is not None


def _classes_of(column: Any, feature: object) -> tuple[np.ndarray, list[str] | None]:
    """Labels and names of classes as `find_labels` returns them. Raises ValueError, saying why they are none."""
    of_lists = isinstance(feature, (datasets.List, datasets.LargeList))
    if not _is_word(feature.feature if of_lists else feature):  # type: ignore[attr-defined]
        raise ValueError(f"{_type_name(feature)} values cannot be labels (numbers, strings and booleans can)")
    cells: list[Any] = column.to_pylist()
    if of_lists and all(len(cell or ()) <= 1 for cell in cells):
        cells, feature = [cell[0] if cell else None for cell in cells], feature.feature  # type: ignore[attr-defined]
    if is_number(feature) or isinstance(feature, datasets.ClassLabel):
        values = whole_numbers(cells)
        known = values != -1
    elif _is_text(feature) or (isinstance(feature, datasets.Value) and feature.dtype == "bool"):
        values = np.array([str(cell).strip() for cell in cells])
        known = np.array([cell is not None and str(cell).strip() != "" for cell in cells])
    else:
        raise ValueError(f"{_type_name(feature)} values cannot be labels (numbers, strings and booleans can)")
    if not known.any():
        raise ValueError("no row has a label")
    if isinstance(feature, datasets.ClassLabel):
        return np.where(known, values, -1).astype(np.int64), list(feature.names)
    return classes_of(values, known)


def whole_numbers(cells: list[Any]) -> np.ndarray:
    """Returns int64 [N]: the number in each cell, or in its list as `_of_lists` reads it; -1 for none. Raises ValueError."""
    single: list[Any] = _of_lists(cells) if any(isinstance(cell, list) for cell in cells) else cells
    known = [-1 if cell is None or cell != cell else cell for cell in single]  # NaN is not itself
    if (odd := next((cell for cell in known if abs(cell) >= 2**63 or cell != int(cell)), None)) is not None:
        raise ValueError(f"{odd:g} is no class (whole numbers below 2^63 are)")
    return np.array(known, np.int64)


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


def _repeats(dataset: datasets.Dataset, name: str) -> bool:
    """Whether a column of strings has at most half as many distinct values as rows."""
    if not _is_text(dataset.features[name]):
        return False
    words = compute.utf8_trim_whitespace(dataset.select_columns([name]).with_format("arrow")[:].column(name).drop_null())
    words = words.filter(compute.not_equal(words, ""))
    return 0 < 2 * len(words.unique()) <= len(words)
