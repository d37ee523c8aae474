"""Behavior cloning by a diffusion policy: action sequences [horizon, 2] denoised given the last observations."""

import argparse
import math
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel


@dataclass
class Config:
    pred_horizon: int = 16
    obs_horizon: int = 2
    action_horizon: int = 8
    num_demos: int = 26
    batch_size: int = 16
    num_epochs: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    optimizer: str = "adamw"
    lr_scheduler: str = "cosine"
    lr_warmup_steps: int = 10
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 10.0
    num_diffusion_iters: int = 100
    beta_schedule: str = "squaredcos_cap_v2"
    prediction_type: str = "epsilon"
    do_mask_loss_for_padding: int = 1
    dropout: float = 0.0
    ema_power: float = 0.75
    ema_max_decay: float = 0.9999
    mixed_precision: str = "no"
    seed: int = 42


def parse_config() -> Config:
    parser = argparse.ArgumentParser()
    for f in fields(Config):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
    return Config(**vars(parser.parse_args()))


# ---------------------------------------------------------------------------------------------------------- data


def collect_demos(count: int, seed: int = 3):
    """Demonstrations of a point that goes around an obstacle to its goal, in pixels of a 512 x 512 table."""
    rng = np.random.default_rng(seed)
    obs, actions, ends = [], [], []
    for _ in range(count):
        position = rng.uniform(40, 470, 2)
        goal = rng.uniform(90, 420, 2)
        side = rng.choice([-1.0, 1.0])
        velocity = np.zeros(2)
        for _ in range(int(rng.integers(36, 56))):
            to_goal = goal - position
            sideways = side * np.array([-to_goal[1], to_goal[0]])
            velocity = 0.6 * velocity + 0.4 * (0.12 * to_goal + 0.07 * sideways)
            action = position + 3 * velocity + rng.normal(0, 1.0, 2)
            obs.append(np.concatenate([position, goal, [side * 100.0]]))
            actions.append(action)
            position = position + velocity
        ends.append(len(obs))
    return np.array(obs, np.float32), np.array(actions, np.float32), np.array(ends)


def create_sample_indices(episode_ends, sequence_length, pad_before, pad_after):
    indices, start = [], 0
    for end in episode_ends:
        length = end - start
        for i in range(-pad_before, length - sequence_length + pad_after + 1):
            indices.append((start, end, start + i))
        start = end
    return indices


def get_data_stats(data):
    data = data.reshape(-1, data.shape[-1])
    return {"min": data.min(axis=0), "max": data.max(axis=0)}


def normalize_data(data, stats):
    ndata = (data - stats["min"]) / (stats["max"] - stats["min"])  # to [0, 1]
    return ndata * 2 - 1  # to [-1, 1]


def unnormalize_data(ndata, stats):
    return (ndata + 1) / 2 * (stats["max"] - stats["min"]) + stats["min"]


class DemoDataset(torch.utils.data.Dataset):
    def __init__(self, cfg: Config):
        obs, actions, ends = collect_demos(cfg.num_demos)
        self.stats = {"obs": get_data_stats(obs), "action": get_data_stats(actions)}
        self.obs = normalize_data(obs, self.stats["obs"])
        self.action = normalize_data(actions, self.stats["action"])
        self.indices = create_sample_indices(ends, cfg.pred_horizon, cfg.obs_horizon - 1, cfg.action_horizon - 1)
        self.pred_horizon, self.obs_horizon = cfg.pred_horizon, cfg.obs_horizon

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, idx):
        start, end, first = self.indices[idx]
        steps = np.arange(first, first + self.pred_horizon)
        inside = steps.clip(start, end - 1)
        return {
            "obs": self.obs[inside][: self.obs_horizon],
            "action": self.action[inside],
            "action_is_pad": (steps < start) | (steps >= end),
        }


