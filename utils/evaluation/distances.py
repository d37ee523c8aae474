"""How far a set of generated images is from a set of real ones, from the features [N, D] of both.

The formulas are those of FID and KID for features of any kind; only with those of Inception do they bear
these names. They are written out here and not taken from torchmetrics, which the tests compare them with, for three reasons:
stored moments can be compared with, the root of a singular covariance is taken by a symmetric decomposition, and the kernel
distance uses all pairs in place of random subsets drawn from the global random state.
"""

from dataclasses import dataclass

import torch

_ROWS = 2048  # at once, against all others


@dataclass
class Moments:
    """Count, mean [D] and scatter [D, D] (sum of outer products around the mean) of features in batches; float64, of fixed
    size."""

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def empty(cls, dimensions: int, device: torch.device | str = "cpu") -> "Moments":
        mean = torch.zeros(dimensions, dtype=torch.float64, device=device)
        return cls(0, mean, mean.new_zeros(dimensions, dimensions))

    def add(self, features: torch.Tensor) -> None:
        """`features` [n, D]. Updated around the running mean (Chan et al. 1983): no difference of large sums."""
        if len(features) == 0:
            return
        features = features.to(self.mean)
        mean = features.mean(0)
        centered, shift = features - mean, mean - self.mean
        total = self.count + len(features)
        self.scatter += centered.T @ centered + torch.outer(shift, shift) * (self.count * len(features) / total)
        self.mean += shift * (len(features) / total)
        self.count = total

    @property
    def covariance(self) -> torch.Tensor:
        """Unbiased. Raises ValueError for fewer than two rows."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 rows, got {self.count}")
        return self.scatter / (self.count - 1)

    def scaled(self, mean: torch.Tensor, scale: torch.Tensor) -> "Moments":
        """Returns those of (features - mean) / scale, both [D]."""
        return Moments(self.count, (self.mean - mean) / scale, self.scatter / torch.outer(scale, scale))

    def to(self, device: torch.device | str) -> "Moments":
        return Moments(self.count, self.mean.to(device), self.scatter.to(device))

    @classmethod
    def of(cls, features: torch.Tensor) -> "Moments":
        moments = cls.empty(features.shape[1], features.device)
        for rows in features.split(_ROWS):
            moments.add(rows)
        return moments


def frechet_distance(first: Moments, second: Moments) -> float:
    """Squared Frechet distance between the Gaussians of two sets (Dowson & Landau 1982; as FID: Heusel et al. 2017, eq. 6).

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1^1/2 C2 C1^1/2)^1/2), at least 0. Biased upwards by the finite sets, the more so the fewer
    images and the more dimensions there are (Chong & Forsyth 2020): compare figures of one N only.
    """
    values, vectors = torch.linalg.eigh(first.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = root @ second.covariance @ root
    cross = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    traces = first.covariance.trace() + second.covariance.trace()
    return max(0.0, ((first.mean - second.mean).square().sum() + traces - 2 * cross).item())


def kernel_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Squared maximum mean discrepancy of features [n, D] and [m, D], kernel (x.y / D + 1)^3 (KID: Binkowski et al. 2018).

    The unbiased estimate over all pairs, which can fall below 0 for sets that are alike. Raises ValueError for fewer than 2
    rows.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"a kernel distance needs at least 2 rows of each set, got {len(first)} and {len(second)}")
    within = sum(_kernel_sum(x, x) / (len(x) * (len(x) - 1)) for x in (first, second))
    return within - 2 * _kernel_sum(first, second) / (len(first) * len(second))


def _kernel_sum(first: torch.Tensor, second: torch.Tensor) -> float:
    """Over all pairs; of a set with itself, without the pairs of a row with itself."""
    same, dimensions = first is second, first.shape[1]
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    columns = second.double()
    for start in range(0, len(first), _ROWS):
        rows = first[start : start + _ROWS].double()
        # Of a symmetric matrix the blocks right of the diagonal count twice, the diagonal's own once.
        others = columns[start:] if same else columns
        kernel = (rows @ others.T).div_(dimensions).add_(1)
        kernel = kernel.square() * kernel
        if same:
            block = kernel[:, : len(rows)]
            total += 2 * kernel[:, len(rows) :].sum() + block.sum() - block.diagonal().sum()
        else:
            total += kernel.sum()
    return total.item()
