"""A rectified flow, with accumulation by hand and torch's AveragedModel."""

import sys

import torch
from plain_ddpm import Network, pictures
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, ROUNDS = int(sys.argv[1]), 2

torch.manual_seed(0)
images = pictures() / 127.5 - 1
model = Network()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
for step in range(STEPS):
    for _ in range(ROUNDS):
        x0 = images[torch.randperm(len(images))[:8]]
        noise = torch.randn_like(x0)
        s = torch.sigmoid(torch.randn(len(x0)))
        x = (1 - s)[:, None, None, None] * x0 + s[:, None, None, None] * noise
        velocity = noise - x0
        loss = (model(x, s * 1000) - velocity).square().mean()
        (loss / ROUNDS).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    print(step + 1, loss.item().hex(), flush=True)
