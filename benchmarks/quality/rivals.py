"""Trains one row of time_to_quality.py in a process of its own, and tells what its updates cost.

    python benchmarks/quality/rivals.py smalldiffusion FOLDER --data PNGS --updates 300 --output_dir OUT --told OUT.json
    python benchmarks/quality/rivals.py script train_ddpm.py --told OUT.json -- --flags of --the script

A rival is the trainer, loss, optimizer, EMA and sampler of another project, given by the folder of its code (what it imports
must be there: einops, ema-pytorch; torch-ema; POT, torchdiffeq). It writes its samples as PNG files. Its settings are those
that the project documents for small images, but for what all rows share: batches of 32, no flips (a mirrored digit is none),
and a network of about 0.7 M parameters. --tuned: what was better for so short a time.
Seconds are of processor time between the first and the last step of the optimizer, of all threads of the process.
"""

import argparse
import atexit
import itertools
import json
import math
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

BATCH = 32
WARM = 10  # updates that do not count as usual ones
Sampler = Callable[[int], torch.Tensor]  # how many -> images [n, 3, side, side] in [0, 1]


class Clock:
    """Processor time of each step of an optimizer of this process; written to `told` at the end, or after `stop_after` steps,
    which end the process."""

    def __init__(self, told: Path, stop_after: int | None):
        self.told, self.stop_after, self.times = told, stop_after, []
        register_optimizer_step_post_hook(self._tick)
        atexit.register(self._tell)

    def _tick(self, *_) -> None:
        self.times.append(time.process_time())
        if len(self.times) == self.stop_after:
            self._tell()
            os._exit(0)

    def _tell(self) -> None:
        if len(self.times) > 1:
            each = statistics.median(b - a for a, b in itertools.pairwise(self.times[min(WARM, len(self.times) - 2) :]))
            figures = {"updates": len(self.times), "seconds": self.times[-1] - self.times[0], "seconds_of_update": each}
            self.told.write_text(json.dumps(figures))


def pixels(folder: Path) -> torch.Tensor:
    """float32 [N, 3, side, side] in [-1, 1]."""
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.iterdir())])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def smalldiffusion(args: argparse.Namespace) -> Sampler:
    """examples/fashion_mnist_unet.py: AdamW of 7e-4, EMA of 0.999, 20 steps of its sampler."""
    sys.path.insert(0, str(args.path / "src"))
    from smalldiffusion import Scaled, ScheduleLogLinear, Unet, samples, training_loop
    from torch_ema import ExponentialMovingAverage

    data = pixels(args.data)
    side = data.shape[-1]
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    schedule = ScheduleLogLinear(sigma_min=0.01, sigma_max=20, N=800)
    network = Scaled(Unet)(side, 3, 3, ch=32, ch_mult=(1, 1, 2), num_res_blocks=1, attn_resolutions=(side // 4,))
    ema = ExponentialMovingAverage(network.parameters(), decay=0.999)
    epochs = math.ceil(args.updates / len(loader)) + 1
    for number, _ in enumerate(training_loop(loader, network, schedule, epochs=epochs, lr=7e-4)):
        ema.update()
        if number == args.updates:
            break

    def sample(count: int) -> torch.Tensor:
        with ema.average_parameters():
            *_, images = samples(network, schedule.sample_sigmas(20), gam=1.6, batchsize=count)
        return images / 2 + 0.5

    return sample


def lucidrains(args: argparse.Namespace) -> Sampler:
    """The Trainer of the README: Adam of 8e-5, EMA of 0.995, sigmoid schedule, 50 steps of its DDIM. Tuned: 2e-3 and the
    cosine schedule, as its code says that the sigmoid is for images larger than 64x64."""
    sys.path.insert(0, str(args.path))
    import torchvision

    torchvision.utils = getattr(torchvision, "utils", None)  # the stand-in has none, and nothing here calls it
    import denoising_diffusion_pytorch.denoising_diffusion_pytorch as theirs

    theirs.T.Resize = theirs.T.CenterCrop = lambda size: nn.Identity()  # images have that size
    theirs.cpu_count = lambda: 0  # no workers: images are loaded by this process, whose time is counted
    network = theirs.Unet(dim=16, dim_mults=(1, 2, 4))
    side = pixels(args.data).shape[-1]
    schedule = {"beta_schedule": "cosine"} if args.tuned else {}
    diffusion = theirs.GaussianDiffusion(network, image_size=side, timesteps=1000, sampling_timesteps=50, **schedule)
    trainer = theirs.Trainer(
        diffusion, str(args.data), train_batch_size=BATCH, train_lr=2e-3 if args.tuned else 8e-5, train_num_steps=args.updates,
        augment_horizontal_flip=False, calculate_fid=False, save_and_sample_every=10**9, results_folder=str(args.output_dir),
    )  # fmt: skip
    trainer.train()
    trainer.ema.ema_model.eval()
    return trainer.ema.ema_model.sample


def torchcfm(args: argparse.Namespace) -> Sampler:
    """examples/images/mnist_example.ipynb: Adam of 1e-3, optimal transport of each batch, no EMA; 50 steps of Euler's
    method, as train_cifar10.py has it with 100."""
    sys.path.insert(0, str(args.path))
    from torchcfm.conditional_flow_matching import ExactOptimalTransportConditionalFlowMatcher
    from torchcfm.models.unet import UNetModel
    from torchdiffeq import odeint

    data = pixels(args.data)
    side = data.shape[-1]
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    options = {"num_channels": 32, "num_res_blocks": 1, "channel_mult": (1, 2), "attention_resolutions": str(side // 2)}
    network = UNetModel(dim=(3, side, side), **options)
    optimizer = torch.optim.Adam(network.parameters())
    matcher = ExactOptimalTransportConditionalFlowMatcher(sigma=0.0)
    batches = (batch for _ in range(10**9) for batch in loader)
    for _ in range(args.updates):
        optimizer.zero_grad()
        images = next(batches)
        times, between, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(images), images)
        torch.mean((network(times, between) - velocity) ** 2).backward()
        optimizer.step()
    network.eval()

    def sample(count: int) -> torch.Tensor:
        return odeint(network, torch.randn(count, *data.shape[1:]), torch.linspace(0, 1, 51), method="euler")[-1] / 2 + 0.5

    return sample


RIVALS = {"smalldiffusion": smalldiffusion, "lucidrains": lucidrains, "torchcfm": torchcfm}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*RIVALS, "script"])
    parser.add_argument("path", type=Path, help="folder of the rival's code, or a script")
    parser.add_argument("--told", type=Path, required=True, help="file for the number of updates and their seconds")
    parser.add_argument("--stop_after", type=int, help="end the process after so many updates, without samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of PNG files")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--num_images", type=int, default=500)
    parser.add_argument("--output_dir", type=Path, help="for the samples")
    return parser.parse_args(argv)


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parse_args(own)
    torch.manual_seed(args.seed)
    Clock(args.told, args.stop_after)
    if args.name == "script":
        sys.argv = [str(args.path), *flags]
        sys.path[0] = str(args.path.parent)
        runpy.run_path(str(args.path), run_name="__main__")
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sample = RIVALS[args.name](args)
    for first in range(0, args.num_images, 100):
        with torch.no_grad():
            images = sample(min(100, args.num_images - first))
        for number, image in enumerate((images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()):
            Image.fromarray(image).save(args.output_dir / f"{first + number:06}.png")


if __name__ == "__main__":
    main()
