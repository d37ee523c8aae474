"""Measures the quality and diversity of generated images, compared with a dataset or a folder of real images.

    accelerate launch evaluate.py --pipeline runs/digits --dataset_name digits
    accelerate launch evaluate.py --pipeline runs/a runs/b/checkpoint-3000 --dataset_name uoft-cs/cifar10 --seeds 0 1 2
    accelerate launch evaluate.py --images out --reference photos
    accelerate launch evaluate.py make-reference --dataset_name digits --resolution 16 --image_channels 1 --output r.safetensors
    accelerate launch evaluate.py --pipeline runs/digits --reference r.safetensors

It prints distances (Frechet, kernel), diversity and memorization. It prints the same figures for real images, so that you can
compare. If the samples have collapsed, it prints the kind of collapse, the cause and a fix. One table has only figures that
can be compared. `--compare evaluation.json` adds earlier results. The images are those that generate.py makes with the same
seed and batch size.

If it was stopped, run the same command again: it starts again, but the features of the reference are cached. Exit status: 0
evaluated, also if there are findings; 2 a mistake in the command or the data.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from utils.core.entrypoint import loading_libraries, run_script
from utils.core.errors import UserError, one_line
from utils.core.files import make_folder
from utils.core.size import Size
from utils.options.flags import DataOptions, EvaluateOptions
from utils.options.parser import parse_options
from utils.options.paths import located, same_place
from utils.runs.evaluations import run_of
from utils.runs.folder import DATA_SOURCES, WITHOUT

if TYPE_CHECKING:
    from PIL import Image

    from utils.data.dataset import ImageSet
    from utils.evaluation.classifier import Classifier
    from utils.evaluation.extractor_base import Extractor
    from utils.evaluation.feature_sets import FeatureSet
    from utils.evaluation.memorization import Originals

# Options of the data that decide neither which images there are nor in which rows, nor their labels.
HOW_IT_IS_READ = {"cache_dir", "cache_images", "preserve_input_precision", "max_bad_images", "shuffle_window", "cache_limit"}


def parse_args(argv: list[str] | None = None) -> EvaluateOptions:
    return parse_options(EvaluateOptions, __doc__, argv)


def main(args: EvaluateOptions) -> None:
    check_paths(args)
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    with loading_libraries(args):
        from utils.core.bars import Bar
        from utils.core.distributed import main_process_first, make_accelerator, on_main_process, waited_for
        from utils.data.arrays import is_array_file
        from utils.diagnostics.finding import Finding, described
        from utils.diagnostics.rules.samples import MIN_VARIED
        from utils.diffusion.guidance import asked_classes, make_guided_prediction
        from utils.diffusion.pipelines import image_shape, load_decoder, load_network, names_of_classes
        from utils.diffusion.sampling import SamplePlan, full_precision, is_edm, make_sampler, sampling_steps
        from utils.evaluation.evaluator import ClassJudge, Evaluation, pipeline_images, refuse_too_few
        from utils.evaluation.extractors import make_extractor
        from utils.evaluation.feature_sets import is_stored, load_features, reference_features, save_features, sync_weights
        from utils.evaluation.image_folder import ImageFolder
        from utils.evaluation.newest import agreed
        from utils.evaluation.table import header, lines, read_results, refuse_to_compare, sentences

    accelerator = make_accelerator(
        mixed_precision=args.mixed_precision,
        cpu_threads=args.cpu_threads,
        collective_timeout=3600.0,  # a batch of samples takes long on a CPU, and one process may have slower cores
    )

    shown = accelerator.is_main_process and not args.quiet

    # ---- what is evaluated, before anything expensive
    earlier = [result for path in args.compare for result in read_results(path)]
    asked_channels = args.image_channels if "image_channels" in args.given else None
    folders = [ImageFolder(folder, asked_channels) for folder in args.images]
    args.pipeline = [agreed(accelerator, pipeline) for pipeline in args.pipeline]
    args.guide_pipeline = args.guide_pipeline and agreed(accelerator, args.guide_pipeline)
    with main_process_first(accelerator, "loading the guide"):  # one download, not one per process
        guide, guide_config = load_network(args.guide_pipeline) if args.guide_pipeline else (None, None)
    networks = []
    for pipeline in args.pipeline:
        with main_process_first(accelerator, "loading the pipeline"):
            unet, scheduler_config = load_network(pipeline)
            autoencoder = load_decoder(pipeline, unet)
        sampler = args.sampler or ("heun" if is_edm(scheduler_config) else "ddim")
        scheduler = make_sampler(sampler, scheduler_config)
        steps = sampling_steps(sampler, args.num_inference_steps, scheduler)
        class_labels = asked_classes(args.class_labels, names_of_classes(pipeline), unet)
        predict = make_guided_prediction(unet, scheduler_config, class_labels, args.guidance, guide, guide_config)
        made: dict[str, Any] = {"sampler": sampler, "num_inference_steps": steps, "mixed_precision": args.mixed_precision}
        made |= {"class_labels": class_labels, "guidance": args.guidance, "guide_pipeline": args.guide_pipeline}
        networks.append((pipeline, unet, autoencoder, scheduler, predict, made))
    shapes = {str(folder.folder): folder.shape for folder in folders}
    shapes |= {
        pipeline: autoencoder.image_shape if autoencoder else image_shape(unet) for pipeline, unet, autoencoder, *_ in networks
    }
    shape = same_shape(shapes) if shapes else args.image_shape

    # ---- the real images, or what was stored of them
    stored: Any = None
    facts: Any = None
    images: Any = None  # none beside stored statistics
    folder_cache = None
    if args.reference and is_array_file(str(args.reference)) and not is_stored(args.reference):
        args.dataset_name, args.reference = str(args.reference), None
    if args.reference and args.reference.is_file():
        stored, facts, _ = load_features(args.reference)
    else:
        if args.reference:
            args.train_data_dir = str(args.reference)
        with waited_for(accelerator, "reading the real images"):  # one of each machine packs them
            images, folder_cache = load_reference(args, shape, shown)
    references = len(stored if stored is not None else images)
    count = args.num_images or min(10_000, references)
    sizes = [(str(folder.folder), len(folder)) for folder in folders] + [(pipeline, count) for pipeline in args.pipeline]
    for name, size in sizes:
        refuse_too_few(size, references, name)
    # A classifier is trained once.
    with Bar(what := "preparing the extractors", shown=shown), main_process_first(accelerator, what):
        extractor = make_extractor(
            args.features,
            images,
            channels=shape[0],
            weights=args.feature_weights,
            weights_sha256=args.feature_weights_sha256,
            cache_dir=folder_cache,
        )
        classifier = make_classifier(args, images, extractor, folder_cache)
    for module in (extractor, classifier) if classifier is not None else (extractor,):
        sync_weights(module)
    extractor.to(accelerator.device)
    if stored is None:
        with Bar("features of the real images", len(images), shown=shown) as progress:
            stored = reference_features(
                accelerator, extractor, images, batch_size=args.batch_size, cache_dir=folder_cache, progress=progress.update
            )
        facts = reference_facts(images, extractor, stored)
    check_reference(args, facts, extractor, shape)
    if args.command == "make-reference":

        def write() -> None:
            digest = save_features(cast(Path, args.output), stored, facts)
            print(f"{len(stored):,} images, {extractor.name}, SHA-256 {digest} in {args.output}")

        on_main_process(accelerator, "writing the reference", write)
        return

    # ---- figures, one source after the other
    evaluation = Evaluation(
        accelerator,
        extractor,
        stored,
        seed=0,
        batch_size=args.batch_size,
        judge=ClassJudge(classifier, images.labels[images.labels >= 0], class_names(images))
        if classifier is not None
        else None,
    )
    common = extractor.identity() | {
        "reference": facts["reference"],
        "reference_fingerprint": facts["reference_fingerprint"],
        "reference_images": len(stored),
        "image_shape": list(shape),
    }
    asked = [{"name": name, **common, "images": size} for name, size in sizes]
    for result in [*asked, *earlier]:  # before hours of sampling, not after them
        refuse_to_compare(asked[0], result)
    results = []
    originals = {}  # of the last split

    def add(name: str, source: Callable, count: int, made_with: str | None = None, **made: Any) -> None:
        nonlocal originals
        if images is not None:
            split = known_split(args, images, made_with or name)
            if split not in originals:
                originals = {split: originals_of(images, stored, split)}
            evaluation.originals, made["validation_split"] = originals[split], split or "unknown"
        with Bar(name, count, shown=shown, afterwards=f"{name}: computing the figures") as progress:
            figures, sheet = evaluation.measure(source, count, progress=progress.update)
        results.append({"name": name, **common, "images": count, **made, "figures": figures})
        on_main_process(accelerator, "writing the result", write_result, args, results, sheet)

    for folder in folders:
        source = folder.source(accelerator.device)
        add(
            str(folder.folder), source, len(folder), folder.settings.get("pipeline"), seed=None, made_by=folder.settings or None
        )
    for pipeline, unet, autoencoder, scheduler, predict, made in networks:
        for network in (unet, guide) if guide is not None else (unet,):
            network.to(accelerator.device)
        for seed in args.seeds:
            made_by = (seed, args.batch_size, accelerator.device, autoencoder)
            plan = SamplePlan(scheduler, made["num_inference_steps"], image_shape(unet), *made_by)
            with plan.decoding(accelerator), full_precision(unet):
                source = pipeline_images(accelerator, unet, plan, name=pipeline, predict=predict)
                add(pipeline, source, count, seed=seed, **made)
        unet.cpu()
    if not accelerator.is_main_process:
        return

    # ---- what was found
    if args.json:
        print(json.dumps({"results": [*results, *earlier]}, indent=2))
        return
    print("\n".join(header(results[0])))
    for warning in dict.fromkeys(text for result in results for text in result["figures"]["warnings"]):
        print(f"note: {warning}")
    for name in dict.fromkeys(result["name"] for result in results if result.get("validation_split") == "unknown"):
        print(
            f"note: {name}: unknown split: copies are searched among all images, also those that were held out of its training"
        )
    unsaved = (each["name"] for each in results if folder_of(args, each) is None and run_of(each["name"]) is None)
    for name in dict.fromkeys(unsaved):
        print(f"note: {name}: the figures are not saved; set --output_dir to save them")
    print("\n" + "\n".join(lines([*results, *earlier])) + "\n")
    print("\n".join(sentences([*results, *earlier])))
    for result in results:
        found = [Finding(f["code"], f["severity"], f["evidence"]) for f in result["figures"]["findings"]]
        few = f" (with fewer than {MIN_VARIED} images, variety is not judged)" * (result["figures"]["rows"] < MIN_VARIED)
        print(f"\n{result['name']}:" + f" nothing found that looks like a collapse{few}" * (not found))
        for finding in found:
            print("\n".join(described(finding)))


def check_paths(args: EvaluateOptions) -> None:
    """Raises UserError where there is no such file or folder, or results cannot be written, before the libraries load."""
    weights = [args.feature_weights] if args.feature_weights else []
    data = [Path(args.train_data_dir)] if args.train_data_dir and not args.dataset_name else []
    named = {"images": args.images, "compare": args.compare, "feature_weights": weights, "train_data_dir": data}
    named["reference"] = [args.reference] if args.reference else []
    for flag, paths in named.items():
        for path in paths:
            if not path.exists():
                raise UserError(f"--{flag} {path}: no such file or folder\ncheck the path")
    if os.environ.get("RANK", "0") == "0":
        for flag, folder in (("output_dir", args.output_dir), ("output", args.output and args.output.parent)):
            if folder is not None:
                make_folder(folder, f"--{flag}")


def same_shape(shapes: dict[str, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Raises UserError where images of several sizes would stand in one table."""
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            sizes = " and ".join(f"{n} {s[1]}x{s[2]}, {s[0]} channels" for n, s in ((first, shape), (name, other)))
            raise UserError(f"the images have different sizes: {sizes}\ncompare images of the same size and number of channels")
    return shape


