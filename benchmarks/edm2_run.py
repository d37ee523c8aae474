"""Does a run of train_edm2.py keep what the paper promises? Figures of its last checkpoint.

    accelerate launch train_edm2.py --ema_widths 0.05 0.10 0.15 --output_dir runs/three-widths
    python benchmarks/edm2_run.py runs/three-widths

- u(sigma): its largest and its root mean square distance from the logarithm of the measured weighted loss of the raw weights,
  over the middle 96 % of the noise that is trained, on training images (`--num_images`).
- magnitudes: of each block's output, and how far weight vectors are from unit variance.
- reconstruction: the average of the last of --ema_widths, made from the snapshots of the two first, beside that tracked in the
  same run: relative distance of the weights, and of the denoised images.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file

from models.edm2_unet import EDM2Block, MPConv2d, MPLinear
from utils import randomness
from utils.augmentation import to_unit_range
from utils.checkpoints import list_checkpoints
from utils.data import load_images
from utils.edm import EDM2Denoiser, denoise, losses_per_sample, noise_levels_at
from utils.ema_snapshots import list_snapshots, reconstruct
from utils.options import data_options
from utils.pipelines import load_network
from utils.run_record import RunRecord
from utils.validation import split_validation


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--num_images", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = RunRecord.read(args.run).options
    checkpoint = list_checkpoints(args.run)[-1]
    unet, config = load_network(str(args.run))
    denoiser = EDM2Denoiser(unet, config["sigma_data"]).eval()
    denoiser.load_state_dict(load_file(checkpoint / "model.safetensors"))
    images = load_images(**data_options(argparse.Namespace(**options)))
    images, _ = split_validation(images, options["validation_images"], options["seed"])
    chosen = np.random.default_rng(0).permutation(len(images))[: args.num_images]
    clean_images = to_unit_range(torch.from_numpy(images.fetch(chosen)), images.max_value)
    labels = torch.from_numpy(images.labels[chosen])

    sigmas = noise_levels_at(torch.linspace(0.02, 0.98, 13).double(), options["P_mean"], options["P_std"]).float()
    distances = []
    for place, level in enumerate(sigmas):
        losses, u = [], None
        for numbers in torch.arange(len(chosen)).split(256):
            noise = randomness.normal(0, f"benchmark/{place}", numbers, images.shape)
            sigma = level.expand(len(numbers))
            denoised, u = denoiser(clean_images[numbers] + level * noise, sigma, labels[numbers])
            losses.append(losses_per_sample(denoised, clean_images[numbers], sigma, u, config["sigma_data"]).weighted)
        distances.append((u[0] - torch.cat(losses).mean().log()).item())
        print(f"sigma {level:6.3f}: u - ln(weighted loss) = {distances[-1]:+.3f}")
    print(f"u(sigma): largest distance {max(map(abs, distances)):.3f}, rms {np.sqrt(np.mean(np.square(distances))):.3f}")

    layers = [module.weight for module in denoiser.modules() if isinstance(module, (MPConv2d, MPLinear))]
    off = max((weight.flatten(1).square().mean(1).sqrt() - 1).abs().max().item() for weight in layers)
    print(f"weights: rms of a vector at most {off:.1e} from 1")
    seen = {}
    for name, module in unet.named_modules():
        if isinstance(module, EDM2Block):
            module.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.square().mean().sqrt().item()}))
    numbers = torch.arange(256)
    sigma = noise_levels_at((numbers + 0.5).double() / 256, options["P_mean"], options["P_std"]).float()
    noisy_images = clean_images[:256] + sigma[:, None, None, None] * randomness.normal(1, "benchmark", numbers, images.shape)
    denoise(unet, noisy_images, sigma, config["sigma_data"], labels[:256])
    print("blocks: " + ", ".join(f"{name} {value:.2f}" for name, value in seen.items()))

    *_, width = options["ema_widths"]
    if len(options["ema_widths"]) < 3:
        return
    tracked = load_file(checkpoint / "ema.safetensors")
    step = int(checkpoint.name.split("-")[1])
    made = reconstruct([s for s in list_snapshots(args.run) if s.width in options["ema_widths"][:2]], width, step)
    tracked = {name: tracked[f"{width}/{name}"] for name in made}
    difference = sum((made[name] - tracked[name]).square().sum() for name in made).sqrt()
    predictions = []
    for weights in (made, tracked):
        unet.load_state_dict(weights)
        predictions.append(denoise(unet, noisy_images, sigma, config["sigma_data"], labels[:256]))
    size = sum(tensor.square().sum() for tensor in tracked.values()).sqrt()
    apart = (predictions[0] - predictions[1]).norm() / predictions[1].norm()
    print(f"reconstruction of width {width} at {step}: weights {difference / size:.2e}, denoised images {apart:.2e} apart")


if __name__ == "__main__":
    main()
