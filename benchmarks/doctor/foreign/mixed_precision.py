"""Plain PyTorch with autocast, a gradient scaler, torch's AveragedModel and a cosine learning rate; DDP under torchrun.

python mixed_precision.py --dtype bf16 --accumulate 2
torchrun --nproc_per_node 2 mixed_precision.py
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from images import shapes
from networks import UNet
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Schedule:
    """Variance preserving: log SNR from 9 to -9, linear in t from 0 to 1."""

    def __call__(self, t):
        logsnr = 9 - 18 * t
        return logsnr.sigmoid().sqrt()[:, None, None, None], (-logsnr).sigmoid().sqrt()[:, None, None, None]


def train(args):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)

    pictures = torch.from_numpy(shapes(512, seed=1)[0]).permute(0, 3, 1, 2).float()
    dataset = TensorDataset((pictures - 127.5) / 127.5)
    sampler = DistributedSampler(dataset, world, rank, shuffle=True, drop_last=True) if world > 1 else None
    loader = DataLoader(dataset, args.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)

    raw_model = UNet(dropout=args.dropout)
    ema = AveragedModel(raw_model, multi_avg_fn=get_ema_multi_avg_fn(args.ema))
    model = torch.compile(raw_model, backend=args.compile) if args.compile else raw_model
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps, eta_min=args.lr / 100)
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16", init_scale=2.0**14)
    autocast = torch.autocast("cpu", dtype=DTYPES[args.dtype]) if args.dtype in DTYPES else contextlib.nullcontext()
    schedule = Schedule()
    torch.manual_seed(args.seed + 1000 * rank)

    step, micro, epoch = 0, 0, 0
    while step < args.steps:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for (images,) in loader:
            model.train()
            t = torch.rand(len(images))
            alpha, sigma = schedule(t)
            noise = torch.randn_like(images)
            noisy = alpha * images + sigma * noise
            with autocast:
                output = model(noisy, t * 1000)
                loss = torch.nn.functional.mse_loss(output.float(), noise)
            scaler.scale(loss / args.accumulate).backward()
            micro += 1
            if micro % args.accumulate:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), args.max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            lr_scheduler.step()
            ema.update_parameters(raw_model)
            step += 1
            print(f"[{rank}] {step} {loss.item()!r} lr {optimizer.param_groups[0]['lr']:.3g}")
            if step % args.evaluate_every == 0:
                ema.eval()
                with torch.no_grad():
                    t = torch.linspace(0.1, 0.9, 8)
                    alpha, sigma = schedule(t)
                    images = dataset.tensors[0][:8]
                    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
                    error = (ema(alpha * images + sigma * noise, t * 1000) - noise).square().mean()
                print(f"[{rank}] evaluation {error.item()!r}")
            if step == args.steps:
                break
        epoch += 1
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=1e-2)
    parser.add_argument("--max_norm", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile: inductor, aot_eager, eager")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--evaluate_every", type=int, default=60)
    train(parser.parse_args())
