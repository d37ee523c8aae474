"""Made-up images for the scripts beside this file: one bright shape on a dark gradient."""

import numpy as np


def shapes(count: int, size: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (uint8, [count, size, size, 3]) and their classes: 0 disk, 1 square, 2 cross, 3 ring."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, count)
    rows, columns = np.mgrid[:size, :size] + 0.5
    center = random.uniform(0.35, 0.65, (2, count, 1, 1)) * size
    radius = random.uniform(0.2, 0.32, (count, 1, 1)) * size
    down, across = np.abs(rows - center[0]), np.abs(columns - center[1])
    distance = np.hypot(down, across)
    inside = np.choose(
        labels[:, None, None],
        [
            distance < radius,
            np.maximum(down, across) < radius,
            (np.minimum(down, across) < radius / 3) & (np.maximum(down, across) < radius),
            (distance < radius) & (distance > radius / 2),
        ],
    )[..., None]
    slope = random.uniform(-60, 60, (count, 1, 1, 3)) * (rows / size - 0.5)[..., None]
    ground = random.uniform(20, 110, (count, 1, 1, 3)) + slope
    bright = random.uniform(140, 255, (count, 1, 1, 3))
    return np.where(inside, bright, ground).clip(0, 255).astype(np.uint8), labels
