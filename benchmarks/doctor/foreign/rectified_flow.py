"""Rectified flow with a small transformer: x_t = (1 - t) x_0 + t noise, and the network predicts noise - x_0.

python rectified_flow.py --steps 150 --times lognormal
"""

import argparse

import torch
from images import shapes
from networks import DiT
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
NO_CLASS = CLASSES


def sample_times(n, kind):
    if kind == "uniform":
        return torch.rand(n)
    return torch.sigmoid(torch.randn(n))  # Stable Diffusion 3, with mean 0 and scale 1


def endless(loader):
    while True:
        yield from loader


@torch.no_grad()
def euler(net, weights, steps=5, guidance=2.0):
    x = torch.randn(CLASSES, 3, 16, 16)
    labels, none = torch.arange(CLASSES), torch.full((CLASSES,), NO_CLASS)
    for i in range(steps, 0, -1):
        t = torch.full((CLASSES,), i / steps)
        with_class = torch.func.functional_call(net, weights, (x, t, labels))
        without = torch.func.functional_call(net, weights, (x, t, none))
        x = x - (without + guidance * (with_class - without)) / steps
    return x


def main(args):
    torch.manual_seed(args.seed)
    pictures, labels = shapes(512, seed=1)
    pictures = torch.as_tensor(pictures).permute(0, 3, 1, 2).div(255).sub(0.5).mul(2)
    loader = DataLoader(
        TensorDataset(pictures, torch.as_tensor(labels)), batch_size=args.batch_size, shuffle=True, drop_last=True
    )

    net = DiT(classes=CLASSES)
    net.checkpointing = args.checkpointing
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps, pct_start=0.1)
    ema = {name: value.clone() for name, value in net.state_dict().items()}

    net.train()
    batches = endless(loader)
    for step in range(1, args.steps + 1):
        x0, y = next(batches)
        y = torch.where(torch.rand(len(y)) < args.label_dropout, NO_CLASS, y)
        noise = torch.randn_like(x0)
        t = sample_times(len(x0), args.times)
        s = t.view(-1, 1, 1, 1)
        x_t = (1 - s) * x0 + s * noise
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            velocity = net(x_t, t, y)
        loss = ((velocity.float() - (noise - x0)) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        opt.step()
        sched.step()
        with torch.no_grad():
            for name, value in net.state_dict().items():
                ema[name].lerp_(value, 1 - args.ema)
        print(step, repr(loss.item()))
        if args.sample_every and step % args.sample_every == 0:
            net.eval()
            print("samples", repr(euler(net, ema).std().item()))
            net.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--ema", type=float, default=0.98)
    parser.add_argument("--times", choices=["uniform", "lognormal"], default="uniform")
    parser.add_argument("--label_dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--sample_every", type=int, default=60)
    main(parser.parse_args())
