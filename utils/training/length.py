"""Updates: how many a run has, what falls due after one, and how the images of one are split."""

import math
from typing import NamedTuple, cast

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

    def is_due(self, step: int, steps: int | None, epochs: int) -> bool:
        """Whether something falls due after `step` finished updates: every `steps` updates, or where that is None at the end of
        epochs 1, 1 + `epochs`, 1 + 2 `epochs` ... as in diffusers' script. Not after the last one, which has its own block."""
        if step == self.max_train_steps:
            return False
        if steps is not None:
            return step % steps == 0
        return step % self.updates_per_epoch == 0 and (step // self.updates_per_epoch - 1) % epochs == 0


def about_small_set(images: int, parameters: int, length: RunLength, dropout: float) -> list[str]:
    """Returns what to say of a small set of images: what it is trained with, and what it can bear; empty for others."""
    if images > FEW_IMAGES:
        return []
    batch, updates = length.global_batch_size, length.max_train_steps
    return [
        f"{images} images are few: {parameters / 1e6:.1f} M parameters, dropout {dropout:g}, {updates:,} updates show each one "
        f"{updates * batch / images:.0f} times. After about {BEARS} times ({BEARS * images // batch:,} updates), samples "
        "become copies (docs/data.md)"
    ]


def updates_per_epoch(num_images: int, train_batch_size: int, num_processes: int, accumulation: int) -> int:
    """Updates per pass over the data, as diffusers' `train_unconditional.py` counts them: the data loader keeps a last short
    batch, is split over the processes rounding up, and the last accumulation window may be short."""
    batches = math.ceil(num_images / train_batch_size)
    return math.ceil(math.ceil(batches / num_processes) / accumulation)


def check_global_batch(num_images: int, global_batch_size: int, asked: int | None = None, small: str | None = None) -> None:
    """`asked`: --global_batch_size. `small`: a preset for small sets. Raises UserError where the images are too few."""
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


def split_batch(options: RunOptions, num_processes: int) -> tuple[int, int]:
    """(micro batch, micro steps) of each process that make up the global batch exactly. A micro batch that was given stays; a
    default or a preset's gives way: to the micro steps if these were given, else to the largest divisor below it. Raises
    UserError when the numbers disagree, or when that divisor is far smaller."""
    global_batch_size, wanted = cast(int, options.global_batch_size), options.micro_batch_size
    asked = options.gradient_accumulation_steps if "gradient_accumulation_steps" in options.given else None
    together = per_process(global_batch_size, num_processes)
    if "train_batch_size" in options.given:
        micro_batch_size, accumulation = wanted, asked or max(1, together // wanted)
    elif asked:
        micro_batch_size, accumulation = max(1, together // asked), asked
    else:
        micro_batch_size = next(size for size in divisors(together) if size <= wanted)
        accumulation = together // micro_batch_size
        if 4 * micro_batch_size < min(wanted, together):  # many times slower, without a word
            raise UserError(
                f"--global_batch_size {global_batch_size} gives each of {num_processes} processes {together} images, which can "
                f"only be split into micro batches of {micro_batch_size}: this is slow\n"
                f"choose a multiple of {num_processes * wanted}, or set --train_batch_size"
            )
    if micro_batch_size * accumulation != together:
        raise UserError(
            f"--global_batch_size {global_batch_size} is not {num_processes} processes x --train_batch_size {micro_batch_size} "
            f"x --gradient_accumulation_steps {accumulation} = {num_processes * micro_batch_size * accumulation}\n"
            f"set --train_batch_size or --gradient_accumulation_steps, not both, to a divisor of {together}: the other follows"
        )
    return micro_batch_size, accumulation


def per_process(global_batch_size: int, num_processes: int) -> int:
    """Returns how many images of an update fall to each process. Raises UserError when they cannot be shared evenly."""
    if global_batch_size % num_processes:
        raise UserError(
            f"--global_batch_size {global_batch_size} cannot be shared evenly by {num_processes} processes\n"
            f"choose a multiple of {num_processes}"
        )
    return global_batch_size // num_processes


def divisors(count: int) -> list[int]:
    """Of `count`, the largest first."""
    return [size for size in range(count, 0, -1) if count % size == 0]
