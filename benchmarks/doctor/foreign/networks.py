"""A small U-Net and a small transformer, as in many a repository."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def sinusoidal(positions: torch.Tensor, width: int) -> torch.Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, device=positions.device) / (width // 2))
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, embedding: int, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.embed = nn.Linear(embedding, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.embed(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h + self.skip(x)


class UNet(nn.Module):
    """Two resolutions; `classes` labels and one more that stands for "no label", or none at all."""

    def __init__(self, dim: int = 24, channels: int = 3, classes: int = 0, dropout: float = 0.0):
        super().__init__()
        self.dim = dim
        self.time = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, 2 * dim))
        self.classes = nn.Embedding(classes + 1, 2 * dim) if classes else None
        self.conv_in = nn.Conv2d(channels, dim, 3, padding=1)
        self.down1 = ResBlock(dim, dim, 2 * dim, dropout)
        self.shrink = nn.Conv2d(dim, dim, 3, stride=2, padding=1)
        self.down2 = ResBlock(dim, 2 * dim, 2 * dim, dropout)
        self.middle = ResBlock(2 * dim, 2 * dim, 2 * dim, dropout)
        self.up2 = ResBlock(4 * dim, dim, 2 * dim, dropout)
        self.up1 = ResBlock(2 * dim, dim, 2 * dim, dropout)
        self.norm_out, self.conv_out = nn.GroupNorm(8, dim), nn.Conv2d(dim, channels, 3, padding=1)

    def forward(self, x, t, labels=None):
        emb = self.time(sinusoidal(t, self.dim))
        if self.classes is not None:
            emb = emb + self.classes(labels)
        h1 = self.down1(self.conv_in(x), emb)
        h2 = self.down2(self.shrink(h1), emb)
        h = self.middle(h2, emb)
        h = self.up2(torch.cat([h, h2], dim=1), emb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, h1], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, emb):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(emb))[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(h)


class DiT(nn.Module):
    def __init__(self, size: int = 16, channels: int = 3, patch: int = 4, width: int = 64, depth: int = 3, classes: int = 0):
        super().__init__()
        self.patch, self.width, self.checkpointing = patch, width, False
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, channels * patch * patch)

    def forward(self, x, t, labels):
        emb = self.time(sinusoidal(t * 1000, self.width)) + self.labels(labels)
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            tokens = checkpoint(block, tokens, emb, use_reentrant=False) if self.checkpointing else block(tokens, emb)
        pixels = self.head(self.norm(tokens)).transpose(1, 2)
        return F.fold(pixels, x.shape[-2:], self.patch, stride=self.patch)
