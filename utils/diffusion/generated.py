"""The folder of generate.py: numbered images that one set of settings made."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from utils.core.errors import UserError
from utils.core.files import write_json
from utils.core.images import image_suffix, is_complete_image, make_grid, read_image, save_image, save_png
from utils.diffusion.sampling import to_uint8, to_uint16

GRID_IMAGES = 64


class GeneratedFolder:
    """`folder` with images of `shape` (C, H, W) in files of `bits` bits for each value."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], bits: int):
        self.folder, self._shape, self._bits, self._suffix = folder, shape, bits, image_suffix(shape[0], bits)

    def has(self, numbers: Iterable[int]) -> bool:
        """Returns whether all images of these numbers are there, and whole."""
        return all(is_complete_image(self._path(number), self._shape) for number in numbers)

    def save(self, numbers: torch.Tensor, images: torch.Tensor) -> None:
        """Writes images in [-1, 1], [n, C, H, W], under their numbers int64 [n]. Raises OSError."""
        files = (to_uint8 if self._bits == 8 else to_uint16)(images).cpu()
        for number, image in zip(numbers.tolist(), files):
            save_image(image, self._path(number))

    def save_grid(self, num_images: int) -> None:
        """Writes grid.png of the first images. Raises OSError."""
        images = torch.stack([read_image(self._path(number)) for number in range(min(num_images, GRID_IMAGES))])
        if self._bits == 16:
            images = (images.float() / 257).round().to(torch.uint8)
        save_png(make_grid(images), self.folder / "grid.png")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}{self._suffix}"


def weights_hash(unet: nn.Module, scheduler_config: dict) -> str:
    """Tells one trained state from another, so that a pipeline that trained on is not mixed with its earlier images."""
    digest = hashlib.sha256()
    for name, value in sorted(unet.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy())
    public = {key: value for key, value in scheduler_config.items() if not key.startswith("_")}
    digest.update(json.dumps(public, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def claim_folder(output_dir: Path, settings: dict) -> None:
    """Records `settings` in `output_dir`/generate.json. Raises UserError if the folder holds images that they would not
    have made, or cannot be written."""
    record = output_dir / "generate.json"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        names = os.listdir(output_dir)
        recorded = json.loads(record.read_text()) if record.exists() else None
        if recorded is None and any(name.endswith(".png") for name in names):
            raise UserError(
                f"--output_dir {output_dir} already has images, which generate.py did not make\nchoose another --output_dir"
            )
        if recorded is not None and any(re.fullmatch(r"\d{6,}\.(png|npy)", name) for name in names):
            refuse_other_settings(output_dir, recorded, settings)
        write_json(record, settings)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot use --output_dir {output_dir}: {error}\nchoose another --output_dir") from error


# What to say of settings that are no flags, where they differ.
OTHER_IMAGES = {
    "weights_sha256": "images of other weights: another pipeline, or one that was trained further since",
    "guide_sha256": "images with another --guide_pipeline, or one that was trained further since",
    "autoencoder": "images of another autoencoder",
    "sampler_version": "images of an earlier version of this sampler",
}


def refuse_other_settings(output_dir: Path, recorded: dict, settings: dict) -> None:
    for key, value in settings.items():
        # The pipeline is recognized by its weights, so that it may be moved or reached by another path.
        if key not in ("pipeline", "num_images") and recorded.get(key) != value:
            was, now = ("not set" if each is None else each for each in (recorded.get(key), value))
            other = OTHER_IMAGES.get(key, f"images with another --{key} ({was}, now {now})")
            if key == "weights_sha256" and recorded.get("pipeline") == settings["pipeline"]:
                other = "images of an earlier state of this pipeline: it was trained further since, or changed"
            raise UserError(f"--output_dir {output_dir} has {other}\nchoose another --output_dir")
    if recorded["num_images"] > settings["num_images"]:
        raise UserError(
            f"--output_dir {output_dir} has {recorded['num_images']} images, more than --num_images "
            f"{settings['num_images']}\nchoose another --output_dir, or more images"
        )
