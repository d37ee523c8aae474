"""Images per second of generate.py's sampler against DDPMPipeline with the same batch.

    python benchmarks/speed/sampling.py                                                     # digits16, on this CPU
    python benchmarks/speed/sampling.py --model_preset cifar10 --batch_size 256             # on a GPU

An untrained network of the preset is sampled, or that of `--pipeline`. DDPMPipeline takes 50 and 20 steps of its own scheduler,
for DDIM-50 and DPM-Solver++ 2M at 20 steps. Turns alternate, and the ratio is the median over neighboring turns. "Deviation",
of a trained pipeline, is the root mean square difference, in levels of 255, from the same images in fp32: what the precision
costs, to be set against quality before it is used.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import DDPMPipeline, DDPMScheduler

from benchmarks.shared.measuring import default_device, describe, free, ratio, synchronize
from benchmarks.shared.tasks import SIZES
from utils.core.limits import usable_cores
from utils.diffusion.pipelines import image_shape
from utils.diffusion.sampling import SamplePlan, full_precision, make_sampler, sample, to_uint8
from utils.diffusion.unet import make_unet
from utils.options.flags import DDPMOptions
from utils.training.memory_estimate import autocast

SAMPLERS = (("ddim", 50), ("dpmsolver++", 20))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", choices=SIZES, default="digits16")
    parser.add_argument("--pipeline", help="folder of a trained one")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cpu_threads", type=int, default=usable_cores())
    parser.add_argument("--variants", nargs="+", default=["fp32", "bf16", "bf16 compiled"])
    return parser.parse_args(argv)


def main() -> None:
    options = parse_args()
    device = default_device()
    torch.set_num_threads(options.cpu_threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as utils.core.distributed has it for every script
    if options.pipeline:
        pipeline = DDPMPipeline.from_pretrained(options.pipeline).to(device)
    else:
        resolution, channels = SIZES[options.model_preset]
        unet = make_unet(DDPMOptions(resolution=resolution, image_channels=channels, model_preset=options.model_preset))
        pipeline = DDPMPipeline(unet, DDPMScheduler()).to(device)
    unet, name = pipeline.unet.eval(), options.pipeline or options.model_preset
    pipeline.set_progress_bar_config(disable=True)
    fast = copy.deepcopy(unet).to(memory_format=torch.channels_last)
    fast.compile()
    numbers = torch.arange(options.batch_size)

    def ours(variant: str, sampler: str, steps: int) -> torch.Tensor:
        precision, *compiled = variant.split()
        network = fast if compiled else unet
        scheduler = make_sampler(sampler, pipeline.scheduler)
        plan = SamplePlan(scheduler, steps, image_shape(unet), 0, options.batch_size, device)
        with full_precision(network, compiled=True), autocast(device, "no" if precision == "fp32" else precision):
            images = sample(network, plan, numbers)
        return to_uint8(images).cpu()

    def seconds(function, *arguments) -> tuple[float, Any]:
        synchronize(device)
        start = time.perf_counter()
        result = function(*arguments)
        synchronize(device)
        return time.perf_counter() - start, result

    print(f"{describe(device)}; {name}, batch {options.batch_size}, median of {options.turns} turns")
    print("sampler            variant            images/s  DDPMPipeline   ratio (quartiles)        deviation  first s")
    for sampler, steps in SAMPLERS:
        plain = ours("fp32", sampler, steps).float()

        def theirs(steps=steps):
            return pipeline(batch_size=options.batch_size, num_inference_steps=steps, output_type="np").images

        theirs()
        for variant in options.variants:
            first, images = seconds(ours, variant, sampler, steps)
            deviation = f"{(images.float() - plain).square().mean().sqrt().item():.3f}" if options.pipeline else "-"
            own, other = [], []
            for _ in range(options.turns):
                own.append(seconds(ours, variant, sampler, steps)[0])
                other.append(seconds(theirs)[0])
            gain, low, high = ratio(other, own)
            rates = [options.batch_size / statistics.median(s) for s in (own, other)]
            row = f"{sampler + ' ' + str(steps):18} {variant:16} {rates[0]:10.2f} {rates[1]:13.2f}"
            print(f"{row}   {gain:.2f} ({low:.2f}, {high:.2f})   {deviation:>10} {first:8.1f}", flush=True)
        print(f"=> {name} {sampler} {steps}: {rates[0]:.1f} images/s {variant}, {gain:.2f} x DDPMPipeline")
        free()


if __name__ == "__main__":
    main()
