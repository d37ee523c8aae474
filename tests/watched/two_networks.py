"""A network and its critic, each with an optimizer: the critic steps first, an autoencoder of clean images."""

import sys

import torch
from plain_ddpm import Network, pictures

torch.manual_seed(0)
images = pictures() / 127.5 - 1
alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)
critic, model = Network(), Network()
of_critic, of_model = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (critic, model))
for step in range(int(sys.argv[1])):
    x0 = images[torch.randint(0, len(images), (8,))]
    t = torch.randint(0, 1000, (8,))
    of_critic.zero_grad()
    (critic(x0, t) - x0).square().mean().backward()
    of_critic.step()
    noise = torch.randn_like(x0)
    a = alpha_bar[t][:, None, None, None]
    loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()
    of_model.zero_grad()
    loss.backward()
    of_model.step()
    print(step + 1, loss.item().hex(), flush=True)
