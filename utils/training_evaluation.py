"""A run's own samples, evaluated while it trains: the same noise every time, in fp32, sharded over the processes."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn

from utils.checkpoints import TrainState
from utils.data import ImageSet, cache_root
from utils.doctor import Doctor
from utils.errors import OUT_OF_MEMORY, UserError
from utils.evaluation import Evaluation
from utils.feature_sets import REFERENCE_ROWS, FeatureSet, evenly, reference_features
from utils.features import make_extractor
from utils.images import save_png
from utils.launch import if_memory_allows, on_main_process
from utils.memorisation import MOST_IMAGES, Originals
from utils.quality import LEAST_IMAGES
from utils.sampling import make_sampler, sample, to_uint8
from utils.tracking import Trackers

FEATURES = "randconv"  # needs no labels, no file and no training
MOST_COMPARED_BYTES, MOST_DECODED = 512 * 2**20, 2048  # of training images that may be copied: packed ones, files
ADVICE = "set a smaller --evaluation_batch_size"
LOGGED = ("precision", "recall", "density", "coverage", "variance_ratio", "distance_ratio", "vendi")


class TrainingEvaluation:
    """Figures of the samples against the training images, up to 50,000 of them; their features are computed once and cached.

    Args:
        unet: the unwrapped network; `make` finds it in full precision and with the weights to evaluate.
        training, held_out: ImageSets; the second, which may be empty, is what real images that were not trained on look like.
        every: updates between two evaluations; None for none.
        best_metric: "fd" or "kd" where that decides which checkpoint is best.
        num_images, batch_size: samples, and at once on each process.
        should_stop: asked during sampling; a stop leaves the evaluation out.
        say: prints a line for the user.
        predict: what the sampler asks in place of the network, see `sampling.sample`.

    Raises UserError for fewer images than figures can be made of.
    """

    def __init__(
        self,
        accelerator,
        unet: nn.Module,
        noise_scheduler,
        output_dir: Path,
        *,
        training: ImageSet,
        held_out: ImageSet,
        trackers: Trackers,
        doctor: Doctor,
        every: int | None,
        best_metric: str,
        num_images: int,
        batch_size: int,
        sampler: str,
        num_inference_steps: int,
        seed: int,
        cache_dir: str | None,
        should_stop: Callable[[], bool],
        say: Callable[[str], None],
        predict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ):
        if every and (num_images < LEAST_IMAGES or len(training) < 2 * LEAST_IMAGES):
            raise UserError(
                f"--eval_steps: {num_images} samples and {len(training)} training images are too few for figures; "
                f"--eval_images must be at least {LEAST_IMAGES}"
            )
        self._accelerator, self._unet, self._folder = accelerator, unet, output_dir / "evaluation"
        self._training, self._held_out, self._cache_dir = training, held_out, cache_dir
        self._trackers, self._doctor, self._should_stop, self._say = trackers, doctor, should_stop, say
        self._every, self._num_images, self._batch_size, self._seed = every, num_images, batch_size, seed
        self._scheduler, self._num_inference_steps = make_sampler(sampler, noise_scheduler), num_inference_steps
        self._best_metric, self._predict = best_metric, predict
        self._evaluation: Evaluation | None = None
        self._stopped = False

    def due(self, state: TrainState, max_train_steps: int) -> bool:
        """Whether the samples of this update are to be evaluated and were not yet. After a stop they still are."""
        if self._every is None or state.step in (0, state.evaluated_step):
            return False
        return state.step % self._every == 0 or state.step == max_train_steps

    def make(self, state: TrainState) -> bool:
        """Evaluates, and notes the distances in `state`; whether they make this the best checkpoint. False when told to stop.

        Every process must call it, and gets the same; what goes wrong costs the evaluation and not the training. Logs the
        figures (see `Evaluation.measure`), records them for the doctor and the report, says what they cost, and writes
        evaluation/nearest.png. The training's weights and random numbers are left as they were.
        """
        step = state.step
        start = time.perf_counter()
        self._stopped, problem = False, None
        try:
            if self._evaluation is None:
                self._evaluation = self._prepare()
            prepared = time.perf_counter()
            figures, sheet = self._evaluation.measure(self._sample, self._num_images, cancelled=lambda: self._stopped)
        except UserError as error:  # on all processes alike: no memory for it, say
            problem = str(error)
        if problem is not None:
            clear_device_cache(garbage_collection=True)  # what it held, for the updates to come
            advice = f"; {ADVICE}" if OUT_OF_MEMORY in problem and ADVICE not in problem else ""
            self._say(f"left out: the evaluation after {step} updates: {problem}{advice}")
            state.evaluated_step = step  # to no avail, but it would fail again
            return False
        if figures is None:
            return False
        state.evaluated_step = step
        done = time.perf_counter()
        logged = {f"eval/{kind}_{FEATURES}": figures[kind] for kind in ("fd", "kd")}
        logged |= {f"eval/{name}": figures[name] for name in LOGGED}
        logged |= {"eval/modes_hit": figures["modes"]["hit"], "eval/modes_different": figures["modes"]["different"]}
        logged |= {"eval/near_duplicates": figures["memorisation"]["near_duplicates"], "eval/seconds": done - start}
        self._trackers.log(logged, step=step)
        self._doctor.record(step, logged | {"evaluation": figures})
        try:
            on_main_process(self._accelerator, lambda: save_png(sheet, self._folder / "nearest.png"))
        except UserError as error:  # a full disk takes no picture, and the figures are worth having without
            self._say(f"left out: {error}")
        floor = figures["floor"]
        self._say(
            f"evaluation after {step} updates: fd_{FEATURES} {figures['fd']:.4g} (real/real floor {floor['fd']:.4g}), "
            f"kd_{FEATURES} {figures['kd']:.4g} ({floor['kd']:.4g}), N {figures['images']}; it took {done - start:.1f} s"
            + (f", {prepared - start:.1f} s of it for the training images, once" if prepared - start > 0.1 else "")
        )
        kinds = [state.record(f"{kind}_{FEATURES}", figures[kind], decides=kind == self._best_metric) for kind in ("fd", "kd")]
        return any(kinds)

    def _prepare(self) -> Evaluation:
        real = _some(self._training, REFERENCE_ROWS)
        with if_memory_allows(self._accelerator, "the extractor", ADVICE):
            extractor = make_extractor(FEATURES, real).to(self._accelerator.device)

        def features(images: ImageSet) -> FeatureSet:
            cache = cache_root(self._cache_dir) / "steady_diffusion"
            return reference_features(self._accelerator, extractor, images, batch_size=self._batch_size, cache_dir=cache)

        reference = features(real)
        held_out = features(_some(self._held_out, MOST_IMAGES)).rows if len(self._held_out) else None
        # The other processes wait while the main one looks for copies, so it looks through as many images as check_data does.
        most = MOST_COMPARED_BYTES // math.prod(real.shape) if real.cached else MOST_DECODED
        originals = Originals(_some(real, max(1, most)), self._held_out, reference.rows, held_out)
        options = {"seed": self._seed, "batch_size": self._batch_size, "originals": originals}
        return Evaluation(self._accelerator, extractor, reference, **options)

    def _sample(self, numbers: torch.Tensor) -> torch.Tensor:
        images = None
        if not self._stopped:
            images = sample(
                self._unet,
                self._scheduler,
                num_inference_steps=self._num_inference_steps,
                sample_numbers=numbers,
                seed=self._seed,
                shape=self._training.shape,
                device=self._accelerator.device,
                batch_size=len(numbers),
                should_stop=self._should_stop,
                predict=self._predict,
            )
        if images is None:  # told to stop: the other processes wait for as many images, whatever they show
            self._stopped = True
            return torch.zeros(len(numbers), *self._training.shape, dtype=torch.uint8, device=self._accelerator.device)
        return to_uint8(images)


def _some(images: ImageSet, most: int) -> ImageSet:
    """At most so many of the images, spread over the set."""
    return images if len(images) <= most else images.subset(evenly(len(images), most).numpy())
