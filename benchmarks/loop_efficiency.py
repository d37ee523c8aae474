"""How much of a bare training loop's speed the real script reaches.

    python benchmarks/loop_efficiency.py                                                         # digits16, on this CPU
    python benchmarks/loop_efficiency.py --model_preset cifar10 --dataset_name synthetic --train_batch_size 128 \\
        --mixed_precision bf16                                                                   # on a GPU

The real `train_ddpm.py` runs in this process, with its EMA, statistics, logging, data pipeline and checks. After every block
of its updates a bare loop does a block too: same network, fused AdamW and precision, with noisy images and targets already on
the device, so forward, backward, clip and step only. Blocks alternate many times, so that a machine that slows down or speeds
up does so for both; the figure is the median of the ratios of neighbouring blocks. Validation, samples, checkpoints and export
are timed apart, as seconds each, since how often they run is the user's choice. Other flags go to train_ddpm.py.
"""

import argparse
import contextlib
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import datasets
import numpy as np
import torch
from PIL import Image

import train_ddpm
import utils.checkpoints
import utils.export
import utils.previews
import utils.tracking
import utils.validation
from utils.optimization import make_optimizer
from utils.unet import make_unet


class BareLoop:
    """Forward, backward, clip, step on data that is already there."""

    def __init__(self, args: argparse.Namespace, device: torch.device, precision: str):
        unet = make_unet(resolution=args.resolution, image_channels=args.image_channels, preset=args.model_preset)
        self.unet = unet.to(device).train()
        if args.compile:
            self.unet.compile()
        self.optimizer = make_optimizer(unet, learning_rate=args.learning_rate)
        shape = (args.train_batch_size, args.image_channels, args.resolution, args.resolution)
        self.noisy_images, self.noise = torch.randn(2, *shape, device=device)
        self.timesteps = torch.randint(0, args.ddpm_num_steps, shape[:1], device=device)
        self.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def run(self, updates: int) -> None:
        device_type = self.noise.device.type
        for _ in range(updates):
            autocast = torch.autocast(device_type, self.autocast) if self.autocast else contextlib.nullcontext()
            with autocast:
                prediction = self.unet(self.noisy_images, self.timesteps).sample
            torch.nn.functional.mse_loss(prediction.float(), self.noise).backward()
            torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def synthetic_dataset(folder: Path, resolution: int) -> Path:
    """2,000 images of noise, for presets whose data cannot be had offline."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (2000, resolution, resolution, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": [Image.fromarray(p) for p in pixels]}, features=features).save_to_disk(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--block_updates", type=int, default=10)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--output_dir", f"{folder}/run", "--max_train_steps", str((options.blocks + 2) * options.block_updates)]
        args = train_ddpm.parse_args(flags)
        if args.dataset_name == "synthetic":
            args.dataset_name = str(synthetic_dataset(Path(folder, "data"), args.resolution))
            args.validation_images = 128
        args.save_images_steps = args.checkpointing_steps = args.save_model_steps = args.max_train_steps // 2
        args.validation_steps = args.max_train_steps // 4

        real, bare, other, loop, block_start, paused = [], [], {}, None, None, 0.0
        update = utils.tracking.ProgressBar.update

        def timed(module, name):  # of a module or class
            """Seconds of each call of `module.name`, kept out of the time of the updates around it."""
            function = getattr(module, name)

            def wrapper(*arguments, **keywords):
                nonlocal paused
                start = time.perf_counter()
                result = function(*arguments, **keywords)
                other.setdefault(name, []).append(time.perf_counter() - start)
                paused += other[name][-1]
                return result

            setattr(module, name, wrapper)

        for module, name in (
            (utils.validation, "validation_loss"),
            (utils.previews.Previews, "make"),
            (utils.checkpoints, "save_checkpoint"),
            (utils.export, "export_pipeline"),
        ):
            timed(module, name)

        def hook(progress):
            nonlocal loop, block_start, paused
            update(progress)
            if progress._bar.n % options.block_updates:
                return
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            synchronize(device)
            if loop is None:
                loop = BareLoop(args, device, args.mixed_precision or "no")
                loop.run(3)  # kernels are chosen, memory is reserved
            elif block_start is not None:
                real.append((time.perf_counter() - block_start - paused) / options.block_updates)
                start = time.perf_counter()
                loop.run(options.block_updates)
                synchronize(device)
                bare.append((time.perf_counter() - start) / options.block_updates)
            block_start, paused = time.perf_counter(), 0.0

        utils.tracking.ProgressBar.update = hook
        train_ddpm.main(args)

    ratios = [b / r for r, b in zip(real, bare)]
    low, high = np.quantile(ratios, (0.25, 0.75))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"\n{device}; torch {torch.__version__}; Python {platform.python_version()}; {' '.join(flags[:-4]) or 'no flags'}")
    print(f"batch {args.train_batch_size}, {args.resolution}x{args.resolution}, {len(real)} pairs of {options.block_updates}")
    print(f"bare loop    {1e3 * statistics.median(bare):8.2f} ms per update")
    print(f"train_ddpm   {1e3 * statistics.median(real):8.2f} ms per update")
    print(f"efficiency   {statistics.median(ratios):8.3f} (median of neighbouring blocks; quartiles {low:.3f}, {high:.3f})")
    for name, seconds in other.items():
        print(f"{name:16} {statistics.median(seconds):8.2f} s each")


if __name__ == "__main__":
    main()
