"""What a run reports: figures accumulated on the device, and the one progress bar."""

import collections
import math
import resource
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from tqdm import tqdm

from utils.core.bars import LINE_SECONDS, Bar, duration, on_terminal, print_progress
from utils.optim.clipping import Gradients

QUARTILES = 4
_WAITING = 64  # micro batches whose losses are summed up together
# Without a terminal, the longest time in seconds without a line, and of the run's first minutes, which people watch.
MINUTE, FIRST_MINUTES = 60.0, 600.0
WATCH_SECONDS = 1.0  # between two looks at how long the update at hand takes
SOON = 3.0  # an update that takes no longer has its line at its end
RECENT = 100  # updates whose median gives the time left
UNKNOWN = 20  # first updates without a time left: many of them are slower, because they are audited


class StepStatistics:
    """Sums on the device between two reports, so that training never waits for the host. Loss figures are means over all
    samples whose loss is finite (`nonfinite.BadUpdates` counts the others). Quartiles are of the timestep: 1 is the least
    noise."""

    def __init__(self, device: torch.device, num_train_timesteps: int):
        self._num_timesteps = num_train_timesteps
        self._loss_sum = torch.zeros(QUARTILES, device=device)
        self._loss_count = torch.zeros(QUARTILES, device=device)
        self._norm_sum = torch.zeros((), device=device)
        self._updates = torch.zeros((), device=device)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # micro batches that are not in the sums yet
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # norm and finite, of updates that are not either

    def add_losses(self, losses: torch.Tensor, timesteps: torch.Tensor) -> None:
        """Adds one micro batch: `losses` and `timesteps` are [B]."""
        self._waiting.append((losses.detach(), timesteps))
        if len(self._waiting) == _WAITING:
            self._sum_up()

    @torch.no_grad()
    def _sum_up(self) -> None:
        """Many micro batches and updates at once: for each of them alone it takes as long."""
        if self._waiting:
            losses, timesteps = map(torch.cat, zip(*self._waiting))
            self._waiting.clear()
            finite = torch.isfinite(losses)
            quartiles = timesteps * QUARTILES // self._num_timesteps
            self._loss_sum.index_add_(0, quartiles, losses.float().where(finite, 0.0))
            self._loss_count.index_add_(0, quartiles, finite.float())
        if self._gradients:
            norms, finite = map(torch.stack, zip(*self._gradients))
            self._gradients.clear()
            self._norm_sum += norms.float().where(finite, 0.0).sum()
            self._updates += finite.sum()

    def add_update(self, gradients: Gradients) -> None:
        """Adds one update: the norm of its gradient before clipping, where that is finite."""
        self._gradients.append((gradients.norm.detach(), gradients.finite))
        if len(self._gradients) == _WAITING:
            self._sum_up()

    def sums(self, accelerator: Accelerator) -> torch.Tensor:
        """Returns what a report is made of, over all processes, on the device."""
        self._sum_up()
        losses = accelerator.reduce(torch.cat([self._loss_sum, self._loss_count]), "sum")
        return torch.cat([losses, torch.stack([self._norm_sum, self._updates])])

    def report(self, values: list[float]) -> dict[str, float]:
        """Means since the last report from the values of `sums`; empties the sums. Without samples the loss is NaN."""
        sums, counts, (norm_sum, updates) = values[:QUARTILES], values[QUARTILES:-2], values[-2:]
        report = {"train/loss": sum(sums) / sum(counts) if sum(counts) else math.nan}
        for i, (loss_sum, count) in enumerate(zip(sums, counts)):
            if count:
                report[f"train/loss_timestep_quartile_{i + 1}"] = loss_sum / count
        if updates:
            report["train/grad_norm"] = norm_sum / updates
        for tensor in (self._loss_sum, self._loss_count, self._norm_sum, self._updates):
            tensor.zero_()
        return report


def read_together(tensors: Sequence[torch.Tensor]) -> list[list]:
    """Returns the values of each tensor, flattened, exact whatever their dtypes: in one copy, so that the host waits once."""
    packed = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    return [part.clone().view(tensor.dtype).tolist() for part, tensor in zip(parts, tensors)]


class Stopwatch:
    """Wall time since the last report that went into training, and the part of it that the loop waited for data."""

    def __init__(self, step: int):
        self._restart(step)

    def _restart(self, step: int) -> None:
        self._step, self._start, self._waited = step, time.perf_counter(), 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside: validation, sampling, checkpoints."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def report(self, step: int, global_batch_size: int) -> dict[str, float]:
        """Returns images per second and the share of time spent waiting for data, since the last report."""
        elapsed_seconds = max(time.perf_counter() - self._start, 1e-9)
        samples = (step - self._step) * global_batch_size
        report = {"perf/images_per_second": samples / elapsed_seconds, "perf/data_wait": self._waited / elapsed_seconds}
        self._restart(step)
        return report


