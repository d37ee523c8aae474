"""Opens a dataset, wherever it is, as one `datasets.Dataset` plus a key that changes when its contents do.

`dataset_name` may be, in this order: "digits" (embedded in scikit-learn), a local folder written by `save_to_disk`, a
local data file, any local folder that `datasets` understands, or a name on the Hugging Face Hub. `train_data_dir` is
a folder of images, or an archive of one. Folders of images are read here, not by `datasets`, which leaves out files without
a word and cannot read the classes of archives. No code of a dataset is run: `datasets` since version 4 has no loading scripts.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from huggingface_hub import snapshot_download
from PIL import Image
from pyarrow.dataset import ParquetFragmentScanOptions

from utils.core.errors import UserError
from utils.core.hub import is_only_a_path, loading, no_such_path
from utils.data.file_tree import ABOUT_IMAGES, FileTree, archive_stem, decoded_text, mark_of, scan, suffix_of
from utils.data.image_folder import ImageFolder
from utils.options.flags import DataOptions
from utils.options.paths import DIGITS

_LONGEST_ROW = 1 << 20  # characters
_BUILDER_OF_SUFFIX = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".tar": "webdataset",
}
_TEXTS, _LONGEST_HEADER = (".csv", ".tsv"), 2**20  # whose first line tells how they are written; its bytes


@dataclasses.dataclass(frozen=True)
class OpenedDataset:
    """`dataset` is a `datasets.Dataset`; `key` names its contents; `description` and `notes` are for people. Relative paths in
    the dataset begin at `base`."""

    dataset: datasets.Dataset
    key: str
    description: str
    notes: list[str] = dataclasses.field(default_factory=list)
    base: str | None = None


def open_dataset(options: DataOptions) -> OpenedDataset:
    """Returns the dataset that the options name; `train_data_dir` is ignored beside a `dataset_name`.

    Raises:
        UserError: no such dataset, config, revision or split, or a folder without images.
    """
    dataset_name, dataset_split, description = options.dataset_name, options.dataset_split, _described(options)
    if dataset_name is None:
        if options.train_data_dir is None:
            raise UserError(
                "no dataset was given\nset --dataset_name (a Hub name, a local path or 'digits') or --train_data_dir"
            )
        return _open_image_folder(options, options.train_data_dir)
    if dataset_name == DIGITS:
        return _open_digits(dataset_split)
    path = Path(dataset_name)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _open_saved(path, dataset_split)
    if path.is_file() and path.suffix.lower() not in _BUILDER_OF_SUFFIX and archive_stem(path.name) is not None:
        return _open_image_folder(options, dataset_name)
    is_folder = path.is_dir() and options.dataset_config_name is None
    images, tables = _images_and_tables(path) if is_folder else (0, 0)
    if images and not tables:  # whatever else is there: `datasets` takes as many captions as images for a set of texts
        return _open_image_folder(options, dataset_name, description)
    try:
        builder, files = find_builder(options)
    except UserError:
        if is_folder and (images or not tables):  # without images, that says what is there instead
            return _open_image_folder(options, dataset_name, description)
        raise
    if is_folder and (builder.name == "imagefolder" or (images and builder.name not in _BUILDER_OF_SUFFIX.values())):
        return _open_image_folder(options, dataset_name, description)
    if builder.name == "imagefolder" and any(
        archive_stem(file) for part in builder.config.data_files.values() for file in part
    ):
        return _open_archives(builder, dataset_split, description)
    with loading(f"the dataset {dataset_name}", dataset_name, "dataset"):
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=dataset_split)
    return OpenedDataset(dataset, contents_key(files, dataset._fingerprint), description, base=_base(builder, dataset_split))


def find_builder(options: DataOptions) -> tuple[datasets.DatasetBuilder, list[Path]]:
    """What `datasets` found out about `dataset_name`, and its files on this machine. Raises UserError."""
    path = Path(str(options.dataset_name))
    files: list[Path] = []
    source: dict[str, Any]
    if path.is_file():
        builder_name = _BUILDER_OF_SUFFIX.get(path.suffix.lower())
        if builder_name is None:
            known = ", ".join([*_BUILDER_OF_SUFFIX, ".zip", ".npy", ".npz", ".h5"])
            raise UserError(
                f"cannot read --dataset_name {path}: its kind of file is not known\nuse a file that ends in one of {known}"
            )
        source = {"path": builder_name, "data_files": {"train": glob.escape(str(path))}}
        files = [path]
    elif path.is_dir():
        source = {"path": options.dataset_name, "name": options.dataset_config_name}
        files = _files_below(path)
        tables = [file for file in files if file.suffix in _BUILDER_OF_SUFFIX]
        tars = [file for file in tables if file.suffix == ".tar"]
        if len(tars) < len(tables) and {file.stem.removesuffix("_stats") for file in tables} <= {file.stem for file in tars}:
            # 00000.parquet and 00000_stats.json are about 00000.tar
            source = {"path": "webdataset", "data_files": {"train": [glob.escape(str(file)) for file in tars]}}
    elif _only_a_path(str(options.dataset_name)):
        name = str(options.dataset_name)
        raise UserError(f"--dataset_name {name}: {no_such_path(name, '--dataset_name')}")
    else:
        source = {"path": options.dataset_name, "name": options.dataset_config_name, "revision": options.dataset_revision}
    source["cache_dir"] = options.cache_dir
    with loading(f"the dataset {options.dataset_name}", str(options.dataset_name), "dataset"):
        builder = _builder(source, is_local=path.exists())
        if builder.name == "csv" and path.exists():
            dialects = [
                _dialect(str(f)) for part in builder.config.data_files.values() for f in part if suffix_of(str(f)) in _TEXTS
            ]
            if dialects and dialects[0] != {"sep": ","}:  # files of several dialects are told by `datasets`
                builder = _builder(source | dialects[0], is_local=True)
    if builder.name == "parquet":  # which else keeps in memory what it has read of a file, to its end
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    return builder, files


def _dialect(path: str) -> dict[str, Any]:
    """What `datasets` has to know of a file of csv or tsv: what stands between the columns, and the encoding."""
    with open(path, "rb") as file:
        header = file.readline(_LONGEST_HEADER)
        header += file.read(len(header) % 2) if b"\0" in header[:4] else b""  # the rest of a \n of two bytes
    text, encoding = decoded_text(header)
    named = re.match("sep=(.)", text)  # by which a spreadsheet knows the mark
    dialect = {"sep": named[1], "skiprows": 1} if named else {"sep": mark_of(text)}
    return dialect | ({"encoding": encoding} if encoding else {})


def _described(options: DataOptions) -> str:
    details = {"config": options.dataset_config_name, "split": options.dataset_split, "revision": options.dataset_revision}
    words = ", ".join(f"{name} {value}" for name, value in details.items() if value is not None)
    return f"{options.dataset_name} ({words})"


def _images_and_tables(folder: Path) -> tuple[int, int]:
    """How many images lie below a folder, and how many files that `datasets` reads as tables; not of a kind that stands beside
    images of the same names, nor what is about the images of its folder, or of one beside it, as 00000.json is."""
    tree, tables = FileTree(str(folder), opens_archives=False), 0
    tree.add_folder(str(folder))
    images = [posixpath.splitext(name)[0] for name in tree.all_images()]
    stems, with_images = set(images), {posixpath.dirname(stem) for stem in images}
    beside = {(posixpath.dirname(name), suffix_of(name)) for name in tree.paths if posixpath.splitext(name)[0] in stems}
    folders = {name[: slash.start()] for name in tree.paths for slash in re.finditer("/", name)}
    for name in tree.paths:
        place, suffix = posixpath.dirname(name), suffix_of(name)
        if suffix in _BUILDER_OF_SUFFIX and (place, suffix) not in beside:
            stem = posixpath.basename(name)[: -len(suffix)]
            about = {stem, stem.split("_")[0]}
            if not about & ABOUT_IMAGES and not folders & {posixpath.join(place, each) for each in about}:
                tables += place not in with_images or suffix != ".json" or _has_rows(os.path.join(folder, name))
    return len(images), tables


def _has_rows(file: str) -> bool:
    """Whether a JSON file is a list, or has an object in each line; one object is about the images, as COCO's."""
    with open(file, encoding="utf-8", errors="replace") as text:
        first, second = text.readline(_LONGEST_ROW).strip(), text.readline(_LONGEST_ROW).strip()
    return first.startswith("[") or (first.endswith("}") and second.startswith("{"))


