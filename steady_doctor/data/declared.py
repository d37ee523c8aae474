"""What a trainer declares of its data: plain values, and callables for what its own code makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


def sides_of(resolution: int | str) -> tuple[int, int]:
    """(height, width): 64 for both, or 64x96 for a height of 64 and a width of 96."""
    height, _, width = str(resolution).partition("x")
    return int(height), int(width or height)


@dataclass(frozen=True)
class DeclaredImages:
    """What is done with each file."""

    sides: tuple[int, int]  # height and width that the network sees
    channels: int
    center_crop: bool = False
    random_flip: bool = False
    color_jitter: float = 0.0  # strength
    background: str = "white"  # color behind transparent pixels
    max_value: int = 255  # of white; 65535 where 16 bits are kept
    data_range: Sequence[float] | None = None  # of arrays: the values of black and white, where they were given


@dataclass(frozen=True)
class Source:
    """Which rows of which files."""

    name: str | None = None  # a file, a folder, or digits; None where a folder of images was opened
    split: str = "train"
    config: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    first: int | None = None  # rows that are used; None: all
    streamed: bool = False


@dataclass(frozen=True)
class DeclaredLatents:
    """Of images that an autoencoder encodes."""

    autoencoder: str  # a folder, or a name on the Hub
    mean: Sequence[float]  # by channel, which the run takes off
    std: Sequence[float]  # by which it divides
    spread: float | None = None  # that the scale of the autoencoder's config is for; None: the scale was measured


@dataclass(frozen=True)
class DeclaredData:
    images: DeclaredImages
    source: Source
    training: int  # images to train on
    held_out: int  # images of the validation
    batch_size: int  # samples of a micro step of one process
    micro_steps: int = 1  # of an update
    processes: int = 1
    process: int = 0  # this one
    balanced: bool = False  # each class equally often
    window: int | None = None  # about so many samples that follow each other are in a random order; None: a whole pass
    replaces_bad: bool = False  # another image stands in for one that cannot be decoded
    dropout: float = 0.0  # share of labels that are dropped
    classes: int | None = None  # that the network has; None: it gets no labels
    latents: DeclaredLatents | None = None


class Given(NamedTuple):
    """What the trainer's own code says. Rows are those of the data set, int64."""

    drawn_rows: Callable[[Tensor], Tensor]  # that its order gives for numbers of samples
    shown_rows: Callable[[Tensor], Tensor]  # the same, with those that stand in for damaged ones
    training_rows: np.ndarray
    held_out_rows: np.ndarray
    held_out: Callable[[int], tuple[Tensor, list[int], np.ndarray | None]]  # as many images [B, C, H, W], rows and labels
    dataset: Any = None  # the `datasets.Dataset` that it opened, where there is one
