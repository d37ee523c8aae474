"""The checks of the images: a planted fault each, and silence about healthy ones."""

import io

import numpy as np
import pytest
from PIL import Image
from test_data_check import image_set, planes, scenes

import diagnose
from utils.diagnostics.data_checks import checks
from utils.diagnostics.data_checks.sample import Sample
from utils.diagnostics.diagnose import judge
from utils.runs.record import RunRecord

SCENES = scenes(160)  # uint8 [160, 32, 32, 3]
NONE = SCENES[:0]


def above_info(images, held_out=NONE, labels=None, random_flip=False, sizes=None) -> set[str]:
    sample = Sample(images, held_out, None if labels is None else np.asarray(labels), sizes, random_flip)
    seen = checks.look_at(sample)
    assert seen["failed"] == []
    return {finding["code"] for finding in seen["findings"] if finding["severity"] != "info"}


def resized(image, side, filter):
    return np.asarray(Image.fromarray(image).resize((side, side), filter))


def enlarged(filter):
    return np.stack([resized(resized(image, 16, Image.Resampling.BOX), 32, filter) for image in SCENES])


def compressed(quality=8):
    changed = []
    for image in SCENES:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        changed.append(np.asarray(Image.open(file)))
    return np.stack(changed)


def with_bars():
    images = SCENES.copy()
    images[:, :4], images[:, -4:] = 0, 0
    return images


def with_mark():
    images = SCENES.astype(int)
    images[:, 10:20:3, 8:24] += 40
    return np.clip(images, 0, 255).astype(np.uint8)


def without_blue():
    return SCENES * np.array([1, 1, 0], np.uint8)


def with_masks():
    images = SCENES.copy()
    images[::8] = 255 * (images[::8, ..., :1] > 127)
    return images


def copied():
    """Each image again: mirrored, darker, moved by a pixel."""
    changed = np.roll(SCENES[:80, :, ::-1], 1, 2) * 0.8
    return np.concatenate([SCENES[:80], changed.astype(np.uint8)])


@pytest.mark.parametrize("random_flip", [False, True])
def test_nothing_is_found_in_healthy_images(random_flip):
    labels = np.arange(120) % 4
    assert above_info(SCENES[:120], SCENES[120:], labels, random_flip) == set()
    assert above_info(SCENES[:120, ..., :1], SCENES[120:, ..., :1]) == set()


@pytest.mark.parametrize(
    "code, made",
    [
        ("data-channels", without_blue),
        ("data-bars", with_bars),
        ("data-pattern", with_mark),
        ("data-mixed", with_masks),
        ("data-copies", copied),
        ("data-resampled", lambda: enlarged(Image.Resampling.NEAREST)),
        ("data-resampled", lambda: enlarged(Image.Resampling.BILINEAR)),
        ("data-compressed", compressed),
    ],
)
def test_a_planted_fault_is_named(code, made):
    assert code in above_info(made())


def test_enlargement_by_the_loading_is_left_to_the_figures():
    sizes = np.full((160, 2), 16)
    assert "data-resampled" not in above_info(enlarged(Image.Resampling.BILINEAR), sizes=sizes)


def test_copies_among_the_held_out_images_are_named():
    assert "data-leak" in above_info(SCENES[:120], SCENES[110:140])


def test_wrong_labels_and_mirrored_digits_are_named():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)[:500]
    labels = labels[:500]
    assert above_info(images, labels=labels) == set()
    wrong = labels.copy()
    wrong[::8] = (wrong[::8] + 3) % 10
    assert above_info(images, labels=wrong) == {"class-mislabeled"}
    assert above_info(images, labels=labels, random_flip=True) == {"data-mirror"}


def test_few_images_and_blank_ones_are_no_reason_to_fail():
    for images in (SCENES[:1], SCENES[:7], SCENES[:70] * 0, SCENES[:70, :5, :5]):
        assert above_info(np.ascontiguousarray(images), images[:12], [0] * len(images), True) <= {"data-leak"}


def test_the_record_becomes_findings_with_pictures(tmp_path, monkeypatch):
    def broken(sample):
        raise ValueError("oops")

    monkeypatch.setitem(checks.CHECKS, broken, "data-mixed")
    images = image_set(planes(with_bars()), np.zeros(160, np.int64), ["a", "b"])
    seen = checks.look_at(Sample.of(images.subset(range(120)), images.subset(range(120, 160)), False), tmp_path)
    classes = {"number": 2, "empty": 1, "counts": {"a": 160, "b": 0}}
    record = RunRecord(tmp_path, history=[{"step": 0, "data_checks": seen, "data": {"classes": classes}}])
    findings, judged = judge(record)
    found = {finding.code: finding for finding in findings}
    assert {"data-bars", "class-empty"} <= found.keys() and "data-compressed" in judged
    assert "4 top, 4 bottom" in found["data-bars"].evidence and found["rule-failed"].evidence == "broken: ValueError: oops"
    with Image.open(tmp_path / found["data-bars"].picture) as picture:
        assert picture.size[0] > 100


def test_a_dataset_alone_gets_a_report(tmp_path, capsys):
    words = ["--dataset_name", "digits", "--resolution", "8", "--image_channels", "1", "--cache_dir", str(tmp_path / "cache")]
    assert diagnose.main(diagnose.parse_args([*words, "--report_dir", str(tmp_path / "report")])) == 0
    assert "data-mirror" in (tmp_path / "report" / "report.html").read_text()
    assert list((tmp_path / "report" / "data_check").glob("*.png"))
