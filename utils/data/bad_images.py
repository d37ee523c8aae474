"""Images that cannot be decoded: named where one ends the run, remembered and counted where others take their places."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from utils.core.distributed import objects_from_all
from utils.core.errors import UserError
from utils.core.files import write_json

_NAMED = 3  # images that a message names


class UndecodableImage(UserError):
    """One image cannot be decoded, now or ever: its file is damaged, empty, absent or no image.

    Its `args` are those of `BadImage` after the row.
    """

    def __str__(self) -> str:
        name, _, reason = self.args
        return f"cannot decode the image {name}: {reason}\nrepair or remove it, or use --on_bad_image replace"


@dataclasses.dataclass(frozen=True)
class BadImage:
    """`row` of the dataset, `name` as messages call the image, its `file` where it has one of its own, and the
    `reason` in one line."""

    row: int
    name: str
    file: str | None
    reason: str


class BadImages(dict[int, BadImage]):
    """Row -> `BadImage`: those known so far, never more than `limit`. With a limit of 0 the first one is an error."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def learn(self, images: Iterable[BadImage]) -> None:
        """Adds `images`, known ones or new.

        Raises:
            UserError: that makes more than `limit`; an `UndecodableImage` where the limit is 0.
        """
        known = self | {bad.row: bad for bad in images}
        if len(known) > self.limit:
            first = [known[row] for row in sorted(known)[:_NAMED]]
            if self.limit == 0:
                raise UndecodableImage(first[0].name, first[0].file, first[0].reason)
            names = "; ".join(f"{bad.name}: {bad.reason}" for bad in first)
            raise UserError(
                f"{len(known)} or more images cannot be decoded, and --max_bad_images is {self.limit} ({names}"
                f"{'; ...' if len(known) > _NAMED else ''})\nrepair or remove these files, or raise --max_bad_images"
            )
        self.update(known)


class BadImageReport:
    """The file that lists every image that could not be decoded: its row, file and reason, and the row in its place.

    What the file listed of an earlier part of the run stays in it, and steers nothing.

    Args:
        path: of the file.
        image_sets: the sets (ImageSet) that the run uses, parts of one dataset.
        gathers: whether each process knows its own alone, as without a packed cache; else all know all.
        print_line: prints a line for the user.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        image_sets: Sequence[Any],
        *,
        gathers: bool,
        print_line: Callable[[str], None],
    ):
        self._path, self._image_sets, self._gathers, self._print_line = path, image_sets, gathers, print_line
        self._writes = accelerator.is_main_process
        self._told = 0
        self._entries: dict[int, dict] = {}
        if self._writes:
            with contextlib.suppress(OSError, ValueError):  # none yet
                self._entries = {entry["row"]: entry for entry in json.loads(path.read_text())}

    def update(self) -> dict[str, float]:
        """Brings the file up to date with what all processes know, and returns the figure to log. On every process alike.

        Raises UserError on all of them when together they know more bad images than may be.
        """
        bad_images = self._image_sets[0].bad_images
        if self._gathers:
            bad_images.learn(objects_from_all(list(bad_images.values())))
        if not self._writes or bad_images.limit == 0:
            return {}
        entries = dict(self._entries)
        for images in self._image_sets:
            for row, replaced_by in images.replacements().items():
                bad = bad_images[row]
                entries[row] = {"row": row, "file": bad.file or bad.name, "reason": bad.reason, "replaced_by": replaced_by}
        if entries != self._entries:
            self._entries = entries
            try:
                write_json(self._path, [entries[row] for row in sorted(entries)])
            except OSError as error:  # a full disk, say: no reason to end a run
                self._print_line(f"{self._path} was not written: {error.strerror or error}")
        if len(bad_images) > self._told:
            self._told = len(bad_images)
            self._print_line(f"{self._told} images cannot be decoded and are replaced by the next that can: see {self._path}")
        return {"data/bad_images": len(entries)}
