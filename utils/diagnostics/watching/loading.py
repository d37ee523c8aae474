"""Whether a script's loader brings the images in another order in each pass. Between two passes nothing is kept but the means
of a few images."""

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.labels import as_labels
from utils.diagnostics.watching.places import tensors_within
from utils.diagnostics.watching.stored_images import StoredImages

SURE = 1e-6  # of the chance that shuffled passes begin alike
MOST = 32  # passes that are compared
SHARE = 0.5  # of the updates, before which a loader has brought something
AHEAD = 3  # batches of which one is trained on: loaders bring some in advance


@dataclass
class _Loader:
    ordered: bool  # its sampler gives the rows one after the other
    images: int  # in a pass; 0: not known
    rows: int  # of the dataset; 0: not known
    sampler: Any = None  # what gives the numbers of its batches
    steps: int = -1  # of all optimizers, when it was last asked
    trained: int = 0  # batches after which an optimizer made a step
    begins: list[torch.Tensor] = field(default_factory=list)  # what each pass begins with: means of its images, float64 [B]
    stored: StoredImages | None = None  # once a second pass begins


class Loading:
    """Sees every batch that torch's loaders are asked for."""

    def __init__(self) -> None:
        self._loaders: dict[int, _Loader] = {}  # by the id of the dataset
        self.labels: tuple[torch.Tensor, ...] = ()  # int64 [B], of the last batches
        self.means: tuple[torch.Tensor, ...] = ()  # of their images, float64 [B]

    def see(self, iterator: Any, batch: Any, steps: int, soon: bool = True) -> None:
        """`iterator`: of a loader, which gave `batch`; `steps`: those that optimizers have made so far; `soon`: one of the next
        updates is looked at."""
        key, loader = id(iterator._dataset), self._loaders.get(id(iterator._dataset))
        if loader is not None:
            loader.trained += loader.steps >= 0 and steps > loader.steps
        another = loader is not None and not loader.trained and loader.sampler is not iterator._index_sampler
        if loader is None or another:  # one that measures the images, before the training begins, has a loader of its own
            sampler = _innermost(iterator._index_sampler)
            images, rows = _length(sampler), _length(iterator._dataset)
            loader = _Loader(type(sampler) is SequentialSampler, images, rows, iterator._index_sampler)
            self._loaders[key] = loader
        loader.steps = steps
        parts = [
            each for each in tensors_within([batch]) if each.ndim == 1 or (soon and each.ndim == 2)
        ]  # whose values are read
        labels = [found for each in parts if (found := as_labels(each)) is not None]
        self.labels = (*self.labels, *labels)[-AHEAD * len(labels) :] if labels else ()
        if iterator._num_yielded == 1 and loader.begins and loader.stored is None:
            with contextlib.suppress(Exception):  # that the script's own dataset raises
                loader.stored = StoredImages(iterator._dataset)
        begins = iterator._num_yielded == 1 and len(loader.begins) < MOST
        means = _means(batch) if begins or soon else None
        if means is not None and begins:
            loader.begins.append(means)
        if means is not None:
            self.means = (*self.means, means)[-AHEAD:]

    @property
    def images(self) -> int:
        """Of the dataset that is trained on; 0: not known."""
        found = max(self._loaders.values(), key=lambda loader: loader.trained, default=None)
        return 0 if found is None else found.rows

    def end(self, updates: int) -> list[Check]:
        """Of the loader that the training takes its images from."""
        found = max(self._loaders.values(), key=lambda loader: loader.trained, default=None)
        if found is None or not found.trained or found.trained < SHARE * updates or not found.begins:
            return []
        first, *others = found.begins
        alike = bool(others) and all(one.shape == first.shape and torch.allclose(one, first, 1e-5, 1e-7) for one in others)
        batch = len(first)
        chance = math.perm(found.images, batch) if found.images >= 2 * batch else 1
        checks = []
        if found.stored is not None:
            text = "the images that the dataset keeps in memory change from pass to pass: is an augmentation made in place?"
            changed = False
            with contextlib.suppress(Exception):
                changed = found.stored.changed()
            name, wanted = "images that the dataset keeps", "the same in each pass"
            checks = [Check("data", name, wanted, "others" if changed else "the same", not changed, text, "warning")]
        again = alike and len(first.unique()) > 1 and chance ** len(others) > 1 / SURE
        name, wanted = "first images of each pass over the data", "others in each"
        if not again and not (found.ordered and not others and found.images >= 2 * batch):
            return [*checks, Check("data", name, wanted, "others" if others else "one pass alone", True)]
        text = f"each of {len(found.begins)} passes over the data begins with the same images in the same order: "
        text += "shuffle=False, or a seed that is set anew?"
        if not again:
            text = "the loader brings the images in the order of the dataset: shuffle=False?"
        severity = "warning" if again else "info"  # a dataset may draw its images, or was shuffled before
        return [*checks, Check("data", name, wanted, "the same" if again else "those of the dataset", False, text, severity)]


def _length(of: Any) -> int:
    """0 of those that have none."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(of)
    return 0


def _innermost(sampler: Any) -> Any:
    """What gives the numbers of the rows: samplers of batches, and those of Accelerate, have it in them."""
    for _ in range(4):
        inner = getattr(sampler, "batch_sampler", None)
        inner = getattr(sampler, "sampler", None) if inner is None else inner
        if inner is None:
            break
        sampler = inner
    return sampler


def _means(batch: Any) -> torch.Tensor | None:
    """Of the images of a batch, float64 [B], which flips do not change."""
    images = [each for each in tensors_within([batch]) if each.ndim > 2 and len(each) > 1]
    return images[0].detach().double().flatten(1).mean(1).cpu() if images else None
