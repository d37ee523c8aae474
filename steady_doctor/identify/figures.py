"""What is kept of a batch of values in place of the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD = 48  # numbers of each sample that are kept


@dataclass
class Figures:
    """Of a batch [B, ...]; all sums in float64, and all of it on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float
    std: float
    fourth: float  # the mean of the fourth power of what is left when the mean is taken off, over the square of the variance
    low: float
    high: float
    means: Tensor  # of each sample, [B]
    stds: Tensor  # of each sample, [B]
    head: Tensor  # some numbers of each sample, spread evenly and always the same ones, [B, at most HEAD]
    same_along: tuple[int, ...]  # axes along which nothing changes; of size 2 at least
    of_channels: Tensor  # mean and spread of each channel where there are images, [2, C]; else [2, 1]

    @classmethod
    def of(cls, value: Tensor) -> "Figures":
        shape = tuple(value.shape)
        rows = value.detach().reshape(shape[0] if shape else 1, -1).double()
        middle, deviation = rows.mean(), rows.std(correction=0)
        kurtosis = (rows - middle).pow(4).mean() / deviation.clamp(min=1e-30) ** 4
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        are_same = [(value == value.narrow(axis, 0, 1)).all() for axis in axes]
        channels = value.detach().double().transpose(0, 1).reshape(shape[1], -1) if len(shape) > 2 else rows.reshape(1, -1)
        step = -(-rows.shape[1] // HEAD)
        parts = [
            torch.stack([middle, deviation, kurtosis, *torch.aminmax(rows), *are_same]),
            rows.mean(1),
            rows.std(1, correction=0),
            rows[:, ::step][:, :HEAD],
            torch.stack([channels.mean(1), channels.std(1, correction=0)]),
        ]
        known = torch.cat([part.flatten() for part in parts]).cpu()  # the host waits here alone
        whole, means, stds, head, spread = (
            flat.view(part.shape) for part, flat in zip(parts, known.split([part.numel() for part in parts]))
        )
        mean, std, fourth, low, high, *are_same = whole.tolist()
        same = tuple(axis for axis, is_same in zip(axes, are_same) if is_same)
        return cls(shape, value.dtype, mean, std, fourth, low, high, means, stds, head, same, spread)

    @property
    def count(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def each(self) -> int:
        """Numbers of one sample."""
        return self.count // max(1, self.shape[0] if self.shape else 1)
