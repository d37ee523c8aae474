"""The real images that samples are compared with, or what was stored of them, and those that samples may be copies of."""

import contextlib
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator

from utils.core.bars import Bar
from utils.core.distributed import main_process_first, waited_for
from utils.core.errors import UserError
from utils.core.size import Size
from utils.data.arrays import OtherChannels, is_array_file
from utils.data.dataset import ImageSet, cache_folder, content_fingerprint, load_images
from utils.data.training_data import split_validation
from utils.evaluation.evaluator import ClassJudge
from utils.evaluation.extractors import Classifier, Extractor, make_extractor, trained_classifier
from utils.evaluation.feature_sets import (
    FeatureSet,
    is_stored,
    load_features,
    reference_features,
    save_features,
    sync_weights,
)
from utils.evaluation.memorization import Originals
from utils.evaluation.results import COMPARABLE, shown
from utils.options.flags import DataOptions, EvaluateOptions
from utils.options.paths import located, same_place
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.folder import DATA_SOURCES, WITHOUT
from utils.runs.state import read_state


@dataclass
class RealImages:
    """What --reference, --dataset_name or --train_data_dir name, before anything is computed of it."""

    options: EvaluateOptions  # as they mean these images
    images: ImageSet | None = None  # none beside stored statistics
    stored: tuple[FeatureSet, dict] | None = None  # with their facts
    cache_dir: Path | None = None  # of what is computed of the images

    def __len__(self) -> int:
        return len(self.stored[0] if self.images is None and self.stored else cast(ImageSet, self.images))


@dataclass
class Reference:
    """The features of the real images. Equal on all processes."""

    features: FeatureSet
    facts: dict  # what a file of statistics must say of itself
    extractor: Extractor  # on the accelerator's device
    judge: ClassJudge | None  # where labels allow one
    options: EvaluateOptions  # as they mean these images
    images: ImageSet | None  # none beside stored statistics

    @property
    def identity(self) -> dict:
        """What figures must share to be compared, as evaluation.json has it."""
        return self.extractor.identity() | self.facts | {"reference_images": len(self.features)}

    def save(self, path: Path) -> str:
        """Writes the statistics; what was written, in a line. Raises OSError."""
        digest = save_features(path, self.features, self.facts)
        return f"{len(self.features):,} images, {self.extractor.name}, SHA-256 {digest} in {path}"


def find_reference(accelerator: Accelerator, args: EvaluateOptions, shape: tuple[int, int, int]) -> RealImages:
    """Returns the real images that the flags name, in this shape (C, H, W). Raises UserError."""
    name, folder = args.dataset_name, args.train_data_dir
    if args.reference and is_array_file(str(args.reference)) and not is_stored(args.reference):
        name = str(args.reference)
    elif args.reference and args.reference.is_file():
        return RealImages(args, stored=load_features(args.reference)[:2])
    elif args.reference:
        folder = str(args.reference)
    size: dict[str, Any] = {"resolution": Size(*shape[1:]).resolution, "image_channels": shape[0]}
    for flag, value in size.items():
        if flag in args.given and getattr(args, flag) != value:
            raise UserError(f"--{flag} {getattr(args, flag)}: the images that are evaluated have {value}\nleave --{flag} out")
    options = replace(args, dataset_name=name, train_data_dir=folder, reference=None, **size)
    what = "reading the real images"  # one process of each machine packs them
    try:
        with waited_for(accelerator, what), Bar(what, shown=accelerator.is_main_process and not args.quiet) as bar:
            images = load_images(options, bar.set)
    except OtherChannels as error:
        if not (args.pipeline or args.images):
            raise
        raise UserError(
            f"{str(error).partition(', and ')[0]}, and the images that are evaluated have {shape[0]} channels\n"
            "compare images of the same size and number of channels"
        ) from None
    return RealImages(options, images, cache_dir=cache_folder(args.cache_dir))


def measure_reference(accelerator: Accelerator, found: RealImages, shape: tuple[int, int, int]) -> Reference:
    """Returns the features of the real images by --features, computed once and cached. Every process must call it. Raises
    UserError, also where stored statistics are of another extractor or image size."""
    args = found.options
    shown_here = accelerator.is_main_process and not args.quiet
    images = found.images
    # A classifier is trained once.
    with Bar(what := "preparing the extractors", shown=shown_here), main_process_first(accelerator, what):
        extractor = make_extractor(
            args.features,
            images,
            channels=shape[0],
            weights=args.feature_weights,
            weights_sha256=args.feature_weights_sha256,
            cache_dir=found.cache_dir,
        )
        classifier = _classifier(args, images, extractor, found.cache_dir)
    for module in (extractor, classifier) if classifier is not None else (extractor,):
        sync_weights(module)
    extractor.to(accelerator.device)
    judge = None
    if images is None:
        features, facts = cast(tuple[FeatureSet, dict], found.stored)
        _refuse_others(args, facts, extractor.identity() | {"image_shape": list(shape)})
    else:
        with Bar("features of the real images", len(images), shown=shown_here) as bar:
            features = reference_features(
                accelerator, extractor, images, batch_size=args.batch_size, cache_dir=found.cache_dir, progress=bar.update
            )
        about = {"reference": images.description, "reference_fingerprint": features.pixels_sha256}
        facts = extractor.identity() | about | {"image_shape": list(images.shape)}
        if classifier is not None:
            labels = cast(Any, images.labels)  # there is a classifier, so there are labels
            names = images.class_names or map(str, range(int(labels.max()) + 1))
            judge = ClassJudge(classifier, labels[labels >= 0], list(names))
    return Reference(features, facts, extractor, judge, args, images)


def _classifier(
    args: EvaluateOptions, images: ImageSet | None, extractor: Extractor, cache_dir: Path | None
) -> Classifier | None:
    """The judge of classes where labels allow one; None otherwise."""
    if isinstance(extractor, Classifier):
        return extractor
    if args.no_classes or args.command or images is None or images.labels is None:
        return None
    try:
        return trained_classifier(images, cache_dir)
    except UserError:  # too many classes, or too few images of each: the other figures do not need it
        return None


def _refuse_others(args: EvaluateOptions, facts: dict, wanted: dict) -> None:
    for key, value in wanted.items():
        if facts.get(key) != value:
            name = COMPARABLE.get(key, key)
            raise UserError(
                f"--reference {args.reference} does not fit: its {name} is {shown(facts.get(key))}, not {shown(value)}\n"
                "use the --features and the image size that it was made with, or make it again"
            )


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
