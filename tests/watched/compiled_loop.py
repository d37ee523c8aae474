"""A loop of which torch compiles a part: the network ("module", or "inplace"), "step" (with its loss and backward pass),
"optimizer", or "later": all of an update, from the second one on."""

import sys

import torch
from torch import nn

torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.time, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x) + self.time(t[:, None].float() / 1000)[:, :, None, None]))


model = Network()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)


def train_step(x0, noise, t):
    a = alphas_cumprod[t][:, None, None, None]
    loss = ((called(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise) ** 2).mean()
    loss.backward()
    return loss


runs = 0  # of compiled code


def counted(graph, inputs):
    from torch._dynamo.backends.debugging import aot_eager

    compiled = aot_eager(graph, inputs)

    def run(*arguments):
        global runs
        runs += 1
        return compiled(*arguments)

    return run


called, part = model, sys.argv[1]
if part == "module":
    called = torch.compile(model, backend=counted)
elif part == "inplace":
    model.compile(backend=counted)
elif part == "step":
    train_step = torch.compile(train_step, backend=counted)
elif part == "optimizer":
    optimizer.step = torch.compile(optimizer.step, backend=counted)


def update(x0, noise, t):
    loss = train_step(x0, noise, t)
    optimizer.step()
    optimizer.zero_grad()
    return loss


for x0 in torch.utils.data.DataLoader(torch.rand(24 * 8, 3, 16, 16) * 2 - 1, batch_size=8):
    loss = update(x0, torch.randn_like(x0), torch.randint(0, 1000, (8,)))
    print(f"loss {loss.item()!r}")
    if part == "later":
        update, part = torch.compile(update, backend=counted), "again"
print("compiled runs:", runs)
