"""One evaluation: images from anywhere beside reference images, with the floor that real images have, and what is wrong.

    evaluation = Evaluation(accelerator, extractor, reference, seed=0)
    figures, sheet = evaluation.measure(make_images, 10_000)     # make_images: numbers -> uint8 [n, C, H, W]

evaluate.py measures pipelines and folders with it, and a training run its own samples.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

from utils.core.distributed import from_all, from_main_process, on_main_process
from utils.core.errors import UserError, memory_problem, one_line
from utils.diagnostics.rules.samples import collapse
from utils.diffusion.sampling import SamplePlan, sample, to_uint8
from utils.evaluation.extractors import INCEPTION_SHA256, Classifier, Extractor
from utils.evaluation.feature_sets import FeatureSet, extract
from utils.evaluation.memorization import Originals, kept_for_memorization, memorization
from utils.evaluation.quality import DISTANCES, MIN_IMAGES, class_figures, compare, real_floor

FID_IMAGES = 50_000  # with fewer of them the number is part of the name
NEAR_FLOOR = 5  # what benchmarks/quality/extractor_validation.py asks of a corruption that can be relied on to be seen


def metric_name(kind: str, result: dict) -> str:
    """What one of the DISTANCES of a result, as evaluate.py writes it, is called: "fd_randconv", "kd_dinov2"; with the very
    weights that papers use "kid", and "fid" of 50,000 images, "fid_10k" of fewer."""
    if result["features"] != "inception" or result["extractor_sha256"] != INCEPTION_SHA256:
        return f"{kind}_{result['features']}"
    name, count = DISTANCES[kind], result["images"]
    if kind != "fd" or count >= FID_IMAGES:
        return name
    return f"{name}_{count // 1000}k" if count >= 1000 else f"{name}_{count}"


@dataclass(frozen=True)
class ClassJudge:
    """What the class balance is measured with."""

    classifier: Classifier  # of the reference's classes
    labels: np.ndarray  # of the reference, int64 [images]
    class_names: list[str]


class Evaluation:
    """Made and called on all processes alike; the figures are computed on the main one and given to all.

    Args:
        extractor: on the CPU; goes to the accelerator's device.
        reference: features of the real images by this extractor.
        judge: for the class balance.
        originals: the real images that samples are compared with one by one; may be set anew between two calls of `measure`.
        batch_size: images at once per process; on a CPU the last bits of the features depend on it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        extractor: Extractor,
        reference: FeatureSet,
        *,
        seed: int,
        batch_size: int = 64,
        judge: ClassJudge | None = None,
        originals: Originals | None = None,
    ):
        self.accelerator, self.extractor, self.reference = accelerator, extractor, reference
        self.seed, self.batch_size = seed, batch_size
        self.judge, self.originals = judge, originals
        self.extractors = [extractor]
        if judge is not None and judge.classifier is not extractor:
            self.extractors.append(judge.classifier)
        for module in self.extractors:
            module.to(accelerator.device)
        self._floors: dict[int, dict] = {}

    def floor(self, count: int) -> dict:
        """`compare` of real images with each other, as for `count` samples; made once. On the main process alone."""
        if count not in self._floors:
            self._floors[count] = real_floor(
                self.reference, count, standardized=self.extractor.standardized, seed=self.seed, device=self._device
            )
        return self._floors[count]

    @property
    def _device(self) -> torch.device | str:
        return self.accelerator.device if self.accelerator.device.type == "cuda" else "cpu"

    def measure(
        self,
        make_images: Callable[[torch.Tensor], torch.Tensor],
        count: int,
        *,
        progress: Callable[[int], None] | None = None,
        canceled: Callable[[], bool] | None = None,
    ) -> tuple[dict | None, Image.Image | None]:
        """Figures (JSON) of images 0 ... count - 1, with `floor`, `warnings` and `findings`, and on the main process the sheet
        of closest pairs.

        `make_images` is called with the numbers int64 [n] of a chunk, and gives uint8 [n, C, H, W] on the accelerator's device.
        `canceled` is asked once all were made: where any process says True, all return (None, None). Raises UserError for
        fewer than 10 samples or 20 reference images, and
        for whatever fails on any process, on every process.
        """
        refuse_too_few(count, len(self.reference))
        kept = 0
        if self.originals is not None:
            kept = kept_for_memorization(count, math.prod(self.originals.training.shape))
        sets, images = extract(
            self.accelerator, self.extractors, count, self.batch_size, make_images, kept_images=kept, progress=progress
        )
        if canceled is not None:
            told = torch.tensor([int(canceled())], device=self.accelerator.device)
            if any(from_all(self.accelerator, told)):
                return None, None
        result = None, None

        def figures() -> None:
            nonlocal result
            try:
                result = self._figures(sets, images)
            except Exception as error:  # numbers that are not finite, no memory: the other processes wait for an answer
                problem = memory_problem(error) or one_line(error)
                raise UserError(f"the figures could not be computed: {problem}") from error

        on_main_process(self.accelerator, "computing the figures", figures)
        return from_main_process(result[0]), result[1]

    def _figures(self, sets: list[FeatureSet], images: torch.Tensor | None) -> tuple[dict, Image.Image | None]:
        options: dict[str, Any] = {"standardized": self.extractor.standardized, "seed": self.seed, "device": self._device}
        figures = compare(sets[0], self.reference, **options)
        figures["floor"] = self.floor(len(sets[0]))
        if (judge := self.judge) is not None:
            device = self.accelerator.device
            probabilities = judge.classifier.probabilities(sets[-1].rows.to(device)).detach().cpu()
            figures["classes"] = class_figures(probabilities, judge.labels, judge.class_names, judge.classifier.accuracy)
        sheet = None
        if images is not None and self.originals is not None:
            figures["memorisation"], sheet = memorization(images, self.originals)
        figures["warnings"] = self.warnings(len(sets[0]))
        fd, floor = figures["fd"], figures["floor"]["fd"]
        if fd < NEAR_FLOOR * floor:
            figures["warnings"].append(
                f"the Frechet distance is within {NEAR_FLOOR} times its floor, where a missing class, duplicates, slight blur "
                "and noise look alike: read the kernel distance, the classes and the modes"
            )
        figures["findings"] = [asdict(finding) for finding in collapse(figures)]
        return figures, sheet

    def warnings(self, count: int) -> list[str]:
        """Returns what weakens the figures of so many samples, in sentences."""
        found, dimensions = [], self.extractor.dimensions
        fewest = min(count, len(self.reference))
        if fewest <= dimensions:
            found.append(
                f"{fewest} images for {dimensions} feature dimensions: the covariance is singular and the Frechet distance "
                f"mostly noise; use more than {dimensions} images, or read the kernel distance"
            )
        elif fewest < 10 * dimensions:
            found.append(
                f"{fewest} images for {dimensions} feature dimensions: much of the Frechet distance is its bias; compare it "
                "with the real/real floor, or read the kernel distance, which has none"
            )
        if self.judge is None:
            found.append(
                "without labels, a missing part is found by the features of its images alone: a small one may not be seen"
            )
        elif self.judge.classifier.accuracy < 0.9:
            found.append(
                f"the classifier is right about {self.judge.classifier.accuracy:.0%} of held-out images: class shares are rough"
            )
        return found


def refuse_too_few(samples: int, references: int, name: str = "") -> None:
    """Raises UserError where figures of so many samples, of `name`, and reference images would mean nothing."""
    if samples < MIN_IMAGES or references < 2 * MIN_IMAGES:
        raise UserError(
            f"{name}{name and ': '}{samples} samples and {references} reference images are too few\n"
            f"use at least {MIN_IMAGES} samples and {2 * MIN_IMAGES} reference images"
        )


def pipeline_images(
    accelerator: Accelerator,
    unet: nn.Module,
    plan: SamplePlan,
    *,
    name: str,
    predict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A source for `Evaluation.measure`: the samples that generate.py makes for these numbers by this plan, as their
    PNGs hold them. `unet` is in eval mode, on the accelerator's device. `predict` as in `sampling.sample`. The
    source raises UserError when pixels are not finite."""

    def make_images(numbers: torch.Tensor) -> torch.Tensor:
        with accelerator.autocast():
            images = sample(unet, plan, numbers, predict=predict)
        if not images.isfinite().all():
            raise UserError(f"{name} made NaN or infinite pixels\ntry --mixed_precision no")
        return to_uint8(images)

    return make_images
