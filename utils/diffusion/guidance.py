"""Asking a network for classes, with guidance away from a weaker prediction."""

from collections.abc import Callable, Mapping, Sequence

import torch
from diffusers import ModelMixin

from models.guided_pipeline import class_number, guided
from utils.core.errors import UserError
from utils.diffusion.classes import classes_known, has_class_for_none
from utils.diffusion.sampling import is_edm


def asked_classes(asked: Sequence[str] | None, names: Sequence[str], unet: ModelMixin) -> list[int] | None:
    """Returns the numbers of the classes of `unet` that --class_labels asks for, as exported pipelines read it; `names` are
    those of its classes. Raises UserError for a class that it does not know."""
    if asked is None:
        return None
    try:
        labels = {name: number for number, name in enumerate(names)}
        return [class_number(label, labels, classes_known(unet)) for label in asked]
    except ValueError as error:
        raise UserError(f"--{error}") from None


def make_guided_prediction(
    unet: ModelMixin,
    scheduler_config: Mapping,
    class_labels: Sequence[int] | None = None,
    guidance: float = 1.0,
    guide: ModelMixin | None = None,
    guide_config: Mapping | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The `predict` of `sampling.sample`: sample i is of the class that is the i-th of `class_labels` (None: of all), again and
    again. None for an unconditional DDPM without a guide, which is to be asked plainly.

    See `models.guided_pipeline.guided` for `guidance` and `guide`; the configs are the pipelines' schedulers'. Raises UserError
    for guidance without a guide, and for a guide of other data.
    """
    num_classes = classes_known(unet)
    if guidance != 1.0 and guide is None and not num_classes:
        raise UserError("--guidance: the pipeline has no classes, so it needs a second network\nset --guide_pipeline")
    if guide is not None:
        if guidance == 1.0:
            raise UserError("--guide_pipeline needs --guidance\nset --guidance, for example 1.5")
        names = ("sample_size", "in_channels", "num_class_embeds")
        wanted, found = ([network.config.get(name) for name in names] for network in (unet, guide))
        process, other = (
            [config.get(name) for name in ("sigma_data", "prediction_type", "beta_schedule", "num_train_timesteps")]
            for config in (scheduler_config, guide_config or {})
        )
        if wanted != found or process != other:
            raise UserError(
                f"--guide_pipeline does not fit: its size, channels and classes are {found}, not {wanted}, or its sigma_data, "
                "prediction type or schedule differs\nuse a pipeline that was trained on the same data with the same flags"
            )
    if not is_edm(scheduler_config) and not num_classes and guide is None:
        return None
    labels = torch.tensor(list(class_labels) if class_labels is not None else range(num_classes))

    def predict(scaled: torch.Tensor, timestep: torch.Tensor, sample_numbers: torch.Tensor) -> torch.Tensor:
        classes = labels.to(sample_numbers.device)[sample_numbers % len(labels)] if num_classes else None
        no_class = torch.full_like(classes, num_classes) if classes is not None and has_class_for_none(unet) else None
        return guided(unet, scaled, timestep, classes, guidance, guide, no_class)

    return predict
