"""Makes images with a trained pipeline, on all processes.

    accelerate launch generate.py --pipeline runs/digits --num_images 5000 --output_dir out --seed 0

This writes out/000000.png ... out/004999.png and out/grid.png; images that no PNG holds (more than 4 channels, or 16 bits in
several) become arrays, out/000000.npy. If it was stopped, run the same command again: it makes only
the missing images. A larger --num_images adds images to the folder.

It works with all unconditional DDPM and DDIM pipelines of diffusers and with those of train_ddpm.py and train_edm2.py, from a
folder or from the Hub. With classes, it makes all classes in turn, or those of --class_labels.

Each image depends only on the seed and on its own number, so any number of processes writes the same files. The batch size
and, on a CPU, the number of threads change float rounding: a few pixels may differ by one level. So all images of a folder
have the same batch size. On a CPU, each process uses one thread. To use more cores, start more processes
(accelerate_configs/multi_cpu.yaml) or set --cpu_threads.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from utils.core.entrypoint import loading_libraries, run_script
from utils.core.errors import UserError
from utils.core.files import whole_file
from utils.options.flags import GenerateOptions
from utils.options.parser import parse_options

if TYPE_CHECKING:
    from torch import nn

GRID_IMAGES = 64


def parse_args(argv: list[str] | None = None) -> GenerateOptions:
    return parse_options(GenerateOptions, __doc__, argv)


def main(args: GenerateOptions) -> None:
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    with loading_libraries(args):
        import torch

        from utils.core.bars import Bar
        from utils.core.distributed import main_process_first, make_accelerator, on_main_process, waited_for
        from utils.core.images import image_suffix, is_complete_image, make_grid, read_image, save_image, save_png
        from utils.diffusion.guidance import asked_classes, make_guided_prediction
        from utils.diffusion.pipelines import image_shape, load_decoder, load_network, names_of_classes, trained_bits
        from utils.diffusion.sampling import (
            SamplePlan,
            full_precision,
            is_edm,
            make_sampler,
            sample,
            sampler_version,
            sampling_steps,
            to_uint8,
            to_uint16,
        )
        from utils.evaluation.newest import agreed

    accelerator = make_accelerator(
        mixed_precision=args.mixed_precision,
        cpu_threads=args.cpu_threads,
    )

    shown = accelerator.is_main_process and not args.quiet

    # Pipeline
    args.pipeline = agreed(accelerator, args.pipeline)
    args.guide_pipeline = args.guide_pipeline and agreed(accelerator, args.guide_pipeline)
    with main_process_first(accelerator, "loading the pipeline"):  # one download, not one per process
        unet, scheduler_config = load_network(args.pipeline)
        autoencoder = load_decoder(args.pipeline, unet)
        guide, guide_config = load_network(args.guide_pipeline) if args.guide_pipeline else (None, None)
    # A wrong number, class or guide ends here, before the folder is touched.
    shape = autoencoder.image_shape if autoencoder else image_shape(unet)
    bits = args.bits or trained_bits(args.pipeline)
    suffix = image_suffix(shape[0], bits)
    sampler = args.sampler or ("heun" if is_edm(scheduler_config) else "ddim")
    scheduler = make_sampler(sampler, scheduler_config)
    num_inference_steps = sampling_steps(sampler, args.num_inference_steps, scheduler)
    made = (args.seed, args.batch_size, accelerator.device, autoencoder)
    plan = SamplePlan(scheduler, num_inference_steps, image_shape(unet), *made)
    class_labels = asked_classes(args.class_labels, names_of_classes(args.pipeline), unet)
    predict = make_guided_prediction(unet, scheduler_config, class_labels, args.guidance, guide, guide_config)

    # Settings: one folder holds one set of images
    settings = {
        "pipeline": args.pipeline,
        "weights_sha256": weights_hash(unet, scheduler_config),
        "autoencoder": autoencoder and [autoencoder.fingerprint(), *(autoencoder.scale or ())],
        "seed": args.seed,
        "sampler": sampler,
        "sampler_version": sampler_version(sampler, scheduler_config),
        "num_inference_steps": num_inference_steps,
        "batch_size": args.batch_size,
        "mixed_precision": args.mixed_precision,
        "compile": args.compile,
        "class_labels": class_labels,
        "guidance": None if args.guidance == 1.0 else args.guidance,
        "guide_sha256": weights_hash(guide, guide_config or {}) if guide is not None else None,
        "bits": bits,
        "num_images": args.num_images,
    }
    on_main_process(accelerator, "claiming the folder", claim_folder, args.output_dir, settings)

    # Work: whole chunks that lack an image, shared out evenly
    chunks = torch.arange(args.num_images).split(args.batch_size)
    complete = torch.zeros(len(chunks), device=accelerator.device)
    with Bar(what := "looking for existing images", shown=shown), waited_for(accelerator, what):
        for c in range(accelerator.process_index, len(chunks), accelerator.num_processes):
            complete[c] = all(is_complete_image(image_path(args.output_dir, i, suffix), shape) for i in chunks[c].tolist())
    todo = [chunk for chunk, done in zip(chunks, accelerator.reduce(complete, "sum").tolist()) if not done]
    unet.to(accelerator.device)
    if guide is not None:
        guide.to(accelerator.device)
    if args.compile:
        for network in (unet, guide) if guide is not None else (unet,):
            network.to(memory_format=torch.channels_last)
            network.compile()
    done = args.num_images - sum(map(len, todo))
    bar = Bar("making images", args.num_images, shown=shown, done=done, afterwards="writing the grid")
    # One process may have a batch more to make, or be slower.
    waited = waited_for(accelerator, "making images")
    with bar, plan.decoding(accelerator), full_precision(unet, compiled=args.compile), waited:
        for first in range(0, len(todo), accelerator.num_processes):
            turn = todo[first : first + accelerator.num_processes]
            if accelerator.process_index < len(turn):
                numbers = turn[accelerator.process_index]
                counted = accelerator.num_processes * len(numbers) / plan.denoising_steps(len(numbers))

                def step(counted: float = counted) -> bool:  # called before every step
                    bar.update(counted)
                    return False

                with accelerator.autocast():
                    images = sample(unet, plan, numbers, should_stop=step, predict=predict)
                if not images.isfinite().all():
                    raise UserError(f"{args.pipeline} made NaN or infinite pixels\ntry --mixed_precision no")
                for i, image in zip(numbers.tolist(), (to_uint8 if bits == 8 else to_uint16)(images).cpu()):
                    save_image(image, image_path(args.output_dir, i, suffix))
            done += sum(map(len, turn))
            bar.done = done  # the other processes keep about the same pace

    # Grid
    if accelerator.is_main_process:
        paths = [image_path(args.output_dir, i, suffix) for i in range(min(args.num_images, GRID_IMAGES))]
        first_images = torch.stack([read_image(path) for path in paths])
        if bits == 16:
            first_images = (first_images.float() / 257).round().to(torch.uint8)
        save_png(make_grid(first_images), args.output_dir / "grid.png")
        print(f"{args.num_images} images in {args.output_dir}")


def weights_hash(unet: "nn.Module", scheduler_config: dict) -> str:
    """Tells one trained state from another, so that a pipeline that trained on is not mixed with its earlier images."""
    digest = hashlib.sha256()
    for name, value in sorted(unet.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy())
    public = {key: value for key, value in scheduler_config.items() if not key.startswith("_")}
    digest.update(json.dumps(public, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def claim_folder(output_dir: Path, settings: dict) -> None:
    """Records `settings` in `output_dir`/generate.json. Raises UserError if the folder holds images that they would not
    have made, or cannot be written."""
    record = output_dir / "generate.json"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        names = os.listdir(output_dir)
        recorded = (
            {"compile": False, "sampler_version": 1, "bits": 8} | json.loads(record.read_text()) if record.exists() else None
        )
        if recorded is None and any(name.endswith(".png") for name in names):
            raise UserError(
                f"--output_dir {output_dir} already has images, which generate.py did not make\nchoose another --output_dir"
            )
        if recorded is not None and any(re.fullmatch(r"\d{6,}\.(png|npy)", name) for name in names):
            refuse_other_settings(output_dir, recorded, settings)
        with whole_file(record) as draft:
            draft.write_text(json.dumps(settings, indent=2) + "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot use --output_dir {output_dir}: {error}\nchoose another --output_dir") from error


# What to say of settings that are no flags, where they differ.
OTHER_IMAGES = {
    "weights_sha256": "images of other weights: another pipeline, or one that was trained further since",
    "guide_sha256": "images with another --guide_pipeline, or one that was trained further since",
    "autoencoder": "images of another autoencoder",
    "sampler_version": "images of an earlier version of this sampler",
}


def refuse_other_settings(output_dir: Path, recorded: dict, settings: dict) -> None:
    for key, value in settings.items():
        # The pipeline is recognized by its weights, so that it may be moved or reached by another path.
        if key not in ("pipeline", "num_images") and recorded.get(key) != value:
            was, now = ("not set" if each is None else each for each in (recorded.get(key), value))
            other = OTHER_IMAGES.get(key, f"images with another --{key} ({was}, now {now})")
            if key == "weights_sha256" and recorded.get("pipeline") == settings["pipeline"]:
                other = "images of an earlier state of this pipeline: it was trained further since, or changed"
            raise UserError(f"--output_dir {output_dir} has {other}\nchoose another --output_dir")
    if recorded["num_images"] > settings["num_images"]:
        raise UserError(
            f"--output_dir {output_dir} has {recorded['num_images']} images, more than --num_images "
            f"{settings['num_images']}\nchoose another --output_dir, or more images"
        )


def image_path(output_dir: Path, number: int, suffix: str) -> Path:
    return output_dir / f"{number:06d}{suffix}"


if __name__ == "__main__":
    run_script(main, parse_args)
