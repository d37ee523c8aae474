"""Whether what the network is told beside the noise level differs between images, where it should."""

from collections import defaultdict

import torch

from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.seen import Seen

ENOUGH = 4  # looks before labels that are all alike are judged


class Conditions:
    """Collects them over the looks."""

    def __init__(self) -> None:
        self._shared: dict[int, list[torch.Tensor | None]] = defaultdict(
            list
        )  # the row that all images share; None: they differ
        self._varied: set[int] = set()  # places for which the script had labels or tokens that differ between images

    def look(self, update: Update) -> list[Check]:
        for step in update.micro_steps:
            call, seen = step.calls.get("network"), step.batch.get("seen") or Seen()
            if call is None or not isinstance(call.inputs[0], torch.Tensor) or len(call.inputs[0]) < 2:
                continue
            batch = len(call.inputs[0])
            labels = [tokens for tokens in seen.labels_of(batch) if not _alike(tokens)]
            for place, value in enumerate(call.inputs[2:]):
                if isinstance(value, torch.Tensor) and value.ndim and len(value) == batch:
                    rows = value.detach().reshape(batch, -1)
                    self._shared[place].append(rows[:1] if _alike(rows) else None)
                    if _alike(rows) and any(_belongs(tokens, rows) for tokens in labels):
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


def _alike(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _belongs(tokens: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether these may be the labels, or the texts, from which the network's input was made: of labels the one that stands
    for none is the highest, and a text has many tokens."""
    if tokens.ndim == 1:
        return rows.shape[1] == 1 and float(tokens.max()) <= float(rows.max())
    return rows.shape[1] > 1
