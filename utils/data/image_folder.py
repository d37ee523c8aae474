"""A folder of images, or a zip or tar archive of one, as a dataset: its splits, its metadata, and its classes.

- Sub-folders named train, validation or test (or as in `_SPLITS`) are splits, where there are no others beside them.
- metadata.csv, .jsonl or .parquet names images by the column `file_name`, relative to itself. Where there is one, the images
  are those that it names, and its other columns are columns of the dataset. So does a dataset.json of NVlabs' tools.
- Else the folders that divide the images are their classes, where there are several, all equally deep; but not folders that are
  numbered as parts of one set are.

Rows are in the order of the metadata, else of the files' names. What is not used is counted and told.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import pyarrow as pa

from utils.core.errors import UserError
from utils.data.decode import image_suffixes
from utils.data.file_tree import FileTree, FolderTable, suffix_of

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_LISTED, _SHOWN = 20, 5  # missing names, and folders, that a note has
_SPLIT_COLUMN = "split"  # of metadata
_PARTS = re.compile(r"(part|shard|chunk|batch)[-_ ]?\d+", re.IGNORECASE)
_SPLIT_OF = {name: split for split, names in _SPLITS.items() for name in names}
_HINTS = (
    dict.fromkeys((".heic", ".heif"), "needs pillow-heif")
    | dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar"), "unpack it")
    | dict.fromkeys((".csv", ".tsv"), "tables are read as metadata.csv with a column file_name")
    | dict.fromkeys((".mdb", ".tfrecord"), "export its images to files")
)


class ImageFolder:
    """The images among the files of `tree`.

    Args:
        source: what messages call it.
        split: as `datasets` writes it: train, test[:100], train+test, ...; all: everything, whatever the folders are called.
        prefixes: split -> how the names of its files begin, where that is known.

    Attributes:
        dataset: a `datasets.Dataset` with the columns `image` and, where there are classes, `label`; or those of the metadata.
        notes: what a user should know of what is used, and what not.

    Raises:
        UserError: no images, no such split, or metadata that cannot be used.
    """

    def __init__(self, tree: FileTree, source: str, split: str, prefixes: dict[str, str] | None = None):
        self._tree, self._source = tree, source
        self._images = tree.images()
        self._prefixes = {"all": ""} if split == "all" else prefixes or self._splits()
        self._beside = FolderTable(tree, source)
        self._metadata = self._beside.table
        self._named = None if self._metadata is None else self._metadata["file_name"].to_pylist()
        rows = {name: self._rows(prefix) for name, prefix in self._prefixes.items()}
        if list(rows) == ["train"] and "train" in (column := self._column_of_splits()) and "" not in column:
            rows = {s: [row for row, own in zip(rows["train"], column) if own == s] for s in _SPLITS if s in column}
            self._prefixes = {split: f"{split!r} in the column {_SPLIT_COLUMN!r}" for split in rows}
        try:
            parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows[name]) for name in rows})
        except (ValueError, AssertionError) as error:
            raise UserError(
                f"cannot use --dataset_split {split}: {' '.join(str(error).split())}\nthe folder has: {', '.join(rows)}"
            ) from None
        used = {part.splitname for part in parts}
        shown = {name for split in used for _, name in rows[split]}
        self.notes = self._describe(rows, used, shown)
        if not shown:
            hint = "image files end in .png, .jpg or the like; tables (.parquet) and arrays (.npz) go to --dataset_name"
            hint = hint if any(" files used" in note for note in self.notes) else "check the path"
            raise UserError(f"{source} has no images" + "".join(f"; {note}" for note in self.notes) + f"\n{hint}")
        self._names = [name for part in parts for _, name in rows[part.splitname][part.from_ : part.to]]
        self.notes += filter(None, [self.missing()])
        classes = self._classes(rows, used) if self._metadata is None else None
        tables = [self._table(rows[part.splitname][part.from_ : part.to], classes) for part in parts]
        self.dataset = datasets.concatenate_datasets(tables)

    def missing(self, most: int | None = None) -> str | None:
        """Which names of the first `most` rows no file has, in words."""
        found = list(dict.fromkeys(name for name in self._names[:most] if name not in self._tree.paths))
        listed = ", ".join(found[:_LISTED]) + ", ..." * (len(found) > _LISTED)
        files = "1 file of the metadata is" if len(found) == 1 else f"{len(found):,} files of the metadata are"
        return f"{files} not there: {listed}" if found else None

    def _splits(self) -> dict[str, str]:
        """Split -> the prefix of its files' names: of the folders that are splits, or train -> all."""
        base = ""
        while self._images:
            tops = {name[len(base) :].split("/")[0] if "/" in name[len(base) :] else "" for name in self._images}
            found = {_split_of(top): f"{base}{top}/" for top in sorted(tops)}
            if "" not in found and "train" in found and len(found) == len(tops):
                return {split: found[split] for split in _SPLITS if split in found}
            if len(tops) > 1 or "" in tops:
                break
            base += f"{tops.pop()}/"
        return {"train": ""}

    def _column_of_splits(self) -> list[str]:
        """The split of each row of the metadata, "" where none is meant; [] where there is no such column."""
        column = _SPLIT_COLUMN if self._metadata is not None and _SPLIT_COLUMN in self._metadata.column_names else None
        return [_split_of(str(value)) for value in self._metadata[column].to_pylist()] if column else []

    def _rows(self, prefix: str) -> list[tuple[int, str]]:
        """(row of the metadata, name) of the images whose names begin with `prefix`."""
        names = self._images if self._named is None else self._named
        return [(row, name) for row, name in enumerate(names) if name.startswith(prefix)]

    def _classes(self, rows: dict[str, list[tuple[int, str]]], used: set[str]) -> dict[str, int] | None:
        """Name of a folder -> its class. Other splits as deep have the same classes, with the same numbers."""
        starts = {split: len(prefix) for split, prefix in self._prefixes.items()}
        folders = {split: {posixpath.dirname(name[starts[split] :]) for _, name in found} for split, found in rows.items()}
        deep = {_depth(folder) for split in used for folder in folders[split]}
        if len(deep) > 1:
            self.notes.append("the folders do not become classes, because their images are not equally deep below the folder")
        if len(deep) > 1 or deep == {0}:
            return None
        paths = [folder.split("/") for part in folders.values() for folder in part if _depth(folder) in deep]
        levels = [sorted(set(level)) for level in zip(*(path[::-1] for path in paths))]  # the deepest one first
        dividing = {n: level for n, level in enumerate(levels, 1) if len(level) > 1}
        self._above = next((n for n, level in dividing.items() if not all(map(_split_of, level))), 0)  # cat/train, cat/val
        names = dividing.pop(self._above, [])
        self.notes += _about_levels(names, [level for level in dividing.values() if level != names])
        counts = Counter(self._class_name(name) for split in used for _, name in rows[split]) if names else Counter()
        if are_parts := _are_parts(counts, lambda: self._are_described(rows, used)):
            self.notes.append(f"the folders {names[0]} to {names[-1]} look like parts of one set, and do not become classes")
        return None if are_parts or not names else {name: number for number, name in enumerate(names)}

    def _class_name(self, name: str) -> str:
        """The deepest folder that divides the images: of n01/images/a.png and n02/images/b.png, n01 and n02."""
        return name.split("/")[-1 - self._above]

    def _are_described(self, rows: dict[str, list[tuple[int, str]]], used: set[str]) -> bool:
        """Whether beside each image, or beside each folder of them, is a file of its name, as downloads leave it."""
        names = {name for split in used for _, name in rows[split]}
        others = {posixpath.splitext(name)[0].removesuffix("_stats") for name in self._tree.paths.keys() - names}
        folders = {name.rsplit("/", self._above)[0] for name in names} if self._above else {""}
        return folders <= others or {posixpath.splitext(name)[0] for name in names} <= others

    def _table(self, rows: list[tuple[int, str]], classes: dict[str, int] | None) -> datasets.Dataset:
        try:
            found = [self._tree.paths[name] if self._metadata is None else self._beside.paths[row] for row, name in rows]
            paths = pa.array(found, pa.string())
        except UnicodeEncodeError as error:
            raise UserError(f"{self._source}: the file name {error.object!r} is not UTF-8\nrename this file") from None
        image = pa.StructArray.from_arrays([pa.nulls(len(rows), pa.binary()), paths], ["bytes", "path"])
        columns: dict[str, Any] = {"image": image}
        features = datasets.Features({"image": datasets.Image()})
        if classes is not None:
            columns["label"] = pa.array([classes[self._class_name(name)] for _, name in rows], pa.int64())
            features["label"] = datasets.ClassLabel(names=list(classes))
        if self._metadata is not None:
            kept = self._metadata.drop_columns(list({"file_name", "image"} & set(self._metadata.column_names)))
            chosen = kept.take(pa.array([row for row, _ in rows], pa.int64()))
            columns |= {name: chosen.column(name) for name in chosen.column_names}
            features |= datasets.Features.from_arrow_schema(chosen.schema)
        table = datasets.table.InMemoryTable(pa.table(columns))
        return datasets.Dataset(table.cast(features.arrow_schema), info=datasets.DatasetInfo(features=features))

    def _describe(self, rows: dict[str, list[tuple[int, str]]], used: set[str], shown: set[str]) -> list[str]:
        """What is used, and what is left out and why."""
        notes = [*self._beside.notes]
        if len(rows) > 1:
            counts = " and ".join(f"{self._prefixes[split]} ({len(found):,} images)" for split, found in rows.items())
            chosen = " and ".join(split for split in rows if split in used)
            notes.append(f"{counts} are splits; used: {chosen} (--dataset_split chooses; all: everything)")
        if self._metadata is None and (masks := self._tree.masks() & shown):
            notes.append(f"{len(masks):,} images that are called masks of others are used, such as {min(masks)}")
        if self._metadata is None and shown and len(folders := _folders(shown)) > 1:
            listed = ", ".join(f"{folder} ({count:,})" for folder, count in sorted(folders.items())[:_SHOWN])
            more = ", ..." * (len(folders) > _SHOWN)
            notes.append(f"images of {len(folders):,} folders are used: {listed}{more}; to use one alone, give that folder")
        elsewhere = tuple(prefix for split, prefix in self._prefixes.items() if split not in used)
        suffixes, left_out = image_suffixes(), Counter(self._tree.left_out)
        for name in sorted(self._tree.paths.keys() - {name for found in rows.values() for _, name in found}):
            if not name.startswith(elsewhere) and name not in self._beside.files:
                suffix = suffix_of(name)
                about = "masks of other images" if self._metadata is None else "not in the metadata"
                left_out[about if suffix in suffixes else suffix or "without a suffix"] += 1
        if left_out:
            hints = {reason: f" ({_HINTS[reason]})" for reason in left_out.keys() & _HINTS.keys()}
            listed = ", ".join(f"{count:,} {reason}{hints.get(reason, '')}" for reason, count in left_out.most_common())
            whole = len(shown & self._tree.paths.keys())
            notes.append(f"{whole:,} of {whole + left_out.total():,} files used; left out: {listed}")
        return notes


