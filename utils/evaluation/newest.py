"""What a name means where weights are to be loaded: of a run that has exported no pipeline yet, its newest checkpoint."""

import sys
from pathlib import Path

from accelerate import Accelerator

from utils.core.distributed import made_on_main_process
from utils.core.errors import UserError
from utils.diffusion.weights import about_weights
from utils.runs.checkpoint_files import list_checkpoints, newest_checkpoint
from utils.runs.checkpoints import EMA_WEIGHTS


def loadable(name: str) -> str:
    """Returns what `pipelines.load_network` loads for a name: `name` itself, or the newest valid checkpoint of a run without an
    exported pipeline. That, and which weights are used of a folder that has others, is told on stderr. Raises UserError where
    such a run has none."""
    run = Path(name)
    is_run = (run / "options.json").is_file() or bool(list_checkpoints(run))
    if not is_run or (run / "model_index.json").is_file():
        _tell(about_weights(name))
        return name
    checkpoint, skipped = newest_checkpoint(run)
    if checkpoint is None:
        damaged = f"restore one from a copy: {'; '.join(skipped)}"
        advice = damaged if skipped else "a run saves a checkpoint every --checkpointing_steps updates, and when it is stopped"
        raise UserError(
            f"cannot load a pipeline from {name}: the run has no exported pipeline and no valid checkpoint yet\n{advice}"
        )
    weights = "averaged weights" if (checkpoint / EMA_WEIGHTS).is_file() else "weights"
    _tell([*skipped, f"{name} has no exported pipeline yet: using the {weights} of {checkpoint.name}"])
    return str(checkpoint)


def _tell(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def agreed(accelerator: Accelerator, name: str) -> str:
    """Returns what `loadable` does, the same on every process: a run that goes on may have saved another one meanwhile."""
    return made_on_main_process(accelerator, "looking at the run", loadable, name)
