"""Images from a network that knows classes, or makes latents, as diffusers pipelines: of EDM2, and of DDPM.

One file that imports torch and diffusers alone, because an exported pipeline carries it.
"""

import difflib
import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import nn


def guided(
    unet: nn.Module,
    x: torch.Tensor,
    timestep: torch.Tensor,
    class_labels: torch.Tensor | None = None,
    guidance: float = 1.0,
    guide: nn.Module | None = None,
    no_class: torch.Tensor | None = None,
) -> torch.Tensor:
    """F_weak + guidance (F - F_weak) at scaled input `x` [B, C, H, W]; 1 is without guidance, and costs nothing.

    The weak network is `guide`, a smaller or less trained one with the same classes (autoguidance, Karras et al. 2024b,
    arXiv 2406.02507), or where that is None `unet` without the class (classifier-free guidance, Ho & Salimans 2022), which it
    is told by `no_class`, int64 [B] or None. Mixing what is predicted mixes the denoised images alike, as both networks predict
    the same of the same noisy image.
    """
    main = unet(x, timestep, class_labels).sample
    if guidance == 1.0:
        return main
    weak = unet(x, timestep, no_class).sample if guide is None else guide(x, timestep, class_labels).sample
    return torch.lerp(weak.float(), main.float(), guidance)


def class_number(asked: str, labels: Mapping[str, int], num_classes: int) -> int:
    """Returns the number of the class that a text means; `labels` maps the names of classes, if they have any, to numbers.

    It is a name first, so that "2" means the class "2" where classes are called 1, 2 and 3. A number from 0 on is "#1", or
    plain "1" where no name is a number. Raises ValueError for a text that means no class, with what to write.
    """
    plain = "" if any(map(_is_number, labels)) else "?"
    number = labels.get(asked)
    if number is None and (digits := re.fullmatch(f"#{plain}([0-9]{{1,9}})", asked)):
        number = int(digits[1])
    if number is None or number >= num_classes:
        raise ValueError(_no_such_class(asked, labels, num_classes))
    return number


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _no_such_class(asked: str, labels: Mapping[str, int], num_classes: int) -> str:
    problem = f"class_labels {asked}: the pipeline has no "
    if not num_classes:
        return problem + "classes\nleave it out"
    if not labels:
        return problem + f"such class\nuse numbers from 0 to {num_classes - 1}: its classes have no names"
    near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(asked, labels, n=1))
    names = [*list(labels)[:20], *(["..."] if len(labels) > 20 else [])]
    return problem + f"such class\n{near}its classes: {', '.join(names)}, or '#0' to '#{num_classes - 1}'"


