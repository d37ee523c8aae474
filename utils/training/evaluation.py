"""How good a run is while it trains: the loss on held-out images, and figures of its own samples.

The same images, noise and noise levels every time, in fp32, sharded over the processes.
"""

import math
import time
from typing import cast

import torch
from PIL.Image import Image

from utils.core import randomness
from utils.core.distributed import on_main_process, together, waited_for
from utils.core.errors import OUT_OF_MEMORY, UserError
from utils.core.images import save_png
from utils.core.waiting import Meeting
from utils.data.dataset import ImageSet, cache_folder
from utils.diffusion.sampling import sample, to_uint8
from utils.evaluation.evaluator import Evaluation
from utils.evaluation.extractors import make_extractor
from utils.evaluation.feature_sets import REFERENCE_ROWS, evenly, reference_features
from utils.evaluation.memorization import Originals
from utils.evaluation.quality import DISTANCES
from utils.training.run import Run
from utils.training.samples import plan_of

DRAWS = 4  # noisings of each image


class Validation:
    """Every `validation_steps` updates and after the last, where there are held-out images."""

    def __init__(self, run: Run):
        self._run = run

    def due(self) -> bool:
        run, step = self._run, self._run.state.step
        last = step == run.length.max_train_steps
        return (last or step % run.options.validation_steps == 0) and len(run.data.validation) > 0

    def make(self) -> None:
        """Logs the loss and notes it in the state. Call it on all processes, with the weights to judge in full precision. What
        fails on any fails on all of them."""
        run, loss = self._run, self.mean_loss()
        with waited_for(run.accelerator, "logging the validation"):
            run.trackers.log({"validation/loss": loss}, step=run.state.step)
            run.doctor.record(run.state.step, {"validation/loss": loss})
        run.state.record("validation loss", loss, decides=run.options.best_metric == "loss")

    @torch.no_grad()
    def mean_loss(self) -> float:
        """Returns the mean over DRAWS noisings of each held-out image, equal on all processes. The noise levels lie in the
        middles of equal slices of the training's, so that the figure moves with the weights and not with the luck of the
        draw."""
        run, size = self._run, self._run.options.micro_batch_size
        objective, accelerator, total = run.objective, run.accelerator, len(run.data.validation) * DRAWS
        loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")

        def summed(first: int) -> torch.Tensor:
            numbers = torch.arange(first, min(first + size, total))
            # A fixed shuffle decides which image gets which slice.
            slices = randomness.permute(run.options.seed, "validation timesteps", torch.zeros_like(numbers), numbers, total)
            drawn = objective.draw(run.data.validation_batch(numbers), (slices.double() + 0.5) / total)
            losses = objective.losses(objective.network, **drawn).shown
            return losses.sum().cpu().double()  # in this order: not every device has float64

        with together(accelerator, "the validation", "set a smaller --train_batch_size, by which it is shared out"):
            batches = list(range(0, total, size))[accelerator.process_index :: accelerator.num_processes]
            with run.progress.part("validating", len(batches), "batches") as bar:
                for first in batches:
                    loss_sum += summed(first)
                    bar.update()
        with Meeting():
            return accelerator.reduce(loss_sum.float().to(accelerator.device), "sum").item() / total


FEATURES = "randconv"  # needs no labels, no file and no training
MAX_COMPARED_BYTES, MAX_DECODED = 512 * 2**20, 2048  # of training images that may be copied: packed ones, files
MORE_COPIES = 0.05  # share of the samples, above twice that of real images, which chance does not make
ADVICE = "set a smaller --evaluation_batch_size"
LOGGED = ("precision", "recall", "density", "coverage", "variance_ratio", "distance_ratio", "vendi")


