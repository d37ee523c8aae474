"""The global batch of an update as processes x micro batch x micro steps."""

from typing import cast

from utils.core.errors import UserError
from utils.options.flags import RunOptions


def split_batch(options: RunOptions, num_processes: int) -> tuple[int, int]:
    """(micro batch, micro steps) of each process that make up the global batch exactly.

    A micro batch that was given stays. One that is a default or a preset's gives way: to the micro steps if these were given,
    else to the largest divisor below it. Raises UserError when the numbers disagree, or when that divisor is far smaller.
    """
    global_batch_size, micro_batch_size = cast(int, options.global_batch_size), options.micro_batch_size
    accumulation = options.gradient_accumulation_steps if "gradient_accumulation_steps" in options.given else None
    exact = "train_batch_size" in options.given
    if exact and accumulation and num_processes * micro_batch_size * accumulation != global_batch_size:
        raise UserError(
            f"--global_batch_size {global_batch_size} is not {num_processes} processes x --train_batch_size {micro_batch_size} "
            f"x --gradient_accumulation_steps {accumulation} = {num_processes * micro_batch_size * accumulation}\n"
            "leave out one of the three flags: it is computed from the others"
        )
    together = per_process(global_batch_size, num_processes)
    if exact:
        flag, kept = "--train_batch_size", micro_batch_size
    elif accumulation:
        flag, kept = "--gradient_accumulation_steps", accumulation
    else:
        wanted, micro_batch_size = micro_batch_size, next(size for size in divisors(together) if size <= micro_batch_size)
        if 4 * micro_batch_size < min(wanted, together):  # many times slower, without a word
            raise UserError(
                f"--global_batch_size {global_batch_size} gives each of {num_processes} processes {together} images, which can "
                f"only be split into micro batches of {micro_batch_size}: this is slow\n"
                f"choose a multiple of {num_processes * wanted}, or set --train_batch_size"
            )
        return micro_batch_size, together // micro_batch_size
    if together % kept:
        raise UserError(
            f"{flag} {kept} does not divide {together}, the images that each of {num_processes} processes has of "
            f"--global_batch_size {global_batch_size}\nchoose a divisor of {together}, or leave {flag} out"
        )
    return (kept, together // kept) if exact else (together // kept, kept)


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
