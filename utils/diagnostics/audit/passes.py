"""The same image in two passes over the data: what is drawn for it comes anew, and where nothing is drawn it is the same."""

from collections.abc import Callable

import torch

from utils.diagnostics.audit.chance import IMPOSSIBLE, agrees, at_least
from utils.diagnostics.audit.files import DeclaredImages
from utils.diagnostics.audit.verdict import Check

TRACKED = 64  # images that are looked at in each pass, about
VALUES = 64  # of an image that are kept
ENOUGH = 256  # pairs of passes, after which no more are kept
BLOCK = 8192  # samples whose rows are computed at once
ALIKE = 1e-3  # above the rounding of one machine's kernels, far below what a jitter changes
JITTER = 0.05  # strength of a jitter from which two images that were drawn anew are not alike


class Passes:
    """`add` keeps a few values of a few images, for which no host waits; `checks` compares them.

    Args:
        count: images of the training.
        rows_of: rows of the dataset, int64 [N], that samples of these numbers, int64 [N], show.
    """

    def __init__(self, count: int, declared: DeclaredImages, rows_of: Callable[[torch.Tensor], torch.Tensor]):
        self._declared, self._rows_of, self._every = declared, rows_of, -(-count // TRACKED)
        self._tracked: dict[int, int] = {}  # number of the sample -> row, of the newest block
        self._block = -1
        self._newest: dict[int, torch.Tensor] = {}  # by row: values [2, N] of the image and of its mirror image
        self._pairs: list[torch.Tensor] = []  # [2, 2, N], of two passes
        self._left, self._seen, self._alike = ENOUGH, 0, 0
        # Where only the place of a crop is drawn, nothing is known: square images have one alone.
        jitter, random = declared.color_jitter, declared.color_jitter or declared.random_flip
        self._judged = jitter >= JITTER if jitter else bool(random or declared.center_crop)

    def add(self, numbers: torch.Tensor, images: torch.Tensor) -> None:
        """The clean images [B, C, H, W] of samples of these numbers, int64 [B] on the host."""
        for place, number in enumerate(numbers.tolist() if self._left and self._judged else ()):
            row = self._row(number)
            if row is None:
                continue
            image = images[place].detach()
            values = torch.stack([image.flatten(), image.flip(-1).flatten()])
            values = values[:, :: -(-values.shape[1] // VALUES) | 1].float().clone()  # an odd step, unlike rows
            if row in self._newest:
                self._left -= 1
                self._pairs.append(torch.stack([self._newest[row], values]))
            self._newest[row] = values

    def _row(self, number: int) -> int | None:
        """Of a sample whose image is looked at. Rows are computed for many samples at once, which is as fast as for a few."""
        if number // BLOCK != self._block:
            self._block = number // BLOCK
            numbers = torch.arange(self._block * BLOCK, (self._block + 1) * BLOCK)
            rows = self._rows_of(numbers)
            chosen = rows % self._every == 0
            self._tracked = dict(zip(numbers[chosen].tolist(), rows[chosen].tolist()))
        return self._tracked.get(number)

    def checks(self) -> list[Check]:
        """None where too little came twice."""
        declared = self._declared
        self._count()
        if not self._seen:
            return []
        seen, alike = self._seen, self._alike
        if declared.color_jitter:
            wanted, fine = "drawn anew", alike < max(8, seen)
        elif declared.random_flip:
            fine = at_least(alike, seen, 0.5) >= IMPOSSIBLE
            fine = fine and (not declared.center_crop or agrees(alike, seen, 0.5))
            wanted = "mirrored at random"
        else:
            wanted, fine = "the same", alike == seen
        name, found = "an image in the next pass", f"{alike} of {seen} are the same as in the pass before"
        text = f"{found}; it should be: {wanted}"
        if alike == seen:
            text = f"augmentation is the same in each pass: {found}. Is it drawn by the image's row, or seeded by the pass?"
        return [Check("data", name, wanted, found, fine, text)]

    def _count(self) -> None:
        if not self._pairs:
            return
        pairs = torch.stack(self._pairs).cpu()
        self._pairs = []
        before, now = pairs[:, 0], pairs[:, 1]  # [pairs, 2, N]
        tells = torch.ones(len(pairs), dtype=torch.bool)
        if self._declared.random_flip:  # of a symmetric image a flip shows nothing
            tells = (before[:, 0] - before[:, 1]).abs().amax(1) > 10 * ALIKE
        if self._declared.color_jitter:  # nor a jitter of black and white
            tells = ((before[:, 0].abs() < 0.9).float().mean(1) > 0.05) & (before[:, 0].var(1) > 0.01)
        alike = (before[:, 0] - now[:, 0]).abs().amax(1) <= ALIKE
        self._seen += int(tells.sum())
        self._alike += int((alike & tells).sum())
