"""Class-conditional toy generator: EDM (Karras et al. 2022) or rectified flow, picked by --loss."""

import argparse
import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CLASSES = 4


def draw_dataset(n, res, seed):
    """uint8 NCHW pictures and integer labels: disc, square, horizontal bar, cross."""
    rng = np.random.RandomState(seed)
    yy, xx = np.mgrid[0:res, 0:res].astype(np.float32)
    images, labels = np.empty([n, 3, res, res], np.uint8), np.arange(n) % NUM_CLASSES
    for i in range(n):
        cx, cy = rng.uniform(res * 0.35, res * 0.65, size=2)
        r = rng.uniform(res * 0.18, res * 0.32)
        dx, dy = np.abs(xx - cx), np.abs(yy - cy)
        mask = [
            dx**2 + dy**2 < r**2,
            np.maximum(dx, dy) < r,
            (dy < r * 0.4) & (dx < r * 1.5),
            (np.minimum(dx, dy) < r * 0.35) & (np.maximum(dx, dy) < r * 1.4),
        ][labels[i]]
        bg, fg = rng.uniform(0, 110, size=3) + np.array([60, 20, 0]), rng.uniform(120, 255, size=3) - [0, 20, 60]
        images[i] = np.where(mask[None], fg[:, None, None], bg[:, None, None] + 2.0 * yy[None]).clip(0, 255)
    return images, labels


class PictureSet(torch.utils.data.Dataset):
    def __init__(self, n=256, res=16, seed=7, xflip=True):
        self.images, self.labels = draw_dataset(n, res, seed)
        self.n, self.xflip = n, xflip

    def __len__(self):
        return self.n * (2 if self.xflip else 1)

    def __getitem__(self, idx):
        image = self.images[idx % self.n]
        if idx >= self.n:
            image = image[:, :, ::-1]
        onehot = np.zeros(NUM_CLASSES, np.float32)
        onehot[self.labels[idx % self.n]] = 1
        return image.copy(), onehot


class InfiniteSampler(torch.utils.data.Sampler):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        rng = np.random.RandomState(self.seed)
        while True:
            yield from rng.permutation(self.n).tolist()


