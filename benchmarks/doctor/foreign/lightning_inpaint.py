"""Inpainting in the manner of latent diffusion's Lightning modules: hooks, a closure for the optimizer, the average in buffers.

The noised image, the mask and the image without the hole enter the network side by side; v-prediction, zero terminal SNR.

python lightning_inpaint.py --steps 100 --accumulate_grad_batches 2 --masked_loss
"""

import argparse
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from images import shapes
from networks import UNet
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class HoleDataset(Dataset):
    """Dictionaries of numpy arrays, height by width by channels, from -1 to 1; the mask is 1 in the hole."""

    def __init__(self, count, seed):
        self.images = shapes(count, seed=seed)[0]
        self.random = np.random.default_rng(seed)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = (self.images[i] / 127.5 - 1.0).astype(np.float32)
        mask = np.zeros((16, 16, 1), np.float32)
        top, left = self.random.integers(0, 9, 2)
        height, width = self.random.integers(5, 9, 2)
        mask[top : top + height, left : left + width] = 1.0
        return {"image": image, "mask": mask, "masked_image": image * (1 - mask)}


class LitEma(nn.Module):
    def __init__(self, model, decay=0.99, use_num_updates=True):
        super().__init__()
        self.m_name2s_name = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("num_updates", torch.tensor(0 if use_num_updates else -1))
        for name, p in model.named_parameters():
            self.m_name2s_name[name] = name.replace(".", "")
            self.register_buffer(name.replace(".", ""), p.clone().detach().data)
        self.collected_params = []

    def forward(self, model):
        decay = self.decay
        if self.num_updates >= 0:
            self.num_updates += 1
            decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            shadow_params = dict(self.named_buffers())
            for key, param in model.named_parameters():
                sname = self.m_name2s_name[key]
                shadow_params[sname].sub_((1.0 - decay) * (shadow_params[sname] - param))

    def copy_to(self, model):
        shadow_params = dict(self.named_buffers())
        for key, param in model.named_parameters():
            param.data.copy_(shadow_params[self.m_name2s_name[key]].data)

    def store(self, parameters):
        self.collected_params = [param.clone() for param in parameters]

    def restore(self, parameters):
        for c_param, param in zip(self.collected_params, parameters):
            param.data.copy_(c_param.data)


class DiffusionWrapper(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.diffusion_model = UNet(dim=width, channels=7)
        self.diffusion_model.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t, c_concat):
        xc = torch.cat([x, *c_concat], dim=1)
        return self.diffusion_model(xc, t)


class InpaintDiffusion(nn.Module):
    def __init__(self, args, timesteps=1000):
        super().__init__()
        self.args, self.num_timesteps, self.global_step = args, timesteps, 0
        self.learning_rate, self.offset_noise_strength = args.lr, args.offset_noise
        self.register_schedule()
        self.model = DiffusionWrapper(24)
        self.model_ema = LitEma(self.model)

    def register_schedule(self, linear_start=0.00085, linear_end=0.012):
        betas = torch.linspace(linear_start**0.5, linear_end**0.5, self.num_timesteps, dtype=torch.float64) ** 2
        root = torch.cumprod(1 - betas, dim=0).sqrt()
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
        self.register_buffer("sqrt_alphas_cumprod", root.float())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - root**2).sqrt().float())

    def extract(self, a, t):
        return a.gather(-1, t).reshape(-1, 1, 1, 1)

    def q_sample(self, x_start, t, noise):
        return self.extract(self.sqrt_alphas_cumprod, t) * x_start + self.extract(self.sqrt_one_minus_alphas_cumprod, t) * noise

    def get_v(self, x, noise, t):
        return self.extract(self.sqrt_alphas_cumprod, t) * noise - self.extract(self.sqrt_one_minus_alphas_cumprod, t) * x

    def get_input(self, batch, k):
        return batch[k].permute(0, 3, 1, 2).contiguous().float()

    def p_losses(self, x_start, c_concat, t):
        noise = torch.randn_like(x_start)
        if self.offset_noise_strength > 0:
            noise = noise + self.offset_noise_strength * torch.randn(*x_start.shape[:2], 1, 1)
        x_noisy = self.q_sample(x_start=x_start, t=t, noise=noise)
        model_output = self.model(x_noisy, t, c_concat=c_concat)
        target = self.get_v(x_start, noise, t)
        loss = nn.functional.mse_loss(target, model_output, reduction="none")
        if self.args.masked_loss:
            hole = c_concat[0] + 0.1 * (1 - c_concat[0])
            loss = loss * hole / hole.mean(dim=(1, 2, 3), keepdim=True)
        return loss.mean(dim=[1, 2, 3])

    def training_step(self, batch, batch_idx):
        x = self.get_input(batch, "image")
        mask = self.get_input(batch, "mask")
        c_concat = [mask, self.get_input(batch, "masked_image")]
        t = torch.randint(0, self.num_timesteps, (x.shape[0],)).long()
        return self.p_losses(x, c_concat, t).mean()

    @torch.no_grad()
    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def on_train_batch_end(self):
        self.model_ema(self.model)

    @contextmanager
    def ema_scope(self):
        self.model_ema.store(self.model.parameters())
        self.model_ema.copy_to(self.model)
        try:
            yield None
        finally:
            self.model_ema.restore(self.model.parameters())

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, foreach=True)
        warm, end = self.args.warm_up_steps, self.args.steps

        def schedule(n):
            return (n + 1) / warm if n < warm else 0.1 + 0.45 * (1 + np.cos(np.pi * (n - warm) / (end - warm)))

        return opt, {"scheduler": LambdaLR(opt, lr_lambda=schedule), "interval": "step"}


class Trainer:
    def __init__(self, max_steps, accumulate_grad_batches, gradient_clip_val, precision, val_check_interval):
        self.max_steps, self.accumulate, self.clip = max_steps, accumulate_grad_batches, gradient_clip_val
        self.bf16, self.val_check_interval = precision == "bf16", val_check_interval

    def closure(self, batch, batch_idx, last):
        if batch_idx % self.accumulate == 0:
            self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.module.training_step(batch, batch_idx)
        (loss / self.accumulate).backward()
        if last and self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.model.parameters(), self.clip)
        return loss

    def fit(self, module, train, val):
        self.module = module
        self.optimizer, scheduler = module.configure_optimizers()
        module.train()
        while True:
            for batch_idx, batch in enumerate(train):
                last = (batch_idx + 1) % self.accumulate == 0
                closure = partial(self.closure, batch, batch_idx, last)
                if not last:
                    closure()
                    continue
                loss = self.optimizer.step(closure=closure)
                module.global_step += 1
                scheduler["scheduler"].step()
                module.on_train_batch_end()
                print(module.global_step, repr(loss.item()))
                if module.global_step % self.val_check_interval == 0:
                    module.eval()
                    with module.ema_scope():
                        print("validation", repr(module.validation_step(next(iter(val)), 0).item()))
                    module.train()
                if module.global_step >= self.max_steps:
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warm_up_steps", type=int, default=8)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--gradient_clip_val", type=float, default=1.0)
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--offset_noise", type=float, default=0.0)
    parser.add_argument("--masked_loss", action="store_true")
    parser.add_argument("--val_check_interval", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train = DataLoader(HoleDataset(512, seed=1), args.batch_size, shuffle=True, drop_last=True)
    val = DataLoader(HoleDataset(64, seed=2), args.batch_size)
    trainer = Trainer(args.steps, args.accumulate_grad_batches, args.gradient_clip_val, args.precision, args.val_check_interval)
    trainer.fit(InpaintDiffusion(args), train, val)
