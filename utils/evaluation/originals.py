"""What the samples of a pipeline may be copies of: the images that its run was trained on, and those that it held out."""

import contextlib
import json
from dataclasses import fields
from pathlib import Path
from typing import cast

from utils.data.dataset import ImageSet, content_fingerprint
from utils.data.training_data import split_validation
from utils.evaluation.memorization import Originals
from utils.evaluation.reference import Reference
from utils.options.flags import DataOptions, EvaluateOptions
from utils.options.paths import located, same_place
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.folder import DATA_SOURCES, WITHOUT
from utils.runs.state import read_state

# Options of the data that decide neither which images there are nor in which rows, nor their labels.
HOW_IT_IS_READ = {"cache_dir", "cache_images", "preserve_input_precision", "max_bad_images", "shuffle_window", "cache_limit"}


class OriginalsOfRuns:
    """What samples may be copies of, by the run that made them."""

    def __init__(self, reference: Reference):
        self._reference = reference
        self._last: tuple[tuple[int, int] | None, Originals] | None = None  # several seeds of a run are asked one by one

    def of(self, source: str) -> tuple[Originals, tuple[int, int] | None]:
        """Returns the originals of samples of `source` and, as `known_split`, how its run divided them; where that is not
        known, they are all of the images of the reference, which has some."""
        images = cast(ImageSet, self._reference.images)
        split = known_split(self._reference.options, images, source)
        if self._last is None or self._last[0] != split:
            self._last = split, Originals(*([images] if split is None else split_validation(images, *split)))
        return self._last[1], split


def known_split(given: EvaluateOptions, images: ImageSet, source: str) -> tuple[int, int] | None:
    """(held-out images, seed) of the run that `source` is, or a checkpoint of; None where it is none, or of other images than
    `images`, which are those of `given`.

    The same images are those of all the same options of the data, or with the same content by another path: the split is a
    choice of row numbers. --validation_images says it for what is no run.
    """
    names = {each.name for each in fields(DataOptions)} - HOW_IT_IS_READ
    for folder in (Path(source), Path(source).parent):
        try:
            options = located(json.loads((folder / "options.json").read_text()), folder, DataOptions.marked("path"))
            trained_on = DataOptions.from_record(WITHOUT | options)
            split = (options["validation_images"], options["seed"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no run, or not one of this version
            continue
        differing = {name for name in names if getattr(trained_on, name) != getattr(given, name)}
        differing -= {n for n in DataOptions.marked("path") if same_place(getattr(trained_on, n), getattr(given, n))}
        return split if not differing or (differing <= set(DATA_SOURCES) and _same_content(folder, images)) else None
    return (given.validation_images, 0) if given.validation_images else None


def _same_content(run: Path, images: ImageSet) -> bool:
    for checkpoint in list_checkpoints(run)[-1:]:
        with contextlib.suppress(OSError, ValueError, TypeError):  # damaged
            return read_state(checkpoint).options.get("data_fingerprint") == content_fingerprint(images)
    return False