def _only_a_path(name: str) -> bool:
    """Whether this cannot be meant as a name on the Hub."""
    files = {*_BUILDER_OF_SUFFIX, ".zip", ".npy", ".npz", ".h5", ".hdf5"} - {".json", ".csv"}  # these two end names of the Hub
    return is_only_a_path(name) or Path(name).suffix.lower() in files


def _base(builder: datasets.DatasetBuilder, split: str) -> str | None:
    """The folder of the files that a split is made of, on this machine or at the Hub."""
    data_files = builder.config.data_files or {}  # of what an offline machine has prepared none are known
    files = [file for name, some in data_files.items() if name in _split_names(split) for file in some]
    if not files:
        return None
    scheme = files[0].rpartition("://")[0]
    base = os.path.commonpath([os.path.dirname(file.rpartition("://")[2]) for file in files])
    return f"{scheme}://{base}" if scheme else base


def _split_names(split: str) -> list[str]:
    """The names in what `datasets` calls a split: train, train[:10%], train+test, ..."""
    return re.findall(r"(?:^|\+)\s*([\w.]+)", split)


def _builder(source: dict[str, Any], is_local: bool) -> datasets.DatasetBuilder:
    """What `datasets` found out about the data; without a network, of what was downloaded earlier."""
    try:
        return datasets.load_dataset_builder(**source)
    except ConnectionError:  # nothing that `datasets` prepared; perhaps an image folder, which it does not
        if is_local:
            raise
        try:
            revision = source.get("revision")
            folder = snapshot_download(source["path"], repo_type="dataset", revision=revision, local_files_only=True)
            return datasets.load_dataset_builder(**source | {"path": folder, "revision": None})
        except Exception:  # the first error says more
            pass
        raise


