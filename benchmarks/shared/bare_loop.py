"""Bare training loops to compare with: forward, backward, clip, step on tensors that are already on the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.training_utils import EMAModel
from torch import nn

from benchmarks.shared.measuring import PeakMemory, allocated, synchronize, tf32
from benchmarks.shared.tasks import DDPM
from utils.training.memory_estimate import SavedTensors, autocast


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
            self.ema: Any = task.make_ema(unet)
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
