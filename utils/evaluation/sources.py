"""The images that evaluate.py measures: finished ones of folders, and those that pipelines make."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from utils.core.errors import UserError
from utils.core.files import read_json
from utils.core.size import Size
from utils.data.decode import ImageFile, ImagePreparation, UndecodableImage, header_of
from utils.data.file_tree import FileTree
from utils.diffusion.sampled import SampledPipeline, load_guide
from utils.evaluation.evaluator import pipeline_images
from utils.evaluation.extractors import eight_bit
from utils.evaluation.newest import agreed
from utils.options.flags import EvaluateOptions

MakeImages = Callable[[torch.Tensor], torch.Tensor]  # as `Evaluation.measure` takes it


_GRAY_MODES = ("1", "L", "LA", "I", "I;16", "F")


class FinishedImages:
    """The images below `folder`, in the order of their names, hidden ones left out; of a folder of generate.py those that it
    numbered.

    Attributes:
        shape: (channels, height, width), read from the headers: 1 channel where all images are gray, else 3; those of arrays
            of generate.py, or `channels`.

    Raises UserError where there is no such folder, no image in it, one that cannot be opened, or images of several sizes.
    """

    def __init__(self, folder: Path, channels: int | None = None):
        if not folder.is_dir():
            what = "is no folder\nunpack it, or give a folder" if folder.exists() else "no such folder\ncheck the path"
            raise UserError(f"--images {folder}: {what}")
        tree = FileTree(str(folder), opens_archives=False)
        tree.add_folder(str(folder))
        files = [Path(tree.paths[name]) for name in tree.images()]
        self.settings = read_json(folder / "generate.json")  # how generate.py made them; empty for other folders
        if self.settings:
            files = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{6,}\.(png|npy)", path.name))
        if not files:
            raise UserError(f"--images {folder} has no images\ncheck the path")
        self.folder, self.files, modes = folder, files, set()
        sizes: dict[tuple[int, ...], Path] = {}
        for path in files:
            header = _header(path)
            if header is None:
                raise UserError(f"{folder}: {path.name} cannot be decoded\nrepair or remove this file")
            mode, *size = header
            modes.add(mode)
            sizes.setdefault(tuple(size), path)
            if len(sizes) > 1:
                named = ", ".join(f"{path.name} {height}x{width}" for (height, width), path in sizes.items())
                raise UserError(f"{folder} has images of different sizes: {named}\nuse images of one size")
        ((height, width),) = sizes
        if self.settings and len(modes) == 1:
            (mode,) = modes
            channels = channels or (mode if isinstance(mode, int) else None)
        self.shape = (channels or (1 if modes <= {*_GRAY_MODES} else 3), height, width)

    def __len__(self) -> int:
        return len(self.files)

    def source(self, device: torch.device | str) -> MakeImages:
        """For `Evaluation.measure`. It raises UserError naming an image that cannot be decoded."""
        channels, *size = self.shape
        prepare = ImagePreparation(Size(*size), channels, center_crop=True, background="white", max_value=255)

        def make_images(numbers: torch.Tensor) -> torch.Tensor:
            images = []
            for path in (self.files[number] for number in numbers.tolist()):
                if path.suffix == ".npy":
                    array = np.load(path).transpose(2, 0, 1)
                    images.append(eight_bit(array, np.iinfo(array.dtype).max))
                    continue
                try:
                    images.append(torch.tensor(prepare(ImageFile(None, str(path), str(path)))[0]))
                except UndecodableImage as error:
                    raise UserError(f"cannot decode the image {path}: {error.args[2]}\nrepair or remove this file") from None
            return torch.stack(images).to(device)

        return make_images


def _header(path: Path) -> tuple[str | int, int, int] | None:
    """Mode, or the channels of an array, then height and width; None where the file cannot be opened."""
    if path.suffix != ".npy":
        return header_of(ImageFile(None, str(path), str(path)))
    try:
        height, width, channels = np.load(path, mmap_mode="r").shape
    except (OSError, ValueError):
        return None
    return channels, height, width


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