class SampleEvaluation:
    """Figures of the samples against the training images, up to 50,000 of them; their features are computed once and cached."""

    def __init__(self, run: Run):
        self._run = run
        self._plan = plan_of(run, run.options.evaluation_batch_size)
        self._evaluation: Evaluation | None = None
        self._stopped = False

    def due(self) -> bool:
        """Returns whether the samples of this update are to be evaluated and were not yet. After a stop they still are."""
        run, step, every = self._run, self._run.state.step, self._run.options.eval_steps
        if every is None or step in (0, run.state.evaluated_step):
            return False
        return step % every == 0 or step == run.length.max_train_steps

    def make(self) -> None:
        """Evaluates, and notes the distances in the state, unless told to stop.

        Every process must call it; what goes wrong costs the evaluation and not the training. Logs the
        figures (see `Evaluation.measure`), records them for the doctor and the report, says what they cost, and writes
        evaluation/nearest.png. The training's weights and random numbers are left as they were.
        """
        if not self._run.attempts.make("the evaluation", self._evaluate):
            self._run.state.evaluated_step = self._run.state.step  # to no avail, but it would fail again

    def _evaluate(self) -> None:
        run, state, step = self._run, self._run.state, self._run.state.step
        start, self._stopped = time.perf_counter(), False
        try:
            if self._evaluation is None:
                self._evaluation = self._prepare()
            prepared = time.perf_counter()
            count = run.options.eval_images
            bar = run.progress.part("evaluating samples", count, "samples", afterwards="computing the figures")
            with bar as self._bar, self._plan.decoding(run.accelerator):
                figures, sheet = self._evaluation.measure(self._sample, count, canceled=lambda: self._stopped)
        except UserError as error:  # on all processes alike
            if OUT_OF_MEMORY not in str(error) or ADVICE in str(error):
                raise
            raise UserError(f"{error}; {ADVICE}") from None
        if figures is None:
            return
        state.evaluated_step = step
        done = time.perf_counter()
        logged = {f"eval/{kind}_{FEATURES}": figures[kind] for kind in DISTANCES}
        logged |= {f"eval/{name}": figures[name] for name in LOGGED}
        logged |= {"eval/modes_hit": figures["modes"]["hit"], "eval/modes_different": figures["modes"]["different"]}
        logged |= {"eval/near_duplicates": figures["memorisation"]["near_duplicates"], "eval/seconds": done - start}
        with waited_for(run.accelerator, "logging the evaluation"):
            run.trackers.log(logged, step=step)
            run.doctor.record(step, logged | {"evaluation": figures})
        try:
            picture = run.output_dir / "evaluation" / "nearest.png"
            on_main_process(run.accelerator, "writing the closest pairs", lambda: save_png(cast(Image, sheet), picture))
        except UserError as error:  # a full disk takes no picture, and the figures are worth having without
            run.print_line(f"left out: {error}")
        floor = figures["floor"]
        run.print_line(
            f"evaluation after {step} updates: fd_{FEATURES} {figures['fd']:.4g} (real/real floor {floor['fd']:.4g}), "
            f"kd_{FEATURES} {figures['kd']:.4g} ({floor['kd']:.4g}), N {figures['images']}; it took {done - start:.1f} s"
            + (f", {prepared - start:.1f} s of it for the training images, once" if prepared - start > 0.1 else "")
        )
        self._note_copies(figures["memorisation"])
        for kind in DISTANCES:
            state.record(f"{kind}_{FEATURES}", figures[kind], decides=kind == run.options.best_metric)

    def _note_copies(self, found: dict) -> None:
        run, state, share, real = self._run, self._run.state, found["copies"], found["copies_real"]
        if share <= MORE_COPIES + 2 * real:
            state.copying_since = None
        elif state.copying_since is None:
            state.copying_since = state.step
            run.print_line(
                f"from update {state.step:,} on, more samples are copies of training images than {found['compared_with']} are: "
                f"{share:.0%}, {real:.0%}; no such checkpoint becomes the best one"
            )

    def _prepare(self) -> Evaluation:
        run, size = self._run, self._run.options.evaluation_batch_size
        real = _some(run.data.training, REFERENCE_ROWS)
        with together(run.accelerator, "preparing the evaluation", ADVICE):
            extractor = make_extractor(FEATURES, real).to(run.accelerator.device)

        with run.progress.part("features of real images", len(real)) as bar:
            cache = cache_folder(run.options.cache_dir)
            reference = reference_features(
                run.accelerator, extractor, real, batch_size=size, cache_dir=cache, progress=bar.update
            )
        # The other processes wait while the main one looks for copies, so it looks through as many images as check_data does.
        most = MAX_COMPARED_BYTES // math.prod(real.shape) if real.cached else MAX_DECODED
        originals = Originals(_some(real, max(1, most)), run.data.validation)
        return Evaluation(run.accelerator, extractor, reference, seed=run.options.seed, batch_size=size, originals=originals)

    def _sample(self, numbers: torch.Tensor) -> torch.Tensor:
        run, images = self._run, None
        steps = self._plan.denoising_steps(len(numbers))

        def should_stop() -> bool:  # asked before every step
            self._bar.update(len(numbers) * run.accelerator.num_processes / steps)
            return run.stopping()

        if not self._stopped:
            network, predict = run.objective.exported, run.objective.predict
            images = sample(network, self._plan, numbers, should_stop=should_stop, predict=predict)
        if images is None:  # told to stop: the other processes wait for as many images, whatever they show
            self._stopped = True
            return torch.zeros(len(numbers), *run.data.training.shape, dtype=torch.uint8, device=run.accelerator.device)
        return to_uint8(images)


def _some(images: ImageSet, most: int) -> ImageSet:
    """At most so many of the images, spread over the set."""
    return images if len(images) <= most else images.subset(evenly(len(images), most).numpy())
