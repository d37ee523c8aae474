"""Time and memory of a device, ratios of what took turns, and the line that names the machine."""

import gc
import platform
import statistics
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """Inside it, the most bytes beyond those there before; afterwards in `bytes`.

    On a CPU what torch's allocator handed out at most, by the profiler, which does not see the libraries' workspace.
    """

    def __init__(self, device: torch.device):
        self._device, self.bytes = device, 0

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = allocated(self._device)
        else:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._profiler.__exit__(*exception)
        now = 0
        events = [event for event in self._profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            self.bytes = max(self.bytes, now)


@contextmanager
def tf32(enabled: bool, cudnn_benchmark: bool = False):
    """On a GPU, matrix products and convolutions in TF32 or in plain fp32, the latter the quickest of several or cuDNN's guess,
    whatever stood before; afterwards that again."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    cudnn.allow_tf32, cudnn.benchmark = enabled, cudnn_benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


def interleaved(loops: dict, blocks: int, updates: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds per update of each loop, block by block in turn, so that a machine that slows down does so for all."""
    seconds = {name: [] for name in loops}
    for _ in range(blocks):
        for name, loop in loops.items():
            seconds[name].append(loop.seconds(updates, clock) / updates)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) of slow / fast over neighboring blocks."""
    ratios = sorted(s / f for s, f in zip(slow, fast))
    if len(ratios) < 2:
        return (ratios[0],) * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe(device: torch.device) -> str:
    """What belongs beside every figure."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free() -> None:
    """Gives back what loops that are gone held, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