def load_reference(args: EvaluateOptions, shape: tuple[int, int, int], shown: bool) -> tuple["ImageSet", Path]:
    """(the real images as an ImageSet of this shape, the folder where what is computed of them is kept). `shown`: whether this
    process shows progress."""
    from utils.core.bars import Bar
    from utils.data.arrays import OtherChannels
    from utils.data.dataset import cache_root, load_images

    size: dict[str, Any] = {"resolution": Size(*shape[1:]).resolution, "image_channels": shape[0]}
    for name, value in size.items():
        if name in args.given and getattr(args, name) != value:
            raise UserError(f"--{name} {getattr(args, name)}: the images that are evaluated have {value}\nleave --{name} out")
    try:
        with Bar("reading the real images", shown=shown) as bar:
            images = load_images(replace(args, **size), bar.set)
    except OtherChannels as error:
        if not (args.pipeline or args.images):
            raise
        raise UserError(
            f"{str(error).partition(', and ')[0]}, and the images that are evaluated have {shape[0]} channels\n"
            "compare images of the same size and number of channels"
        ) from None
    return images, cache_root(args.cache_dir) / "steady_diffusion"


def reference_facts(images: "ImageSet", extractor: "Extractor", features: "FeatureSet") -> dict:
    """Returns what a file of statistics must say of itself."""
    return extractor.identity() | {
        "reference": images.description,
        "reference_fingerprint": features.pixels_sha256,
        "image_shape": list(images.shape),
    }


