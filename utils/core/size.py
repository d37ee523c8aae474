"""The size of images, height before width: what `--resolution 64x96` means."""

import re
from typing import NamedTuple


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int

    @classmethod
    def of(cls, resolution: int | str) -> "Size":
        """Of 64 (64 x 64 pixels) or "64x96" (height x width). Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", str(resolution))
        size = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if min(size) < 1:
            raise ValueError(f"{resolution} is not a size in pixels")
        return size

    @property
    def resolution(self) -> int | str:
        """As `--resolution` has it, and a run's options.json: one number for a square."""
        return self.height if self.height == self.width else f"{self.height}x{self.width}"


def read_resolution(text: str) -> int | str:
    """Returns what `text` means as `Size.resolution`. Raises ValueError."""
    return Size.of(text).resolution
