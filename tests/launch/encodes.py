"""Run as one of several processes: encodes images, and waits so many seconds before each batch. Prints how many it encoded.

python tests/launch/encodes.py VAE SECONDS OTHERS FLAGS   # it begins when so many others are about to; the cache is last
"""

import os
import sys
import time
from pathlib import Path

import torch

import train_ddpm
from utils.data.autoencoder import load_autoencoder
from utils.data.dataset import load_images
from utils.data.latents import pack_latents

vae, seconds, others, *words = sys.argv[1:]
torch.set_num_threads(1)
images = load_images(train_ddpm.parse_args(words))
autoencoder = load_autoencoder(vae, images.shape)
encode, batches = autoencoder.encode, []


def slowly(images: torch.Tensor) -> torch.Tensor:
    time.sleep(float(seconds))
    batches.append(len(images))
    return encode(images)


autoencoder.encode = slowly
cache = Path(words[-1])
(cache / f"ready-{os.getpid()}").touch()
end = time.monotonic() + 120
while len(list(cache.glob("ready-*"))) <= int(others) and time.monotonic() < end:
    time.sleep(0.02)
pack_latents(images, autoencoder, cache_dir=str(cache), mirrors=False, device=torch.device("cpu"))
print(f"encoded {sum(batches)}")
