"""A warning, after the first updates, that a run on a CPU will take very long."""

import time

from utils.options.presets import smaller_preset
from utils.training.run import Run

LONG_SECONDS = 3600.0
MEASURED_UPDATES, MEASURED_SECONDS = 5, 20.0  # whichever are over first


class Forecast:
    """Measures the quickest of the first updates."""

    def __init__(self, run: Run):
        self._run, self._last, self._started = run, 0.0, 0.0
        self._seconds: list[float] = []
        self._measures = run.accelerator.device.type == "cpu"

    def begin(self) -> None:
        self._last = self._started = time.monotonic()

    def after_update(self) -> None:
        if not self._measures:
            return
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last = now
        measured = len(self._seconds)
        if measured == MEASURED_UPDATES or (measured > 1 and now - self._started > MEASURED_SECONDS):
            self._measures = False
            self._tell(min(self._seconds))

    def _tell(self, seconds: float) -> None:
        run, options = self._run, self._run.options
        left = run.length.max_train_steps - run.state.step
        if left * seconds < LONG_SECONDS:
            return
        advice, parameters = "set fewer --max_train_steps, or train on a GPU", run.facts["parameters"]
        if options.script == "train_ddpm" and (smaller := smaller_preset(options.resolution, parameters)):
            name, size = smaller
            advice = (
                f"a smaller network is quicker: --model_preset {name} has {size / 1e6:.1f} M parameters, this one has "
                f"{parameters / 1e6:.1f} M"
            )
        run.print_line(
            f"warning: an update takes {seconds:.2g} s on this CPU, so the {left:,} updates to come take about "
            f"{left * seconds / 3600:.1f} hours. Try: {advice}"
        )
