"""Sizes in flags: of images (`--resolution 64x96`: height x width), files (`--cache_limit 50GB`), runs (`--budget 2h`)."""

import re
from typing import NamedTuple

LARGEST = 16384  # pixels of a side


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int

    @classmethod
    def of(cls, resolution: int | str) -> "Size":
        """Of 64 (64 x 64 pixels) or "64x96" (height x width). Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", str(resolution))
        size = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if not 1 <= min(size) <= max(size) <= LARGEST:
            raise ValueError(f"{resolution} is not a size in pixels")
        return size

    @property
    def resolution(self) -> int | str:
        """As `--resolution` has it, and a run's options.json: one number for a square."""
        return self.height if self.height == self.width else f"{self.height}x{self.width}"


def read_bytes(text: str) -> int:
    """Returns the bytes that `text` means: 500MB, 50GB, 1.5TB, or a number of bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise ValueError(f"{text} is not a size of files")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


def describe_size(size: int) -> str:
    """Returns what so many bytes are called: 0.8 kB, 50.0 MB, 2.5 GB."""
    if size < 1e5:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def read_budget(text: str) -> tuple[float, str]:
    """Returns (3600.0, "seconds") for 1h, 60min or 3600s, and (3000.0, "updates") for 3000updates. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)|(\d+)\s*updates", text.strip())
    if not found or float(found[1] or found[3]) == 0:
        raise ValueError(f"{text} is neither a time nor a number of updates")
    if found[3]:
        return float(found[3]), "updates"
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]], "seconds"
