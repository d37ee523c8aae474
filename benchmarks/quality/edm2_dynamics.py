"""Does a network of train_edm2.py train as the paper says?

    accelerate launch train_edm2.py --ema_widths 0.05 0.10 0.15 --output_dir runs/three-widths
    python benchmarks/quality/edm2_dynamics.py run runs/three-widths
    python benchmarks/quality/edm2_dynamics.py magnitudes --updates 1500 --output_dir runs/dynamics

`run` looks at the last checkpoint of a run:

- u(sigma): its largest and its root mean square distance from the logarithm of the measured weighted loss of the raw weights,
  over the middle 96 % of the noise that is trained, on training images (`--num_images`).
- magnitudes: of each block's output, and how far weight vectors are from unit variance.
- reconstruction: the average of the last of --ema_widths, made from the snapshots of the two first, beside that tracked in the
  same run: relative distance of the weights, and of the denoised images.

`magnitudes` asks whether they drift in a plain U-Net and stay in EDM2's. It trains the digits with the preset networks of
train_ddpm.py and of train_edm2.py, both with Adam, a constant learning rate after the same warm-up, no weight decay and the
same batches. It writes output_dir/dynamics.html: root mean squares of the weights and of the activations that each convolution
and linear layer gives, over the training. It prints for each network the medians over the layers at a tenth of the training and
at its end, and the largest factor by which a layer grew in between. Runs that are already there are not trained again.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.shared.real_script import train_once
from models.edm2_unet import EDM2Block, MPConv2d, MPLinear
from utils.core import randomness
from utils.data.augmentation import to_unit_range
from utils.data.dataset import load_images
from utils.data.training_data import split_validation
from utils.diagnostics.report.page import write_page
from utils.diagnostics.report.plots import Curve, plot
from utils.diffusion.edm2 import EDM2Denoiser, denoise, losses_per_sample, noise_levels_at
from utils.diffusion.pipelines import load_network
from utils.options.flags import DataOptions
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.ema_snapshots import list_snapshots, reconstruct
from utils.runs.record import RunRecord

COMMON = """--adam_weight_decay 0 --lr_scheduler constant_with_warmup --lr_warmup_steps 100 --train_batch_size 32 --seed 0
    --adam_beta1 0.9 --adam_beta2 0.99 --save_images_steps 100000 --save_model_steps 100000"""
RUNS = {
    "plain": ("train_ddpm.py", ["--optimizer", "adam", "--learning_rate", "2e-3"]),
    "EDM2": ("train_edm2.py", ["--optimizer", "adam", "--learning_rate", "1e-2"]),
}
KINDS = {"activation": "activations", "weight": "weights"}


@torch.no_grad()
def examine_run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options = RunRecord.read(args.run).options
    checkpoint = list_checkpoints(args.run)[-1]
    unet, config = load_network(str(args.run))
    denoiser = EDM2Denoiser(unet, config["sigma_data"]).eval()
    denoiser.load_state_dict(load_file(checkpoint / "model.safetensors"))
    images = load_images(DataOptions.from_record(options))
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
            losses.append(losses_per_sample(denoised, clean_images[numbers], sigma, u, config["sigma_data"]).shown)
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


def compare_magnitudes(args: argparse.Namespace) -> None:
    sections = {kind: [] for kind in KINDS}
    print("| network | what | at a tenth | at the end | most that a layer grew |\n|---|---|---|---|---|")
    for name, (script, flags) in RUNS.items():
        lengths = ["--max_train_steps", args.updates, "--logging_steps", max(1, args.updates // 50)]
        flags = [*COMMON.split(), *flags, *lengths, "--cpu_threads", args.cpu_threads]
        records = train_once(script, flags, args.output_dir / name.lower()).records("layers")
        for kind, words in KINDS.items():
            series = magnitudes(records, kind)
            tenth = len(records) // 10
            ratio = max(values[-1] / values[tenth] for values in series.values())
            early, late = (statistics.median(values[i] for values in series.values()) for i in (tenth, -1))
            print(f"| {name} | {words} | {early:.3f} | {late:.3f} | {ratio:.2f} |", flush=True)
            sections[kind].append(figure(f"{name}: {words}", [step for step, _ in records], series))
    header = "<header><h1>Magnitudes over the training</h1></header>"
    pages = [(words.capitalize(), "".join(sections[kind])) for kind, words in KINDS.items()]
    write_page(
        args.output_dir / "dynamics.html", title="Magnitudes", header=header, sections=pages, source=str(args.output_dir)
    )


def magnitudes(records: list[tuple[int, dict]], kind: str) -> dict[str, list[float]]:
    """Layer -> its magnitude at each record. Not of output layers, whose scale is what they are to tell, nor of EDM2's
    modulation, which is added to 1 and starts from 0."""
    left_out = ("conv_out.weight", "unet.conv_out.weight", "uncertainty.linear.weight")
    measured = [name for name, figures in records[0][1].items() if "activation" in figures]
    layers = [name for name in measured if name not in left_out and not name.endswith("modulation.weight")]
    return {name: [measured[name][kind] for _, measured in records] for name in layers}


def figure(title: str, steps: list[int], series: dict[str, list[float]]) -> str:
    """Lowest, median and highest layer."""
    columns = [sorted(values) for values in zip(*series.values())]
    curves = [
        Curve("median layer", steps, [statistics.median(column) for column in columns], "median"),
        Curve("highest layer", steps, [column[-1] for column in columns], 1),
        Curve("lowest layer", steps, [column[0] for column in columns], 2),
    ]
    return plot(title, curves, unit="root mean square", reading="Flat lines: the layers see the same all along.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("run", type=Path)
    run.add_argument("--num_images", type=int, default=512)
    run.set_defaults(measure=examine_run)
    magnitudes = commands.add_parser("magnitudes")
    magnitudes.add_argument("--updates", type=int, default=1500)
    magnitudes.add_argument("--output_dir", type=Path, default=Path("runs/dynamics"))
    magnitudes.add_argument("--cpu_threads", type=int, default=1)
    magnitudes.set_defaults(measure=compare_magnitudes)
    args = parser.parse_args()
    args.measure(args)


if __name__ == "__main__":
    main()
