"""`--profile N`: on what N updates spend their time, operation by operation."""

from pathlib import Path
from typing import cast

from torch.profiler import ProfilerActivity, profile

from utils.core.distributed import on_main_process
from utils.core.files import whole_file
from utils.training.run import Run

_FIRST = 5  # updates before the first that is profiled: they choose kernels, reserve memory and are audited most
_ROWS = 20


class Profile:
    """Of the main process: `profile/updates-A-B.json.gz` for chrome://tracing or Perfetto, and a table in report.html. Its
    methods are to be called on every process: the others wait while it writes."""

    def __init__(self, run: Run):
        self._run, self._wanted = run, run.options.profile  # None once they are made
        self._begin = min(run.state.step + _FIRST, run.length.max_train_steps - 1)
        self._began, self._profiler = False, cast(profile | None, None)

    def after_update(self) -> None:
        """To be called after each update. Profiling changes no number of the training."""
        if self._wanted is None:
            return
        step = self._run.state.step
        if self._began and step - self._begin >= self._wanted:
            self.close()
        elif not self._began and step == self._begin:
            self._began = True
            if not self._run.accelerator.is_main_process:
                return
            device = self._run.accelerator.device.type
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
            self._profiler = profile(activities=activities)
            self._profiler.start()

    def close(self) -> None:
        """Writes what was profiled; nothing where that has been done, or no update was. On every process."""
        updates = self._run.state.step - self._begin
        if self._began and self._wanted is not None and updates >= 1:
            self._wanted = None
            accelerator, what = self._run.accelerator, "writing the profile"
            self._run.attempts.make("the profile", on_main_process, accelerator, what, self._write, self._profiler, updates)
            self._profiler = None

    def _write(self, profiler: profile, updates: int) -> None:
        run = self._run
        profiler.stop()
        path = run.output_dir / "profile" / f"updates-{self._begin + 1}-{run.state.step}.json.gz"
        _export(profiler, path)
        rows = _longest(profiler, run.accelerator.device.type)
        run.doctor.record(run.state.step, {"profile": {"updates": updates, "rows": rows}})
        run.print_line(f"profiled {updates} updates: {path}; the longest operations are in report.html")


def _export(profiler: profile, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as draft:
        compressed = draft.with_suffix(".json.gz")  # by its name torch knows what to write
        profiler.export_chrome_trace(str(compressed))
        compressed.replace(draft)


def _longest(profiler: profile, device: str) -> list[dict]:
    """The operations with most time of their own: name, calls, seconds and share of all, on the GPU where there is one."""
    events = profiler.key_averages()
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    total = max(sum(getattr(event, own) for event in events), 1e-9)
    longest = sorted(events, key=lambda event: getattr(event, own), reverse=True)[:_ROWS]
    return [
        {
            "name": event.key[:80],
            "calls": event.count,
            "seconds": getattr(event, own) / 1e6,
            "share": getattr(event, own) / total,
        }
        for event in longest
    ]