# ------------------------------------------------------------------------------------------------------- network


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=x.device) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Conv1dBlock(nn.Module):
    """Conv1d --> GroupNorm --> Mish"""

    def __init__(self, inp_channels, out_channels, kernel_size, n_groups=8):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(inp_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(n_groups, out_channels),
            nn.Mish(),
        )

    def forward(self, x):
        return self.block(x)


class ConditionalResidualBlock1D(nn.Module):
    def __init__(self, in_channels, out_channels, cond_dim, kernel_size=5, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            [Conv1dBlock(in_channels, out_channels, kernel_size), Conv1dBlock(out_channels, out_channels, kernel_size)]
        )
        self.out_channels = out_channels
        # FiLM modulation https://arxiv.org/abs/1709.07871: per-channel scale and bias
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, out_channels * 2), nn.Unflatten(-1, (-1, 1)))
        self.dropout = nn.Dropout(dropout)
        self.residual_conv = nn.Conv1d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, cond):
        out = self.blocks[0](x)
        embed = self.cond_encoder(cond).reshape(x.shape[0], 2, self.out_channels, 1)
        scale, bias = embed[:, 0], embed[:, 1]
        out = (1 + scale) * out + bias
        out = self.blocks[1](self.dropout(out))
        return out + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    def __init__(self, input_dim, global_cond_dim, step_embed_dim=64, down_dims=(32, 64), kernel_size=5, dropout=0.0):
        super().__init__()
        dsed = step_embed_dim
        self.diffusion_step_encoder = nn.Sequential(
            SinusoidalPosEmb(dsed), nn.Linear(dsed, dsed * 4), nn.Mish(), nn.Linear(dsed * 4, dsed)
        )
        cond = dict(cond_dim=dsed + global_cond_dim, kernel_size=kernel_size, dropout=dropout)
        first, second = down_dims
        Block = ConditionalResidualBlock1D
        self.down_modules = nn.ModuleList(
            [Block(input_dim, first, **cond), nn.Conv1d(first, first, 3, 2, 1), Block(first, second, **cond)]
        )
        self.mid_modules = nn.ModuleList([Block(second, second, **cond), Block(second, second, **cond)])
        self.up_modules = nn.ModuleList(
            [Block(second * 2, first, **cond), nn.ConvTranspose1d(first, first, 4, 2, 1), Block(first * 2, first, **cond)]
        )
        self.final_conv = nn.Sequential(Conv1dBlock(first, first, kernel_size), nn.Conv1d(first, input_dim, 1))

    def forward(self, sample, timestep, global_cond):
        """sample: [B, T, D]; timestep: [B] or a number; global_cond: [B, C]; returns [B, T, D]."""
        sample = sample.moveaxis(-1, -2)
        timesteps = torch.as_tensor(timestep, device=sample.device).expand(sample.shape[0])
        global_feature = self.diffusion_step_encoder(timesteps)
        global_feature = torch.cat([global_feature, global_cond], axis=-1)

        down1, shrink, down2 = self.down_modules
        h1 = down1(sample, global_feature)
        h2 = down2(shrink(h1), global_feature)
        x = h2
        for mid in self.mid_modules:
            x = mid(x, global_feature)
        up2, grow, up1 = self.up_modules
        x = grow(up2(torch.cat((x, h2), dim=1), global_feature))
        x = up1(torch.cat((x, h1), dim=1), global_feature)
        return self.final_conv(x).moveaxis(-1, -2)


# ------------------------------------------------------------------------------------------------------ training


