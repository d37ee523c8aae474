"""`--push_to_hub` with a folder whose run has ended: its pipeline is pushed, and nothing is trained."""

import os
from collections.abc import Callable
from pathlib import Path

from utils.core.errors import UserError
from utils.diffusion.hub import check_hub, has_pipeline, push_to_hub
from utils.options.flags import AnyRun, RunOptions
from utils.runs.record import RunRecord
from utils.runs.start import LENGTH


def train_or_push(train: Callable[[AnyRun], int]) -> Callable[[AnyRun], int]:
    """`train`, but for options that ask for nothing else than the push of a run that has ended. Returns the exit status."""

    def run(options: AnyRun) -> int:
        if not pushes_alone(options):
            return train(options)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{options.output_dir} holds a finished run: its pipeline will be pushed, nothing is trained")
            check_hub(options)
            print(f"pushed to {push_to_hub(options)}")
        return 0

    return run


def pushes_alone(options: RunOptions) -> bool:
    """Whether the run in the folder has ended well and no flag that was given asks for another run or a longer one."""
    folder = Path(options.output_dir)
    if not options.push_to_hub or options.overwrite_output_dir or options.dry_run or not has_pipeline(folder):
        return False
    try:
        record = RunRecord.read(folder)
    except UserError:
        return False
    asked = options.shaping() | {name: getattr(options, name) for name in LENGTH}
    given = {name: value for name, value in asked.items() if name in options.given}
    return record.exit_status == 0 and all(record.options.get(name) == value for name, value in given.items())
