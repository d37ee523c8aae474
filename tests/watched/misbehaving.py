"""A script that ends in many ways, and does what scripts do: forks workers, replaces sys.argv, has modules called utils."""

import os
import signal
import sys

import torch
from plain_ddpm import Network, pictures

how, steps = sys.argv[1], int(sys.argv[2])
sys.argv = ["replaced"]


class Slow(torch.utils.data.Dataset):
    def __init__(self):
        self.images = pictures() / 127.5 - 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index] + 0 * torch.randn(1)


def train():
    torch.manual_seed(0)
    workers = 2 if how == "workers" else 0
    loader = torch.utils.data.DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=workers, drop_last=True)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)
    done = 0
    while True:
        for x0 in loader:
            t = torch.randint(0, 1000, (8,))
            noise = torch.randn_like(x0)
            a = alpha_bar[t][:, None, None, None]
            loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            print(done, loss.item().hex(), flush=True)
            if done == steps:
                return


train()
if how == "crash":
    raise ValueError("the script's own error")
if how == "exit":
    sys.exit(7)
if how == "word":
    sys.exit("a word")
if how == "_exit":
    os._exit(5)
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
if how == "interrupt":
    raise KeyboardInterrupt
