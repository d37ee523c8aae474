"""Feature extractors: images in, the vectors [N, D] out that quality and diversity are measured on.

Every figure names the extractor that it was made with, because figures of different ones cannot be compared. Nothing is
downloaded: the default makes its weights from a fixed seed, `classifier` is trained on the reference data, `inception`
and `dinov2` have published weights, which they read from local files; the packages that they need are imported here alone.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.nn import functional

from utils.core import randomness
from utils.core.errors import UserError
from utils.core.files import whole_file
from utils.data.augmentation import averaged_down, to_unit_range
from utils.data.dataset import ImageSet, content_fingerprint
from utils.data.loader import SampleOrder


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


VERSION = 2  # raise it when the same data gives other weights
_SIDE = 32  # pixels: larger images are averaged down, so that training takes a minute or so at any resolution
_STEPS, _BATCH, _LEARNING_RATE = 600, 64, 2e-3
_HELD_OUT = 0.1  # of the images, to judge it by
MAX_CLASSES = 1000


class Classifier(Extractor):
    """Three convolutions of 32, 64 and 64 channels; its features are the 64 pooled values that the last, linear layer reads.

    Attributes:
        accuracy: on images of the reference set that it was not trained on.
    """

    name = "classifier"
    resize = f"larger than {_SIDE} pixels: averaged down to {_SIDE}"
    dimensions = 64
    accuracy: float

    def __init__(self, channels: int, classes: int):
        super().__init__()
        layers, inputs = [], channels
        for outputs in (32, 64, 64):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2, ceil_mode=True)]  # a single pixel stays one
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(averaged_down(to_unit_range(images, 255), _SIDE)).mean((2, 3))

    def probabilities(self, features: torch.Tensor) -> torch.Tensor:
        """Of the classes, float32 [n, classes], from features [n, 64]."""
        return self.head(features.to(self.head.weight)).softmax(1)


def trained_classifier(images: ImageSet, cache_dir: Path | None) -> Classifier:
    """Returns a classifier of the labels of `images`: from `cache_dir`, or trained now and put there.

    Nine tenths of the images, chosen by a fixed seed, train it; the others judge it. The random state of torch is left as it
    was. Of several processes each may call it: they train the same. Raises UserError where there are no labels, or too few
    images.
    """
    if images.labels is None:
        raise UserError(
            "--features classifier needs class labels, and the data has none\nset --label_column, or use other --features"
        )
    classes = int(images.labels.max()) + 1
    if (images.labels < 0).any():  # of no class
        images = images.subset(np.flatnonzero(images.labels >= 0))
    if classes < 2 or classes > MAX_CLASSES or len(images) < 10 * classes:
        raise UserError(
            f"--features classifier does not work with {classes} classes and {len(images)} images\n"
            f"use other --features: it needs 2 to {MAX_CLASSES} classes, and 10 images of each"
        )
    key = f"{VERSION} {images.fingerprint} {content_fingerprint(images)} {len(images)}"
    path = cache_dir and cache_dir / f"classifier-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        classifier = Classifier(images.shape[0], classes)
    if not (path and _load(classifier, path)):
        classifier.accuracy = _train(classifier, images)
        if path:
            _save(classifier, path)
    classifier.sha256 = tensors_sha256(classifier.state_dict())
    return classifier.eval().requires_grad_(False)


def _train(classifier: Classifier, images: ImageSet) -> float:
    """Trains on the CPU or the accelerator that there is; the accuracy on what was held out."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    order = np.random.default_rng(0).permutation(len(images))
    held_out, trained = order[: max(1, int(_HELD_OUT * len(order)))], order[max(1, int(_HELD_OUT * len(order))) :]
    labels = torch.from_numpy(images.labels)
    classifier.to(device).train()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=_STEPS)
    shown = SampleOrder(len(trained), seed=0)
    for step in range(_STEPS):
        rows = trained[shown.indices(torch.arange(step * _BATCH, (step + 1) * _BATCH)).numpy()]
        batch = eight_bit(images.fetch(rows), images.max_value).to(device)
        logits = classifier.head(classifier(batch))
        functional.cross_entropy(logits, labels[rows].to(device), label_smoothing=0.05).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    classifier.eval()
    right = 0
    with torch.no_grad():
        for rows in np.array_split(held_out, len(held_out) // 256 + 1):
            batch = eight_bit(images.fetch(rows), images.max_value).to(device)
            right += (classifier.head(classifier(batch)).argmax(1).cpu() == labels[rows]).sum().item()
    classifier.cpu()
    return right / len(held_out)


def _save(classifier: Classifier, path: Path) -> None:
    """Complete or not at all; a cache that cannot be written is made again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, shared=True) as draft:
            draft.write_bytes(save(classifier.state_dict(), {"accuracy": json.dumps(classifier.accuracy)}))


def _load(classifier: Classifier, path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            classifier.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            classifier.accuracy = json.loads(file.metadata()["accuracy"])
        return True
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError):
        return False


# The network of Heusel et al. 2017 as torch-fidelity converted it; the file's name holds the start of its SHA-256.
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
EXTRACTORS = ("randconv", "classifier", "inception", "dinov2")


class RandomConvolutions(Extractor):
    """Two random 3x3 convolutions at each of three scales, pooled over the image: 3 x (16 + 24) = 120 features.

    Random networks rank generators much as trained ones do (Naeem et al. 2020, section 4; Lee et al. 2022). The first layer
    sees texture, sharpness and color, the second, at half the size, corners and strokes; the coarser scales whole shapes.
    What was tried and seen with it is in benchmarks/quality/RESULTS.md. The weights are made by exact arithmetic from a fixed
    seed, so that they are the same to the last bit everywhere. Larger images are reduced to 64 pixels first, by averaging.
    """

    name = "randconv"
    resize = "larger than 64 pixels: averaged down to 64"
    SCALES, FIRST, HIDDEN, SECOND, LARGEST = 3, 16, 32, 24, 64
    dimensions = SCALES * (FIRST + SECOND)

    def __init__(self, channels: int):
        super().__init__()
        for scale in range(self.SCALES):
            for layer, (outputs, inputs) in enumerate(((self.HIDDEN, channels), (self.SECOND, self.HIDDEN))):
                self.register_buffer(f"weight_{scale}_{layer}", _normal_filters(f"randconv {scale} {layer}", outputs, inputs))
        self.sha256 = tensors_sha256(self.state_dict())

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels, features = averaged_down(to_unit_range(images, 255), self.LARGEST), []
        for scale in range(self.SCALES):
            if scale:
                pixels = _halve(pixels)
            first = _convolve(pixels, getattr(self, f"weight_{scale}_0"))
            second = _convolve(_halve(first), getattr(self, f"weight_{scale}_1"))
            features += [first[:, : self.FIRST].mean((2, 3)), second.mean((2, 3))]
        return torch.cat(features, dim=1)


_FILTER_SEED = 4  # of 0 to 5: lowest floor, and distances rise with every corruption (benchmarks/quality/RESULTS.md)


def _normal_filters(purpose: str, outputs: int, inputs: int) -> torch.Tensor:
    """float32 [outputs, inputs, 3, 3], nearly normal, each filter of norm sqrt(2), which ReLU keeps the scale with (He et al.
    2015).

    Sums of the eight bytes of a random word are nearly normal, and integers: nothing is rounded before the last product, as it
    is, differently on every CPU, by a logarithm or a sum of floats.
    """
    words = randomness.random_bits(_FILTER_SEED, purpose, torch.arange(outputs), inputs * 9)
    sums: Any = sum(words >> shift & 255 for shift in range(0, 64, 8)) * 2 - 8 * 255  # mean 0
    scales = [math.sqrt(2 / int(squares)) for squares in sums.square().sum(1)]
    return (sums.double() * torch.tensor(scales, dtype=torch.float64)[:, None]).float().view(outputs, inputs, 3, 3)


def _halve(pixels: torch.Tensor) -> torch.Tensor:
    """Averages of 2 x 2 pixels; a side of one pixel stays."""
    return functional.avg_pool2d(pixels, tuple(min(2, side) for side in pixels.shape[-2:]))


def _convolve(pixels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(functional.pad(pixels, (1, 1, 1, 1), mode="replicate"), weight).relu_()


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


def make_extractor(
    name: str,
    images: ImageSet | None,
    *,
    weights: Path | None = None,
    weights_sha256: str | None = None,
    cache_dir: Path | None = None,
    channels: int | None = None,
) -> Extractor:
    """Returns the extractor `name` of EXTRACTORS, on the CPU, in eval mode.

    Args:
        images: the reference images, which `classifier` is trained on. None where there are only
            stored statistics; then `channels` says what images will come.
        weights: local file of `inception`, local folder of `dinov2`; these two need it.
        weights_sha256: what the hash of that file must begin with.
        cache_dir: where a trained classifier is kept.

    Raises:
        UserError: reference images, labels, a file or a package are missing, or the file has another hash.
    """
    if name == "randconv":
        extractor = RandomConvolutions(images.shape[0] if images is not None else cast(int, channels))
    elif name == "classifier":
        if images is None:
            raise UserError(
                "--features classifier needs the reference images, and --reference is a file of statistics\n"
                "set --dataset_name or --train_data_dir instead"
            )
        extractor = trained_classifier(images, cache_dir)
    elif name in ("inception", "dinov2"):
        count = images.shape[0] if images is not None else channels
        if count not in (None, 1, 3):
            raise UserError(f"--features {name} needs 1 or 3 channels, and these images have {count}\nset --features randconv")
        extractor = {"inception": Inception, "dinov2": DINOv2}[name](cast(Path, weights), weights_sha256)
    else:
        raise UserError(f"unknown --features {name!r}\nchoose from {', '.join(EXTRACTORS)}")
    return extractor.eval().requires_grad_(False)
