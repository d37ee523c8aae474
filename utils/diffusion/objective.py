"""What a training script trains: all that tells one recipe from another. A new recipe is a new `Objective`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from torch import nn

from utils.data.training_data import Batch, TrainingData
from utils.diffusion.sampling import Scheduler

CODE_LOADER = "DiffusionPipeline.from_pretrained({path!r}, trust_remote_code=True)"  # of a pipeline that carries code


class Losses(NamedTuple):
    trained: torch.Tensor  # [B], what the gradient is of
    shown: torch.Tensor  # [B], what is logged and validated


class Objective(ABC):
    """The methods are pure but for `after_step`: training, validation, the replay of a bad update and the doctor share them.

    Attributes:
        network: what the optimizer trains, unwrapped; exported: the part of it that is averaged, sampled and published.
        noise_scheduler: of diffusers, what the pipeline is exported with.
        level: the name of the noise levels [B] among what `draw` gives.
        num_bins: `bins` are below it.
        classes: how many the network knows; 0 for an unconditional one.
        kept: what a checkpoint needs of the pipeline that the run started from, beside the options; JSON.
        notes: what the user is told about it.
        loader: the Python expression that loads the exported pipeline, with `{path!r}` in it.
        predict: what a sampler asks in place of `exported`, see `sampling.sample`; None for a plain call.
    """

    network: nn.Module
    exported: ModelMixin
    noise_scheduler: Scheduler
    level: str
    num_bins: int
    classes: int = 0
    kept: Mapping[str, Any] = {}
    notes: Sequence[str] = ()
    loader: str
    predict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @abstractmethod
    def draw(self, batch: Batch, quantiles: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The arguments of `losses`: "clean_images" and "noise", each [B, C, H, W], and noise levels, [B], under `level`.

        The levels are random, functions of the sample numbers. With `quantiles` (float64 [B] in (0, 1), on the CPU) they are
        those below which that share of the training's levels lies, and nothing is random: for a validation.
        """

    @abstractmethod
    def losses(self, network: nn.Module, *_: Any, **drawn: Any) -> Losses:
        """Of what `draw` gave. `network` is `network` or what wraps it."""

    @abstractmethod
    def bins(self, *_: Any, **drawn: Any) -> torch.Tensor:
        """Returns where each noise level lies among the training's, int64 [B]: 0 is the least noise."""

    def after_step(self, finite: torch.Tensor) -> None:  # noqa: B027 (most recipes do nothing here)
        """What follows the optimizer's step; `finite`, 0-dim bool, is whether it was made."""

    @abstractmethod
    def path(self) -> list[float]:
        """Returns the timesteps of a sampler at which the way from noise to image is looked at."""

    @abstractmethod
    def caption(self, timestep: float) -> str:
        """Returns what to write below a picture of that way."""

    @abstractmethod
    def probe(self, data: TrainingData) -> dict:
        """Returns what `exported` is like, which is in full precision meanwhile; JSON."""

    @abstractmethod
    def card(self) -> dict:
        """Returns facts of this recipe for the model card, see `model_card`."""

    def schedule(self) -> dict:
        """Returns facts of the noise schedule for the report; JSON."""
        return {}
