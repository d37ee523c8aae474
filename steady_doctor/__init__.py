"""A doctor for training scripts of diffusion models: it records what one update does, and says what is wrong with it.

    python -m steady_doctor my_train.py --its_flags ...

or, in a loop of one's own, `from steady_doctor import watch`.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def watch(
    model: "nn.Module",
    optimizer: "Optimizer",
    *,
    watch_dir: "str | os.PathLike | None" = None,
) -> None:
    """Watches the training of `model` by `optimizer` from here to the end of the process, and changes nothing of it. The doctor
    sees by itself which noise scheduler, averages and library are used beside them.

    Args:
        watch_dir: folder for diagnosis.json and report.html; default: watch/<the script's name>.
    """
    from torch import nn  # takes seconds, which `python -m steady_doctor --help` has not

    from steady_doctor.ending import tell_before_death
    from steady_doctor.result import Result

    if Result.is_watching:  # this script runs under the doctor already
        return
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner  # of torch.compile, or of several processes
    folder = Path(watch_dir or Path("watch") / (Path(sys.argv[0]).stem or "script"))
    own = getattr(optimizer, "optimizer", optimizer)  # within Accelerate's
    result = Result(folder, network=type(model).__name__, optimizer=own)
    result.begin()

    def tell(status: int | None) -> int:
        result.finish(status == 0)
        return status or 0

    tell_before_death(tell)
    atexit.register(lambda: result.finish(getattr(sys, "last_type", None) is None))  # which an error leaves
