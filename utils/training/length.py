"""When things happen, counted in updates: the length of a run and what falls due after an update."""

import math
from typing import NamedTuple

from utils.core.errors import UserError
from utils.options.flags import RunOptions
from utils.options.presets import FEW_IMAGES, small_preset

BEARS = 200  # times that few images can be shown before samples are copies: 24 digits as well as 48 (docs/data.md)
FEWEST_UPDATES = 100  # between two sample grids, by default


class RunLength(NamedTuple):
    global_batch_size: int  # images of an update, over all processes
    updates_per_epoch: int
    max_train_steps: int  # updates of the whole run

    @classmethod
    def of(cls, options: RunOptions, num_images: int, num_processes: int) -> "RunLength":
        """Raises UserError where there are fewer images than one update takes."""
        micro_batch, accumulation = options.micro_batch_size, options.gradient_accumulation_steps
        global_batch_size = num_processes * micro_batch * accumulation
        small = small_preset(options.resolution) if options.model_preset == options.usual_preset else None
        check_global_batch(num_images, global_batch_size, options.global_batch_size, small)
        of_an_epoch = updates_per_epoch(num_images, micro_batch, num_processes, accumulation)
        return cls(global_batch_size, of_an_epoch, options.max_train_steps or options.num_epochs * of_an_epoch)


def about_small_set(images: int, parameters: int, length: RunLength, dropout: float) -> list[str]:
    """Returns what to say of a small set of images: what it is trained with, and what it can bear; empty for others."""
    if images > FEW_IMAGES:
        return []
    updates, times = length.max_train_steps, length.max_train_steps * length.global_batch_size / images
    said = (
        f"{images} images are few: {parameters / 1e6:.1f} M parameters, dropout {dropout:g}, {updates:,} updates show each one "
    )
    most = f"{BEARS * images // length.global_batch_size:,} updates"
    return [f"{said}{times:.0f} times. After about {BEARS} times ({most}), samples become copies (docs/data.md)"]


def updates_per_epoch(num_images: int, train_batch_size: int, num_processes: int, accumulation: int) -> int:
    """Updates per pass over the data, as diffusers' `train_unconditional.py` counts them: the data loader keeps a last short
    batch, is split over the processes rounding up, and the last accumulation window may be short."""
    batches = math.ceil(num_images / train_batch_size)
    return math.ceil(math.ceil(batches / num_processes) / accumulation)


def check_global_batch(num_images: int, global_batch_size: int, asked: int | None = None, small: str | None = None) -> None:
    """`asked`: --global_batch_size, of the command line or a preset. `small`: a preset for small sets. Raises UserError
    where the images are too few."""
    if num_images == 0:
        raise UserError("there are no training images\ncheck the data and --validation_images")
    if num_images < global_batch_size:
        product = "smaller --train_batch_size (global batch = processes x --train_batch_size x --gradient_accumulation_steps)"
        advice = f"set --global_batch_size to {num_images} or less" if asked else f"use a {product}"
        advice += f", or --model_preset {small}, which is for small sets" if asked and small else ""
        raise UserError(f"{num_images} training images are fewer than one global batch of {global_batch_size}\n{advice}")


def preview_steps(options: RunOptions, updates_per_epoch: int) -> int | None:
    """Updates from one sample grid to the next; None: they come with epochs. Where nobody has set how often, they are some
    updates apart: their cost is that of many updates, and an epoch of a small set may be one or two."""
    asked = options.save_images_steps is not None or "save_images_epochs" in options.given
    few = options.save_images_epochs * updates_per_epoch < FEWEST_UPDATES
    return FEWEST_UPDATES if few and not asked else options.save_images_steps


def is_due(step: int, last_step: int, *, steps: int | None, epochs: int, epoch_steps: int) -> bool:
    """Whether something falls due after `step` finished updates: every `steps` updates, or where that is None at the end of
    epochs 1, 1 + `epochs`, 1 + 2 `epochs` ... as in diffusers' script. Not after the last update, which has its own block."""
    if step == last_step:
        return False
    if steps is not None:
        return step % steps == 0
    return step % epoch_steps == 0 and (step // epoch_steps - 1) % epochs == 0