class FourierEmbedding(nn.Module):
    def __init__(self, channels, bandwidth=1.0):
        super().__init__()
        self.register_buffer("freqs", torch.randn(channels // 2) * bandwidth)

    def forward(self, x):
        y = x.float().outer(2 * np.pi * self.freqs)
        return torch.cat([y.cos(), y.sin()], dim=1)


class Block(nn.Module):
    def __init__(self, cin, cout, emb, dropout):
        super().__init__()
        self.norm0, self.norm1 = nn.GroupNorm(8, cin), nn.GroupNorm(8, cout)
        self.conv0 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv1 = nn.Conv2d(cout, cout, 3, padding=1)
        self.affine = nn.Linear(emb, cout * 2)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        self.dropout = dropout
        nn.init.normal_(self.conv1.weight, std=1e-3)

    def forward(self, x, emb):
        h = self.conv0(F.silu(self.norm0(x)))
        scale, shift = self.affine(emb)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(torch.addcmul(shift, self.norm1(h), scale + 1))
        h = self.conv1(F.dropout(h, p=self.dropout, training=self.training))
        return (h + self.skip(x)) * np.sqrt(0.5)


class TinyUNet(nn.Module):
    def __init__(self, ch=24, emb=64, dropout=0.1, label_dropout=0.1):
        super().__init__()
        self.label_dropout = label_dropout
        self.map_noise = FourierEmbedding(emb)
        self.map_layer0, self.map_layer1 = nn.Linear(emb, emb), nn.Linear(emb, emb)
        self.map_label = nn.Linear(NUM_CLASSES, emb, bias=False)
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.enc0 = Block(ch, ch, emb, dropout)
        self.enc1 = Block(ch, ch * 2, emb, dropout)
        self.mid = Block(ch * 2, ch * 2, emb, dropout)
        self.dec1 = Block(ch * 4, ch * 2, emb, dropout)
        self.dec0 = Block(ch * 3, ch, emb, dropout)
        self.norm_out, self.conv_out = nn.GroupNorm(8, ch), nn.Conv2d(ch, 3, 3, padding=1)
        nn.init.normal_(self.conv_out.weight, std=1e-2)

    def forward(self, x, noise_labels, class_labels):
        emb = self.map_noise(noise_labels)
        labels = class_labels
        if self.training and self.label_dropout > 0:
            keep = torch.rand([x.shape[0], 1], device=x.device) >= self.label_dropout
            labels = labels * keep.to(labels.dtype)
        emb = F.silu(self.map_layer0(emb) + self.map_label(labels * np.sqrt(NUM_CLASSES)))
        emb = F.silu(self.map_layer1(emb))
        h0 = self.enc0(self.conv_in(x), emb)
        h1 = self.enc1(F.avg_pool2d(h0, 2), emb)
        m = self.dec1(torch.cat([self.mid(h1, emb), h1], dim=1), emb)
        m = self.dec0(torch.cat([F.interpolate(m, scale_factor=2, mode="nearest"), h0], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(m)))


class EDMPrecond(nn.Module):
    def __init__(self, model, sigma_data=0.5, bf16=False):
        super().__init__()
        self.model, self.sigma_data, self.bf16 = model, sigma_data, bf16

    def forward(self, x, sigma, class_labels):
        sigma = sigma.reshape(-1, 1, 1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (self.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.log() / 4
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            F_x = self.model(c_in * x, c_noise.flatten(), class_labels)
        return c_skip * x + c_out * F_x.to(torch.float32)


class FlowNet(nn.Module):
    def __init__(self, model, bf16=False):
        super().__init__()
        self.model, self.bf16 = model, bf16

    def forward(self, x, t, class_labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            v = self.model(x, t.flatten(), class_labels)
        return v.to(torch.float32)


class EDMLoss:
    def __init__(self, P_mean=-1.2, P_std=1.2, sigma_data=0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def __call__(self, net, images, labels):
        rnd_normal = torch.randn([images.shape[0], 1, 1, 1], device=images.device)
        sigma = (rnd_normal * self.P_std + self.P_mean).exp()
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        n = torch.randn_like(images) * sigma
        D_yn = net(images + n, sigma, labels)
        return weight * ((D_yn - images) ** 2)


class FlowLoss:
    """x_t = (1 - t) x + t eps, velocity eps - x."""

    def __init__(self, times="lognorm", loc=0.0, scale=1.0):
        self.times, self.loc, self.scale = times, loc, scale

    def __call__(self, net, images, labels):
        shape = [images.shape[0], 1, 1, 1]
        if self.times == "lognorm":
            t = torch.sigmoid(torch.randn(shape, device=images.device) * self.scale + self.loc)
        else:
            t = torch.rand(shape, device=images.device)
        eps = torch.randn_like(images)
        x_t = (1 - t) * images + t * eps
        velocity = eps - images
        return (net(x_t, t, labels) - velocity) ** 2


def training_loop(opts):
    np.random.seed(opts.seed)
    torch.manual_seed(opts.seed)
    dataset = PictureSet(xflip=not opts.no_xflip)
    batch_gpu = opts.batch // opts.rounds
    sampler = InfiniteSampler(len(dataset), seed=opts.seed)
    data_iter = iter(torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=batch_gpu))

    unet = TinyUNet(dropout=opts.dropout, label_dropout=opts.label_dropout)
    if opts.loss == "edm":
        net = EDMPrecond(unet, opts.sigma_data, opts.bf16)
        loss_fn = EDMLoss(opts.P_mean, opts.P_std, opts.sigma_data)
    else:
        net = FlowNet(unet, opts.bf16)
        loss_fn = FlowLoss(opts.times)
    net.train().requires_grad_(True)
    optimizer = torch.optim.Adam(net.parameters(), lr=opts.lr, betas=(0.9, 0.999), eps=1e-8)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    print(f"{opts.loss}: {sum(p.numel() for p in net.parameters())} parameters, {len(dataset)} pictures")

    cur_nimg = 0
    for step in range(1, opts.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for _ in range(opts.rounds):
            images, labels = next(data_iter)
            images = images.to(torch.float32) / 127.5 - 1
            loss = loss_fn(net, images, labels)
            loss_sum += loss.detach().sum().item()
            loss.sum().mul(1 / opts.batch).backward()

        # learning rate ramp-up, gradient hygiene, update
        for g in optimizer.param_groups:
            g["lr"] = opts.lr * min((cur_nimg + opts.batch) / max(opts.rampup_nimg, 1e-8), 1)
        for param in net.parameters():
            if param.grad is not None:
                torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
        optimizer.step()

        # exponential moving average, half-life counted in pictures
        ema_halflife_nimg = opts.ema_halflife
        if opts.ema_rampup_ratio > 0:
            ema_halflife_nimg = min(ema_halflife_nimg, cur_nimg * opts.ema_rampup_ratio)
        ema_beta = 0.5 ** (opts.batch / max(ema_halflife_nimg, 1e-8))
        with torch.no_grad():
            for p_ema, p_net in zip(ema.parameters(), net.parameters()):
                p_ema.copy_(p_net.detach().lerp(p_ema, ema_beta))
        cur_nimg += opts.batch
        print(f"step {step} loss {loss_sum / (opts.batch * images[0].numel())!r}", flush=True)

    if opts.outfile:
        torch.save({"ema": ema.state_dict(), "net": net.state_dict(), "opts": vars(opts)}, opts.outfile)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", choices=["edm", "flow"], default="edm")
    parser.add_argument("--times", choices=["lognorm", "uniform"], default="lognorm")
    for name, value in {
        "steps": 48,
        "batch": 16,
        "rounds": 2,
        "lr": 2e-3,
        "rampup_nimg": 256.0,
        "ema_halflife": 320.0,
        "ema_rampup_ratio": 0.5,
        "P_mean": -1.2,
        "P_std": 1.2,
        "sigma_data": 0.5,
        "dropout": 0.1,
        "label_dropout": 0.1,
        "seed": 0,
        "outfile": "",
    }.items():
        parser.add_argument("--" + name, type=type(value), default=value)
    for name in ("bf16", "no_xflip"):
        parser.add_argument("--" + name, action="store_true")
    training_loop(parser.parse_args())