def peak_memory_gib(device: torch.device) -> float:
    """Returns the most memory that this process ever held on its device, in GiB; where that is the machine's, all of it."""
    if device.type in ("cpu", "mps"):
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return torch.accelerator.max_memory_allocated(device) / 2**30


class ProgressBar:
    """The updates of a run, on the main process: on a terminal tqdm's bar, elsewhere a line for each report. An update that
    takes long shows that it goes on. `part` gives the bars of what happens between updates."""

    def __init__(self, enabled: bool, first_step: int, total_steps: int, *, quiet: bool = False):
        """`quiet`: prints lines for the user, but no progress."""
        self._enabled, self._shown = enabled, enabled and not quiet
        self._step = self._first_step = first_step
        self._total_steps = total_steps
        self._start = self._last_line = self._last_update = time.monotonic()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        self._seconds: collections.deque[float] = collections.deque(maxlen=RECENT)  # of updates
        self.awaits_loss = self._shown  # until the first figures
        self.line_follows = False  # whether `show` comes after the next update
        self._figures = ""
        self._bar = tqdm(
            initial=first_step,
            total=total_steps,
            unit="update",
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]",
            disable=not (self._shown and on_terminal()),
            dynamic_ncols=True,
        )

    def begin(self) -> None:
        """The updates begin."""
        self._last_update = time.monotonic()
        if self._shown:
            self._watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True)
            self._watch.start()

    def update(self) -> None:
        now = time.monotonic()
        self._step += 1
        self._seconds.append(now - self._last_update)
        self._last_update = now
        self._bar.set_postfix_str(self._said(self._figures), refresh=False)
        self._bar.update()
        if self._is_silent(now) and not self.line_follows:
            self._line("")

    def _said(self, figures: str) -> str:
        """The figures, and the time left by the median of recent updates: the first ones do more."""
        left = "estimating the time left"
        if len(self._seconds) >= UNKNOWN:
            left = f"{duration(statistics.median(self._seconds) * (self._total_steps - self._step))} left"
        return f"{figures}, {left}" if figures else left

    def look(self) -> None:
        """Shows that the update at hand goes on, where nothing was shown for long."""
        now = time.monotonic()
        if Bar.active:  # which shows itself, and is between two updates
            self._last_line = self._last_update = now
        elif self._step >= self._total_steps:  # no update is at hand
            return
        elif self._is_silent(now) and now - self._last_update > SOON:
            self._line(f"{duration(now - self._last_update)} so far", self._step + 1)

    def _is_silent(self, now: float) -> bool:
        return now - self._last_line > (MINUTE if now - self._start > FIRST_MINUTES else LINE_SECONDS)

    def show(self, loss: float, learning_rate: float, images_per_second: float | None = None) -> None:
        """The newest figures of the run; the speed where it was measured."""
        figures = f"loss {loss:.4f}, lr {learning_rate:.2e}"
        if images_per_second is not None:
            figures += f", {images_per_second:.0f} images/s"
        self.awaits_loss = False
        self._figures = figures
        self._line(figures)

    def _line(self, figures: str, step: int | None = None) -> None:
        """One line about the updates, the newest of which is `step` (None: the last one that ended), where there is no bar."""
        if not self._shown:
            return
        self._last_line = time.monotonic()
        if self._bar.disable:
            print_progress(f"update {step or self._step} of {self._total_steps}: {self._said(figures)}")
        else:
            self._bar.set_postfix_str(self._said(self._figures))

    def part(self, what: str, total: int | None = None, unit: str = "images", *, afterwards: str | None = None) -> Bar:
        """A bar for what is made between two updates; see `Bar`."""
        return Bar(what, total, unit, shown=self._shown, afterwards=afterwards)

    def print_line(self, message: str) -> None:
        """Prints a line above the bar, or after it once it is closed, on the main process."""
        if self._enabled:
            tqdm.write(message)
            sys.stdout.flush()  # a log file of both streams keeps the order

    def end(self) -> None:
        """No update follows."""
        self._closed.set()
        if self._watch is not None:
            self._watch.join()

    def close(self) -> None:
        self.end()
        self._bar.close()


def _watch(progress: "weakref.ref[ProgressBar]", closed: threading.Event) -> None:
    """Until it is closed, or gone with a run that failed."""
    while not closed.wait(WATCH_SECONDS):
        if (watched := progress()) is None:
            return
        watched.look()
        del watched
