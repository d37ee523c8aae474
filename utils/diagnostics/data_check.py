"""Figures of a dataset that tell before training what will go wrong: scaling, blanks, copies, balance, enlargement.

figures = check_data(images, seed=0)      # images: an ImageSet; the result can be written as JSON

Figures only, no verdicts. Pixels are meant after scaling to [-1, 1]. Memory holds one chunk of images and a thumbnail of each,
and what is read is bounded, so that a million images cost as much as two hundred thousand.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch

from utils.core import randomness
from utils.data.augmentation import averaged_down, to_unit_range
from utils.data.dataset import ImageSet, Indices

# An image is a near-copy of another when their 8 x 8 gray thumbnails differ, in root mean square, by less than this share
# of the contrast (standard deviation over the thumbnail) of the image itself; at equal brightness that is a correlation
# above 1 - 0.05^2 / 2 = 0.9987. Measured: JPEG at quality 75 moves images of 32 x 32 by 0.02, and by 0.01 when they were
# larger; resizing there and back by 0.03. Between different images the closest two of 1,797 digits differ by 0.09, of 520
# patches of photographs, plain sky among them, by 0.12, of noise by 0.9. The scale is the image's own contrast and not the
# spread of the set: two clear skies are close in a varied set, but what differs between them is as large as what either
# shows. The price is that copies of nearly plain images, whose contrast is a few of 255 levels, are missed.
NEAR_COPY_DISTANCE = 0.05

_THUMBNAIL = 8  # pixels
_LUMA = torch.tensor([0.299, 0.587, 0.114])  # ITU-R BT.601, which JPEG keeps better than the colors
_CHUNK_BYTES = 2**20  # of pixels; eight times as much as float64
_SIZES_SAMPLE = 256
_COMPARED = 4096  # images at once, with all of the sample
_MAX_COUNTS = 1000  # classes whose counts are listed
_NAMED = 5  # images of a kind whose rows or files are listed


def check_data(
    images: ImageSet, *, seed: int, sample: int = 2048, max_images: int = 200_000, max_bytes: int = 512 * 2**20
) -> dict:
    """Looks at `images`, the same way for the same seed.

    Args:
        sample: images for which near-copies are searched among all that are read; without a cache, where reading means
            decoding, also the number of images read.
        max_images, max_bytes: bounds on the images read and on their bytes as integers; a random choice of a larger set.

    Returns:
        A dict of numbers, strings, lists and dicts; shares lie in [0, 1]; rows are those of the dataset:
        images, shape, max_value: of the whole set.
        images_read: what the figures from here to `near_copies` are about.
        min, max: floats in [-1, 1]. mean, std: lists with a float per channel.
        constant_share, constant_rows: images of one single value; some rows of them.
        copies: {share, rows, repeated, following, following_by_chance}: images that repeat an earlier one pixel for pixel, 1 -
            distinct / read; two rows of the largest group of equal ones. The next three leave out images whose values differ by
            less than a 16th of the range: the number in the largest group, those equal to the image of the row before, and how
            many would be in a random order. Of a set that is read in part, all are too low: a copy is seen only when its
            original is read too.
        near_copies: {images, share, rows} of `images` sampled ones: the share that has another, not equal, image nearer than
            NEAR_COPY_DISTANCE; the rows of the nearest pair. Constant images have no contrast and are left out. Brightness,
            flips and shifts are not seen through. None where there is nothing to compare.
        sizes: {images, enlarged_share, shorter_side_min, shorter_side_median} of the files of a sample before
            preparation, in pixels; enlarged are those with a side below that of the resolution. None if not known.
        classes: {number, empty, largest, largest_share, counts} of the whole set's labels; `counts` by name, None for more
            than a thousand classes. None without labels.
        damaged: {images, share, files} of the images that cannot be decoded, where the set allows them, among all images or,
            without a cache, those read; `files` has {row, file, reason} of some. Other figures than copies and constant ones
            count the images in their places.

    Raises:
        ValueError: there are no images.
        UserError: without a cache, naming an image that cannot be decoded, once there are more than may be.
    """
    if len(images) == 0:
        raise ValueError("there are no images to look at")
    image_bytes = math.prod(images.shape) * (1 if images.max_value == 255 else 2)
    limit = min(max_images, max(1, max_bytes // image_bytes)) if images.cached else sample
    nearby = images.nearby(limit, seed)
    read = _choose(seed, "data check", len(images), limit) if nearby is None else nearby
    sampled = _choose(seed, "data check sample", len(read), sample)
    figures = {"images": len(images), "shape": list(images.shape), "max_value": images.max_value, "images_read": len(read)}
    return {
        **figures,
        **_pixel_figures(images, read, sampled, max(1, _CHUNK_BYTES // image_bytes)),
        "sizes": _size_figures(images, seed),
        "classes": _class_figures(images),
        "damaged": _damage_figures(images, len(images) if images.cached else len(read)),
    }


def _choose(seed: int, purpose: str, total: int, count: int) -> np.ndarray:
    """`count` of range(total), in ascending order, which disks prefer; all of them where there are no more."""
    if count >= total:
        return np.arange(total)
    return np.sort(randomness.shuffled(seed, purpose, count, total).numpy())


def _pixel_figures(images: ImageSet, read: np.ndarray, sampled: np.ndarray, chunk: int) -> dict:
    thumbnails: list[torch.Tensor] = []
    sums, squares = torch.zeros(2, images.shape[0], dtype=torch.float64)
    hashes, lows, highs = (np.empty(len(read), dtype) for dtype in (np.uint64, np.int64, np.int64))
    for start in range(0, len(read), chunk):
        part = slice(start, start + chunk)
        pixels = images.fetch(read[part])
        flat = pixels.reshape(len(pixels), -1)
        lows[part], highs[part], hashes[part] = flat.min(1), flat.max(1), _hashes(flat)
        # In float64 the sums of 8 bits are exact, and those of 16 bits lose 1e-15 of themselves: next to no variance.
        pixels = torch.from_numpy(pixels)
        values = pixels.double()
        sums += values.sum((0, 2, 3))
        squares += values.square_().sum((0, 2, 3))
        thumbnails.append(gray_thumbnails(pixels, images.max_value))

    whole = images.shown(read) == read  # the others are copies that the set made, instead of images that cannot be decoded
    constant = read[(lows == highs) & whole]
    half, count = images.max_value / 2, len(read)
    pixels_each = count * math.prod(images.shape[1:])  # of a channel
    means = sums / pixels_each
    variances = squares / pixels_each - means.square()
    return {
        "min": float(lows.min() / half - 1),
        "max": float(highs.max() / half - 1),
        "mean": (means / half - 1).tolist(),
        "std": (variances.clamp(min=0).sqrt() / half).tolist(),
        "constant_share": len(constant) / count,
        "constant_rows": _dataset_rows(images, constant[:_NAMED]),
        "copies": _copy_figures(images, read[whole], hashes[whole], (highs - lows)[whole] > images.max_value / 16),
        "near_copies": _near_copies(images, read, sampled, hashes, torch.cat(thumbnails).double()),
    }


def _hashes(flat: np.ndarray) -> np.ndarray:
    """64 bits of BLAKE2b of each row: among 200,000 images two differing ones agree with a probability of 1e-9."""
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in flat)
    return np.frombuffer(digests, np.uint64)


def gray_thumbnails(pixels: torch.Tensor, max_value: int) -> torch.Tensor:
    """Gray thumbnails float32 [batch, pixels] in [-1, 1] of integer images [batch, channels, height, width]."""
    small = averaged_down(to_unit_range(pixels, max_value), _THUMBNAIL).flatten(2)
    return _LUMA @ small if small.shape[1] == 3 else small.mean(1)


def _copy_figures(images: ImageSet, read: np.ndarray, hashes: np.ndarray, varied: np.ndarray) -> dict:
    _, groups, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    members = read[groups == sizes.argmax()]
    following = (hashes[1:] == hashes[:-1]) & (np.diff(read) == 1) & varied[1:]
    of_varied = np.bincount(groups[varied]).astype(np.float64)
    return {
        "repeated": int(of_varied.max(initial=0)),
        "following": int(following.sum()),
        "following_by_chance": float((of_varied * (of_varied - 1)).sum() / len(read)),
        "share": 1 - len(sizes) / len(read),
        "rows": _dataset_rows(images, members[:2]) if len(members) > 1 else [],
    }


def _near_copies(
    images: ImageSet, read: np.ndarray, asked: np.ndarray, hashes: np.ndarray, thumbnails: torch.Tensor
) -> dict | None:
    """For each of the images `read[asked]` the nearest other one of `read`, in thumbnails float64 [read, pixels]."""
    contrast = thumbnails[asked].std(1, correction=0)
    asked, contrast = asked[(contrast > 0).numpy()], contrast[contrast > 0]
    _, first, own = np.unique(hashes, return_index=True, return_inverse=True)  # exact copies are no near-copies
    if len(asked) == 0 or len(first) < 2:
        return None
    chunks = ((start, thumbnails[first[start : start + _COMPARED]]) for start in range(0, len(first), _COMPARED))
    others = first[nearest(thumbnails[asked], chunks, torch.from_numpy(own[asked])).numpy()]
    relative = (thumbnails[asked] - thumbnails[others]).square().mean(1).sqrt() / contrast
    closest = int(relative.argmin())
    return {
        "images": len(relative),
        "share": float((relative < NEAR_COPY_DISTANCE).double().mean()),
        "rows": _dataset_rows(images, read[[asked[closest], others[closest]]]),
    }


def nearest(queries: torch.Tensor, chunks: Iterable[tuple[int, torch.Tensor]], own: torch.Tensor | None = None) -> torch.Tensor:
    """Index int64 [n] of the row that is nearest to each of `queries` [n, D]; `chunks` gives (index of the first row, rows
    [N, D]), and `own` int64 [n] is the row that each query must not find: itself."""
    queries = queries.double()  # the scores of faint or far-off images are small differences of large numbers
    best, indices = queries.new_full((len(queries),), torch.inf), torch.zeros(len(queries), dtype=torch.int64)
    for start, rows in chunks:
        rows = rows.double()
        scores = torch.addmm(rows.square().sum(1), queries, rows.T, alpha=-2)  # |q - r|^2 without |q|^2, the same for all r
        if own is not None:
            here = (own >= start) & (own < start + len(rows))
            scores[here.nonzero()[:, 0], own[here] - start] = torch.inf
        found, places = scores.min(1)
        better = found < best
        best[better], indices[better] = found[better], places[better] + start
    return indices


def _dataset_rows(images: ImageSet, indices: Indices) -> list[int]:
    return images.dataset_rows(indices).tolist()


def _size_figures(images: ImageSet, seed: int) -> dict | None:
    sizes = images.original_sizes(_choose(seed, "data check sizes", len(images), _SIZES_SAMPLE))
    if sizes is None or len(sizes) == 0:
        return None
    shorter = sizes.min(1)
    return {
        "images": len(sizes),
        "enlarged_share": float((sizes < images.shape[1:]).any(1).mean()),
        "shorter_side_min": int(shorter.min()),
        "shorter_side_median": float(np.median(shorter)),
    }


def _damage_figures(images: ImageSet, looked_at: int) -> dict:
    rows = sorted(images.replacements())
    named = [images.bad_images[row] for row in rows[:_NAMED]]
    files = [{"row": bad.row, "file": bad.file or bad.name, "reason": bad.reason} for bad in named]
    return {"images": len(rows), "share": len(rows) / looked_at, "files": files}


def _class_figures(images: ImageSet) -> dict | None:
    if images.labels is None:
        return None
    classes, counts = np.unique(images.labels[images.labels >= 0], return_counts=True)
    counts = dict(zip(classes.tolist(), counts.tolist()))
    if images.class_names is not None:
        counts = {name: counts.get(label, 0) for label, name in enumerate(images.class_names)}
    shares = np.array(list(counts.values())) / sum(counts.values())
    return {
        "number": len(shares),
        "empty": int((shares == 0).sum()),
        "largest": str(list(counts)[shares.argmax()]),
        "largest_share": float(shares.max()),
        "counts": {str(name): count for name, count in counts.items()} if len(shares) <= _MAX_COUNTS else None,
    }
