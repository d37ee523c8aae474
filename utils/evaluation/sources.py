"""The images that evaluate.py measures: finished ones of folders, and those that pipelines make."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from utils.core.errors import UserError
from utils.diffusion.sampled import SampledPipeline, load_guide
from utils.evaluation.evaluator import pipeline_images
from utils.evaluation.finished_images import FinishedImages
from utils.evaluation.newest import agreed
from utils.options.flags import EvaluateOptions

MakeImages = Callable[[torch.Tensor], torch.Tensor]  # as `Evaluation.measure` takes it


@dataclass
class ImageSource:
    """One set of images.

    Attributes:
        made: how it was made, as evaluation.json says it.
        made_by: the run or pipeline whose training images it may have copied.
        count: number of images; None: as many as are asked for.
        ready: what `make_images` needs is on the device within it.
    """

    name: str
    made: dict[str, Any]
    made_by: str
    count: int | None
    ready: Callable[[], AbstractContextManager[MakeImages]]


def find_sources(accelerator: Accelerator, args: EvaluateOptions) -> tuple[list[ImageSource], tuple[int, int, int]]:
    """Returns what --images and --pipeline name, a source for each of --seeds, and the common (C, H, W) of its images; that of
    the flags where nothing is named. Every process must call it. Raises UserError."""
    asked_channels = args.image_channels if "image_channels" in args.given else None
    folders = [FinishedImages(folder, asked_channels) for folder in args.images]
    names = [agreed(accelerator, pipeline) for pipeline in args.pipeline]
    guide_name = args.guide_pipeline and agreed(accelerator, args.guide_pipeline)
    guide = load_guide(accelerator, guide_name)
    pipelines = [SampledPipeline(accelerator, name, args, guide) for name in names]
    shapes = {str(folder.folder): folder.shape for folder in folders} | {each.name: each.image_shape for each in pipelines}
    sources = [_of_folder(folder, accelerator.device) for folder in folders]
    for pipeline in pipelines:
        made = {
            "sampler": pipeline.sampler,
            "num_inference_steps": pipeline.num_inference_steps,
            "mixed_precision": args.mixed_precision,
            "class_labels": pipeline.class_labels,
            "guidance": args.guidance,
            "guide_pipeline": guide_name,
        }
        sources += [_of_pipeline(pipeline, {"seed": seed, **made}) for seed in args.seeds]
    return sources, _same_shape(shapes) if shapes else args.image_shape


def _of_folder(folder: FinishedImages, device: torch.device) -> ImageSource:
    name, settings = str(folder.folder), folder.settings
    made = {"seed": None, "made_by": settings or None}
    return ImageSource(name, made, settings.get("pipeline") or name, len(folder), lambda: nullcontext(folder.source(device)))


def _of_pipeline(pipeline: SampledPipeline, made: dict[str, Any]) -> ImageSource:
    @contextmanager
    def ready() -> Iterator[MakeImages]:
        plan = pipeline.plan(made["seed"])
        with pipeline.sampling(plan):
            yield pipeline_images(pipeline.accelerator, pipeline.unet, plan, name=pipeline.name, predict=pipeline.predict)

    return ImageSource(pipeline.name, made, pipeline.name, None, ready)


def _same_shape(shapes: dict[str, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Raises UserError where images of several sizes would stand in one table."""
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            sizes = " and ".join(f"{n} {s[1]}x{s[2]}, {s[0]} channels" for n, s in ((first, shape), (name, other)))
            raise UserError(f"the images have different sizes: {sizes}\ncompare images of the same size and number of channels")
    return shape
