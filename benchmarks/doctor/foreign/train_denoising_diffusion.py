import argparse
from copy import deepcopy
from pathlib import Path
from random import seed as seed_python

import numpy as np
import torch
from torch import nn
from torch.amp import autocast
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset

from denoising_diffusion import GaussianDiffusion, Unet, exists

def cycle(dl):
    while True:
        for data in dl:
            yield data

# data: small drawings, kept as they come out of a PNG, and sequences

def draw_images(num, size, rng):
    images = np.zeros((num, size, size, 3), dtype = np.uint8)
    yy, xx = np.mgrid[:size, :size] / (size - 1)
    for image in images:
        top, bottom = rng.integers(0, 256, size = (2, 3))
        image[:] = top + (bottom - top) * yy[..., None]
        cx, cy, radius = rng.uniform(0.3, 0.7), rng.uniform(0.3, 0.7), rng.uniform(0.15, 0.3)
        distance = np.hypot(xx - cx, yy - cy) if rng.random() < 0.5 else np.maximum(abs(xx - cx), abs(yy - cy))
        image[distance < radius] = rng.integers(0, 256, size = 3)
    return images

class ImageDataset(Dataset):
    def __init__(self, images, augment_horizontal_flip = False):
        self.images = images
        self.augment_horizontal_flip = augment_horizontal_flip

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        img = torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255
        if self.augment_horizontal_flip and torch.rand(()) < 0.5:
            img = img.flip(-1)
        return img

class Dataset1D(Dataset):
    """two sines of random frequency and phase, scaled to 0 .. 1"""

    def __init__(self, num, length, rng):
        position = np.arange(length) / length
        freq, phase = rng.uniform(1, 5, size = (num, 2, 1)), rng.uniform(0, 2 * np.pi, size = (num, 2, 1))
        waves = np.sin(2 * np.pi * freq * position + phase).sum(axis = 1, keepdims = True)
        self.tensor = torch.from_numpy((waves / 2 + 1) / 2).float()

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, index):
        return self.tensor[index].clone()

# exponential moving average, after ema_pytorch

class EMA(nn.Module):
    def __init__(self, model, beta = 0.995, update_after_step = 10, update_every = 2, inv_gamma = 1., power = 2 / 3, min_value = 0.):
        super().__init__()
        self.online_model = [model]  # in a list, so that it is no submodule
        self.ema_model = deepcopy(model).eval()
        self.ema_model.requires_grad_(False)
        self.beta, self.inv_gamma, self.power, self.min_value = beta, inv_gamma, power, min_value
        self.update_after_step, self.update_every = update_after_step, update_every
        self.register_buffer('initted', torch.tensor(False))
        self.register_buffer('step', torch.tensor(0))

    @property
    def model(self):
        return self.online_model[0]

    def get_current_decay(self):
        epoch = max(self.step.item() - self.update_after_step - 1, 0)
        if epoch <= 0:
            return 0.
        value = 1 - (1 + epoch / self.inv_gamma) ** -self.power
        return min(max(value, self.min_value), self.beta)

    @torch.no_grad()
    def copy_params_from_model_to_ema(self):
        for ma_params, current_params in zip(self.ema_model.parameters(), self.model.parameters()):
            ma_params.copy_(current_params)

    def update(self):
        step = self.step.item()
        self.step += 1
        if step % self.update_every != 0:
            return
        if step <= self.update_after_step:
            self.copy_params_from_model_to_ema()
            return
        if not self.initted.item():
            self.copy_params_from_model_to_ema()
            self.initted.copy_(torch.tensor(True))
        self.update_moving_average(self.ema_model, self.model)

    @torch.no_grad()
    def update_moving_average(self, ma_model, current_model):
        current_decay = self.get_current_decay()
        for ma_params, current_params in zip(ma_model.parameters(), current_model.parameters()):
            ma_params.lerp_(current_params, 1. - current_decay)

# trainer

