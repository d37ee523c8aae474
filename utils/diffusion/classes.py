"""Classes of images: how many a network knows, which labels it is told in training, and what tells it no class.

Labels are int64, -1 for no class. An EDM2 network takes them so; diffusers' UNet2DModel has an embedding for each of
`num_class_embeds` numbers, and ours the last of them for no class, as DiT has (Peebles & Xie 2023).
"""

from typing import TYPE_CHECKING

import torch
from diffusers import ModelMixin

from utils.core import randomness
from utils.core.errors import UserError

if TYPE_CHECKING:  # else generate.py would wait for the libraries that read data
    from utils.data.dataset import ImageSet


def count_classes(images: "ImageSet") -> int:
    """Returns the number of classes of a dataset; 0 without labels."""
    if images.labels is None or len(images.labels) == 0:
        return 0
    return max(int(images.labels.max()) + 1, len(images.class_names or ()))


def needed_classes(images: "ImageSet") -> int:
    """`count_classes`; raises UserError without labels."""
    classes = count_classes(images)
    if not classes:
        why = "".join(f"; {note}" for note in images.notes)  # what was not used is among them
        raise UserError(
            f"--class_conditional needs class labels, and the data has none{why}\n"
            "put the images into one folder for each class, or name the column of the labels with --label_column"
        )
    return classes


def has_class_for_none(unet: ModelMixin) -> bool:
    """Returns whether the last class embedding of `unet` is that of no class: in a UNet2DModel, not in an EDM2UNet."""
    return "model_channels" not in unet.config and bool(unet.config.get("num_class_embeds"))


def classes_known(unet: ModelMixin) -> int:
    """Returns the number of classes that a network of ours can be asked for; 0 for an unconditional one."""
    return (unet.config.get("num_class_embeds") or 0) - has_class_for_none(unet)


def training_labels(seed: int, sample_numbers: torch.Tensor, labels: torch.Tensor, dropout: float) -> torch.Tensor:
    """`labels` int64 [B] with a share of `dropout` replaced by -1, no class, so that the network learns both."""
    dropped = randomness.uniform(seed, "label dropout", sample_numbers)[:, 0] < dropout
    return labels.masked_fill(dropped, -1)


def class_of_samples(sample_numbers: torch.Tensor, num_classes: int) -> torch.Tensor | None:
    """Returns every class in turn, int64 [B]; None where there are no classes."""
    return sample_numbers % num_classes if num_classes else None


def embedded(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns the embeddings of a UNet2DModel that `labels` [B] mean: the last one, `num_classes`, for -1."""
    return torch.where(labels < 0, num_classes, labels)
