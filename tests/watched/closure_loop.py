"""What loops do in other ways: a closure for the optimizer, the time before the images, a condition joined to the images, an
average whose tensors are made anew in each update.
"""

import sys

import torch
import torch.nn.functional as F
from plain_ddpm import Network, pictures

STEPS, T = int(sys.argv[1]), 1000


class Joined(Network):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(6, 12, 3, padding=1)

    def forward(self, times, sample):
        return super().forward(sample, times)


class Average:
    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model, decay=0.95):
        self.shadow = {name: decay * self.shadow[name] + (1 - decay) * p.detach() for name, p in model.named_parameters()}


torch.manual_seed(0)
images = pictures() / 127.5 - 1
alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0)
model = Joined()
average = Average(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def closure():
    x0 = images[torch.randint(0, len(images), (8,))]
    small = F.interpolate(F.avg_pool2d(x0, 4), scale_factor=4)
    t = torch.randint(0, T, (len(x0),))
    noise = torch.randn_like(x0)
    a = alpha_bar[t].view(-1, 1, 1, 1)
    noised = a.sqrt() * x0 + (1 - a).sqrt() * noise
    optimizer.zero_grad()
    loss = F.mse_loss(model(t, sample=torch.cat([small, noised], dim=1)), noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


for step in range(STEPS):
    loss = optimizer.step(closure)
    average.update(model)
    print(step + 1, loss.item().hex(), flush=True)