def main():
    cfg = parse_config()
    accelerator = Accelerator(gradient_accumulation_steps=cfg.gradient_accumulation_steps, mixed_precision=cfg.mixed_precision)
    set_seed(cfg.seed)

    dataset = DemoDataset(cfg)
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=cfg.batch_size, shuffle=True, drop_last=True)
    obs_dim, action_dim = dataset.obs.shape[-1], dataset.action.shape[-1]

    noise_pred_net = ConditionalUnet1D(input_dim=action_dim, global_cond_dim=obs_dim * cfg.obs_horizon, dropout=cfg.dropout)
    noise_scheduler = DDPMScheduler(
        num_train_timesteps=cfg.num_diffusion_iters,
        beta_schedule=cfg.beta_schedule,
        clip_sample=True,
        prediction_type=cfg.prediction_type,
    )
    params = noise_pred_net.parameters()
    if cfg.optimizer == "adamw":
        optimizer = torch.optim.AdamW(params=params, lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    else:
        optimizer = torch.optim.RMSprop(params=params, lr=cfg.learning_rate)
    lr_scheduler = get_scheduler(
        name=cfg.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=cfg.lr_warmup_steps,
        num_training_steps=len(dataloader) * cfg.num_epochs // cfg.gradient_accumulation_steps,
    )
    noise_pred_net, optimizer, dataloader, lr_scheduler = accelerator.prepare(
        noise_pred_net, optimizer, dataloader, lr_scheduler
    )
    ema = EMAModel(parameters=noise_pred_net.parameters(), decay=cfg.ema_max_decay, use_ema_warmup=True, power=cfg.ema_power)

    global_step = 0
    noise_pred_net.train()
    for _epoch in range(cfg.num_epochs):
        for nbatch in dataloader:
            with accelerator.accumulate(noise_pred_net):
                nobs = nbatch["obs"]
                naction = nbatch["action"]
                B = nobs.shape[0]

                # FiLM conditioning on the observations: (B, obs_horizon * obs_dim)
                obs_cond = nobs[:, : cfg.obs_horizon, :].flatten(start_dim=1)

                noise = torch.randn(naction.shape, device=naction.device)
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (B,), device=naction.device).long()
                noisy_actions = noise_scheduler.add_noise(naction, noise, timesteps)
                pred = noise_pred_net(noisy_actions, timesteps, global_cond=obs_cond)

                if noise_scheduler.config.prediction_type == "epsilon":
                    target = noise
                elif noise_scheduler.config.prediction_type == "sample":
                    target = naction
                else:
                    target = noise_scheduler.get_velocity(naction, noise, timesteps)
                loss = nn.functional.mse_loss(pred, target, reduction="none")
                if cfg.do_mask_loss_for_padding:
                    in_episode_bound = ~nbatch["action_is_pad"]
                    loss = loss * in_episode_bound.unsqueeze(-1)
                loss = loss.mean()

                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(noise_pred_net.parameters(), cfg.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema.step(noise_pred_net.parameters())
                global_step += 1
                accelerator.print("step", global_step, "loss", repr(loss.item()), "lr", lr_scheduler.get_last_lr()[0])

    # preview: the actions of a few demonstrations, by the averaged weights
    ema_noise_pred_net = accelerator.unwrap_model(noise_pred_net)
    ema.copy_to(ema_noise_pred_net.parameters())
    ema_noise_pred_net.eval()
    items = [dataset[i] for i in range(0, len(dataset), len(dataset) // 8)]
    obs_cond = torch.from_numpy(np.stack([item["obs"] for item in items])).flatten(1).to(accelerator.device)
    truth = torch.from_numpy(np.stack([item["action"] for item in items])).to(accelerator.device)
    naction = torch.randn(truth.shape, device=accelerator.device)
    noise_scheduler.set_timesteps(cfg.num_diffusion_iters)
    with torch.no_grad():
        for k in noise_scheduler.timesteps:
            pred = ema_noise_pred_net(naction, k, global_cond=obs_cond)
            naction = noise_scheduler.step(model_output=pred, timestep=k, sample=naction).prev_sample
    print("action error", repr((naction - truth).abs().mean().item()), "(in [-1, 1])")
    print("first actions", unnormalize_data(naction[0, :3].cpu().numpy(), dataset.stats["action"]).round(1).tolist())


if __name__ == "__main__":
    main()
