"""Run under a launcher: every process samples its share and writes what it got back to the folder given as argument."""

import os
import sys
from pathlib import Path

import torch
from diffusers import DDPMScheduler

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "diffusion")]
from test_sampling import tiny_unet  # noqa: E402

from utils.core.distributed import make_accelerator  # noqa: E402
from utils.diffusion.sampling import SamplePlan, full_precision, make_sampler, sample_sharded  # noqa: E402

accelerator = make_accelerator(cpu_threads=1)
unet = tiny_unet()
results = {}
for name, num_images, record_timesteps, should_stop in [
    ("even", 8, None, None),
    ("short last chunk", 7, (999, 500, 0), None),
    ("fewer chunks than processes", 2, None, None),
    ("one process stops", 7, None, lambda: accelerator.process_index == 1),
]:
    with full_precision(unet):
        results[name] = sample_sharded(
            accelerator,
            unet,
            SamplePlan(make_sampler("ddpm", DDPMScheduler()), 4, (1, 8, 8), 3, 2, accelerator.device),
            num_images,
            should_stop=should_stop,
            record_timesteps=record_timesteps,
        )
torch.save(results, Path(sys.argv[1]) / f"{accelerator.process_index}.pt")
accelerator.wait_for_everyone()
os._exit(0)  # as the scripts end, see script.run_script
