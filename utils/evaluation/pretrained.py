"""Extractors with published weights, read from local files that the user names: Inception (for FID) and DINOv2.

The optional packages are imported here alone, and nothing is downloaded.
"""

import hashlib
from pathlib import Path

import torch
from torch.nn import functional

from utils.core.errors import UserError
from utils.evaluation.extractor_base import Extractor, tensors_sha256

# The network of Heusel et al. 2017 as torch-fidelity converted it; the file's name holds the start of its SHA-256.
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


def _check_file(path: Path, expected: str | None) -> str:
    """SHA-256 of `path`. Raises UserError where it cannot be read or does not begin with `expected`."""
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read --feature_weights {path}: {error.strerror or error}\ncheck the path") from None
    if expected and not found.startswith(expected.lower()):
        raise UserError(
            f"--feature_weights {path} has the SHA-256 {found[:16]}..., not {expected[:16]}\n"
            "download the file again, or set --feature_weights_sha256 to the right hash"
        )
    return found


class Inception(Extractor):
    """The 2,048 features of FID: Inception v3 of 2015 with TensorFlow 1's bilinear resize to 299 pixels (torch-fidelity)."""

    name = "inception"
    dimensions = 2048
    resize = "TensorFlow 1 bilinear to 299"
    standardized = False

    def __init__(self, weights: Path, expected_sha256: str | None = None):
        """Raises UserError for a file that is missing, has another hash or holds other weights, or without torch-fidelity."""
        super().__init__()
        self.sha256 = _check_file(weights, expected_sha256 or INCEPTION_SHA256)
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise UserError(f"--features inception needs torch-fidelity: {error}\npip install torch-fidelity") from None
        try:
            # torch-fidelity's own call leaves this to torch's default.
            torch.load(weights, map_location="cpu", weights_only=True)
            self.network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
        except Exception as error:  # a pickle of code, a zip file cut short, other keys, other shapes
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"--feature_weights {weights} does not have the weights of Inception v3: {reason}\n"
                f"use {INCEPTION_FILE}, a release file of torch-fidelity"
            ) from None

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        (features,) = self.network(images)
        return features.float()


class DINOv2(Extractor):
    """The CLS token after the final norm (Oquab et al. 2024; for evaluation Stein et al. 2023), at 224 pixels."""

    name = "dinov2"
    resize = "bicubic, antialiased, to 224"
    mean: torch.Tensor
    std: torch.Tensor
    standardized = False

    def __init__(self, weights: Path, expected_sha256: str | None = None):
        """`weights`: a folder with config.json and model.safetensors. Raises UserError for a missing one, or without
        transformers."""
        super().__init__()
        if not (weights / "config.json").is_file():
            raise UserError(
                f"--features dinov2 needs weights: {weights} has no config.json\n"
                "set --feature_weights to a folder with the config.json and model.safetensors of a DINOv2 model"
            )
        _check_file(weights / "model.safetensors", expected_sha256)
        try:
            from transformers import Dinov2Model
        except ImportError as error:
            raise UserError(f"--features dinov2 needs transformers: {error}\npip install transformers") from None
        try:
            options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
            self.network, loaded = Dinov2Model.from_pretrained(weights, **options)
            if loaded["missing_keys"]:  # transformers fills them with random numbers and goes on
                raise ValueError(f"{len(loaded['missing_keys'])} weights are missing, such as {min(loaded['missing_keys'])}")
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"--feature_weights {weights} does not have a DINOv2 model: {reason}\n"
                "use a folder with the config.json and model.safetensors of one"
            ) from None
        self.dimensions = self.network.config.hidden_size
        self.sha256 = tensors_sha256(self.state_dict())
        # ImageNet's mean and standard deviation, in units of [0, 1].
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1), persistent=False)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.expand(-1, 3, -1, -1).float() / 255
        pixels = functional.interpolate(pixels, (224, 224), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        return self.network(pixel_values=(pixels - self.mean) / self.std).last_hidden_state[:, 0].float()
