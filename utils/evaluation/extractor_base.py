"""What an extractor of features is, and what identifies one."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn


class Extractor(nn.Module):
    """A network from uint8 images [n, C, H, W] to float32 features [n, dimensions], on the device of its weights.

    Attributes:
        name: one of `extractors.EXTRACTORS`.
        dimensions: of a feature.
        resize: in words, how images are brought to the size that it looks at.
        standardized: whether its features mean something only beside the spread that the reference data has in each of
            them, as those of random or fitted networks do; those of the published ones are used as they are.
        sha256: of the weights; with `name` and `resize` it says which figures may be compared.
    """

    name: str
    dimensions: int
    resize = "none"
    standardized = True
    sha256: str

    def identity(self) -> dict:
        """Returns what two extractors must share for their figures to be compared; JSON."""
        return {"features": self.name, "extractor_sha256": self.sha256, "resize": self.resize, "dimensions": self.dimensions}


def tensors_sha256(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """Of `text`, and of names, shapes and bytes of the tensors, such as the weights of an extractor."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def eight_bit(images: np.ndarray, max_value: int) -> torch.Tensor:
    """uint8 tensor of the integer images of an ImageSet: what they would be as a PNG of 8 bits, which samples are."""
    if max_value == 255:
        return torch.from_numpy(images)
    return torch.from_numpy((images.astype(np.float64) * (255 / max_value)).round().astype(np.uint8))
