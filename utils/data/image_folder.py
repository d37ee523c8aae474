"""A folder of images, or a zip or tar archive of one, as a dataset: its splits, its metadata, and its classes.

- Sub-folders named train, validation or test (or as in `_SPLITS`) are splits, where there are no others beside them.
- metadata.csv, .jsonl or .parquet names images by the column `file_name`, relative to itself. Where there is one, the images
  are those that it names, and its other columns are columns of the dataset.
- Else the folders that hold the images are their classes, where there are several, all equally deep.

Rows are in the order of the metadata, else of the files' names. What is not used is counted and told.
"""

import io
import os
import posixpath
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import UserError, one_line
from utils.data.decode import image_suffixes
from utils.data.file_tree import FileTree, suffix_of
from utils.data.stored_files import is_address, read_address

if TYPE_CHECKING:
    import datasets

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {name: split for split, names in _SPLITS.items() for name in names}
_HINTS = dict.fromkeys((".heic", ".heif"), "needs pillow-heif") | dict.fromkeys(
    (".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar"), "unpack it"
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
        import datasets

        self._tree, self._source = tree, source
        self._images = tree.images()
        self._prefixes = {"all": ""} if split == "all" else prefixes or self._splits()
        self._metadata = self._read_metadata()
        self._named = None if self._metadata is None else self._metadata["file_name"].to_pylist()
        rows = {name: self._rows(prefix) for name, prefix in self._prefixes.items()}
        try:
            parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows[name]) for name in rows})
        except (ValueError, AssertionError) as error:
            raise UserError(
                f"cannot use --dataset_split {split}: {' '.join(str(error).split())}\nthe folder has: {', '.join(rows)}"
            ) from None
        used = {part.splitname for part in parts}
        shown = {name for split in used for _, name in rows[split]}
        self.notes = self._describe({name: len(found) for name, found in rows.items()}, used, shown)
        if not shown:
            raise UserError(f"{source} has no images" + "".join(f"; {note}" for note in self.notes) + "\ncheck the path")
        classes = self._classes(used) if self._metadata is None else None
        tables = [self._table(rows[part.splitname][part.from_ : part.to], classes) for part in parts]
        self.dataset = datasets.concatenate_datasets(tables)

    def _splits(self) -> dict[str, str]:
        """Split -> the prefix of its files' names: of the folders that are splits, or train -> all."""
        base = ""
        while self._images:
            tops = {name[len(base) :].split("/")[0] if "/" in name[len(base) :] else "" for name in self._images}
            found = {_SPLIT_OF.get(top.lower(), ""): f"{base}{top}/" for top in sorted(tops)}
            if "" not in found and "train" in found and len(found) == len(tops):
                return {split: found[split] for split in _SPLITS if split in found}
            if len(tops) > 1 or "" in tops:
                break
            base += f"{tops.pop()}/"
        return {"train": ""}

    def _rows(self, prefix: str) -> list[tuple[int, str]]:
        """(row of the metadata, name) of the images whose names begin with `prefix`."""
        names = self._images if self._named is None else self._named
        return [(row, name) for row, name in enumerate(names) if name.startswith(prefix)]

    def _classes(self, used: set[str]) -> dict[str, int] | None:
        """Name of a folder -> its class. Other splits as deep have the same classes, with the same numbers."""
        folders = {
            split: {posixpath.dirname(name[len(prefix) :]) for name in self._images if name.startswith(prefix)}
            for split, prefix in self._prefixes.items()
        }
        deep = {_depth(folder) for split in used for folder in folders[split]}
        if len(deep) > 1:
            self.notes.append("the folders do not become classes, because their images are not equally deep below the folder")
        if len(deep) > 1 or deep == {0}:
            return None
        names = sorted({posixpath.basename(folder) for part in folders.values() for folder in part if _depth(folder) in deep})
        return {name: number for number, name in enumerate(names)} if len(names) > 1 else None

    def _table(self, rows: list[tuple[int, str]], classes: dict[str, int] | None) -> "datasets.Dataset":
        import datasets
        import pyarrow as pa

        try:
            paths = pa.array([self._path(name, row) for row, name in rows], pa.string())
        except UnicodeEncodeError as error:
            raise UserError(f"{self._source}: the file name {error.object!r} is not UTF-8\nrename this file") from None
        image = pa.StructArray.from_arrays([pa.nulls(len(rows), pa.binary()), paths], ["bytes", "path"])
        columns: dict[str, Any] = {"image": image}
        features = datasets.Features({"image": datasets.Image()})
        if classes is not None:
            columns["label"] = pa.array([classes[posixpath.basename(posixpath.dirname(name))] for _, name in rows], pa.int64())
            features["label"] = datasets.ClassLabel(names=list(classes))
        if self._metadata is not None:
            kept = self._metadata.drop_columns(list({"file_name", "image"} & set(self._metadata.column_names)))
            chosen = kept.take(pa.array([row for row, _ in rows], pa.int64()))
            columns |= {name: chosen.column(name) for name in chosen.column_names}
            features |= datasets.Features.from_arrow_schema(chosen.schema)
        table = datasets.table.InMemoryTable(pa.table(columns))
        return datasets.Dataset(table.cast(features.arrow_schema), info=datasets.DatasetInfo(features=features))

    def _path(self, name: str, row: int) -> str:
        return self._tree.paths.get(name) or self._beside[row]

    def _describe(self, found: dict[str, int], used: set[str], shown: set[str]) -> list[str]:
        """What is used, and what is left out and why."""
        notes = []
        if len(found) > 1:
            counts = " and ".join(f"{self._prefixes[split]} ({found[split]:,} images)" for split in found)
            chosen = " and ".join(split for split in found if split in used)
            notes.append(f"{counts} are splits; used: {chosen} (--dataset_split chooses; all: everything)")
        elsewhere = tuple(prefix for split, prefix in self._prefixes.items() if split not in used)
        suffixes, left_out = image_suffixes(), Counter(self._tree.left_out)
        for name in sorted(self._tree.paths.keys() - shown):
            if not name.startswith(elsewhere) and not _is_metadata(name):
                suffix = suffix_of(name)
                left_out["not in the metadata" if suffix in suffixes else suffix or "without a suffix"] += 1
        if left_out:
            hints = {reason: f" ({_HINTS[reason]})" for reason in left_out.keys() & _HINTS.keys()}
            listed = ", ".join(f"{count:,} {reason}{hints.get(reason, '')}" for reason, count in left_out.most_common())
            whole = len(shown & self._tree.paths.keys())
            notes.append(f"{whole:,} of {whole + left_out.total():,} files used: {listed}")
        return notes

    def _read_metadata(self) -> Any:
        """All rows of the metadata as a `pyarrow.Table`, with `file_name` relative to the root; None where there is none.

        The files that it names and that are not there get a path, too: they are told as images that cannot be decoded.
        """
        import pyarrow as pa

        tables: list[Any] = []
        self._beside: list[str] = []  # of each row, where its file should be
        for name in sorted(filter(_is_metadata, self._tree.paths)):
            path = self._tree.paths[name]
            try:
                table = _read_table(path, suffix_of(name))
                files = table["file_name"].to_pylist()
            except KeyError:
                raise UserError(
                    f"{path} has no column file_name\n"
                    f"name the column of the files file_name; its columns: {', '.join(table.column_names)}"
                ) from None
            except Exception as error:  # pyarrow has many
                raise UserError(f"cannot read {path}: {one_line(error)}\nrepair or remove this file") from error
            for row, file in enumerate(files):
                if not isinstance(file, str) or is_address(file) or posixpath.normpath(file).startswith(("/", "..")):
                    raise UserError(
                        f"{path}, row {row}: file_name is {file!r}, which is not a file in the same folder\n"
                        "use paths relative to that folder"
                    )
            files = [posixpath.normpath(file) for file in files]
            self._beside += [_sibling(path, file) for file in files]
            files = [posixpath.join(posixpath.dirname(name), file) for file in files]
            tables.append(table.set_column(table.column_names.index("file_name"), "file_name", pa.array(files, pa.string())))
        try:
            return pa.concat_tables(tables, promote_options="permissive") if tables else None
        except pa.ArrowException as error:
            raise UserError(
                f"the metadata files in {self._source} have columns of different types: {one_line(error)}\n"
                "give equal columns equal types"
            ) from error


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _is_metadata(name: str) -> bool:
    return posixpath.basename(name) in _METADATA


def _sibling(path: str, name: str) -> str:
    """What reads the file `name` beside the file that `path` reads."""
    if not is_address(path):
        return os.path.join(os.path.dirname(path), name)
    kind, _, rest = path.partition("://")
    member, _, archive = rest.rpartition("::")
    return f"{kind}://{posixpath.join(posixpath.dirname(member), name)}::{archive}"


def _read_table(path: str, suffix: str) -> Any:
    from pyarrow import csv, json, parquet

    file = io.BytesIO(read_address(path) if is_address(path) else Path(path).read_bytes())
    if suffix == ".parquet":
        return parquet.read_table(file)
    if suffix == ".jsonl":
        return json.read_json(file, read_options=json.ReadOptions(block_size=len(file.getbuffer()) + 1))
    return csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True))
