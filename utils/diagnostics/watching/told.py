"""`watch(model, optimizer, ...)`: two lines in a loop, for those who would rather tell what is to be watched."""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from utils.diagnostics.watching.ending import tell_before_death
from utils.diagnostics.watching.facts import Average, Facts
from utils.diagnostics.watching.hooks import install
from utils.diagnostics.watching.result import Result
from utils.diagnostics.watching.watcher import Watcher, unwrapped


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    noise_scheduler: Any = None,
    *,
    ema: Any = None,
    accelerator: Any = None,
    watch_dir: "str | os.PathLike | None" = None,
) -> Watcher:
    """Watches the training of `model` by `optimizer` from here to the end of the process, and changes nothing of it.

    Args:
        noise_scheduler: of diffusers, where one is used.
        ema: averaged weights: diffusers' EMAModel, or a copy of the model.
        accelerator: of Accelerate, where it is used.
        watch_dir: folder for diagnosis.json and report.html; default: watch/<the script's name>.
    """
    result = Result(Path(watch_dir or Path("watch") / (Path(sys.argv[0]).stem or "script")))
    watcher = Watcher(result.write)
    facts = Facts(accelerator=accelerator, noise_schedulers=[] if noise_scheduler is None else [noise_scheduler])
    names = dict(unwrapped(model).named_parameters())
    if hasattr(ema, "shadow_params"):
        facts.averages.append(Average("EMA", dict(zip(names, ema.shadow_params)), ema))
    elif isinstance(ema, nn.Module):
        inner = {name.removeprefix("module."): tensor for name, tensor in ema.named_parameters()}
        facts.averages.append(Average("EMA", {name: inner[name] for name in names if name in inner}, ema))
    watcher.told(model, optimizer, facts)
    hooks = install(watcher)

    def finish(status: int | None, last_look: bool) -> int:
        watcher.exit_status = status
        result.finish(watcher, hooks, ended=status == 0, last_look=last_look)
        return status or 0

    tell_before_death(finish)
    atexit.register(result.finish, watcher, hooks, ended=True)
    return watcher
