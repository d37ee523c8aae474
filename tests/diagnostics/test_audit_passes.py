"""The same images in several passes, drawn anew or not: the audit's judgment beside what is declared."""

import pytest
import torch

from utils.diagnostics.audit.files import DeclaredImages
from utils.diagnostics.audit.passes import Passes

COUNT = 50
DECLARED = {"random_flip": False, "color_jitter": 0.0, "center_crop": False}
NOISE = torch.Generator().manual_seed(0)
IMAGES = torch.rand((COUNT, 1, 8, 8), generator=NOISE) * 1.6 - 0.8


def flipped(images, passes):
    drawn = torch.rand(len(images), generator=NOISE) < 0.5
    return torch.where(drawn[:, None, None, None], images.flip(-1), images)


def flipped_alike(images, passes):
    return torch.where((torch.arange(len(images)) % 3 == 0)[:, None, None, None], images.flip(-1), images)


def flipped_in_turns(images, passes):
    return images.flip(-1) if passes % 2 else images


def jittered(images, passes):
    return (images * (0.8 + 0.4 * torch.rand((len(images), 1, 1, 1), generator=NOISE))).clamp(-1, 1)


def unchanged(images, passes):
    return images


def seen(augment, images=IMAGES, passes: int = 4, **declared) -> list:
    order = torch.stack([torch.randperm(len(images), generator=NOISE) for _ in range(passes + 1)]).flatten()
    looks = Passes(len(images), DeclaredImages(8, 1, background="white", max_value=255, **DECLARED | declared), by(order))
    for number in range(passes):
        rows = order[number * len(images) : (number + 1) * len(images)]
        shown = augment(images, number)[rows]
        numbers = torch.arange(number * len(images), (number + 1) * len(images))
        for part in range(0, len(images), 10):
            looks.add(numbers[part : part + 10], shown[part : part + 10])
    return looks.checks()


def by(order):
    return lambda numbers: order[numbers % len(order)]


@pytest.mark.parametrize(
    ("augment", "declared"),
    [
        (flipped, {"random_flip": True}),
        (flipped, {"random_flip": True, "center_crop": True}),
        (jittered, {"color_jitter": 0.2}),
        (jittered, {"color_jitter": 0.2, "random_flip": True}),
        (unchanged, {"center_crop": True}),
    ],
)
def test_what_is_drawn_as_declared_is_healthy(augment, declared):
    [check] = seen(augment, **declared)
    assert check.healthy, check


@pytest.mark.parametrize(
    ("augment", "declared", "words"),
    [
        (flipped_alike, {"random_flip": True}, "the same in each pass: 150 of 150"),
        (flipped_in_turns, {"random_flip": True, "center_crop": True}, "0 of 150 are the same"),
        (unchanged, {"color_jitter": 0.1}, "the same in each pass"),
        (jittered, {"center_crop": True}, "it should be: the same"),
    ],
)
def test_what_is_not_is_said(augment, declared, words):
    [check] = seen(augment, **declared)
    assert check.healthy is False and check.stage == "data" and words in check.message, check


def test_symmetric_and_black_images_tell_nothing():
    symmetric = IMAGES + IMAGES.flip(-1)
    assert seen(flipped_alike, symmetric, random_flip=True) == []
    assert seen(unchanged, -torch.ones_like(IMAGES), color_jitter=0.2) == []


def test_nothing_is_said_of_a_random_crop_or_of_one_pass():
    assert seen(unchanged) == []
    assert seen(flipped, passes=1, random_flip=True) == []


def test_a_weak_jitter_is_not_judged_and_little_is_kept():
    assert seen(unchanged, color_jitter=0.01) == []
    looks = Passes(
        1, DeclaredImages(64, 1, background="white", max_value=255, **DECLARED | {"random_flip": True}), torch.zeros_like
    )
    looks.add(torch.tensor([0]), torch.rand(1, 1, 64, 64))
    assert sum(values.untyped_storage().nbytes() for values in looks._newest.values()) <= 2 * 64 * 4