def _open_archives(builder: Any, split: str, description: str) -> OpenedDataset:
    """An image folder that consists of archives, of the Hub."""
    manager = datasets.DownloadManager(dataset_name=builder.dataset_name, download_config=datasets.DownloadConfig())
    tree, prefixes = FileTree(str(builder.hash)), {}
    for name, files in builder.config.data_files.items():
        if split != "all" and name not in _split_names(split):
            continue
        with loading(f"the dataset {description}", description, "dataset"):
            places = manager.download(list(files))
        base = posixpath.commonpath([posixpath.dirname(file) for file in files])
        for file, place in zip(files, places):
            inside = f"{name}/{posixpath.relpath(file, base)}"
            if (stem := archive_stem(inside)) is not None:
                tree.add_archive(place, stem + "/", kind=suffix_of(inside)[1:])
            else:
                tree.add_file(inside, place, os.stat(place))
        folders = {posixpath.dirname(image) for image in tree.images() if image.startswith(f"{name}/")}
        prefixes[name] = f"{posixpath.commonpath(folders)}/" if folders else f"{name}/"
    if not prefixes:
        splits = ", ".join(map(repr, builder.config.data_files))
        raise UserError(f"--dataset_split {split}: {description} has no such split\nchoose from {splits}")
    images = ImageFolder(tree, description, split, prefixes)
    return OpenedDataset(images.dataset, tree.key(split), description, images.notes)


def _open_image_folder(options: DataOptions, folder: str, description: str | None = None) -> OpenedDataset:
    tree = scan(folder)
    images = ImageFolder(tree, folder, options.dataset_split)
    if options.on_bad_image == "fail" and (missing := images.missing(options.max_train_images)):
        others = [note for note in images.notes if note not in (missing, images.missing())]  # one may be on a wrong encoding
        how = "".join(f"; {note}" for note in others)
        raise UserError(f"{missing}{how}\nrepair the metadata, or use --on_bad_image replace")
    return OpenedDataset(images.dataset, tree.key(options.dataset_split), description or folder, images.notes)


def _open_saved(path: Path, split: str) -> OpenedDataset:
    with loading(f"the dataset {path}", str(path), "dataset"):
        saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise UserError(f"--dataset_split {split}: {path} has no such split\nchoose from {', '.join(map(repr, splits))}")
    key = contents_key(_files_below(path), split)
    return OpenedDataset(splits[split], key, f"{path} (split {split})", base=os.path.abspath(path))


@functools.cache
def _open_digits(split: str) -> OpenedDataset:
    """1,797 scans of handwritten digits, 8x8, values 0..16 (UCI "Optical Recognition of Handwritten Digits")."""
    from sklearn.datasets import load_digits

    if split != "train":
        raise UserError(
            f"--dataset_split {split}: digits has no such split\nleave --dataset_split out: digits has only 'train'"
        )
    scans, labels = load_digits(return_X_y=True)
    pixels = np.rint(scans.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    names = [str(digit) for digit in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": [Image.fromarray(scan) for scan in pixels], "label": labels}
    key = hashlib.sha256(pixels.tobytes() + labels.astype(np.int64).tobytes()).hexdigest()
    return OpenedDataset(datasets.Dataset.from_dict(rows, features=features), key, "digits (scikit-learn's handwritten digits)")


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def contents_key(files: list[Path], fingerprint: str) -> str:
    """Returns what changes with any file's path, size or time of change, and with what `datasets` knows about the data.

    For `load_dataset` that is a hash of the builder's name, config, version, data files (of the Hub: its commit) and
    split, equal in every process.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for path in files:
        status = path.stat()
        digest.update(f"\0{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def hub_name(dataset_name: str | None) -> str | None:
    """`dataset_name` where it means a dataset of the Hub, for the model card; None for local data and the digits."""
    if dataset_name is None or dataset_name == DIGITS or _only_a_path(dataset_name) or Path(dataset_name).exists():
        return None
    return dataset_name
