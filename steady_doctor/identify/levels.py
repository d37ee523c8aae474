"""What the noise levels of all samples are like, as numbers that are uniform from 0 to 1 where they are drawn as declared."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.declare.declaration import Process


@dataclass
class Levels:
    """Figures alone; places are the uniform numbers."""

    count: int
    low: float  # of the levels themselves
    high: float
    different: int
    distance: float  # the largest one of the places' distribution from the uniform one
    center: float  # the mean of the places, beside 1/2
    spread: float  # their variance over the uniform one's, beside 1
    means: float | None = None  # the variance of the batches' means, over that of chance
    batches: int = 0
    correlations: tuple[tuple[str, float, int], ...] = ()  # of which pairs, their mean product over chance, of how many


def identify_levels(process: Process, levels: Tensor, batch: int) -> Levels:
    """`levels`: float64 [N], in the order of the micro steps, each of `batch` of them; 0: they differ in number."""
    places, count = process.places(levels), len(levels)
    below = torch.arange(1, count + 1, dtype=torch.float64) / count - places.sort().values
    found = Levels(
        count=count,
        low=float(levels.min()),
        high=float(levels.max()),
        different=len(levels.unique()),
        distance=float(torch.maximum(below.abs(), (below - 1 / count).abs()).max()),
        center=float(places.mean()) - 0.5,
        spread=float(places.var()) * 12 - 1,
    )
    if batch > 1:
        together = (places.reshape(-1, batch) - 0.5) * 12**0.5
        found.batches, found.means = len(together), float(together.mean(1).square().mean()) * batch
        half = batch // 2
        pairs = {
            "neighbors in a batch": (together[:, 1:], together[:, :-1]),
            "the first and the last in a batch": (together[:, :half], together.flip(1)[:, :half]),
            "the two halves of a batch": (together[:, :half], together[:, batch - half :]),
            "the same places of two batches": (together[1:], together[:-1]),
        }
        found.correlations = tuple((name, float((a * b).mean()), a.numel()) for name, (a, b) in pairs.items())
    return found
