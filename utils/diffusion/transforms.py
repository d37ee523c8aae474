"""What the network is told of its images' transforms (`draw_transforms`): a vector that is added to its time embedding.

The layer has no bias, so that zeros add nothing, and what samples, validates and publishes the network needs nothing of it. So
it stands beside the part of the network that is averaged and exported. Checkpoints have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import UNet2DModel
from torch import nn
from torch.nn.utils import skip_init

from models.edm2_unet import EDM2UNet, MPLinear
from utils.data.augmentation import TRANSFORM_NUMBERS


class TransformEmbedding(nn.Module):
    """Of a UNet2DModel or an EDM2UNet. It adds 0 at first.

    Karras et al. 2022 have such a layer, and Karras et al. 2024 none: for an EDM2UNet it is one that keeps magnitude, with a
    learned gain from 0 on, as its blocks have for their modulation.
    """

    def __init__(self, unet: UNet2DModel | EDM2UNet):
        super().__init__()
        self._vectors: torch.Tensor | None = None
        self.linear: nn.Linear
        self.gain: nn.Parameter | None = None
        if isinstance(unet, EDM2UNet):
            self.linear = MPLinear(TRANSFORM_NUMBERS, unet.noise_embedding.out_features)
            self.gain = nn.Parameter(torch.zeros(()))
            unet.noise_embedding.register_forward_hook(self._add)
        else:
            channels = unet.time_embedding.linear_2.out_features
            self.linear = skip_init(nn.Linear, TRANSFORM_NUMBERS, channels, bias=False)  # draws no random numbers
            nn.init.zeros_(self.linear.weight)
            unet.time_embedding.register_forward_hook(self._add)

    @contextmanager
    def given(self, numbers: torch.Tensor | None) -> Iterator[None]:
        """Inside, a pass of the network is told `numbers` float32 [B, 9]; None says zeros."""
        if numbers is not None:
            self._vectors = self.linear(numbers) if self.gain is None else self.linear(numbers, self.gain)
        try:
            yield
        finally:
            self._vectors = None

    def _add(self, embedding: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output if self._vectors is None else output + self._vectors.to(output.dtype)


class ConditionedUNet(nn.Module):
    """A UNet2DModel that is trained with transforms."""

    def __init__(self, unet: UNet2DModel):
        super().__init__()
        self.unet, self.transforms = unet, TransformEmbedding(unet)

    def forward(self, *given: torch.Tensor, transforms: torch.Tensor | None = None) -> object:
        with self.transforms.given(transforms):
            return self.unet(*given)
