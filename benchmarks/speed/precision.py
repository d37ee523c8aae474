"""How far each way of computing lies from fp32: output and gradient of one training step, same weights, same batch.

    python benchmarks/speed/precision.py --model_preset digits16 cifar10

Errors are relative, in the L2 norm. The reference is eager fp32 without TF32. For scale: the gradients of two different batches
of this size, in the last row, differ by far more than any of the ways of computing one.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from benchmarks.shared.bare_loop import Switches
from benchmarks.shared.measuring import default_device, describe, free, tf32
from benchmarks.shared.tasks import SIZES
from utils.diffusion.unet import make_unet
from utils.options.flags import DDPMOptions
from utils.training.memory_estimate import autocast

PLAIN = Switches(sdpa=True)
WAYS = {
    "tf32": replace(PLAIN, tf32=True),
    "channels last": replace(PLAIN, channels_last=True),
    "compiled": replace(PLAIN, compile=True),
    "bf16": replace(PLAIN, mixed_precision="bf16"),
    "bf16, compiled, channels last": replace(PLAIN, mixed_precision="bf16", compile=True, channels_last=True),
    "fp16": replace(PLAIN, mixed_precision="fp16"),
}
LOSS_SCALE = 1024.0  # as a GradScaler would have it: fp16 gradients below 6e-8 are 0


def step(preset: str, switches: Switches, device: torch.device, batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient) of a step, flat and in fp32."""
    resolution, channels = SIZES[preset]
    unet = make_unet(
        DDPMOptions(resolution=resolution, image_channels=channels, model_preset=preset, channels_last=switches.channels_last)
    )
    unet = unet.to(device).train()
    if switches.compile:
        unet.compile()
    generator = torch.Generator().manual_seed(seed)
    noisy_images, noise = torch.randn(2, batch, channels, resolution, resolution, generator=generator).to(device)
    timesteps = torch.randint(0, 1000, (batch,), generator=generator).to(device)
    scale = LOSS_SCALE if switches.mixed_precision == "fp16" else 1.0
    with tf32(switches.tf32):
        with autocast(device, switches.mixed_precision):
            prediction = unet(noisy_images, timesteps).sample
        (nn.functional.mse_loss(prediction.float(), noise) * scale).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in unet.parameters()]) / scale
    return prediction.detach().float().flatten(), gradient


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", nargs="+", choices=SIZES, default=["digits16"])
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return parser.parse_args(argv)


def main() -> None:
    options = parse_args()
    device = default_device()
    print(f"{describe(device)}; batch {options.batch_size}; relative error of output and gradient")
    for preset in options.model_preset:
        output, gradient = step(preset, PLAIN, device, options.batch_size)
        worst = 0.0
        for name in options.ways:
            if device.type == "cpu" and ("tf32" in name or "fp16" in name):
                continue
            found = step(preset, WAYS[name], device, options.batch_size)
            errors = relative(found[0], output), relative(found[1], gradient)
            worst = max(worst, *errors)
            print(f"{preset:10} {name:30} {errors[0]:10.2e} {errors[1]:10.2e}", flush=True)
            free()
        other = relative(step(preset, PLAIN, device, options.batch_size, seed=1)[1], gradient)
        print(f"{preset:10} {'another batch':30} {'':10} {other:10.2e}")
        print(f"=> precision, {preset}: at most {worst:.1e} from fp32; another batch {other:.1e}")


if __name__ == "__main__":
    main()
