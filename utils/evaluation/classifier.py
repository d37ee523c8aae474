"""A small classifier of the reference dataset's own labels: an extractor that looks at what the classes differ in, and the
judge of which classes a set of samples shows. It is trained here, apart from any generator, and kept by the dataset's
fingerprint."""

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from utils.core.errors import UserError
from utils.core.files import whole_file
from utils.data.augmentation import averaged_down, to_unit_range
from utils.data.dataset import ImageSet, content_fingerprint
from utils.data.loader import SampleOrder
from utils.evaluation.extractor_base import Extractor, eight_bit, tensors_sha256

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
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, shared=True) as draft:
            save_file(classifier.state_dict(), draft, {"accuracy": json.dumps(classifier.accuracy)})


def _load(classifier: Classifier, path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            classifier.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            classifier.accuracy = json.loads(file.metadata()["accuracy"])
        return True
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError):
        return False