def _split_of(folder: str) -> str:
    """The split that a folder's name means, such as train2017 or val_256; "" for others."""
    return _SPLIT_OF.get(re.sub(r"[\W\d_]+$", "", folder.lower()), "")


def _folders(names: set[str]) -> Counter[str]:
    """How many of these files each folder has, of the first level that divides them; "." has those beside the folders."""
    base = posixpath.join(posixpath.commonpath([posixpath.dirname(name) for name in names]), "")
    return Counter(rest.split("/")[0] if "/" in (rest := name[len(base) :]) else "." for name in names)


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _about_levels(names: list[str], others: list[list[str]]) -> list[str]:
    """What a user should know of the folders `names`, which are classes, and of those of other levels, which are none."""
    listed = [", ".join(level[:_SHOWN]) for level in others]
    if not names:
        return [f"the folders {other} become no classes" for other in listed]
    become = f"the folders {', '.join(names[:_SHOWN])} become classes"
    return [f"{become}, and {other} do not: a metadata.csv with file_name and label gives others" for other in listed]


def _are_parts(counts: Counter[str], are_described: Callable[[], bool]) -> bool:
    """Whether folders with so many images are parts of one set, filled one after the other.

    Those of well-known tools have numbers of five digits, and are equally large but where `are_described`.
    """
    names = sorted(counts)
    if names and all(map(_PARTS.fullmatch, names)):
        return True
    if not names or not all(name.isdecimal() and len(name) == len(names[0]) for name in names):
        return False
    numbers, sizes = [int(name) for name in names], [counts[name] for name in names]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1  # 00000, 01000 have 1,000 each
    follow = numbers == list(range(numbers[0], numbers[0] + step * len(numbers), step)) and numbers[0] in (0, 1)
    alike = set(sizes[:-1]) == {sizes[0]} and sizes[-1] <= sizes[0]
    return len(names[0]) >= 5 and follow and (alike or are_described())
