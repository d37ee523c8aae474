"""Run under a launcher: every process makes its share of a grid, and writes what it got back to the folder that is given."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import DDPMScheduler

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "diffusion")]
from test_sampling import PATH, SHAPE, tiny_unet  # noqa: E402

from utils.core.distributed import make_accelerator  # noqa: E402
from utils.training.samples import SampleGrids  # noqa: E402

accelerator = make_accelerator(cpu_threads=1)
results = {}
for name, num_images, should_stop in [
    ("even", 4, lambda: False),
    ("short last chunk", 3, lambda: False),
    ("fewer chunks than processes", 1, lambda: False),
    ("one process stops", 3, lambda: accelerator.process_index == 1),
]:
    run = SimpleNamespace(
        accelerator=accelerator,
        options=SimpleNamespace(sampler="ddpm", sampling_steps=4, seed=3, eval_batch_size=num_images),
        objective=SimpleNamespace(exported=tiny_unet(), noise_scheduler=DDPMScheduler(), path=lambda: PATH, predict=None),
        data=SimpleNamespace(samples=SimpleNamespace(shape=SHAPE), autoencoder=None),
    )
    results[name] = SampleGrids(run)._sample(nullcontext, should_stop)
torch.save(results, Path(sys.argv[1]) / f"{accelerator.process_index}.pt")
accelerator.wait_for_everyone()
os._exit(0)  # as the scripts end, see script.run_script
