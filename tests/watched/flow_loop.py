"""A rectified flow: torch's loader, accumulation by hand, torch's AveragedModel."""

import sys

import torch
from plain_ddpm import Network, pictures
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

ROUNDS, CLASSES = 2, 6


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(0)
images, labels = pictures() / 127.5 - 1, torch.arange(64) % CLASSES
batches = endless(DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True))
model = Network(classes=CLASSES)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
for step in range(int(sys.argv[1])):
    for _ in range(ROUNDS):
        x0, label = next(batches)
        noise = torch.randn_like(x0)
        s = torch.sigmoid(torch.randn(len(x0)))
        share = s[:, None, None, None]
        x = (1 - share) * x0 + share * noise
        velocity = noise - x0
        error = (model(x, s * 1000, label) - velocity).square()
        (error.mean() / ROUNDS).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    print(step + 1, error.mean().item().hex(), flush=True)
