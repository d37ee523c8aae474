import json
from types import SimpleNamespace

import pytest

from utils.core.errors import UserError
from utils.data import bad_images
from utils.data.bad_images import BadImage, BadImageReport, BadImages


class Part:
    """A stand-in for ImageSet: part of a dataset whose row 5 takes the place of any other."""

    def __init__(self, bad_images: BadImages, rows: set[int]):
        self.bad_images, self.rows = bad_images, rows

    def replacements(self) -> dict[int, int]:
        return {row: 5 for row in self.bad_images if row in self.rows}


def bad_image(row: int) -> BadImage:
    return BadImage(row, f"{row}.png (row {row})", f"{row}.png" if row < 4 else None, "damaged")


def test_bad_images_of_all_processes_and_of_earlier_parts_of_the_run_are_listed(tmp_path, monkeypatch):
    path, said, known = tmp_path / "bad_images.json", [], BadImages(3)
    path.write_text(json.dumps([{"row": 9, "file": "9.png", "reason": "earlier", "replaced_by": 8}]))
    monkeypatch.setattr(bad_images, "objects_from_all", lambda mine: [*mine, bad_image(4), bad_image(2)])
    parts = (Part(known, {0, 1, 2}), Part(known, {3, 4, 5}))
    main, other = SimpleNamespace(is_main_process=True), SimpleNamespace(is_main_process=False)
    report = BadImageReport(main, path, parts, gathers=True, print_line=said.append)
    known.learn([bad_image(0)])
    assert report.update() == {"data/bad_images": 4}
    entries = json.loads(path.read_text())
    assert [(e["row"], e["file"], e["reason"], e["replaced_by"]) for e in entries] == [
        (0, "0.png", "damaged", 5),
        (2, "2.png", "damaged", 5),
        (4, "4.png (row 4)", "damaged", 5),
        (9, "9.png", "earlier", 8),
    ]
    assert len(said) == 1 and said[0].startswith("3 images cannot be decoded")
    path.unlink()
    assert report.update() == {"data/bad_images": 4} and len(said) == 1 and not path.exists()  # nothing is new
    # Together they know too many, though each alone does not: all of them raise.
    for accelerator in (main, other):
        mine = BadImages(2)
        mine.learn([bad_image(0)])
        with pytest.raises(UserError, match=r"3 or more images .* and --max_bad_images is 2"):
            BadImageReport(accelerator, path, (Part(mine, {0}),), gathers=True, print_line=said.append).update()
    assert list(tmp_path.iterdir()) == []


def test_a_list_that_cannot_be_written_is_a_note(tmp_path):
    said, known = [], BadImages(3)
    known.learn([bad_image(0)])
    main = SimpleNamespace(is_main_process=True)
    report = BadImageReport(main, tmp_path / "absent" / "a.json", (Part(known, {0}),), gathers=False, print_line=said.append)
    assert report.update() == {"data/bad_images": 1}
    assert "was not written: No such file" in said[0]
