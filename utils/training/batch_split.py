"""The global batch of an update as processes x micro batch x micro steps."""

from typing import cast

from utils.core.errors import UserError
from utils.options.flags import RunOptions


def split_batch(options: RunOptions, num_processes: int) -> tuple[int, int]:
    """(micro batch, micro steps) of each process that make up the global batch exactly.

    A micro batch that was given stays. One that is a default or a preset's gives way: to the micro steps if these were given,
    else to the largest divisor below it. Raises UserError when the numbers disagree, or when that divisor is far smaller.
    """
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
