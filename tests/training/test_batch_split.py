"""What becomes of the flags about the batch, as a user would type them, on so many processes."""

import pytest

import train_ddpm
import train_edm2
from utils.core.errors import UserError
from utils.options.flags import DDPMOptions
from utils.training.length import split_batch

PAPER = (train_edm2, "--dataset_name x/y --model_preset S")  # a global batch of 2048 in micro batches of 32
CIFAR10 = (train_ddpm, "--dataset_name x/y --model_preset cifar10")  # micro batches of 128
PLAIN = (train_ddpm, "--dataset_name x/y")  # of 16


def split(run: tuple, flags: str, processes: int) -> tuple[int, int]:
    """(micro batch, micro steps)"""
    script, common = run
    args = script.parse_args([*common.split(), *flags.split()])
    if args.global_batch_size is None:
        return args.train_batch_size, args.gradient_accumulation_steps
    return split_batch(args, processes)


@pytest.mark.parametrize(
    ("run", "flags", "processes", "expected"),
    [
        (PAPER, "", 1, (32, 64)),
        (PAPER, "", 8, (32, 8)),
        (PAPER, "", 128, (16, 1)),
        (PAPER, "--train_batch_size 64", 4, (64, 8)),
        (PAPER, "--global_batch_size 16", 1, (16, 1)),
        (PAPER, "--global_batch_size 96", 2, (24, 2)),
        (PAPER, "--global_batch_size 256 --gradient_accumulation_steps 4", 1, (64, 4)),
        (PAPER, "--gradient_accumulation_steps 4", 8, (32, 4)),
        (CIFAR10, "--global_batch_size 512", 2, (128, 2)),
        (PLAIN, "--global_batch_size 24", 1, (12, 2)),
        # A resumed run on other processes: what was not given follows.
        (PLAIN, "--global_batch_size 64 --train_batch_size 8", 2, (8, 4)),
        (PLAIN, "--global_batch_size 64 --train_batch_size 8", 4, (8, 2)),
        (PLAIN, "--global_batch_size 64 --gradient_accumulation_steps 4", 2, (8, 4)),
        (PLAIN, "--global_batch_size 64 --gradient_accumulation_steps 4", 4, (4, 4)),
        (PLAIN, "--global_batch_size 64 --gradient_accumulation_steps 4 --train_batch_size 8", 2, (8, 4)),
    ],
)
def test_what_was_given_stays_and_the_rest_follows(run, flags, processes, expected):
    assert split(run, flags, processes) == expected


@pytest.mark.parametrize(
    ("run", "flags", "processes", "message"),
    [
        (PLAIN, "--global_batch_size 64 --train_batch_size 8 --gradient_accumulation_steps 4", 4, "not 4 processes .* = 128\n"),
        (PLAIN, "--global_batch_size=64 --train_batch_size=8 --gradient_accumulation_steps=1", 1, "not 1 processes .* = 8\n"),
        (PLAIN, "--global_batch_size 24 --train_batch_size 7", 1, "24 is not 1 .* 7 .* = 21\n.*divisor of 24:"),
        (PLAIN, "--global_batch_size 24 --train_batch_size 48", 1, "24 is not .* = 48\n"),
        (PAPER, "--global_batch_size 64 --gradient_accumulation_steps 3", 2, "64 is not 2 .*steps 3 = 60\n.* of 32:"),
        (PAPER, "", 3, "--global_batch_size 2048 cannot be shared evenly by 3 processes"),
        (PAPER, "--train_batch_size auto --gradient_accumulation_steps 1", 1, "auto needs to know .*\nset --global_batch_size"),
        (PLAIN, "--train_batch_size auto --global_batch_size 8 --gradient_accumulation_steps 1", 1, "do not go together"),
        (CIFAR10, "--global_batch_size 514", 1, "micro batches of 2: .*\n.* a multiple of 128, or set"),
        (CIFAR10, "--global_batch_size 262", 2, "each of 2 processes 131 images, which .* of 1:"),
    ],
)  # fmt: skip
def test_what_disagrees_is_refused_in_one_line(run, flags, processes, message):
    with pytest.raises(UserError, match=message) as caught:
        split(run, flags, processes)
    assert str(caught.value).count("\n") <= 1


def test_a_split_makes_up_the_global_batch():
    for together in range(1, 60):
        for micro in range(1, 20):
            options = DDPMOptions(global_batch_size=3 * together, train_batch_size=micro)  # none of them given
            largest = max(d for d in range(1, micro + 1) if together % d == 0)
            if largest >= min(micro, together) / 4:
                assert split_batch(options, 3) == (largest, together // largest)
            else:
                with pytest.raises(UserError, match=f"micro batches of {largest}:"):
                    split_batch(options, 3)
