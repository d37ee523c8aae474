"""Are the samples copies? How near each is to its nearest training image, beside how near other real images are to theirs.

No figure tells memorisation from too little training (Stein et al. 2023), so there is no verdict "free of memorisation":
there are the distances of samples and of real images, the rate of near-duplicates of both, and the closest pairs for the eye.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from PIL import Image
from torch.nn.functional import adaptive_avg_pool2d

from utils.augmentation import to_unit_range
from utils.data_check import NEAR_COPY_DISTANCE, grey_thumbnails
from utils.feature_sets import evenly
from utils.features import eight_bit
from utils.images import side_by_side

SIDE = 16  # pixels: larger images are compared after averaging down to this
MOST_IMAGES, MOST_BYTES = 1000, 256 * 2**20  # of samples that are looked at
SHEET_PAIRS = 24
_CHUNK_BYTES = 16 * 2**20  # of training images at once, as float32


@dataclass
class Nearest:
    """For each query its nearest training image: `distances` float32 [n], `indices` int64 [n] into the training set."""

    distances: torch.Tensor
    indices: torch.Tensor


def kept_for_memorisation(count: int, image_bytes: int) -> int:
    """How many of `count` samples, of so many bytes each, are compared with the training images."""
    return max(1, min(count, MOST_IMAGES, MOST_BYTES // max(image_bytes, 1)))


def nearest_rows(queries: torch.Tensor, rows: torch.Tensor, own: torch.Tensor | None = None) -> Nearest:
    """Among `rows` [N, D] by Euclidean distance; `own` int64 [n] is the row that each query must not find: itself."""
    chunks = torch.arange(len(rows)).split(max(1, _CHUNK_BYTES // (4 * max(len(queries), 1))))
    indices = _nearest(queries, ((int(chunk[0]), rows[chunk]) for chunk in chunks), own)
    return Nearest((queries - rows[indices]).norm(dim=1), indices)


def _nearest(queries: torch.Tensor, chunks: Iterable[tuple[int, torch.Tensor]], own: torch.Tensor | None) -> torch.Tensor:
    """Index int64 [n] of each query's nearest row; `chunks` gives (index of the first row, rows)."""
    best, indices = torch.full((len(queries),), torch.inf), torch.zeros(len(queries), dtype=torch.int64)
    for start, rows in chunks:
        scores = torch.addmm(rows.square().sum(1), queries, rows.T, alpha=-2)  # |q - r|^2 without |q|^2, the same for all r
        if own is not None:
            here = (own >= start) & (own < start + len(rows))
            scores[here.nonzero()[:, 0], own[here] - start] = torch.inf
        found, places = scores.min(1)
        better = found < best
        best[better], indices[better] = found[better], places[better] + start
    return indices


def small_pixels(images: torch.Tensor) -> torch.Tensor:
    """float32 [n, C x h x w] in [-1, 1] of uint8 [n, C, H, W], averaged down to at most 16 x 16."""
    return adaptive_avg_pool2d(to_unit_range(images, 255), [min(side, SIDE) for side in images.shape[-2:]]).flatten(1)


def near_duplicates(images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Distances float64 [n] between images and others, both uint8 [n, C, H, W], in units of the contrast of the former's
    thumbnail; a near-duplicate is below NEAR_COPY_DISTANCE, where what that means was measured. Blank images give infinity."""
    first, second = grey_thumbnails(images, 255).double(), grey_thumbnails(others, 255).double()
    contrast = first.std(1, correction=0)
    distances = (first - second).square().mean(1).sqrt() / contrast.clamp(min=1e-12)
    return distances.where(contrast > 1e-6, torch.inf)


def memorisation(samples: torch.Tensor, training, held_out=None) -> tuple[dict, Image.Image]:
    """Figures (JSON) and a sheet of the closest pairs.

    Args:
        samples: uint8 [n, C, H, W], on the CPU.
        training: an ImageSet, all of whose images are compared with; memory holds a chunk of them.
        held_out: an ImageSet of real images that were not trained on. Without it, as many of the training images as there are
            samples stand in, each compared with all others.

    Returns:
        images, training_images; compared_with: "held-out images" or "other training images".
        pixel_distance, pixel_distance_real: medians of the root mean square difference, in [-1, 1] units, at up to 16 x 16.
        pixel_ratio: the first over the second: below 1 the samples are nearer to the training images than real ones are.
        near_duplicates, near_duplicates_real: shares.
    """
    real = held_out if held_out is not None and len(held_out) else training
    chosen = evenly(len(real), len(samples))
    others = _fetch(real, chosen)
    own = torch.cat([torch.full((len(samples),), -1), chosen]) if real is training else None
    queries = small_pixels(torch.cat([samples, others]))
    numbers = torch.arange(len(training)).split(max(1, _CHUNK_BYTES // (4 * max(queries.shape[1], len(queries)))))
    indices = _nearest(queries, ((int(part[0]), small_pixels(_fetch(training, part))) for part in numbers), own)
    found = _fetch(training, indices)
    relative = near_duplicates(torch.cat([samples, others]), found)
    count = len(samples)
    distances = (queries - small_pixels(found)).square().mean(1).sqrt()
    typical, typical_real = distances[:count].median().item(), distances[count:].median().item()
    figures = {
        "images": count,
        "training_images": len(training),
        "compared_with": "other training images" if real is training else "held-out images",
        "pixel_distance": typical,
        "pixel_distance_real": typical_real,
        "pixel_ratio": typical / max(typical_real, 1e-12),
        "near_duplicates": (relative[:count] < NEAR_COPY_DISTANCE).double().mean().item(),
        "near_duplicates_real": (relative[count:] < NEAR_COPY_DISTANCE).double().mean().item(),
    }
    closest = relative[:count].argsort()[: min(SHEET_PAIRS, count)]
    sheet = side_by_side(samples[closest], found[:count][closest], ("samples", "nearest training images"), columns=6)
    return figures, sheet


def _fetch(images, indices: torch.Tensor) -> torch.Tensor:
    return eight_bit(images.fetch(indices.numpy()), images.max_value)


def feature_memorisation(rows: torch.Tensor, training_rows: torch.Tensor, held_out_rows: torch.Tensor | None = None) -> dict:
    """The same in features: medians of the distance to the nearest training row, and their ratio; JSON.

    Args:
        rows, training_rows, held_out_rows: [n, D]; without the last, training rows stand in, each compared with all others.
    """
    rows = rows[evenly(len(rows), MOST_IMAGES)]
    if held_out_rows is None or len(held_out_rows) == 0:
        own = evenly(len(training_rows), len(rows))
        real = nearest_rows(training_rows[own], training_rows, own)
    else:
        real = nearest_rows(held_out_rows[evenly(len(held_out_rows), len(rows))], training_rows)
    typical = nearest_rows(rows, training_rows).distances.median().item()
    typical_real = real.distances.median().item()
    ratio = typical / max(typical_real, 1e-12)
    return {"feature_distance": typical, "feature_distance_real": typical_real, "feature_ratio": ratio}
