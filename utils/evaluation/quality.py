"""The figures of a set of images beside a set of real ones, and of real images beside other real ones: the floor of each
figure."""

import dataclasses

import numpy as np
import torch

from utils.core import randomness
from utils.evaluation.distances import Moments, frechet_distance, kernel_distance
from utils.evaluation.diversity import (
    coverage_of_bins,
    empty_regions,
    fit_modes,
    mean_pairwise_distance,
    nearest_mode,
    neighborhoods,
    variance_ratio,
    vendi_score,
)
from utils.evaluation.feature_sets import SAMPLE_ROWS, FeatureSet

NEIGHBORS = 5  # of precision, recall, density and coverage
IMAGES_PER_MODE, MAX_MODES = 40, 100  # Richardson & Weiss use 100 bins; fewer where a bin would hold too few to be judged
MIN_REGION_IMAGES, REGION_ROWS = 100, 5_000
DISTANCES = {"fd": "fid", "kd": "kid"}  # figures in an extractor's own units -> what papers call them with Inception's weights
MIN_IMAGES = 10  # below that no figure means anything
_MIN_SPREAD = 0.1  # of the median spread


def compare(
    generated: FeatureSet, real: FeatureSet, *, standardized: bool, seed: int, device: torch.device | str = "cpu"
) -> dict:
    """Measures quality and diversity of `generated` against `real`; JSON.

    Args:
        standardized: see `Extractor`: whether features are first brought to mean 0 and deviation 1 over the real images.

    Returns:
        images, reference_images, rows: how many; `rows` of each are what the figures after `kd` are about.
        fd: squared Frechet distance of all images. kd: kernel distance of up to 10,000 of each; can be below 0.
        precision, recall, density, coverage: with the 5 nearest neighbors.
        variance_ratio, distance_ratio: generated over real. vendi: effective number of different images.
        modes: see `mode_figures`. regions: see `region_figures`.

    Raises ValueError for fewer than 10 images of a kind.
    """
    if min(len(generated), len(real)) < MIN_IMAGES:
        raise ValueError(f"at least {MIN_IMAGES} images of each kind are needed, got {len(generated)} and {len(real)}")
    moments, real_moments = generated.moments.to(device), real.moments.to(device)
    rows, real_rows = (_shuffled(features.rows, seed)[:SAMPLE_ROWS].to(device) for features in (generated, real))
    if standardized:
        rows, real_rows = (standardize(x, real_moments) for x in (rows, real_rows))
        moments, real_moments = (x.scaled(*location_and_spread(real_moments)) for x in (moments, real_moments))
    count = min(len(rows), len(real_rows))
    some, some_real = rows[:count], real_rows[:count]
    near = neighborhoods(some, some_real, min(NEIGHBORS, count - 1))
    real_distance = mean_pairwise_distance(some_real)
    return {
        "images": len(generated),
        "reference_images": len(real),
        "rows": count,
        "fd": frechet_distance(moments, real_moments),
        "kd": kernel_distance(rows, real_rows),
        **dataclasses.asdict(near),
        "variance_ratio": variance_ratio(some, some_real),
        "distance_ratio": mean_pairwise_distance(some) / max(real_distance, 1e-12),
        "vendi": vendi_score(some - some_real.mean(0)),
        "modes": mode_figures(rows, real_rows, seed),
        "regions": region_figures(some, some_real, seed),
    }


def location_and_spread(real: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation [D] that features are standardized by. A feature that hardly moves in the real images is not
    blown up: it would count for all the others as soon as it moves in generated ones."""
    spread = real.covariance.diagonal().sqrt()
    return real.mean, spread.clamp(min=max(_MIN_SPREAD * spread.median().item(), 1e-6))


def standardize(rows: torch.Tensor, real: Moments) -> torch.Tensor:
    """[n, D], by `location_and_spread`."""
    mean, spread = location_and_spread(real.to(rows.device))
    return (rows - mean.to(rows)) / spread.to(rows)


def mode_figures(generated: torch.Tensor, real: torch.Tensor, seed: int) -> dict:
    """Returns how the generated rows spread over clusters of the real ones: see `Coverage`, and `number` of the modes.

    One half of the real rows makes the clusters and the other half says how much of the real images each holds: the first half
    lies nearer to its own centers than new images do, which would look like a difference.
    """
    fitted, counted = real[::2], real[1::2]
    modes = max(2, min(MAX_MODES, len(counted) // IMAGES_PER_MODE))
    centers = fit_modes(fitted, modes, seed)
    found = coverage_of_bins(nearest_mode(generated, centers), nearest_mode(counted, centers), modes)
    return {"number": modes, **dataclasses.asdict(found)}


def region_figures(generated: torch.Tensor, real: torch.Tensor, seed: int) -> dict | None:
    """Returns where one of two sets of as many rows has images and the other nearly none, without clusters or labels:
    `missing`, about the real rows (see `EmptyRegions`), and `crowded`, about the generated ones; `rows` of each. None for
    fewer than 100 rows."""
    if len(real) < MIN_REGION_IMAGES:
        return None
    generated, real = generated[:REGION_ROWS], real[:REGION_ROWS]
    missing, crowded = empty_regions(generated, real, seed)
    return {"rows": len(real), "missing": dataclasses.asdict(missing), "crowded": dataclasses.asdict(crowded)}


def class_figures(probabilities: torch.Tensor, labels: np.ndarray, names: list[str], accuracy: float) -> dict:
    """How the classes that a classifier sees in the samples spread beside the labels of the real images: see `Coverage`; JSON.

    Args:
        probabilities: float32 [n, classes], of the samples. labels: int64 [m]. names: of the classes.
        accuracy: the classifier's on images that it did not train on: what it mistakes looks like imbalance.
    """
    bins = probabilities.shape[1]
    found = coverage_of_bins(probabilities.argmax(1), torch.from_numpy(labels), bins)
    return {"number": bins, "names": names[:bins], "accuracy": accuracy, **dataclasses.asdict(found)}


def real_floor(real: FeatureSet, count: int, *, standardized: bool, seed: int, device: torch.device | str = "cpu") -> dict:
    """`compare` of real images with other real ones: what each figure is where nothing is wrong.

    The kept rows are split at random: `count` of them, at most half, stand for the generated images. With fewer images than the
    generated set has, the distances are larger than its own floor would be, never smaller.
    """
    rows = _shuffled(real.rows, seed + 1)
    first = min(count, len(rows) // 2)
    return compare(
        FeatureSet.of(rows[:first]), FeatureSet.of(rows[first:]), standardized=standardized, seed=seed, device=device
    )


def _shuffled(rows: torch.Tensor, seed: int) -> torch.Tensor:
    return rows[randomness.shuffled(seed, "evaluation rows", len(rows), len(rows))] if len(rows) else rows
