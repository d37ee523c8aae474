"""Stage "data" of the step audit, for latents: what the network sees, beside latents of the files, which it encodes once more.

The autoencoder is loaded again by diffusers alone, and works on the CPU. A latent is mean + spread * noise, with noise that is
drawn anew for each sample. So (latent - mean) / spread has a mean square of 1, within chance. A wrong image, place or scale
gives far more. Autoencoders without a spread give the mean.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.diagnostics.audit.files import DeclaredImages, DecodedFile
from utils.diagnostics.audit.verdict import Check, not_observed

_ROUNDING = 0.01  # of the spread of a latent's values: what two devices may differ by, with TF32
_MOST = 8.0  # standard errors of a mean square


class LatentFiles:
    """The autoencoder that is declared, and the scale of the run.

    Args:
        name: what --vae names.
        scale: (mean, standard deviation) by channel, which the run takes off.
        from_config: the spread that the config's scale is for, where that scale is declared; None: the scale is measured.
    """

    def __init__(self, name: str, scale: tuple[Sequence[float], Sequence[float]], from_config: float | None):
        self._name, self._from_config = name, from_config
        self._mean, self._std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in scale)

    @cached_property
    def _network(self) -> Any:
        import diffusers

        subfolder = "vae" if Path(self._name, "vae").is_dir() else None
        try:
            config = diffusers.ModelMixin.load_config(self._name, subfolder=subfolder)
        except (OSError, AttributeError):
            subfolder = "vae"
            config = diffusers.AutoencoderKL.load_config(self._name, subfolder=subfolder)
        return getattr(diffusers, config["_class_name"]).from_pretrained(self._name, subfolder=subfolder).float().eval()

    @torch.no_grad()
    def _encoded(self, planes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, spread) of the latents of one image [C, H, W], float64 [c, h, w]; a spread of 0 where there is none."""
        found = self._network.encode(torch.from_numpy(planes.astype(np.float32))[None])
        if hasattr(found, "latent_dist"):
            return found.latent_dist.mean[0].double(), found.latent_dist.std[0].double()
        mean = (found.latents if hasattr(found, "latents") else found.latent)[0].double()
        return mean, torch.zeros_like(mean)

    def check(self, shown: torch.Tensor, files: list, declared: DeclaredImages) -> list[Check]:
        """Whether float [B, c, h, w], what the network is trained on, are latents of the `files` (see `check_images`)."""
        text = "latents of the files' images"
        try:
            network = self._network
        except Exception as error:  # the folder is gone, or the Hub out of reach: each library raises its own kind
            return [not_observed("data", "latents", text, f"the autoencoder cannot be loaded again: {type(error).__name__}")]
        errors, wrong = [], []
        for latent, file in zip(shown.detach().cpu().double(), files):
            try:
                planes = DecodedFile(file, declared).planes(center_crop=True)
            except Exception:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
                continue
            turned = [planes, planes[..., ::-1]] if declared.random_flip else [planes]
            both = [self._error(latent, *self._encoded(each)) for each in turned]
            errors.append(min(both, key=lambda found: found[0]))
            wrong += [errors[-1]] if errors[-1][1] else []
        if not errors:
            return [not_observed("data", "latents", text, "none of the files can be decoded")]
        message = f"the network sees latents that {wrong[0][1]} ({len(wrong)} of {len(errors)} looked at)" if wrong else ""
        observed = f"{len(errors)} latents, {max(found[0] for found in errors):.3g} times the declared variance at most"
        checks = [Check("data", "latents", text, observed, not wrong, message)]
        return checks + self._scale(network.config)

    def _error(self, latent: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor) -> tuple[float, str]:
        """(mean square of the noise that is in a latent, what is wrong with it)."""
        if latent.shape != mean.shape or not latent.isfinite().all():
            return math.inf, "have another shape, or are not finite"
        values = latent * self._std + self._mean
        rounding = _ROUNDING * self._std.expand_as(mean)
        square = float(((values - mean).square() / (spread.square() + rounding.square())).mean())
        chance = _MOST * math.sqrt(2 / mean.numel())
        if square > 1 + chance:
            return square, "are not those of the files, by the scale of the run"
        plain = spread > 4 * rounding
        if plain.sum() >= 32:
            noise = float(((values - mean) / spread)[plain].square().mean())
            if noise < 1 - _MOST * math.sqrt(2 / int(plain.sum())) - 2 / 16:
                return square, f"have less noise than their spread ({noise:.2g} of its variance)"
        return square, ""

    def _scale(self, config: Any) -> list[Check]:
        if self._from_config is None or not config.get("scaling_factor"):
            return []
        scaling, shift = float(config["scaling_factor"]), float(config.get("shift_factor") or 0.0)
        means, stds = config.get("latents_mean"), config.get("latents_std")
        known = means is not None and stds is not None
        mean = torch.tensor(means if known else [shift], dtype=torch.float64).reshape(-1, 1, 1)
        std = torch.tensor(stds if known else [1.0], dtype=torch.float64).reshape(-1, 1, 1) / scaling / self._from_config
        fits = torch.allclose(self._mean, mean.expand_as(self._mean), rtol=1e-5, atol=1e-6)
        fits = fits and torch.allclose(self._std, std.expand_as(self._std), rtol=1e-5)
        found, declared = (
            f"mean {float(m.mean()):.4g}, spread {float(s.mean()):.4g}" for m, s in ((self._mean, self._std), (mean, std))
        )
        text = f"latents are scaled by {found}, and the autoencoder's config says {declared}"
        return [Check("data", "scale of latents", declared, found, fits, text)]
