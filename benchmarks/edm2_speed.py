"""What does forced weight normalisation cost? Updates of the EDM2 network with and without it, taken in turns.

    python benchmarks/edm2_speed.py --preset digits16 --batch_size 32
    python benchmarks/edm2_speed.py --preset XS --resolution 64 --batch_size 32 --mixed_precision bf16 --compile     # on a GPU

Prints the median time of an update either way (on a CPU the processor's time, which a busy machine disturbs less), their
ratio, and on a GPU the peak of its memory.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from models.edm2_unet import force_weight_norm
from utils.edm import EDM2Denoiser, losses_per_sample, training_noise_levels
from utils.edm2_network import make_edm2_unet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits16")
    parser.add_argument("--resolution", type=int, default=16)
    parser.add_argument("--image_channels", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--updates", type=int, default=60, help="of each kind")
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    unet = make_edm2_unet(resolution=args.resolution, image_channels=args.image_channels, num_classes=10, preset=args.preset)
    denoiser = EDM2Denoiser(unet, 0.5).to(device).train()
    if args.compile:
        unet.compile()
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-3, fused=True)
    images = torch.randn(args.batch_size, args.image_channels, args.resolution, args.resolution, device=device)
    labels = torch.arange(args.batch_size, device=device) % 10
    sigma = training_noise_levels(0, torch.arange(args.batch_size), -0.8, 1.6).to(device)
    finite = torch.tensor(True, device=device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def update(forced: bool) -> float:
        start = clock()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16"):
            denoised, u = denoiser(images + sigma[:, None, None, None] * torch.randn_like(images), sigma, labels)
        losses_per_sample(denoised, images, sigma, u, 0.5).total.mean().backward()
        optimizer.step()
        if forced:
            force_weight_norm(denoiser, finite)
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    for _ in range(5):
        update(True)
    pairs = [(update(False), update(True)) for _ in range(args.updates)]
    plain, forced = (statistics.median(column) for column in zip(*pairs))
    print(f"{args.preset}, batch {args.batch_size}, {device}: {1e3 * plain:.1f} ms without, {1e3 * forced:.1f} ms with")
    print(f"ratio of the medians {forced / plain:.3f}, median of the ratios {statistics.median(b / a for a, b in pairs):.3f}")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