def check_reference(args: EvaluateOptions, facts: dict, extractor: "Extractor", shape: tuple[int, int, int]) -> None:
    """Raises UserError where stored statistics are of another extractor or image size than what is evaluated."""
    from utils.evaluation.table import COMPARABLE, shown

    wanted = extractor.identity() | {"image_shape": list(shape)}
    for key, value in wanted.items():
        if facts.get(key) != value:
            name = COMPARABLE.get(key, key)
            raise UserError(
                f"--reference {args.reference} does not fit: its {name} is {shown(facts.get(key))}, not {shown(value)}\n"
                "use the --features and the image size that it was made with, or make it again"
            )


def make_classifier(
    args: EvaluateOptions, images: "ImageSet | None", extractor: "Extractor", cache_dir: Path | None
) -> "Classifier | None":
    """Returns the judge of classes where labels allow one; None otherwise."""
    from utils.evaluation.classifier import Classifier, trained_classifier

    if isinstance(extractor, Classifier):
        return extractor
    if args.no_classes or args.command or images is None or images.labels is None:
        return None
    try:
        return trained_classifier(images, cache_dir)
    except UserError:  # too many classes, or too few images of each: the other figures do not need it
        return None


def class_names(images: "ImageSet") -> list[str]:
    labels: Any = images.labels  # there is a classifier, so there are labels
    return list(images.class_names or map(str, range(int(labels.max()) + 1)))


