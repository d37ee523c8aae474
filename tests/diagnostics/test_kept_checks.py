"""What was seen of a set is kept beside its packed images: read again for the same question alone, and never needed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from utils.diagnostics.data_check import check_data
from utils.diagnostics.data_checks import checks, kept
from utils.diagnostics.data_checks.sample import Sample

MIRRORED = {"dataset_name": "digits", "image_channels": 1, "max_train_images": 300}  # as digits may not be: a picture of it


@pytest.fixture
def looks(monkeypatch) -> list:
    """Grows by one each time that images are looked at."""
    made = []
    monkeypatch.setattr(kept, "check_data", lambda images, seed: made.append(images) or check_data(images, seed=seed))
    return made


@pytest.fixture
def quick(looks, monkeypatch) -> None:
    """The looks show nothing, in no time."""
    monkeypatch.setattr(kept, "look_at", lambda sample: {"failed": [], "findings": []})


@pytest.fixture
def ask(opened, tmp_path):
    """Returns what is recorded of a set that is opened anew, as the start of a run does."""

    def of(images=None, held_out=range(40), *, seed=0, random_flip=True, folder=tmp_path / "run", **options):
        images = images or opened(**MIRRORED | options)
        return kept.records_of_images(
            images.subset(range(40, len(images))), images.subset(held_out), seed=seed, random_flip=random_flip, folder=folder
        )

    return of


def test_the_second_start_reads_what_the_first_saw(ask, opened, looks, tmp_path):
    first, again = ask(folder=tmp_path / "first"), ask(folder=tmp_path / "again")
    assert len(looks) == 1
    images = opened(**MIRRORED)
    training = images.subset(range(40, 300))
    seen = checks.look_at(Sample.of(training, images.subset(range(40)), True))
    assert first == again == {"data": check_data(training, seed=0), "data_checks": checks.record_of(seen, tmp_path / "now")}
    (picture,) = {finding["picture"] for finding in again["data_checks"]["findings"] if finding["code"] == "data-mirror"}
    assert (tmp_path / "again" / picture).read_bytes() == (tmp_path / "now" / picture).read_bytes()


def test_another_question_is_asked_anew(ask, opened, looks, quick, monkeypatch, tmp_path):
    images = opened(**MIRRORED)
    ask(images)
    relabeled = dataclasses.replace(images, labels=np.roll(images.labels, 1))
    renamed = dataclasses.replace(images, class_names=list("abcdefghij"))
    others = [{"seed": 1}, {"random_flip": False}, {"held_out": range(41)}, {"images": relabeled}, {"images": renamed}]
    others += [{"max_train_images": 299}, {"resolution": 10}]
    for number, other in enumerate(others, 1):
        ask(**other)
        assert len(looks) == 1 + number, other
        ask(**other)
        assert len(looks) == 1 + number, other
    code = tmp_path / "utils" / "diagnostics" / "data_checks"
    code.mkdir(parents=True)
    for name, count in ("data_check.py", 9), ("another.py", 10):
        (code / name).write_text("pass")
        monkeypatch.setattr(kept, "__file__", str(code / "kept.py"))
        ask()
        assert len(looks) == count, name


def test_what_cannot_be_kept_is_asked_again(ask, opened, looks, monkeypatch):
    def broken(sample):
        raise MemoryError

    images = opened(**MIRRORED)
    folder = Path(images.store.packed.path).parent
    with monkeypatch.context() as patch:
        patch.setitem(checks.CHECKS, broken, "data-mixed")
        assert ask(images)["data_checks"]["failed"] == ["broken: MemoryError: "]
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(PermissionError()))  # a cache that is only read
        expected = ask(images, folder=None)
    assert len(looks) == 2 and not list(folder.glob("*checked*"))
    ask(images)
    (file,) = folder.glob("checked-*.json")
    for count, damaged in ((4, file.read_text()[:-9]), (5, file.read_text().replace("1", "2", 1)), (6, '{"seen": {"x": 1}}')):
        file.write_text(damaged)
        assert ask(images, folder=None) == expected and len(looks) == count
    assert json.loads(file.read_text())["seen"]["data"] == expected["data"]
    ask(opened(**MIRRORED, cache_images="no"))
    ask(opened(**MIRRORED, cache_images="no"))
    assert len(looks) == 8


def test_few_files_are_kept(ask, opened, quick, monkeypatch):
    monkeypatch.setattr(kept, "KEPT", 3)
    images = opened(**MIRRORED)
    files = set()
    for seed in range(4):
        ask(images, seed=seed)
        files |= set(images.store.packed.path.parent.glob("checked-*.json"))
    assert len(files) == 4 and sum(file.exists() for file in files) == 3
