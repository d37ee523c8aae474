"""Speech-like signals from their spectrograms, in the manner of WaveGrad: the network is told the noise level.

python wave_grad.py --steps 100 --accumulate 2
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

HOP, FRAMES, BANDS = 8, 32, 12
PARAMS = {
    "batch_size": 16,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "noise_schedule": np.linspace(1e-4, 0.02, 1000).tolist(),
    "ema": 0.99,
}


class Speech(Dataset):
    """Tones with harmonics, int16 as in a wave file, and how loud each band of them is."""

    def __init__(self, count, seed):
        random = np.random.default_rng(seed)
        pitch, time = random.uniform(0.01, 0.1, (count, 1, 1)), np.arange(HOP * FRAMES)
        loud = random.uniform(0, 1, (count, BANDS, 1)) / np.arange(1, BANDS + 1)[:, None]
        phase = random.uniform(0, 2 * np.pi, (count, BANDS, 1))
        waves = (loud * np.sin(2 * np.pi * pitch * np.arange(1, BANDS + 1)[:, None] * time + phase)).sum(1)
        self.audio = (32000 * waves / np.abs(waves).max(1, keepdims=True)).astype(np.int16)
        self.spectrograms = np.repeat(loud, FRAMES, 2).astype(np.float32) + random.normal(0, 0.01, (count, BANDS, FRAMES))

    def __len__(self):
        return len(self.audio)

    def __getitem__(self, i):
        return {
            "audio": torch.from_numpy(self.audio[i] / 32767.5).float(),
            "spectrogram": torch.from_numpy(self.spectrograms[i]).float(),
        }


class PositionalEncoding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, noise_level):
        step = torch.arange(self.dim // 2, device=noise_level.device) / (self.dim // 2)
        angles = 5000 * noise_level.unsqueeze(1) * torch.exp(-np.log(1e4) * step)
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.dilated_conv = nn.Conv1d(channels, 2 * channels, 3, padding=dilation, dilation=dilation)
        self.level_projection = nn.Linear(64, channels)
        self.conditioner_projection = nn.Conv1d(BANDS, 2 * channels, 1)
        self.output_projection = nn.Conv1d(channels, 2 * channels, 1)

    def forward(self, x, level, conditioner):
        y = x + self.level_projection(level).unsqueeze(-1)
        gate, filtered = (self.dilated_conv(y) + self.conditioner_projection(conditioner)).chunk(2, dim=1)
        residual, skip = self.output_projection(torch.sigmoid(gate) * torch.tanh(filtered)).chunk(2, dim=1)
        return (x + residual) / 2**0.5, skip


class WaveGrad(nn.Module):
    def __init__(self, channels=24, layers=6):
        super().__init__()
        self.input_projection = nn.Conv1d(1, channels, 1)
        self.encoding = PositionalEncoding(32)
        self.embedding = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.residual_layers = nn.ModuleList(ResidualBlock(channels, 2 ** (i % 3)) for i in range(layers))
        self.skip_projection = nn.Conv1d(channels, channels, 1)
        self.output_projection = nn.Conv1d(channels, 1, 1)

    def forward(self, audio, spectrogram, noise_scale):
        x = torch.relu(self.input_projection(audio.unsqueeze(1)))
        level = self.embedding(self.encoding(noise_scale))
        conditioner = torch.repeat_interleave(spectrogram, HOP, dim=-1)
        skips = 0
        for layer in self.residual_layers:
            x, skip = layer(x, level, conditioner)
            skips = skips + skip
        x = torch.relu(self.skip_projection(skips / len(self.residual_layers) ** 0.5))
        return self.output_projection(x)


class WaveGradLearner:
    def __init__(self, model, dataset, optimizer, args):
        self.model, self.dataset, self.optimizer, self.args = model, dataset, optimizer, args
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        self.step = 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.loss_fn = nn.L1Loss()
        beta = np.array(PARAMS["noise_schedule"])
        noise_level = np.cumprod(1 - beta) ** 0.5
        self.noise_level = torch.tensor(np.concatenate([[1.0], noise_level], axis=0).astype(np.float32))

    def train(self, max_steps):
        while True:
            for features in self.dataset:
                loss = self.train_step(features)
                self.step += 1
                print(self.step, repr(loss.item()))
                if self.step >= max_steps:
                    return

    def train_step(self, features):
        for param in self.model.parameters():
            param.grad = None
        for part in zip(*(features[key].chunk(self.args.accumulate) for key in ("audio", "spectrogram"))):
            loss = self.loss(*part) / self.args.accumulate
            loss.backward()
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), PARAMS["max_grad_norm"])
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                self.shadow[name].mul_(PARAMS["ema"]).add_(param, alpha=1 - PARAMS["ema"])
        return loss * self.args.accumulate

    def loss(self, audio, spectrogram):
        N = len(audio)
        s = torch.randint(1, len(self.noise_level), [N])
        l_a, l_b = self.noise_level[s - 1], self.noise_level[s]
        noise_scale = l_a + torch.rand(N) * (l_b - l_a)
        noise_scale = noise_scale.unsqueeze(1)
        noise = torch.randn_like(audio)
        noisy_audio = noise_scale * audio + (1.0 - noise_scale**2) ** 0.5 * noise
        predicted = self.model(noisy_audio, spectrogram, noise_scale.squeeze(1))
        return self.loss_fn(noise, predicted.squeeze(1))


def main(args):
    torch.manual_seed(args.seed)
    dataset = DataLoader(Speech(256, seed=1), batch_size=PARAMS["batch_size"], shuffle=True, drop_last=True)
    model = WaveGrad()
    opt = torch.optim.Adam(model.parameters(), lr=PARAMS["learning_rate"])
    WaveGradLearner(model, dataset, opt, args).train(max_steps=args.steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    main(parser.parse_args())
