"""An autoencoder of diffusers: from images to latents and back. It is never trained here, and no code of its folder is run."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny, ModelMixin
from diffusers.utils import logging

from utils.core.errors import UserError, explained
from utils.core.hub import loading
from utils.core.size import Size

CLASSES = {each.__name__: each for each in (AutoencoderKL, AutoencoderTiny, AutoencoderDC)}
PROBED = 256  # side of the image by which the factor is found
BATCH_PIXELS = 2**19  # of images that are encoded or decoded at once: 8 of 256x256
MOST_AT_ONCE = 64


class Scale(NamedTuple):
    """Latents are `mean` + `std` x, by channel; x is what a network is trained on."""

    mean: list[float]
    std: list[float]

    def multiplied(self, factor: float) -> "Scale":
        """For a network that is trained on `factor` x."""
        return Scale(self.mean, [value / factor for value in self.std])


class Autoencoder:
    """In fp32 and in eval mode, on the CPU between two uses.

    Args:
        network: one of CLASSES.
        image_shape: channels, height and width of the images, which fit it.
        factor: pixels along a side of a latent pixel.
        channels: of latents.

    Attributes:
        latent_shape: channels, height and width.
        scale: set once it is known; `decode` needs it.
    """

    def __init__(self, network: ModelMixin, image_shape: tuple[int, int, int], factor: int, channels: int):
        self.network = network.float().eval().requires_grad_(False)
        self.image_shape = image_shape
        self.latent_shape = (channels, image_shape[1] // factor, image_shape[2] // factor)
        self.at_once = max(1, min(MOST_AT_ONCE, BATCH_PIXELS // (image_shape[1] * image_shape[2])))
        self.scale = None

    @property
    def scale(self) -> Scale | None:
        return self._scale

    @scale.setter
    def scale(self, scale: Scale | None) -> None:
        self._scale = scale
        self._scales: dict[torch.device, list[torch.Tensor]] = {}  # mean and std where they were asked for

    @property
    def config(self) -> dict[str, Any]:
        return {name: value for name, value in self.network.config.items() if not name.startswith("_")}

    def own_scale(self) -> Scale | None:
        """The one that its config has; None where it has none."""
        config, channels = self.config, self.latent_shape[0]
        scaling = config.get("scaling_factor")
        if not scaling:
            return None
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is not None and std is not None:
            return Scale([float(value) for value in mean], [float(value) / scaling for value in std])
        return Scale([float(config.get("shift_factor") or 0.0)] * channels, [1.0 / scaling] * channels)

    @property
    def has_spread(self) -> bool:
        """Whether `encode` gives a spread beside the mean."""
        return isinstance(self.network, AutoencoderKL)

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.network.state_dict().values())

    def facts(self) -> dict[str, Any]:
        """What a run keeps of it, by names in its options.json and its checkpoints; JSON. The scale has to be known."""
        mean, std = self.known_scale()
        shape = list(self.latent_shape)
        return {"vae.weights": self.fingerprint(), "vae.latent_mean": mean, "vae.latent_std": std, "vae.latent_shape": shape}

    def fingerprint(self) -> str:
        """Hex string that changes with its class, its config or its weights."""
        digest = hashlib.sha256(type(self.network).__name__.encode())
        digest.update(json.dumps(self.config, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy())
        return digest.hexdigest()[:32]

    @contextlib.contextmanager
    def on(self, device: torch.device | str) -> Iterator[None]:
        """Inside it the network is on `device`, without gradients and without autocast; then it is where it was before. Around
        several calls of `decode` it moves once."""
        before = self.network.device
        try:
            self.network.to(device)
            with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
                yield
        finally:
            self.network.to(before)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Mean, and where the autoencoder has one, spread of the latents: [B, 1 or 2, c, h, w] of images [B, C, H, W] in
        [-1, 1]. Call it in `on`."""
        return torch.cat([self._encoded(part) for part in images.split(self.at_once)])

    def _encoded(self, images: torch.Tensor) -> torch.Tensor:
        encoded = self.network.encode(images)
        if "latent_dist" in encoded:
            return torch.stack([encoded.latent_dist.mean, encoded.latent_dist.std], 1)
        return (encoded.latents if "latents" in encoded else encoded.latent)[:, None]

    def normalized(self, latents: torch.Tensor) -> torch.Tensor:
        """What a network is trained on, of latents [B, c, h, w]."""
        mean, std = self._scale_on(latents)
        return (latents - mean) / std

    def decode(self, normalized: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] in [-1, 1], of what a network makes, [B, c, h, w]."""
        mean, std = self._scale_on(normalized)
        with self.on(normalized.device):
            parts = [self.network.decode(part).sample for part in (normalized.float() * std + mean).split(self.at_once)]
        return torch.cat(parts).clamp_(-1.0, 1.0)

    def known_scale(self) -> Scale:
        """Returns `scale`; raises ValueError before it is set."""
        if self.scale is None:
            raise ValueError("the scale of the latents is not known yet")
        return self.scale

    def _scale_on(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if like.device not in self._scales:  # made once: the host waits for such a copy to a GPU
            self._scales[like.device] = [
                torch.tensor(values, dtype=torch.float32, device=like.device)[:, None, None] for values in self.known_scale()
            ]
        mean, std = self._scales[like.device]
        return mean, std


def load_autoencoder(name: str, image_shape: tuple[int, int, int]) -> Autoencoder:
    """The autoencoder `name`, of the Hub or a folder, or that of a pipeline, for images of this shape.

    Raises UserError where there is none, it is of another class, or the images do not fit it.
    """
    subfolder, config, factor, channels, wanted = _looked_at(f"--vae {name}", name, _found)
    if image_shape[0] != wanted:
        raise UserError(
            f"--vae {name} is for images of {wanted} channels, and --image_channels is {image_shape[0]}\n"
            f"set --image_channels {wanted}, or use another autoencoder"
        )
    if any(length % factor for length in image_shape[1:]):
        size, fitting = (
            Size(*lengths).resolution for lengths in (image_shape[1:], [-(-n // factor) * factor for n in image_shape[1:]])
        )
        raise UserError(
            f"--resolution {size} does not divide by {factor}, as --vae {name} needs it\nuse another one, for example {fitting}"
        )
    return _loaded(name, subfolder, config, image_shape, (factor, channels))


def autoencoder_of(pipeline: str, latent_shape: tuple[int, int, int], scale: Scale) -> Autoencoder:
    """That of a pipeline that makes latents of this shape. Raises UserError where it cannot be loaded or does not fit."""
    subfolder, config, factor, channels, image_channels = _looked_at(
        f"the autoencoder of {pipeline}", pipeline, lambda name: ("vae", AutoencoderKL.load_config(name, subfolder="vae"))
    )
    if channels != latent_shape[0]:
        raise UserError(
            f"the autoencoder of {pipeline} has {channels} channels, and its unet has {latent_shape[0]}\nuse another pipeline"
        )
    image_shape = (image_channels, latent_shape[1] * factor, latent_shape[2] * factor)
    autoencoder = _loaded(pipeline, subfolder, config, image_shape, (factor, channels))
    autoencoder.scale = scale
    return autoencoder


def _loaded(name: str, subfolder: str, config: dict, image_shape: tuple[int, int, int], sizes: tuple[int, int]) -> Autoencoder:
    logging.disable_progress_bar()  # one bar, the script's own
    with loading(f"the autoencoder of {name}", name, "model"):
        network = CLASSES[config["_class_name"]].from_pretrained(name, subfolder=subfolder)
    return Autoencoder(network, image_shape, *sizes)


def _found(name: str) -> tuple[str, dict]:
    """(subfolder, config): of the autoencoder itself, or of the `vae` of a pipeline."""
    try:
        return "", AutoencoderKL.load_config(name)
    except OSError:
        if Path(name).is_dir() and not Path(name, "vae", "config.json").is_file():
            raise OSError("it has neither config.json nor vae/config.json") from None
        return "vae", AutoencoderKL.load_config(name, subfolder="vae")


def _looked_at(what: str, name: str, find: Callable[[str], tuple[str, dict]]) -> tuple[str, dict, int, int, int]:
    """What `find` gives, and, by a pass that computes nothing: pixels along a side of a latent pixel, channels of latents, and
    channels of images. `what` is what errors call it."""
    with loading(what, name, "model"):
        subfolder, config = find(name)
    if config.get("_class_name") not in CLASSES:
        raise UserError(
            f"{what} is of the class {config.get('_class_name')}, which is not supported\nuse one of {', '.join(CLASSES)}"
        )
    cannot = f"the autoencoder of {name} cannot be built"
    with explained(cannot, "check its config.json, or use another one"), torch.device("meta"):
        network = CLASSES[config["_class_name"]].from_config(config)
        image_shape = (network.config.in_channels, PROBED, PROBED)
        latents = Autoencoder(network, image_shape, 1, 1).encode(torch.zeros(1, *image_shape))
    return subfolder, config, PROBED // latents.shape[-1], latents.shape[-3], image_shape[0]
