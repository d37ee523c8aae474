"""Opens a dataset, wherever it is, as one `datasets.Dataset` plus a key that changes when its contents do.

`dataset_name` may be, in this order: "digits" (embedded in scikit-learn), a local folder written by `save_to_disk`, a
local data file, any local folder that `datasets` understands, or a name on the Hugging Face Hub. `train_data_dir` is
a folder of images, in one folder per class if they have classes. No code of a dataset is run: `datasets` since
version 4 has no loading scripts.
"""

import dataclasses
import functools
import glob
import hashlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from utils.core.errors import UserError
from utils.options.flags import DataOptions

if TYPE_CHECKING:
    import datasets

_BUILDER_OF_SUFFIX = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tar": "webdataset",
}


@dataclasses.dataclass(frozen=True)
class OpenedDataset:
    """`dataset` is a `datasets.Dataset`; `key` names its contents; `description` is for people."""

    dataset: "datasets.Dataset"
    key: str
    description: str


def open_dataset(options: DataOptions) -> OpenedDataset:
    """Returns the dataset that the options name; `train_data_dir` is ignored beside a `dataset_name`.

    Raises:
        UserError: no such dataset, config, revision or split, or a folder without images.
    """
    dataset_name, dataset_split = options.dataset_name, options.dataset_split
    if dataset_name is None:
        if options.train_data_dir is None:
            raise UserError("no dataset: give --dataset_name (a Hub name, a local path or 'digits') or --train_data_dir")
        return _open_image_folder(options.train_data_dir, dataset_split, options.cache_dir)
    if dataset_name == "digits":
        return _open_digits(dataset_split)
    path = Path(dataset_name)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _open_saved(path, dataset_split)
    if path.is_file():
        builder = _BUILDER_OF_SUFFIX.get(path.suffix.lower())
        if builder is None:
            known = ", ".join(_BUILDER_OF_SUFFIX)
            raise UserError(f"cannot read {dataset_name}: a data file must end in one of {known}")
        source = {"path": builder, "data_files": {"train": glob.escape(str(path))}}
        files = [path]
    elif path.is_dir():
        source = {"path": dataset_name, "name": options.dataset_config_name}
        files = _files_below(path)
    else:
        source = {"path": dataset_name, "name": options.dataset_config_name, "revision": options.dataset_revision}
        files = []
    dataset = _load(dataset_name, split=dataset_split, cache_dir=options.cache_dir, **source)
    details = {"config": options.dataset_config_name, "split": dataset_split, "revision": options.dataset_revision}
    details = ", ".join(f"{name} {value}" for name, value in details.items() if value is not None)
    return OpenedDataset(dataset, _contents_key(files, dataset._fingerprint), f"{dataset_name} ({details})")


def _load(shown_name: str, **options: Any) -> "datasets.Dataset":
    """`datasets.load_dataset`, whose many kinds of failure become one clear line."""
    import datasets

    try:
        return datasets.load_dataset(**options)
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load the dataset {shown_name}: {message}") from error


def _open_image_folder(folder: str, split: str, cache_dir: str | None) -> OpenedDataset:
    if not os.path.isdir(folder):
        raise UserError(f"--train_data_dir {folder}: no such folder")
    files = _files_below(Path(folder))
    Image.init()
    if not any(path.suffix.lower() in Image.EXTENSION for path in files):
        raise UserError(f"--train_data_dir {folder}: no images in it")
    # Everything below the folder, as in diffusers; `data_dir` would guess splits from words in the files' names.
    pattern = os.path.join(glob.escape(folder), "**")
    dataset = _load(folder, path="imagefolder", data_files={"train": pattern}, split=split, cache_dir=cache_dir)
    return OpenedDataset(dataset, _contents_key(files, dataset._fingerprint), folder)


def _open_saved(path: Path, split: str) -> OpenedDataset:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load the dataset {path}: {message}") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise UserError(f"{path} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    return OpenedDataset(splits[split], _contents_key(_files_below(path), split), f"{path} (split {split})")


@functools.cache
def _open_digits(split: str) -> OpenedDataset:
    """1,797 scans of handwritten digits, 8x8, values 0..16 (UCI "Optical Recognition of Handwritten Digits")."""
    import datasets
    from sklearn.datasets import load_digits

    if split != "train":
        raise UserError(f"digits has no split {split!r}; it has 'train'")
    scans, labels = load_digits(return_X_y=True)
    pixels = np.rint(scans.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    names = [str(digit) for digit in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": [{"bytes": _png(scan), "path": None} for scan in pixels], "label": labels}
    key = hashlib.sha256(pixels.tobytes() + labels.astype(np.int64).tobytes()).hexdigest()
    return OpenedDataset(datasets.Dataset.from_dict(rows, features=features), key, "digits (scikit-learn's handwritten digits)")


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _contents_key(files: list[Path], fingerprint: str) -> str:
    """Changes with any file's path, size or time of change, and with what `datasets` knows about the data.

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
    if dataset_name is None or dataset_name == "digits" or Path(dataset_name).exists():
        return None
    return dataset_name
