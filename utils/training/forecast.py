"""Warnings that a run on a CPU will take very long: of a large network at once, of others after the first updates."""

import time

from utils.options.presets import smaller_preset
from utils.training.run import Run

LONG_SECONDS = 3600.0
LARGE, MANY = 20_000_000, 100  # parameters and updates; with both, a run on any CPU takes hours
MEASURED_UPDATES, MEASURED_SECONDS = 5, 20.0  # whichever are over first


class Forecast:
    """Measures the quickest of the first updates."""

    def __init__(self, run: Run):
        self._run, self._last, self._started = run, 0.0, 0.0
        self._seconds: list[float] = []
        self._measures = run.accelerator.device.type == "cpu"

    def begin(self) -> None:
        self._last = self._started = time.monotonic()
        parameters, left = self._run.facts["parameters"], self._run.length.max_train_steps - self._run.state.step
        if self._measures and parameters > LARGE and left > MANY:
            size = f"this network has {parameters / 1e6:.1f} M parameters, and an update takes many seconds on a CPU"
            self._run.print_line(f"warning: {size}. Try: {self._smaller() or 'a smaller network, or a GPU'}")

    def _smaller(self) -> str | None:
        """Advice; None where no preset is smaller."""
        run, options = self._run, self._run.options
        found = smaller_preset(options.script, options.resolution, run.facts["parameters"])
        return found and f"--model_preset {found[0]}, which has {found[1] / 1e6:.1f} M parameters and is faster"

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
        run = self._run
        left = run.length.max_train_steps - run.state.step
        if left * seconds < LONG_SECONDS:
            return
        run.print_line(
            f"warning: an update takes {seconds:.2g} s on this CPU, so the {left:,} updates to come take about "
            f"{left * seconds / 3600:.1f} hours. Try: {self._smaller() or 'set fewer --max_train_steps, or train on a GPU'}"
        )