class Trainer:
    def __init__(
        self,
        diffusion_model,
        dataset,
        *,
        train_batch_size = 16,
        gradient_accumulate_every = 1,
        train_lr = 1e-3,
        train_num_steps = 70,
        adam_betas = (0.9, 0.99),
        warmup_steps = 0,
        ema_decay = 0.995,
        ema_update_after_step = 10,
        ema_update_every = 2,
        save_and_sample_every = 25,
        num_samples = 8,
        max_grad_norm = 1.,
        amp = False,
        results_folder = './results'
    ):
        self.model = diffusion_model
        self.gradient_accumulate_every = gradient_accumulate_every
        self.train_num_steps = train_num_steps
        self.save_and_sample_every = save_and_sample_every
        self.num_samples = num_samples
        self.max_grad_norm = max_grad_norm
        self.amp = amp

        dl = DataLoader(dataset, batch_size = train_batch_size, shuffle = True, drop_last = True)
        self.dl = cycle(dl)

        self.opt = Adam(diffusion_model.parameters(), lr = train_lr, betas = adam_betas)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: min(1., (step + 1) / max(1, warmup_steps)))
        self.ema = EMA(
            diffusion_model, beta = ema_decay, update_after_step = ema_update_after_step, update_every = ema_update_every
        )

        self.results_folder = Path(results_folder)
        self.results_folder.mkdir(parents = True, exist_ok = True)
        self.step = 0

    def save(self, milestone):
        data = {
            'step': self.step,
            'model': self.model.state_dict(),
            'opt': self.opt.state_dict(),
            'sched': self.sched.state_dict(),
            'ema': self.ema.state_dict()
        }
        torch.save(data, str(self.results_folder / f'model-{milestone}.pt'))

    def load(self, milestone):
        data = torch.load(str(self.results_folder / f'model-{milestone}.pt'), weights_only=True)
        self.step = data['step']
        self.model.load_state_dict(data['model'])
        self.opt.load_state_dict(data['opt'])
        self.sched.load_state_dict(data['sched'])
        self.ema.load_state_dict(data['ema'])

    def train(self):
        self.model.train()

        while self.step < self.train_num_steps:
            total_loss = 0.

            for _ in range(self.gradient_accumulate_every):
                data = next(self.dl)

                with autocast('cpu', dtype = torch.bfloat16, enabled = self.amp):
                    loss = self.model(data)
                    loss = loss / self.gradient_accumulate_every
                    total_loss += loss.item()

                loss.backward()

            if exists(self.max_grad_norm) and self.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()

            self.step += 1
            self.ema.update()
            print(f'{self.step}: loss: {total_loss:.4f}')

            if self.step % self.save_and_sample_every == 0:
                milestone = self.step // self.save_and_sample_every
                samples = self.ema.ema_model.sample(batch_size = self.num_samples)
                samples = (samples.clamp(0., 1.) * 255).round().byte().numpy()
                np.save(str(self.results_folder / f'sample-{milestone}.npy'), samples)
                self.save(milestone)

        print('training complete')

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--results_folder', default = './results')
    parser.add_argument('--one_d', action = 'store_true', help = 'sequences in place of images')
    parser.add_argument('--num_items', type = int, default = 640)
    parser.add_argument('--size', type = int, default = 16)
    parser.add_argument('--seq_length', type = int, default = 64)
    parser.add_argument('--augment_horizontal_flip', action = 'store_true')
    parser.add_argument('--dim', type = int, default = 24)
    parser.add_argument('--dropout', type = float, default = 0.)
    parser.add_argument('--self_condition', action = 'store_true')
    parser.add_argument('--objective', choices = ['pred_noise', 'pred_x0', 'pred_v'], default = 'pred_v')
    parser.add_argument('--beta_schedule', choices = ['linear', 'cosine', 'sigmoid'], default = 'sigmoid')
    parser.add_argument('--timesteps', type = int, default = 1000)
    parser.add_argument('--sampling_timesteps', type = int, default = 10)
    parser.add_argument('--offset_noise_strength', type = float, default = 0.)
    parser.add_argument('--min_snr_loss_weight', action = 'store_true')
    parser.add_argument('--train_num_steps', type = int, default = 70)
    parser.add_argument('--train_batch_size', type = int, default = 16)
    parser.add_argument('--gradient_accumulate_every', type = int, default = 1)
    parser.add_argument('--train_lr', type = float, default = 1e-3)
    parser.add_argument('--warmup_steps', type = int, default = 0)
    parser.add_argument('--max_grad_norm', type = float, default = 1.)
    parser.add_argument('--ema_decay', type = float, default = 0.995)
    parser.add_argument('--ema_update_after_step', type = int, default = 10)
    parser.add_argument('--ema_update_every', type = int, default = 2)
    parser.add_argument('--save_and_sample_every', type = int, default = 25)
    parser.add_argument('--amp', action = 'store_true')
    parser.add_argument('--seed', type = int, default = 42)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    seed_python(args.seed)
    rng = np.random.default_rng(args.seed)

    if args.one_d:
        channels, data_shape = 1, (1, args.seq_length)
        dataset = Dataset1D(args.num_items, args.seq_length, rng)
    else:
        channels, data_shape = 3, (3, args.size, args.size)
        dataset = ImageDataset(draw_images(args.num_items, args.size, rng), args.augment_horizontal_flip)

    model = Unet(args.dim, channels = channels, self_condition = args.self_condition, dropout = args.dropout, one_d = args.one_d)
    diffusion = GaussianDiffusion(
        model, data_shape = data_shape, timesteps = args.timesteps, sampling_timesteps = args.sampling_timesteps,
        objective = args.objective, beta_schedule = args.beta_schedule, min_snr_loss_weight = args.min_snr_loss_weight,
        offset_noise_strength = args.offset_noise_strength
    )
    print(f'{sum(p.numel() for p in model.parameters())} parameters')

    trainer = Trainer(
        diffusion, dataset, train_batch_size = args.train_batch_size, train_lr = args.train_lr,
        train_num_steps = args.train_num_steps, gradient_accumulate_every = args.gradient_accumulate_every,
        warmup_steps = args.warmup_steps, ema_decay = args.ema_decay, ema_update_after_step = args.ema_update_after_step,
        ema_update_every = args.ema_update_every, save_and_sample_every = args.save_and_sample_every,
        max_grad_norm = args.max_grad_norm, amp = args.amp, results_folder = args.results_folder
    )
    trainer.train()

if __name__ == '__main__':
    main()