def originals_of(images: "ImageSet", stored: "FeatureSet", split: tuple[int, int] | None) -> "Originals":
    """What samples may be copies of, with `split` into training and held-out images; None: all of them, it is not known."""
    import torch

    from utils.data.split import split_validation
    from utils.evaluation.memorization import Originals

    if split is None:
        return Originals(images, rows=stored.rows)
    training, validation = split_validation(images, *split)
    rows = images.dataset_rows(stored.indices.numpy())
    is_validation = torch.isin(rows, validation.dataset_rows(range(len(validation))))
    return Originals(training, validation, stored.rows[~is_validation], stored.rows[is_validation])


def known_split(args: EvaluateOptions, images: "ImageSet", source: str) -> tuple[int, int] | None:
    """(held-out images, seed) of the run that `source` is, or a checkpoint of; None where it is none, or of other images.

    The same images are those of all the same options of the data, or with the same content by another path: the split is a
    choice of row numbers. --validation_images says it for what is no run.
    """
    size: dict[str, Any] = {"resolution": Size(*images.shape[1:]).resolution, "image_channels": images.shape[0]}
    given = replace(args, **size)
    names = {each.name for each in fields(DataOptions)} - HOW_IT_IS_READ
    for folder in (Path(source), Path(source).parent):
        try:
            options = located(json.loads((folder / "options.json").read_text()), folder, DataOptions.paths())
            trained_on = DataOptions.from_record(WITHOUT | options)
            split = (options["validation_images"], options["seed"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no run, or not one of this version
            continue
        differing = {name for name in names if getattr(trained_on, name) != getattr(given, name)}
        differing -= {n for n in DataOptions.paths() if same_place(getattr(trained_on, n), getattr(given, n))}
        return split if not differing or (differing <= set(DATA_SOURCES) and _same_content(folder, images)) else None
    return (args.validation_images, 0) if args.validation_images else None


def _same_content(run: Path, images: "ImageSet") -> bool:
    from utils.data.dataset import content_fingerprint
    from utils.runs.checkpoint_files import list_checkpoints
    from utils.runs.state import read_state

    for checkpoint in list_checkpoints(run)[-1:]:
        with contextlib.suppress(OSError, ValueError, TypeError):  # damaged
            return read_state(checkpoint).options.get("data_fingerprint") == content_fingerprint(images)
    return False


def folder_of(args: EvaluateOptions, result: dict) -> Path | None:
    """Returns where a result goes: --output_dir, or evaluation/ of the run that was evaluated; None for what is neither."""
    run = Path(result["name"])
    return args.output_dir or (run / "evaluation" if (run / "options.json").is_file() else None)


def write_result(args: EvaluateOptions, results: list[dict], sheet: "Image.Image | None") -> None:
    """The last of the results, and the sheet of its closest pairs, beside those before it of the same folder; and what was
    found, in the record of the run. A run that cannot be written is no reason to lose the figures. Raises UserError where
    --output_dir does not take them."""
    from utils.evaluation.results import add_to_record, write_figures

    folder, owner = folder_of(args, results[-1]), run_of(results[-1]["name"])
    try:
        if folder is not None:
            write_figures(folder, [result for result in results if folder_of(args, result) == folder], sheet)
    except OSError as error:
        if args.output_dir:
            raise UserError(f"cannot write {folder}: {error.strerror or error}\nchoose another --output_dir") from None
        tell(f"the figures are not saved: cannot write {folder}: {error.strerror or error}; set --output_dir to save them")
    if owner is not None:
        try:
            add_to_record(*owner, results[-1])
        except (OSError, UserError) as error:
            tell(f"what was found is not in the record of {owner[0]}: {one_line(error)}")


def tell(note: str) -> None:
    print(f"note: {note}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main, parse_args)
