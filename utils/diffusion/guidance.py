"""Asking an EDM2 network for classes, with guidance away from a weaker prediction."""

import difflib
from collections.abc import Callable, Mapping, Sequence

import torch
from diffusers import ModelMixin

from models.edm2_pipeline import guided
from utils.core.errors import UserError
from utils.diffusion.sampling import is_edm

_NAMED = 20  # classes that a message lists


def class_numbers(asked: Sequence[str] | None, names: Sequence[str]) -> list[int] | None:
    """The numbers of the classes that --class_labels names, by number or by name. Raises UserError for an unknown name."""
    if asked is None:
        return None
    numbers = {name: number for number, name in enumerate(names)}
    for label in asked:
        if not label.isdigit() and label not in numbers:
            near = difflib.get_close_matches(label, names, n=1)
            known = f"did you mean {near[0]}? " if near else ""
            listed = ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])
            raise UserError(
                f"--class_labels {label}: {known}the pipeline's classes are "
                + (f"{listed} (or numbers, from 0)" if names else "numbers: it has no names for them")
            )
    return [int(label) if label.isdigit() else numbers[label] for label in asked]


def make_guided_prediction(
    unet: ModelMixin,
    scheduler_config: Mapping,
    class_labels: Sequence[int] | None = None,
    guidance: float = 1.0,
    guide: ModelMixin | None = None,
    guide_config: Mapping | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The `predict` of `sampling.sample`: sample i is of the class that is the i-th of `class_labels` (None: of all), again and
    again. None for a network of another kind than EDM2's, which is to be asked plainly.

    See `models.edm2_pipeline.guided` for `guidance` and `guide`; the configs are the pipelines' schedulers'. Raises UserError
    for classes that the network does not know, for guidance without a guide, and for a guide of other data.
    """
    if not is_edm(scheduler_config):
        if class_labels is not None or guidance != 1.0 or guide is not None:
            raise UserError("--class_labels, --guidance and --guide_pipeline need a pipeline of train_edm2.py")
        return None
    num_classes = unet.config.num_class_embeds
    if class_labels is not None and not all(0 <= label < num_classes for label in class_labels):
        known = f"from 0 to {num_classes - 1}" if num_classes else "none: it was trained without classes"
        raise UserError(f"--class_labels {' '.join(map(str, class_labels))}: the pipeline's classes are {known}")
    if guidance != 1.0 and guide is None and not num_classes:
        raise UserError("--guidance of a pipeline without classes needs --guide_pipeline")
    if guide is not None:
        if guidance == 1.0:
            raise UserError("--guide_pipeline does nothing without --guidance, such as 1.5")
        names = ("sample_size", "in_channels", "num_class_embeds")
        wanted, found = ([network.config.get(name) for name in names] for network in (unet, guide))
        if wanted != found or scheduler_config["sigma_data"] != (guide_config or {}).get("sigma_data"):
            raise UserError(
                f"--guide_pipeline is of other data: size, channels and classes {found}, not {wanted}, or its sigma_data"
            )
    labels = torch.tensor(list(class_labels) if class_labels is not None else range(num_classes))

    def predict(scaled: torch.Tensor, timestep: torch.Tensor, sample_numbers: torch.Tensor) -> torch.Tensor:
        classes = labels.to(sample_numbers.device)[sample_numbers % len(labels)] if num_classes else None
        return guided(unet, scaled, timestep, classes, guidance, guide)

    return predict
