"""Whether the labels that a network gets are those of its images, where the script shows which these are."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from utils.diagnostics.audit.verdict import Check

FEWEST_LOOKS = 3
FEWEST = 8  # labels of a batch
SEVERAL = 3  # different ones, for their order to say something
MANY = 4096  # classes in a row of 0 and 1
DROPPED = 3  # labels that were replaced by one, before it is judged


@dataclass
class _Replaced:
    """Where the network's labels differ from others that the script has, pooled over the looks."""

    ours: list[int] = field(default_factory=list)  # what the network gets there
    others: list[int] = field(default_factory=list)
    all_ours: set[int] = field(default_factory=set)
    all_others: set[int] = field(default_factory=set)

    def add(self, ours: torch.Tensor, others: torch.Tensor) -> None:
        differs = ours != others
        self.ours += ours[differs].tolist()
        self.others += others[differs].tolist()
        self.all_ours |= set(ours.tolist())
        self.all_others |= set(others.tolist())


class Labels:
    """Of one input of the network. Collects over the looks."""

    def __init__(self) -> None:
        self._sorted: list[bool] = []
        self._moved: list[bool] = []  # whether the images have another order than the loader's
        self._given: set[int] = set()
        self._loaded: set[int] = set()
        self._apart: list[bool] = []  # whether they are those of none of the loader's batches
        self._replaced: dict[int, _Replaced] = defaultdict(_Replaced)  # by the place among the tensors of the script

    def look(
        self, given: torch.Tensor, others: Sequence[torch.Tensor], loaded: Sequence[torch.Tensor], moved: bool = False
    ) -> None:
        """`given`: labels int64 [B] that the network gets; `others`: such tensors that the script had; `loaded`: those that
        came in its loader's last batches; `moved`: the images have another order than there."""
        ours = given.cpu()
        in_order = any(labels.shape == ours.shape and bool((labels.cpu() == ours).all()) for labels in loaded)
        self._moved.append(moved and in_order and len(ours.unique()) > 1)
        if len(ours) >= FEWEST:
            self._sorted.append(_sorted(ours) or any(_sorted(ours[ours != empty]) for empty in ours.unique()))
        known = [labels.cpu() for labels in loaded if labels.shape == ours.shape]
        if known and len(ours) >= FEWEST and len(ours.unique()) > 1:
            fits = any(_follows(ours, labels) for labels in known)
            self._apart.append(not fits and any(set(ours.tolist()) <= set(labels.tolist()) for labels in known))
            self._given |= set(ours.tolist())
            self._loaded |= {label for labels in known for label in labels.tolist()}
        for place, other in enumerate(others):
            if other.shape == ours.shape and 0 < int((other.cpu() != ours).sum()) <= len(ours) / 2:
                self._replaced[place].add(ours, other.cpu())

    def checks(self) -> list[Check]:
        name, wanted = "order of a batch's labels", "that of its images"
        in_order = len(self._sorted) >= FEWEST_LOOKS and all(self._sorted)
        text = "the labels of each batch are sorted: do they belong to its images?"
        found = "sorted" if in_order else "not sorted"
        checks = [Check("condition", name, wanted, found, not in_order, text, "info")]  # their images may be sorted as well
        # Of fewer numbers they are something else, such as how often an image was turned.
        apart = len(self._apart) >= FEWEST_LOOKS and all(self._apart) and self._given == self._loaded
        text = "the network gets other labels than those that the loader brought with the images: are they of other rows?"
        name, found = "labels beside those of the loader's batch", "others" if apart else "the same, or none came"
        checks.append(Check("condition", name, "the same", found, not apart, text, "warning"))
        moved = len(self._moved) >= FEWEST_LOOKS and all(self._moved)
        text = (
            "the images have another order than in the loader's batch, and their labels have not: they belong to other images"
        )
        name, found = "order of the images beside that of their labels", "another" if moved else "the same, or not known"
        checks.append(Check("condition", name, "the same", found, not moved, text))
        return [*checks, *self._dropped()]

    def _dropped(self) -> list[Check]:
        for replaced in self._replaced.values():
            if len(replaced.ours) < DROPPED:
                continue
            ours, others, name = set(replaced.ours), set(replaced.others), "label of images whose own is dropped"
            # The last one may stand for images without a label, too.
            if len(ours) == 1 < len(others) and ours <= replaced.all_others and max(ours) < max(replaced.all_others):
                text = (
                    f"dropped labels become {replaced.ours[0]}, which is the label of other images, too: their class is mixed"
                )
                found = f"{replaced.ours[0]}, a class of the data"
                return [Check("condition", name, "one that no image has", found, False, text, "warning")]
            if len(others) == 1 < len(ours) and not others & replaced.all_ours:
                text = f"labels are dropped (they become {replaced.others[0]}) in a tensor that the network does not get"
                return [Check("condition", name, "what the network gets", "not given to it", False, text, "warning")]
        return []


def are_reordered(images: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Whether images are those of the loader's batch in another order, by their means, float64 [B], of scaled values."""
    if images.shape != loaded.shape or len(images) < FEWEST or len(loaded.unique()) < len(loaded):
        return False
    ours, theirs = (values - values.mean() for values in (images, loaded))
    scale = float(ours.norm() / theirs.norm())
    room = 1e-4 * float(ours.norm())
    in_order, sorted_alike = (
        float((a - scale * b).norm()) < room for a, b in ((ours, theirs), (ours.sort().values, theirs.sort().values))
    )
    return sorted_alike and not in_order


def as_labels(value: torch.Tensor) -> torch.Tensor | None:
    """Labels int64 [B] of a network's input: as it is, or of rows [B, classes] with at most a single 1, of which those of zeros
    are -1; None where it holds none."""
    if value.ndim == 1 and value.dtype is torch.int64:
        return value
    value = value.to(torch.int64) if value.dtype is torch.bool else value
    if value.ndim != 2 or not 1 < value.shape[1] <= MANY or not bool(((value == 0) | (value == 1)).all()):
        return None
    counts = value.sum(1)
    return torch.where(counts > 0, value.argmax(1), -1) if bool((counts <= 1).all() and (counts > 0).any()) else None


def _sorted(labels: torch.Tensor) -> bool:
    return len(labels.unique()) >= SEVERAL and bool((labels.diff() >= 0).all() or (labels.diff() <= 0).all())


def _follows(labels: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Whether each label is a function of the loaded one; some may be replaced by one that stands for none."""
    for empty in [None, *labels.unique().tolist()]:
        kept = labels != empty if empty is not None else torch.ones_like(labels, dtype=torch.bool)
        pairs = {(a, b) for a, b in zip(loaded[kept].tolist(), labels[kept].tolist())}
        if len(pairs) == len({a for a, _ in pairs}):
            return True
    return False
