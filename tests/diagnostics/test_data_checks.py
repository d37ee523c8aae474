"""The checks of the images: a planted fault each, and silence about healthy ones."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from test_data_check import image_set, planes, scenes

import diagnose
from benchmarks.doctor.sets import damages
from benchmarks.doctor.sets.pictures import Pictures
from utils.diagnostics.data_checks import checks, copies, recognition
from utils.diagnostics.data_checks.changed import changed as check_of_changes
from utils.diagnostics.data_checks.population import strangers
from utils.diagnostics.data_checks.recognition import contradicted as labels_check
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


def damaged(name, held_out=40):
    """(training images, held-out images) of a fault of the benchmark of data sets, at its middle strength."""
    made = getattr(damages, name)(Pictures(list(SCENES), held_out=held_out), np.random.default_rng(0), 1)
    images = np.stack(made.images)
    return images[:-held_out], images[-held_out:]


def things(count, seed=0):
    """Blots of one color, each of its own outline and grain, on white: uint8 [count, 32, 32, 1]."""
    rng = np.random.default_rng(seed)
    images = np.full((count, 32, 32, 1), 255, np.uint8)
    for image in images:
        outline = rng.random((5, 5)).repeat(4, 0).repeat(4, 1)[..., None] > 0.4
        y, x = rng.integers(4, 9, 2)
        image[y : y + 20, x : x + 20] = np.where(outline, rng.integers(0, 200) + rng.integers(0, 4, (20, 20, 1)), 255)
    return images


def slanted(angle, count=120):
    """Three rows of short strokes, each to the right or to the left of upright."""
    rng, images = np.random.default_rng(3), []
    for _ in range(count):
        page = Image.new("L", (96, 96), 255)
        for row in range(3):
            for x in range(int(rng.integers(4, 16)), 90, 12):
                top, jitter = 32 * row + 8, int(rng.integers(-3, 4))
                side = angle if angle else int(rng.choice([-8, 8]))
                ImageDraw.Draw(page).line([(x + jitter, top + 18), (x + jitter + side, top)], fill=0, width=3)
        images.append(np.asarray(page.resize((48, 48), Image.Resampling.BOX)))
    return np.stack(images)[..., None]


@pytest.mark.parametrize("random_flip", [False, True])
def test_nothing_is_found_in_healthy_images(random_flip):
    labels = np.arange(120) % 4
    assert above_info(SCENES[:120], SCENES[120:], labels, random_flip) == set()
    assert above_info(SCENES[:120, ..., :1], SCENES[120:, ..., :1]) == set()


PLANTED = [
    *(("data-channels", "dead_everywhere"), ("data-bars", "bars"), ("data-pattern", "dust"), ("data-leak", "leaked")),
    *(("data-mixed", "masks"), ("data-mixed", "washed_out"), ("data-copies", "augmented_on_disk")),
    *(("data-copies", "brighter_copies"), ("data-compressed", "compressed")),
    *(("data-resampled", "enlarged_by_nearest"), ("data-resampled", "enlarged_bilinearly")),
]


@pytest.mark.parametrize(("code", "name"), PLANTED)
def test_a_planted_fault_is_named(code, name):
    assert code in above_info(*damaged(name))


@pytest.mark.parametrize("labels", [None, "classes", "two_classes", "others"])
def test_a_kind_that_is_a_class_of_its_own_is_no_mixture(labels):
    """Dark images among bright ones; in the last turn, the classes say nothing of it."""
    rng = np.random.default_rng(0)
    dark = np.arange(200) % 5 == 0
    images = rng.integers(0, 60, (200, 16, 16, 1)) + np.where(dark, 0, 190)[:, None, None, None]
    given = {None: None, "classes": dark, "two_classes": dark * (1 + np.arange(200) % 2), "others": np.arange(200) % 4}[labels]
    sample = Sample(images.astype(np.uint8), NONE[..., :1], None if given is None else given.astype(np.int64))
    assert bool(list(strangers(sample))) is (labels in (None, "others"))


def test_classes_of_a_few_images_do_not_explain_a_mixture():
    images = np.arange(200).repeat(16 * 16 * 3).reshape(200, 16, 16, 3).astype(np.uint8)
    part = np.arange(200) < 40
    assert not Sample(images, NONE, np.arange(200) // 4).is_labeled(np.arange(200), part)
    assert Sample(images, NONE, np.arange(200) // 8).is_labeled(np.arange(200), part)
    assert not Sample(images, NONE, np.where(part, -1, 0)).is_labeled(np.arange(200), part)


def test_a_few_images_that_come_again_and_again_are_copies():
    """Four images, each 40 times: moved and darker."""
    rng = np.random.default_rng(2)
    moved = [np.roll(SCENES[i % 4], rng.integers(-2, 3, 2), (0, 1)) * rng.uniform(0.6, 1) for i in range(160)]
    assert "data-copies" in above_info(np.stack(moved).astype(np.uint8))


def test_things_on_a_plain_background_are_copies_only_when_each_pixel_says_so():
    images = things(160)
    assert above_info(images) == set()
    images[80:] = np.roll(images[:80, :, ::-1], (2, -3), (1, 2))
    assert above_info(images) == {"data-copies"}
    assert above_info(images[:80], images[80:120]) == {"data-leak"}


def test_moved_copies_are_those_that_a_comparison_of_all_windows_finds():
    images = things(24, seed=1)
    images[20:] = np.roll(images[[3, 5, 8, 13]], (-2, 4), (1, 2))
    found, place = copies.moved(images[12:], images, np.arange(12, 24))
    middles = images[12:, 5:27, 5:27]  # 70 % of the side
    for number, middle in enumerate(middles):
        equal = {
            other
            for other in range(24)
            for y in range(11)
            for x in range(11)
            for part in (middle, middle[:, ::-1])
            if other != 12 + number and (images[other, y : y + 22, x : x + 22] == part).all()
        }
        assert found[number] == bool(equal) and (not equal or place[number] in equal)
    assert found.sum() == 5  # the four, and number 13, which is in the first part and in the second


def test_rows_of_strokes_that_all_lean_one_way_are_not_to_be_mirrored():
    assert above_info(slanted(8), random_flip=True) == {"data-mirror"}
    assert above_info(slanted(0), random_flip=True) == set()


def test_dark_corners_and_a_few_doubled_images_are_for_information_alone():
    images = SCENES.copy()
    images[:24] = 3 + np.random.default_rng(0).integers(0, 3, (24, 32, 32, 1))
    images[30:46] = enlarged(Image.Resampling.NEAREST)[30:46]
    assert above_info(images) == set()
    seen = [finding["evidence"] for finding in checks.look_at(Sample(images, NONE))["findings"]]
    assert any("nearly plain" in evidence for evidence in seen) and any("2.0 times" in evidence for evidence in seen)


def test_enlargement_by_the_loading_is_left_to_the_figures():
    sizes = np.full((160, 2), 16)
    assert "data-resampled" not in above_info(enlarged(Image.Resampling.BILINEAR), sizes=sizes)
    wide = enlarged(Image.Resampling.BILINEAR)[:, 6:26]  # 20x32, of files that cover its height but not its width
    assert "data-resampled" not in above_info(wide, sizes=np.full((160, 2), 22))
    assert "data-resampled" in above_info(wide, sizes=np.full((160, 2), 32))


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
    images = image_set(planes(np.concatenate(damaged("bars"))), np.zeros(160, np.int64), ["a", "b"])
    sample = Sample.of(images.subset(range(120)), images.subset(range(120, 160)), False)
    seen = checks.record_of(checks.look_at(sample), tmp_path)
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


def horizons(count=200, seed=5):
    """A blue sky that gets paler downwards above a green land with some grain: uint8 [count, 32, 32, 3]."""
    rng, rows = np.random.default_rng(seed), np.arange(32)[:, None, None]
    images = []
    for _ in range(count):
        sky = np.array([110, 160, 230]) * rng.uniform(0.7, 1.1) + 1.5 * rows
        land = np.array([70, 120, 50]) * rng.uniform(0.6, 1.4) + rng.normal(0, 12, (32, 32, 3))
        line = 16 + np.cumsum(rng.normal(0, 0.8, 32))[:, None]
        images.append(np.where(rows > line, land, sky + rng.normal(0, 4, (32, 32, 3))))
    return np.clip(np.stack(images), 0, 255).astype(np.uint8)


def wrong_bits(image):
    """A hundredth of the bits flipped, at other places in each image."""
    bits = np.unpackbits(image)
    bits ^= np.random.default_rng(int(image.sum())).random(len(bits)) < 0.01
    return np.packbits(bits).reshape(image.shape)


def halved(image):
    return resized(resized(image, 16, Image.Resampling.BOX), 32, Image.Resampling.BILINEAR)


CHANGED = {
    "negatives": lambda image: 255 - image,
    "exchanged": lambda image: image[..., ::-1],
    "gray": lambda image: image.mean(-1, keepdims=True).repeat(3, -1).astype(np.uint8),
    "turned by 90": lambda image: np.rot90(image),
    "upside down": lambda image: image[::-1, ::-1],
    "contrast": lambda image: image // 2 + 64,
    "half as bright": lambda image: image // 2,
    "enlarged": halved,
    "wrong pixels": wrong_bits,
}


@pytest.mark.parametrize("word", CHANGED)
def test_a_part_of_the_images_that_was_changed_is_named_with_its_share(word):
    images = horizons(400)
    changed = np.random.default_rng(1).random(len(images)) < 0.15
    images[changed] = [CHANGED[word](image) for image in images[changed]]
    seen = [finding for finding in check_of_changes(Sample(images, NONE)) if word in finding.evidence]
    assert len(seen) == 1 and seen[0].severity == "warning"
    share = float(seen[0].evidence.split("about ")[1].split("%")[0]) / 100
    assert share == pytest.approx(changed.mean(), abs=0.04)  # a standard deviation of binomial counts is 0.025


def test_images_without_an_orientation_or_a_color_of_their_own_are_left_alone():
    rng = np.random.default_rng(2)
    textures = np.clip(127 + 40 * rng.standard_normal((200, 16, 16, 3)), 0, 255).astype(np.uint8)
    textures[::5] = textures[::5, ::-1, ::-1, ::-1]
    assert list(check_of_changes(Sample(textures, NONE))) == []
    assert list(check_of_changes(Sample(horizons(), NONE))) == []


def test_scores_are_those_of_a_regression_without_the_image():
    rng = np.random.default_rng(3)
    features, kinds = rng.standard_normal((40, 6)).astype(np.float32), np.repeat([0, 1], 20)
    features[:, -1] = 1
    features[20:, 0] += 1.5
    for pairs in (False, True):
        scores = recognition.held_out_scores(torch.from_numpy(features), torch.from_numpy(kinds), pairs)
        errors = []
        for ridge in 10.0 ** np.arange(-3, 2):
            expected = np.empty((40, 2))
            penalty = ridge * np.linalg.eigvalsh(features.T.astype(float) @ features / 20).mean() * np.eye(6)
            for out in range(40):
                kept = np.setdiff1d(np.arange(40), [out, (out + 20) % 40] if pairs else [out])
                x, y = features[kept].astype(float), np.eye(2)[kinds[kept]] - 0.5
                expected[out] = features[out] @ np.linalg.solve(x.T @ x / 20 + penalty, x.T @ y / 20)
            errors.append((((expected - np.eye(2)[kinds] + 0.5) ** 2).mean(), expected))
        assert scores == pytest.approx(min(errors, key=lambda one: one[0])[1], abs=1e-5)


@pytest.mark.parametrize("overlap", [0.3, 1.0, 3.0])
def test_classes_that_overlap_have_no_wrong_labels_whatever_their_sizes(overlap):
    """Two normal distributions: the log-odds, which the margin is, are known; their overlap alone makes the errors."""
    rng = np.random.default_rng(4)
    for share in (0.5, 0.1):
        kinds = rng.random(3000) < share
        odds = (rng.normal(0, overlap, 3000) + (2 * kinds - 1)) / overlap**2
        assert not recognition.contradictions(np.where(kinds, odds, -odds), 2, 0.02).sure


def test_wrong_labels_of_classes_that_hardly_overlap_are_counted():
    rng = np.random.default_rng(6)
    margins = np.abs(rng.normal(3, 1, 2000))
    wrong = rng.random(2000) < 0.1
    found = recognition.contradictions(np.where(wrong, -margins, margins), 2, 0.02)
    assert found.sure and found.share == pytest.approx(wrong.mean(), abs=0.01) and 0.05 < found.least < found.share
    assert not recognition.contradictions(np.where(wrong & (rng.random(2000) < 0.1), -margins, margins), 2, 0.02).sure


def test_labels_that_mean_nothing_are_no_wrong_labels():
    rng = np.random.default_rng(7)
    for shares in ((0.5, 0.5), (0.3, 0.7), (0.04, 0.96), (0.2, 0.3, 0.5)):
        assert list(labels_check(Sample(SCENES, NONE, rng.choice(len(shares), len(SCENES), p=shares)))) == []


@pytest.mark.parametrize("exchanged", [True, False])
def test_two_classes_that_were_confused_are_named(exchanged):
    rng = np.random.default_rng(8)
    images, labels = horizons(450, 9), rng.integers(0, 3, 450)
    images[labels == 1] = 255 - images[labels == 1]
    images[labels == 2] = np.rot90(images[labels == 2], 1, (1, 2))
    given = np.where((labels < 2) & (rng.random(450) < 0.3) & exchanged, 1 - labels, labels)
    assert ("class-mislabeled" in {one.code for one in labels_check(Sample(images, NONE, given))}) == exchanged
