"""Latents that the network sees, beside those of the files, which are encoded once more: by diffusers alone, on the CPU.

A latent is mean + spread * noise, with noise that is drawn anew for each sample. So (latent - mean) / spread has a mean square
of 1, within chance. A wrong image, place or scale gives far more. Autoencoders without a spread give the mean.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steady_doctor.data.declared import DeclaredImages, DeclaredLatents
from steady_doctor.data.decode import decoded_or_none
from steady_doctor.found import Found

_ROUNDING = 0.01  # of the spread of a latent's values: what two devices may differ by, with TF32
_MOST = 8.0  # standard errors of a mean square


class Latents:
    def __init__(self, declared: DeclaredLatents):
        self._declared = declared
        self._mean, self._std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (declared.mean, declared.std))

    @cached_property
    def _network(self) -> Any:
        """None where the folder is gone, or the Hub out of reach: each library raises its own kind."""
        import diffusers

        name = self._declared.autoencoder
        for subfolder in ("vae", None) if Path(name, "vae").is_dir() else (None, "vae"):
            try:
                config = diffusers.AutoencoderKL.load_config(name, subfolder=subfolder)
                return getattr(diffusers, config["_class_name"]).from_pretrained(name, subfolder=subfolder).float().eval()
            except Exception:
                continue
        return None

    @torch.no_grad()
    def _encoded(self, planes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, spread) of the latents of one image [C, H, W], float64 [c, h, w]; a spread of 0 where there is none."""
        found = self._network.encode(torch.from_numpy(planes.astype(np.float32))[None])
        if hasattr(found, "latent_dist"):
            return found.latent_dist.mean[0].double(), found.latent_dist.std[0].double()
        mean = (found.latents if hasattr(found, "latents") else found.latent)[0].double()
        return mean, torch.zeros_like(mean)

    def check(self, update: int, latents: torch.Tensor, files: list, declared: DeclaredImages, part: str) -> Iterator[Found]:
        """Whether float [B, c, h, w], what the network is trained on, are latents of the `files`, see `decoded`."""
        if self._network is None:
            return
        squares = []
        for latent, file in zip(latents.detach().cpu().double(), files):
            if (known := decoded_or_none(file, replace(declared, center_crop=True))) is None:
                continue
            turned = [known[0], known[0][..., ::-1]][: 1 + declared.random_flip]
            squares.append(min(self._square(latent, *self._encoded(each)) for each in turned))
        chance = 1 + _MOST * math.sqrt(2 / latents[0].numel())
        if other := [square for square in squares if square > chance]:
            figures = {"count": len(other), "of": len(squares), "square": max(other), "part": part}
            yield Found("data-latents-differ", update, figures)
        yield from self._scale(update)

    def _square(self, latent: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor) -> float:
        """The mean square of the noise that is in a latent."""
        if latent.shape != mean.shape or not latent.isfinite().all():
            return math.inf
        values, rounding = latent * self._std + self._mean, _ROUNDING * self._std
        return float(((values - mean).square() / (spread.square() + rounding.square())).mean())

    def _scale(self, update: int) -> Iterator[Found]:
        config, spread = self._network.config, self._declared.spread
        if spread is None or not config.get("scaling_factor"):
            return
        means, stds = config.get("latents_mean"), config.get("latents_std")
        known = means is not None and stds is not None
        mean = torch.tensor(means if known else [float(config.get("shift_factor") or 0.0)], dtype=torch.float64)
        std = torch.tensor(stds if known else [1.0], dtype=torch.float64) / float(config["scaling_factor"]) / spread
        own = self._mean.flatten(), self._std.flatten()
        fits = (torch.allclose(a, b.expand_as(a), rtol=1e-5, atol=1e-6) for a, b in zip(own, (mean, std)))
        if not all(fits):
            found, asked = ([float(part.mean()) for part in both] for both in (own, (mean, std)))
            yield Found("data-latents-scale", update, {"found": found, "asked": asked})
