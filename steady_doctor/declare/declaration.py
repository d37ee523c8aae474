"""What a training is declared to be, where that is known: then each quantity of a step is judged beside its own formula.

A script that says nothing of itself has no declaration; laws that need none judge it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Process(Protocol):
    """The noising, and what the network is trained on. Levels are timesteps or sigmas [B]; the results are float64 [B]."""

    @property
    def learned(self) -> bool:
        """Whether the loss of each sample is divided by exp(u), and u is added, u being learned for each level."""

    @property
    def possible(self) -> int:
        """Different levels; 0: any number of them."""

    def input(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shares of image and noise in what the network gets."""

    def told(self, levels: Tensor) -> Tensor:
        """Returns the number that the network is told."""

    def target(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shares of image and noise in what the network is to give."""

    def weight(self, levels: Tensor) -> Tensor:
        """Returns what the mean squared error of the network's output counts, before it is divided by exp(u)."""

    def places(self, levels: Tensor) -> Tensor:
        """Returns numbers that are uniform from 0 to 1 where the levels are drawn as declared."""


@dataclass(frozen=True)
class Optimizer:
    kind: str  # the name of torch's class
    settings: Mapping[str, Any]  # of all groups, beside learning rate and weight decay
    weight_decay: float  # of tensors of two dimensions and more; all others have none


@dataclass(frozen=True)
class Declaration:
    """Updates count from 1."""

    process: Process
    optimizer: Optimizer | None  # None: one that torch has not
    learning_rate: Callable[[int], float]  # of the n-th update
    micro_steps: int = 1
    averages: Mapping[str, Callable[[int], float]] = field(default_factory=dict)  # name -> decay of the n-th update
    layers: torch.dtype = torch.float32  # in which layers compute
    dropout: float | None = None  # None: not declared
    normalized: bool = False  # the rows of all matrices have a root mean square of 1 after each step
    l1_weight: float = 0.0  # of the sum of the absolute values in the loss, of all matrices and kernels that are averaged
    trained: Callable[[str], bool] = lambda name: True  # by the name of a parameter
    classes: int = 0  # that the network is told of
    no_class: int = -1  # what it is told for no class
    numbers: int = 0  # of each image, that it is told beside: 0 what needs no telling
