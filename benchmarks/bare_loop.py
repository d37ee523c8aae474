"""Bare training loops to compare with: forward, backward, clip, step on tensors that are already on the device."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.training_utils import EMAModel
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.bare_tasks import DDPM
from utils.memory import SavedTensors, autocast


@dataclass(frozen=True)
class Switches:
    """What a loop has on. By default it is eager fp32, every other switch off."""

    mixed_precision: str = "no"
    tf32: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    sdpa: bool = False
    compile: bool = False
    fused: bool = False  # AdamW, or Adam, in one kernel
    checkpointing: bool = False
    ema: str = "none"  # or "script" (ours, over lists of tensors), "diffusers" (EMAModel, as train_unconditional.py has it)
    item: bool = False  # the host reads the loss after every update
    force_weight_norm: bool = True  # EDM2's: a part of its update and no switch for speed; DDPM has none

    def in_precision(self, mixed_precision: str) -> "Switches":
        return replace(self, mixed_precision=mixed_precision)


# What diffusers' train_unconditional.py does by default: attention has been SDPA since torch 2.
UNCONDITIONAL = Switches(sdpa=True, ema="diffusers", item=True)
ALL = Switches(mixed_precision="bf16", tf32=True, cudnn_benchmark=True, channels_last=True, sdpa=True, compile=True, fused=True)


class BareLoop:
    """A network, its optimizer and a batch. `run` makes updates; `compile_seconds` is what the first one took."""

    def __init__(self, task: DDPM, switches: Switches, batch_size: int, device: torch.device):
        self.task, self.switches, self.device, self.batch_size = task, switches, device, batch_size
        before = allocated(device)
        unet = task.make_network(gradient_checkpointing=switches.checkpointing, channels_last=switches.channels_last)
        if not switches.sdpa:
            for module in unet.modules():
                if isinstance(module, Attention):  # EDM2's layers have nothing but SDPA
                    module.set_processor(AttnProcessor())
        self.trained = task.trained(unet).to(device).train()
        if switches.compile:
            unet.compile()
        self.parameters = list(self.trained.parameters())
        self.optimizer = task.make_optimizer(self.parameters, fused=switches.fused or None)
        if switches.ema == "script":
            self.ema = task.make_ema(unet)
        elif switches.ema == "diffusers":
            self.ema = EMAModel(unet.parameters(), decay=0.9999, use_ema_warmup=True, power=0.75)
            self.ema.to(device)
        self.unet, self.batch = unet, task.batch(batch_size, device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.compile_seconds = self.seconds(1)
        self.run(2)  # kernels are chosen, memory is reserved
        self.own_bytes = allocated(device) - before

    def seconds(self, updates: int, clock: Callable[[], float] = time.perf_counter) -> float:
        synchronize(self.device)
        start = clock()
        self.run(updates)
        synchronize(self.device)
        return clock() - start

    def run(self, updates: int) -> None:
        with tf32(self.switches.tf32, self.switches.cudnn_benchmark):
            for _ in range(updates):
                self._update()

    def _loss(self) -> torch.Tensor:
        with autocast(self.device, self.switches.mixed_precision):
            prediction = self.task.predict(self.trained, self.batch)
        return self.task.loss(prediction, self.batch)

    def _update(self) -> None:
        loss = self._loss()
        loss.backward()
        if self.task.max_grad_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.task.max_grad_norm)
        self.optimizer.step()
        if self.switches.force_weight_norm:
            self.task.force_weight_norm(self.trained, self.finite)
        self.optimizer.zero_grad()
        if self.switches.ema == "script":
            self.ema.update(0.9999, self.finite)
        elif self.switches.ema == "diffusers":
            self.ema.step(self.unet.parameters())
        if self.switches.item:
            loss.item()

    def activation_bytes(self) -> int:
        """What a forward pass keeps for its backward pass, by saved-tensor hooks."""
        with SavedTensors(self.parameters) as saved:
            self._loss()
        return saved.bytes

    def update_bytes(self) -> int:
        """Most bytes that an update adds to what is there without it (weights, optimizer, EMA, batch)."""
        with PeakMemory(self.device) as peak:
            self.run(1)
        return peak.bytes

    def peak_bytes(self, updates: int) -> int:
        """Most device memory of this loop during some updates, whatever else is there; 0 on a CPU, which does not count it."""
        if self.device.type != "cuda":
            return 0
        others = allocated(self.device) - self.own_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(updates)
        return torch.cuda.max_memory_allocated(self.device) - others


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
    """(median, lower quartile, upper quartile) of slow / fast over neighbouring blocks."""
    ratios = sorted(s / f for s, f in zip(slow, fast))
    if len(ratios) < 2:
        return (ratios[0],) * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}"


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
