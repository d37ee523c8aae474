"""A loop that tells the doctor what it trains."""

import copy
import sys

import torch
from diffusers import DDPMScheduler
from plain_ddpm import Network, pictures

from steady_doctor import watch

torch.manual_seed(0)
images = pictures() / 127.5 - 1
model, scheduler = Network(), DDPMScheduler()
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watch(model, optimizer, watch_dir=sys.argv[1])
for _ in range(6):
    x0 = images[torch.randint(0, len(images), (8,))]
    noise, t = torch.randn_like(x0), torch.randint(0, 1000, (8,))
    loss = (model(scheduler.add_noise(x0, noise, t), t) - noise).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), model.parameters()):
            average.lerp_(weight, 0.1)