class GuidedPipeline(DiffusionPipeline):
    """What the pipelines have in common; `id2label` has the names of the classes by their numbers, if they have any.

    With `vae`, an autoencoder of diffusers, the network makes latents: latent_mean + latent_std x, by channel, are decoded.
    """

    usual_steps: int | None = None  # None: all that were trained
    _optional_components: ClassVar = ["vae"]

    def __init__(
        self,
        unet: nn.Module,
        scheduler: SchedulerMixin,
        id2label: dict[int, str] | dict[str, str] | None = None,  # as JSON has them, the numbers are strings
        vae: nn.Module | None = None,
        latent_mean: list[float] | None = None,
        latent_std: list[float] | None = None,
    ):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.register_to_config(id2label=id2label)
        if vae is not None:
            self.register_to_config(latent_mean=latent_mean, latent_std=latent_std)
        self.labels = {name: int(number) for number, name in (id2label or {}).items()}

    @property
    def num_classes(self) -> int:
        return self.unet.config.num_class_embeds or 0

    def no_class(self, batch_size: int) -> torch.Tensor | None:
        """What tells the network no class: None, or labels int64 [B]."""
        return None

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | None = None,
        class_labels: int | str | list[int | str] | torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        guide: "DiffusionPipeline | None" = None,
        num_inference_steps: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Images by class, with guidance or without. Raises ValueError for classes, a batch size or a guide that do not fit.

        Args:
        batch_size: number of images; as many as `class_labels`, or 1.
        class_labels: the class of each image, or of all of them; None leaves it open. An int is the number of a class, for a
            text see `class_number`.
        guidance_scale: 1 for none. See `guided`.
        guide: another pipeline of this kind, whose network guides away from its own mistakes.
        num_inference_steps: None for all that a DDPM was trained with, and 32 for EDM2, whose Heun's method asks the network
            2 n - 1 times.
        output_type: "pil", "np" (float [B, H, W, C] in [0, 1]), "pt" (float [B, C, H, W] in [-1, 1], not clipped) or "latent"
            (what the network makes).
        """
        config, device = self.unet.config, self._execution_device
        if class_labels is not None:
            if not self.num_classes:
                raise ValueError("this network knows no classes; leave class_labels out")
            class_labels = torch.as_tensor(self._numbers(class_labels), device=device).reshape(-1)
            batch_size = len(class_labels) if batch_size is None else batch_size
            if len(class_labels) not in (1, batch_size):
                raise ValueError(f"batch_size is {batch_size}, but there are {len(class_labels)} class_labels")
            if class_labels.min() < 0 or class_labels.max() >= self.num_classes:
                raise ValueError(f"class_labels must be from 0 to {self.num_classes - 1}, got {class_labels.tolist()}")
            class_labels = class_labels.expand(batch_size)
        self._check_guidance(guidance_scale, guide, class_labels)
        batch_size = 1 if batch_size is None else batch_size
        no_class = self.no_class(batch_size)
        class_labels = no_class if class_labels is None else class_labels
        self.scheduler.set_timesteps(num_inference_steps or self.usual_steps or self.scheduler.config.num_train_timesteps)
        size = config.sample_size
        shape = (batch_size, config.in_channels, *((size, size) if isinstance(size, int) else size))
        # Schedulers of flow matching have neither: they begin at unit noise, and the network sees x as it is.
        x = randn_tensor(shape, generator=generator, device=device) * getattr(self.scheduler, "init_noise_sigma", 1.0)
        scale = getattr(self.scheduler, "scale_model_input", lambda x, timestep: x)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            scaled = scale(x, timestep).to(self.unet.dtype)
            weak = None if guide is None else guide.unet
            prediction = guided(self.unet, scaled, timestep, class_labels, guidance_scale, weak, no_class)
            x = self.scheduler.step(prediction.float(), timestep, x, generator=generator).prev_sample
        images = x if output_type == "latent" else self.decoded(x)
        if output_type not in ("pt", "latent"):
            images = (images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] of what the network makes."""
        if self.vae is None:
            return x
        mean, std = (torch.tensor(self.config[name], device=x.device)[:, None, None] for name in ("latent_mean", "latent_std"))
        return self.vae.decode((x * std + mean).to(self.vae.dtype)).sample.float()

    def _numbers(self, class_labels: int | str | list[int | str] | torch.Tensor) -> int | list[int] | torch.Tensor:
        if isinstance(class_labels, str):
            class_labels = [class_labels]
        if not isinstance(class_labels, list | tuple):
            return class_labels
        known = self.labels, self.num_classes
        return [class_number(label, *known) if isinstance(label, str) else label for label in class_labels]

    def _check_guidance(
        self, guidance_scale: float, guide: "DiffusionPipeline | None", class_labels: torch.Tensor | None
    ) -> None:
        """Raises ValueError where guidance would do nothing, or lead to other data."""
        if guide is None:
            if guidance_scale != 1.0 and class_labels is None:
                raise ValueError(f"guidance_scale {guidance_scale} moves away from no class: give class_labels, or a guide")
            return
        if guidance_scale == 1.0:
            raise ValueError("a guide does nothing at guidance_scale 1; set it above, such as 1.5")
        own, other = (
            [p.unet.config.get(name) for name in ("sample_size", "in_channels", "num_class_embeds")]
            + [p.scheduler.config.get(name) for name in ("sigma_data", "prediction_type", "beta_schedule")]
            for p in (self, guide)
        )
        if own != other:
            raise ValueError(
                f"the guide is of other data: size, channels, classes, sigma_data, prediction and schedule {other}, not {own}"
            )


class EDM2Pipeline(GuidedPipeline):
    """`unet` is F of EDM's preconditioning; `scheduler` is any of the EDM kind, Heun's method unless replaced."""

    usual_steps = 32


class ClassDDPMPipeline(GuidedPipeline):
    """`unet` is diffusers' UNet2DModel with one class embedding more than there are classes: the last one is that of no class.
    `scheduler` is that of the training, or any of diffusers' made from its config."""

    @property
    def num_classes(self) -> int:
        return self.unet.config.num_class_embeds - 1

    def no_class(self, batch_size: int) -> torch.Tensor:
        return torch.full((batch_size,), self.num_classes, device=self._execution_device)


class LatentDDPMPipeline(GuidedPipeline):
    """`unet` is diffusers' UNet2DModel, which makes latents and knows no classes, or one whose scheduler
    carries code; `scheduler` as for ClassDDPMPipeline."""
