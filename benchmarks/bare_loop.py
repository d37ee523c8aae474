"""Bare training loops to compare with: forward, backward, clip, step on tensors that are already on the device."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.training_utils import EMAModel
from torch import nn

from utils.ema import EMA
from utils.memory import autocast, flops_per_image
from utils.unet import make_unet

SIZES = {"digits16": (16, 1), "cifar10": (32, 3), "celeba64": (64, 3), "256": (256, 3)}  # preset -> resolution, channels


@dataclass(frozen=True)
class Switches:
    """What a loop has on. All off is eager fp32."""

    mixed_precision: str = "no"
    tf32: bool = False
    channels_last: bool = False
    sdpa: bool = False
    compile: bool = False
    fused: bool = False  # AdamW in one kernel
    checkpointing: bool = False
    ema: str = "none"  # or "foreach" (ours), "diffusers" (EMAModel, as train_unconditional.py has it)
    item: bool = False  # the host reads the loss after every update

    def in_precision(self, mixed_precision: str) -> "Switches":
        return replace(self, mixed_precision=mixed_precision)


# What diffusers' train_unconditional.py does by default: attention has been SDPA since torch 2.
UNCONDITIONAL = Switches(sdpa=True, ema="diffusers", item=True)
ALL = Switches(mixed_precision="bf16", tf32=True, channels_last=True, sdpa=True, compile=True, fused=True)


class BareLoop:
    """A network, its optimizer and a batch. `run` makes updates; `compile_seconds` is what the first one took."""

    def __init__(self, preset: str, switches: Switches, batch_size: int, device: torch.device, dropout: float | None = None):
        self.switches, self.device, self.batch_size = switches, device, batch_size
        before = allocated(device)
        resolution, channels = SIZES[preset]
        self.unet = make_unet(resolution=resolution, image_channels=channels, preset=preset, dropout=dropout).to(device).train()
        if switches.channels_last:
            self.unet.to(memory_format=torch.channels_last)
        if not switches.sdpa:
            for module in self.unet.modules():
                if isinstance(module, Attention):
                    module.set_processor(AttnProcessor())
        if switches.checkpointing:
            self.unet.enable_gradient_checkpointing()
        if switches.compile:
            self.unet.compile()
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-4, fused=switches.fused or None)
        if switches.ema == "foreach":
            self.ema = EMA(self.unet)
        elif switches.ema == "diffusers":
            self.ema = EMAModel(self.unet.parameters(), decay=0.9999, use_ema_warmup=True, power=0.75)
            self.ema.to(device)
        shape = (batch_size, channels, resolution, resolution)
        self.noisy_images, self.noise = torch.randn(2, *shape, device=device)
        self.timesteps = torch.randint(0, 1000, shape[:1], device=device)
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
        with tf32(self.switches.tf32):
            for _ in range(updates):
                self._update()

    def _update(self) -> None:
        with autocast(self.device, self.switches.mixed_precision):
            prediction = self.unet(self.noisy_images, self.timesteps).sample
        loss = nn.functional.mse_loss(prediction.float(), self.noise)
        loss.backward()
        nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.switches.ema == "foreach":
            self.ema.update(0.9999, self.finite)
        elif self.switches.ema == "diffusers":
            self.ema.step(self.unet.parameters())
        if self.switches.item:
            loss.item()

    def peak_bytes(self, updates: int) -> int:
        """Most device memory of this loop during some updates, whatever else is there; 0 on a CPU, which does not count it."""
        if self.device.type != "cuda":
            return 0
        others = allocated(self.device) - self.own_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(updates)
        return torch.cuda.max_memory_allocated(self.device) - others


@contextmanager
def tf32(enabled: bool):
    """On a GPU, matrix products and convolutions in TF32 or in plain fp32, whatever stood before; afterwards that again."""
    if not torch.cuda.is_available():
        yield
        return
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def preset_flops(preset: str) -> int:
    """Training FLOPs per image of a preset."""
    resolution, channels = SIZES[preset]
    network = partial(make_unet, resolution=resolution, image_channels=channels, preset=preset)
    return flops_per_image(network, (channels, resolution, resolution))


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
