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

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from utils.core.entrypoint import loading_libraries, run_script
from utils.core.errors import UserError
from utils.core.files import make_folder
from utils.options.flags import EvaluateOptions
from utils.options.parser import parse_options

if TYPE_CHECKING:
    from utils.evaluation.reference import Reference

MOST_IMAGES = 10_000  # of each pipeline, where --num_images does not say it


def parse_args(argv: list[str] | None = None) -> EvaluateOptions:
    return parse_options(EvaluateOptions, __doc__, argv)


def main(args: EvaluateOptions) -> None:
    check_paths(args)
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    with loading_libraries(args):
        from utils.core.bars import Bar
        from utils.core.distributed import make_accelerator, on_main_process
        from utils.evaluation.evaluator import Evaluation, refuse_too_few
        from utils.evaluation.reference import OriginalsOfRuns, find_reference, measure_reference
        from utils.evaluation.results import printed_lines, read_results, refuse_to_compare, save_result
        from utils.evaluation.sources import find_sources

    accelerator = make_accelerator(
        mixed_precision=args.mixed_precision,
        cpu_threads=args.cpu_threads,
        collective_timeout=3600.0,  # a batch of samples takes long on a CPU, and one process may have slower cores
    )
    shown = accelerator.is_main_process and not args.quiet

    # What is evaluated and compared, before anything expensive
    earlier = [result for path in args.compare for result in read_results(path)]
    sources, shape = find_sources(accelerator, args)
    found = find_reference(accelerator, args, shape)
    usual = args.num_images or min(MOST_IMAGES, len(found))
    for source in sources:
        refuse_too_few(source.count or usual, len(found), source.name)
    reference = measure_reference(accelerator, found, shape)
    if args.output is not None:  # make-reference
        on_main_process(accelerator, "writing the reference", store, reference, args.output)
        return
    asked = [{"name": source.name, **reference.identity, "images": source.count or usual} for source in sources]
    for result in [*asked, *earlier]:  # before hours of sampling, not after them
        refuse_to_compare(asked[0], result)

    # Figures, one source after the other
    evaluation = Evaluation(
        accelerator, reference.extractor, reference.features, seed=0, batch_size=args.batch_size, judge=reference.judge
    )
    originals = OriginalsOfRuns(reference)
    results: list[dict] = []
    for source, about in zip(sources, asked):
        about |= source.made
        if reference.images is not None:
            evaluation.originals, split = originals.of(source.made_by)
            about["validation_split"] = split or "unknown"
        bar = Bar(source.name, count := about["images"], shown=shown, afterwards=f"{source.name}: computing the figures")
        with source.ready() as make_images, bar:
            figures, sheet = evaluation.measure(make_images, count, progress=bar.update)
        results.append(about | {"figures": figures})
        on_main_process(accelerator, "writing the result", save_result, args.output_dir, results, sheet)

    if accelerator.is_main_process:
        together = {"results": [*results, *earlier]}
        print(json.dumps(together, indent=2) if args.json else "\n".join(printed_lines(results, earlier, args.output_dir)))


def store(reference: "Reference", path: Path) -> None:
    print(reference.save(path))


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


if __name__ == "__main__":
    run_script(main, parse_args)
