"""An autoencoder with a perceptual loss: networks, noise and an optimizer, but nothing that is a denoiser."""

import sys

import torch
from plain_ddpm import pictures
from torch import nn

steps = int(sys.argv[1])
torch.manual_seed(0)
encoder = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))
decoder = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, padding=1))
features = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)).requires_grad_(False)
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], 1e-3)
images = pictures() / 127.5 - 1
for step in range(steps):
    x = images[torch.randperm(len(images))[:8]]
    code = encoder(x)
    made = decoder(code + 0.1 * torch.randn_like(code))
    loss = (made - x).square().mean() + (features(made) - features(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step + 1, loss.item().hex(), flush=True)
