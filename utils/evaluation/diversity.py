"""How varied a set of generated images is beside a set of real ones: pure functions of features [N, D], numbers out.

Nothing holds N x N numbers: distances are computed in blocks of rows, on the device of the features. 50,000 x 2,048 of each
kind stay within 8 GB.
"""

from dataclasses import dataclass
from typing import Any

import torch

from utils.core.randomness import derive_seed
from utils.diagnostics.rules.samples import SIGNIFICANCE

_BLOCK_BYTES = 256 * 2**20  # of a block of distances


def _blocks(rows: torch.Tensor, others: int) -> tuple[torch.Tensor, ...]:
    return rows.split(max(1, _BLOCK_BYTES // (8 * max(others, 1))))


def _centered(features: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """float64: small numbers keep their digits in the products that distances are made of."""
    return features.double() - center


def _distances(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Euclidean, float64 [n, m], of float64 rows that are `_centered`.

    As |a|^2 + |b|^2 - 2 ab, which is quick but leaves the rounding of these sums: about sqrt(D) units in the last place of
    |a|^2. What is no more than that becomes 0, for repeated images are at a distance of 0 from each other, and their
    neighborhoods reach no further. It is 1e-7 of the norm for 120 dimensions: float32 features have no more digits themselves.
    """
    distances = torch.cdist(rows, others, compute_mode="use_mm_for_euclid_dist")
    rounding = (4 * torch.finfo(torch.float64).eps * rows.shape[1] ** 0.5) ** 0.5
    return distances.masked_fill_(distances <= rounding * rows.norm(dim=1, keepdim=True), 0)


def variance_ratio(generated: torch.Tensor, real: torch.Tensor) -> float:
    """Returns the total variance of the generated features over that of the real ones: 1 healthy, 0 all alike."""
    return (_total_variance(generated) / _total_variance(real)).item()


def _total_variance(features: torch.Tensor) -> torch.Tensor:
    mean = features.mean(0, dtype=torch.float64)
    squares = sum((rows - mean).square().sum() for rows in features.split(4096))
    return squares / (len(features) - 1)


def mean_pairwise_distance(features: torch.Tensor) -> float:
    """Returns the mean Euclidean distance of two different rows."""
    features = _centered(features, features.mean(0, dtype=torch.float64))
    total: Any = sum(_distances(rows, features).sum() for rows in _blocks(features, len(features)))
    return (total / (len(features) * (len(features) - 1))).item()


def vendi_score(features: torch.Tensor) -> float:
    """Returns the effective number of different images (Friedman & Dieng 2023), between 1 and min(N, D).

    The exponential of the entropy of the eigenvalues of K / N, where K is the cosine similarity of the rows. Those of the D x
    D matrix X'X / N are the same, but for zeros, and do not ask for N x N memory. Center the features first: rows that share
    a large offset are all alike to a cosine. Rows of zeros are left out.
    """
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64, device=features.device)
    count = 0
    for rows in features.split(4096):
        norms = rows.norm(dim=1, dtype=torch.float64)
        kept = norms > 0
        unit = rows[kept] / norms[kept, None]
        gram += unit.T @ unit
        count += len(unit)
    if count == 0:
        return 1.0
    values = torch.linalg.eigvalsh(gram / count).clamp(min=0)
    return torch.exp(-torch.special.xlogy(values, values).sum()).item()


@dataclass(frozen=True)
class Neighborhoods:
    """Precision and recall (Kynkaanniemi et al. 2019), density and coverage (Naeem et al. 2020)."""

    precision: float  # share of generated images inside the real ones' neighborhoods
    recall: float  # share of real images inside the generated ones' neighborhoods
    density: float  # how many real neighborhoods a generated image is in, over k; about 1 for equal distributions
    coverage: float  # share of real images with a generated one in their neighborhood; 1 - 2^-k for equal distributions and N


def neighborhoods(generated: torch.Tensor, real: torch.Tensor, k: int = 5) -> Neighborhoods:
    """Returns the four figures with neighborhoods that reach to the k-th nearest other image of the same set.

    Raises ValueError for sets of no more than k rows.
    """
    if min(len(generated), len(real)) <= k:
        raise ValueError(f"{k} neighbors need more than {k} rows of each set, got {len(generated)} and {len(real)}")
    center = real.mean(0, dtype=torch.float64)
    generated, real = _centered(generated, center), _centered(real, center)
    real_radii, generated_radii = (_nearest_others(rows, k)[0][:, -1] for rows in (real, generated))
    inside, precise, covered = 0, 0, torch.zeros(len(real), dtype=torch.bool, device=real.device)
    recalled = torch.zeros_like(covered)
    start = 0
    for rows in _blocks(generated, len(real)):
        distances = _distances(rows, real)
        hits = distances <= real_radii
        inside += hits.sum().item()
        precise += hits.any(1).sum().item()
        covered |= hits.any(0)
        recalled |= (distances <= generated_radii[start : start + len(rows), None]).any(0)
        start += len(rows)
    return Neighborhoods(
        precision=precise / len(generated),
        recall=recalled.double().mean().item(),
        density=inside / (k * len(generated)),
        coverage=covered.double().mean().item(),
    )


def _nearest_others(features: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances float64 and indices int64, both [N, count], of each row's nearest other rows, the nearest one first."""
    found, start = [], 0
    for rows in _blocks(features, len(features)):
        distances = _distances(rows, features)
        own = torch.arange(len(rows), device=rows.device)
        distances[own, start + own] = torch.inf
        found.append(distances.topk(count, dim=1, largest=False))
        start += len(rows)
    values, indices = map(torch.cat, zip(*found))
    return values, indices


def fit_modes(real: torch.Tensor, modes: int, seed: int) -> torch.Tensor:
    """Centers [modes, D] of k-means clusters of REAL features: fitted to generated ones, every mode would be covered.

    Computed by scikit-learn on the CPU, the same for the same seed.
    """
    from sklearn.cluster import KMeans

    kmeans = KMeans(modes, n_init=1, random_state=derive_seed(seed, "modes") % 2**32).fit(real.float().cpu().numpy())
    return torch.from_numpy(kmeans.cluster_centers_).to(real)


def nearest_mode(features: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Returns the index int64 [N] of each row's nearest center."""
    center = centers.mean(0, dtype=torch.float64)
    others = _centered(centers, center)
    return torch.cat([_distances(_centered(rows, center), others).argmin(1) for rows in _blocks(features, len(centers))])


@dataclass(frozen=True)
class Coverage:
    """How two sets spread over the same bins: modes, or classes."""

    generated: list[int]  # counts
    real: list[int]
    different: int  # bins whose shares differ by more than chance
    hit: float  # share of the bins with real images that have a generated one
    largest: int  # the bin that most exceeds its real share, in generated images beyond it
    largest_share: float
    largest_real_share: float


def coverage_of_bins(generated: torch.Tensor, real: torch.Tensor, bins: int) -> Coverage:
    """From bin numbers int64 [n] and [m] in [0, bins). Bins differ by a two-sided z-test of two proportions at the 5 % level
    each (number of statistically different bins, Richardson & Weiss 2018, section 3.1): of alike sets about 5 % of the bins
    do."""
    counts = torch.bincount(generated.cpu(), minlength=bins).double()
    real_counts = torch.bincount(real.cpu(), minlength=bins).double()
    shares, real_shares = counts / counts.sum(), real_counts / real_counts.sum()
    different = different_bins(counts, real_counts)
    largest = int((shares - real_shares).argmax())
    return Coverage(
        generated=[int(count) for count in counts],
        real=[int(count) for count in real_counts],
        different=int(different.sum()),
        hit=((counts > 0) & (real_counts > 0)).sum().item() / max(1, int((real_counts > 0).sum())),
        largest=largest,
        largest_share=shares[largest].item(),
        largest_real_share=real_shares[largest].item(),
    )


def different_bins(counts: torch.Tensor, others: torch.Tensor, significance: float = SIGNIFICANCE) -> torch.Tensor:
    """bool [bins]: where the share in `counts` float64 [bins] differs from that in `others` by the z-test at `significance`."""
    n, m = counts.sum(), others.sum()
    pooled = (counts + others) / (n + m)
    error = (pooled * (1 - pooled) * (1 / n + 1 / m)).sqrt()
    z = (counts / n - others / m).abs() / error.clamp(min=1e-300)
    return torch.special.erfc(z / 2**0.5) < significance


_AROUND = 20  # nearest images that make the surroundings of one
_NEARLY_NONE = 0.2  # of them
_PERMUTATIONS, _DEVIATIONS = 32, 4


@dataclass(frozen=True)
class EmptyRegions:
    """Images of one set with nearly none of the other set around them: at most a fifth of the 20 nearest of both sets."""

    share: float  # of the images of the one set
    by_chance: float  # that share where the sets are alike: the mean over permutations of who belongs to which set
    limit: float  # what chance does not exceed: 4 standard deviations over `by_chance`


def empty_regions(generated: torch.Tensor, real: torch.Tensor, seed: int) -> tuple[EmptyRegions, EmptyRegions]:
    """(about the real images, about the generated ones) of two sets with the same number of rows [N, D].

    A part of the data that is never generated shows as real images among themselves, whether or not it is a cluster; a part
    that is generated far too often shows as generated images among themselves. The test is that of nearest neighbors
    (Schilling 1986), for each image. Raises ValueError for sets of different sizes.
    """
    if len(generated) != len(real):
        raise ValueError(f"sets of one size are compared, got {len(generated)} and {len(real)} rows")
    pool = torch.cat([real, generated])
    _, around = _nearest_others(_centered(pool, pool.mean(0, dtype=torch.float64)), _AROUND)
    is_generated = torch.arange(len(around), device=around.device) >= len(real)
    return tuple(  # type: ignore[return-value]
        EmptyRegions(_lonely_share(around, others), *_by_chance(around, others, seed))
        for others in (is_generated, ~is_generated)
    )


def _lonely_share(around: torch.Tensor, others: torch.Tensor) -> float:
    """Share of the rows that are not `others` (bool [N]) around which (indices [N, k]) nearly none are."""
    lonely = others[around].sum(1) <= _NEARLY_NONE * around.shape[1]
    return lonely[~others].double().mean().item()


def _by_chance(around: torch.Tensor, others: torch.Tensor, seed: int) -> tuple[float, float]:
    """(mean, limit) of `_lonely_share` where nothing but chance says which rows are of which set."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "permutations") % 2**63)
    found = []
    for _ in range(_PERMUTATIONS):
        mixed = torch.zeros_like(others)
        order = torch.randperm(len(others), generator=generator).to(others.device)
        mixed[order[: int(others.sum())]] = True
        found.append(_lonely_share(around, mixed))
    shares = torch.tensor(found, dtype=torch.float64)
    mean = shares.mean().item()
    # Where a set is small the few permutations may say less than counting does.
    deviation = max(shares.std().item(), (mean / int((~others).sum())) ** 0.5)
    return mean, mean + _DEVIATIONS * deviation
