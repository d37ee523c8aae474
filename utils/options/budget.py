"""`--budget`: the flags that utils/training/budget.py sets, and the command line that repeats the run without it."""

import contextlib
import shlex
import sys
from typing import Any

from utils.core.errors import UserError
from utils.options.flags import AnyRun, RunOptions
from utils.options.parser import resolve, words_of

OF_THE_DATA = ("dataset_name", "output_dir", "resolution", "image_channels", "random_flip")  # no network's preset changes them
OF_THE_BATCH = ("train_batch_size", "global_batch_size", "gradient_accumulation_steps")
SETS = (
    *OF_THE_DATA,
    *("model_preset", "validation_images", "train_batch_size", "global_batch_size", "max_train_steps", "ema_max_decay"),
    *("learning_rate", "lr_warmup_steps", "lr_decay_steps", "logging_steps", "validation_steps", "eval_steps"),
    *("checkpointing_steps", "save_images_steps", "save_model_steps", "eval_batch_size", "eval_images"),
)


def chosen_by(options: AnyRun, chosen: dict[str, Any]) -> AnyRun:
    """Returns the options with the `chosen` values where the user gave none: those of a preset come last."""
    made = resolve(type(options), chosen, {name: getattr(options, name) for name in options.given if name != "budget"})
    made.budget = options.budget
    made.given |= {"max_train_steps"} & chosen.keys()  # by which a choice is known
    return made


def repeating(options: RunOptions) -> str:
    """Returns the command line that gives `options` without --budget, but for flags of one start of a run and secrets."""
    left_out = options.marked("once", "secret")
    values = {name: getattr(options, name) for name in sorted(options.given.union(SETS).difference(left_out))}
    wanted = {name: value for name, value in vars(options).items() if name not in left_out}
    for name in SETS:  # what the others mean anyway
        fewer = {other: value for other, value in values.items() if other != name}
        with contextlib.suppress(UserError):  # it is needed
            if wanted.items() <= vars(resolve(type(options), {}, fewer)).items():
                values = fewer
    return ("accelerate launch " if sys.argv[0].endswith(".py") else "") + shlex.join([sys.argv[0], *words_of(values)])
