"""Whether what the network is told beside the noise level differs between images, where it should."""

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch

from utils.diagnostics.audit.seen import MicroStep, Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.seen import Seen, Times

ENOUGH = 4  # looks before labels that are all alike are judged


class Conditions:
    """Collects them over the looks."""

    def __init__(self) -> None:
        self._shared: dict[int, list[torch.Tensor | None]] = defaultdict(
            list
        )  # the row that all images share; None: they differ
        self._varied: set[int] = set()  # places for which the script had labels or tokens that differ between images

    def look(self, update: Update, tables: Collection[int]) -> list[Check]:
        """`tables`: rows of the embeddings that are trained."""
        for step in update.micro_steps:
            call, seen = step.calls.get("network"), step.batch.get("seen") or Seen()
            if call is None or not isinstance(call.inputs[0], torch.Tensor) or len(call.inputs[0]) < 2:
                continue
            batch = len(call.inputs[0])
            drawn = drawn_steps(step)
            labels = [tokens for tokens in seen.labels_of(batch) if not _alike(tokens)]
            given = [
                value for value in (*call.inputs[1:], *(step.batch.get("beside") or ())) if isinstance(value, torch.Tensor)
            ]
            free = [tokens for tokens in labels if not any(_same(tokens, value) for value in given)]  # no timesteps
            beside = step.batch.get("beside") or ()  # what a control network gets, which is trained beside the network
            beside = conditions_of(beside if begins_alike(beside, call.inputs) else (None, *beside), batch, drawn)
            for place, value in enumerate((*conditions_of(call.inputs, batch, drawn), *beside)):
                rows = value.detach().reshape(batch, -1)
                self._shared[place].append(rows[:1] if _alike(rows) else None)
                same_kind = (other for other in seen.conditions.values() if other.shape == value.shape)
                labeled = any(_belongs(tokens, rows, tables) for tokens in free)
                if _alike(rows) and (labeled or not all(map(_alike, same_kind))):
                    self._varied.add(place)
        return [check for place in sorted(self._shared) if (check := self._judged(place)) is not None]

    def _judged(self, place: int) -> Check | None:
        rows = self._shared[place]
        if len(rows) < ENOUGH:
            return None
        first = rows[0]
        one = first is not None and all(row is not None and torch.equal(row, first) for row in rows)
        text = f"the network gets the same label or text for all images, in all {len(rows)} passes looked at"
        if all(row is not None for row in rows) and not one:
            one, text = (
                True,
                f"the network gets one label or text for all images of a batch, in all {len(rows)} passes looked at",
            )
        varied = one and place in self._varied
        text += (
            ", though the script has different ones for them: are they always dropped, or those of one image?" if varied else ""
        )
        name = "label or text" if place == 0 else f"label or text, input {place + 3}"
        observed = "one for all" if one else "different"
        return Check(
            "condition", name, "different for different images", observed, not one, text, "warning" if varied else "info"
        )


def drawn_steps(step: MicroStep) -> list[Times]:
    """The whole numbers that were drawn, and before them what `add_noise` got."""
    noised = [Times(noising.timesteps, highest=sys.maxsize) for noising in step.batch.get("noising") or []]
    return noised + (step.batch.get("seen") or Seen()).times


def conditions_of(inputs: Sequence[Any], batch: int, drawn: Sequence[Times] = ()) -> list[torch.Tensor]:
    """What a network gets for each image beside the noised image and the noise level."""
    told = place_of_told(inputs, batch, drawn)
    values = [value for place, value in enumerate(inputs) if place not in (0, told)]
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim and len(value) == batch]


def begins_alike(beside: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether a network beside another gets the same image."""
    both = (*beside[:1], *inputs[:1])
    return all(isinstance(value, torch.Tensor) for value in both) and both[0].shape == both[-1].shape


def place_of_told(inputs: Sequence[Any], batch: int, drawn: Sequence[Times] = ()) -> int | None:
    """Of the number for each image, or for all, that a network gets as its noise level: the first one, or, where that is of
    labels, the one that was drawn from more numbers."""
    places = []
    for place, value in enumerate(inputs):
        one = isinstance(value, torch.Tensor) and value.numel() in (1, batch) and value.dtype != torch.bool
        if place and (one or (isinstance(value, (int, float)) and not isinstance(value, bool))):
            places.append(place)
    if not places:
        return None
    first = inputs[places[0]]
    if not isinstance(first, torch.Tensor) or first.is_floating_point():
        return places[0]
    widest = max(places, key=lambda place: _range_of(inputs[place], drawn))
    return widest if float(torch.as_tensor(inputs[widest]).max()) > float(first.max()) else places[0]


def _range_of(value: Any, drawn: Sequence[Times]) -> int:
    found = (times.highest for times in drawn if isinstance(value, torch.Tensor) and _same(times.values, value))
    return max(found, default=0)


def _alike(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _same(tokens: torch.Tensor, value: torch.Tensor) -> bool:
    return tokens.numel() == value.numel() and bool((tokens.reshape(-1) == value.reshape(-1).to(tokens.device)).all())


def _belongs(tokens: torch.Tensor, rows: torch.Tensor, tables: Collection[int]) -> bool:
    """Whether these may be the labels, or the texts, from which the network's input was made: of labels the one that stands
    for none is the highest or 0, and a text has many tokens. A mask is not made of them."""
    if tokens.ndim == 1:
        highest = float(tokens.max())
        looked_up = not rows.any() and any(highest < count for count in tables)
        return rows.shape[1] == 1 and (looked_up or highest <= float(rows.max()))
    is_mask = bool(rows.any()) and bool(((rows == 0) | (rows == 1)).all())
    return rows.shape[1] > 1 and rows.shape[1] >= tokens.shape[1] and not is_mask
