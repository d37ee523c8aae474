"""What was found out about the images of a set, kept beside its packed images."""

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import PIL
import torch

from utils.core.files import read_json, write_json
from utils.data.cache import PackedImages
from utils.data.dataset import ImageSet
from utils.diagnostics.data_check import check_data
from utils.diagnostics.data_checks.checks import look_at, record_of
from utils.diagnostics.data_checks.sample import Sample

KEPT = 16  # files of a set, the newest: of several seeds, say
_CODE = ("core", "data", "diagnostics")  # folders of utils/: what they compute may change with any of their files


def records_of_images(
    training: ImageSet, held_out: ImageSet | None, *, seed: int, random_flip: bool | None, folder: Path | None
) -> dict:
    """Returns the records `data` (see `check_data`) and `data_checks` (see `look_at`) of a history; pictures go below `folder`.

    Packed images are looked at once: another start of the same images, labels and settings, with the same code, reads what was
    seen, unless a check failed. Raises what `check_data` and `Sample.of` raise.
    """
    path = _place(training, held_out, seed, random_flip)
    kept = read_json(path) if path else {}
    seen = kept.get("seen")
    if not seen or kept.get("sha256") != _sha256(seen):  # of a damaged file, too
        seen = {"data": check_data(training, seed=seed)}
        seen["data_checks"] = look_at(Sample.of(training, held_out, random_flip))
        if path and not seen["data_checks"]["failed"]:
            with contextlib.suppress(OSError):  # a full disk, or one that is only read
                write_json(path, {"sha256": _sha256(seen), "seen": seen}, shared=True)
                files = sorted(path.parent.glob("checked-*.json"), key=lambda file: file.stat().st_mtime)
                for old in files[:-KEPT]:
                    old.unlink()
    return seen | {"data_checks": record_of(seen["data_checks"], folder)}


def _sha256(seen: dict) -> str:
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _place(training: ImageSet, held_out: ImageSet | None, seed: int, random_flip: bool | None) -> Path | None:
    """The file of what was seen, whose name has a digest of all that it depends on; None where no images are packed."""
    if not isinstance(training.store, PackedImages):
        return None
    sets = [training.fingerprint, None if held_out is None else held_out.fingerprint]
    versions = [np.__version__, PIL.__version__, torch.__version__]
    digest = hashlib.sha256(json.dumps([sets, training.class_names, seed, random_flip, versions]).encode())
    digest.update(b"" if training.labels is None else training.labels.tobytes())
    utils = Path(__file__).parents[2]
    for file in sorted(file for name in _CODE for file in (utils / name).rglob("*.py")):
        digest.update(file.read_bytes())
    return training.store.packed.path.with_name(f"checked-{digest.hexdigest()[:32]}.json")
