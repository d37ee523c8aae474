"""Scaling, flip, color jitter and transforms against exact values and against Pillow's enhancers."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from utils.core import randomness
from utils.data.augmentation import augment, draw_transforms, to_unit_range, transformed

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 3, 9, 8), dtype=np.uint8))
NUMBERS = torch.arange(64) + 10**10


@pytest.mark.parametrize("max_value", [255, 65535])
def test_scaling_is_even_and_can_be_undone(max_value):
    values = torch.from_numpy(np.arange(max_value + 1).astype(np.uint8 if max_value == 255 else np.uint16))
    scaled = to_unit_range(values, max_value)
    assert scaled.dtype == torch.float32 and scaled[[0, -1]].tolist() == [-1.0, 1.0]
    assert torch.equal(augment(values[:, None, None, None], values.long(), seed=0, max_value=max_value).flatten(), scaled)
    expected = np.linspace(-1, 1, max_value + 1)
    assert np.abs(scaled.numpy() - expected).max() < 1.3e-7
    restored = ((scaled.double() + 1) * max_value / 2).round().long()
    assert torch.equal(restored, torch.arange(max_value + 1))


def test_half_of_the_images_are_mirrored_left_to_right():
    plain = to_unit_range(IMAGES, 255)
    out = augment(IMAGES, NUMBERS, seed=0, max_value=255, random_flip=True)
    mirrored = torch.from_numpy(plain.numpy()[..., ::-1].copy())
    is_plain = (out == plain).flatten(1).all(1)
    is_mirrored = (out == mirrored).flatten(1).all(1)
    assert (is_plain ^ is_mirrored).all()
    many = augment(
        torch.arange(2, dtype=torch.uint8).view(1, 1, 1, 2).expand(4000, -1, -1, -1),
        torch.arange(4000),
        seed=1,
        max_value=255,
        random_flip=True,
    )
    share = (many[:, 0, 0, 0] > many[:, 0, 0, 1]).float().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("options", [{"random_flip": True}, {"color_jitter": 0.4}, {"random_flip": True, "color_jitter": 0.4}])
def test_choices_belong_to_the_sample(options):
    whole = augment(IMAGES, NUMBERS, seed=3, max_value=255, **options)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    parts = [augment(IMAGES[i : i + 5], NUMBERS[i : i + 5], seed=3, max_value=255, **options) for i in range(0, 64, 5)]
    shuffled = augment(IMAGES[order], NUMBERS[order], seed=3, max_value=255, **options)
    for actual, expected in ((shuffled, whole[order]), (torch.cat(parts), whole)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # a gray level is 8e-3
    for seed, numbers in ((4, NUMBERS), (3, NUMBERS + 64)):
        assert (augment(IMAGES, numbers, seed=seed, max_value=255, **options) - whole).abs().max() > 0.1


def test_color_jitter_agrees_with_pillow():
    strength = 0.5
    out = augment(IMAGES, NUMBERS, seed=0, max_value=255, color_jitter=strength)
    factors = 1 - strength + 2 * strength * randomness.uniform(0, "color_jitter", NUMBERS, 3).numpy()
    for image, result, (brightness, contrast, saturation) in zip(IMAGES, out, factors.tolist()):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy())
        expected = ImageEnhance.Brightness(expected).enhance(brightness)
        expected = ImageEnhance.Contrast(expected).enhance(contrast)
        expected = np.asarray(ImageEnhance.Color(expected).enhance(saturation)).transpose(2, 0, 1)
        difference = (result.numpy() + 1) * 127.5 - expected
        assert np.abs(difference).max() < 5  # Pillow rounds to 8 bits, and factors enlarge the rounding, three times
        assert abs(difference.mean()) < 2  # it truncates
    assert out.min() >= -1 and out.max() <= 1
    assert (factors.min(0) < 0.6).all() and (factors.max(0) > 1.4).all()


def test_color_jitter_of_gray_images_scales_brightness_and_contrast():
    gray = IMAGES[:, :1]
    out = augment(gray, NUMBERS, seed=0, max_value=255, color_jitter=0.3)
    brightness, contrast, _ = (0.7 + 0.6 * randomness.uniform(0, "color_jitter", NUMBERS, 3).double()).unbind(1)
    expected = (gray.double() / 255 * brightness[:, None, None, None]).clamp(0, 1)
    mean = expected.mean((1, 2, 3), keepdim=True)
    expected = (mean + (expected - mean) * contrast[:, None, None, None]).clamp(0, 1)
    np.testing.assert_allclose(out, expected * 2 - 1, rtol=0, atol=1e-5)
    assert out.shape == gray.shape


UNEVEN = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
STAIRS = torch.zeros(1, 1, 32, 32)
STAIRS[..., 12:20, 10:22] = 1


def one(images: torch.Tensor, **numbers: float) -> torch.Tensor:
    """`images` transformed by one vector, whose numbers that are not named are 0."""
    vector = torch.tensor([[numbers.get(f"n{place}", 0.0) for place in range(9)]])
    return transformed(images, vector.expand(len(images), -1))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (one(UNEVEN, n0=1), UNEVEN.flip(-1)),
        (one(UNEVEN, n1=1), UNEVEN.flip(-2)),
        (one(UNEVEN, n3=-1, n4=1), UNEVEN.rot90(-1, (-2, -1))),
        (one(UNEVEN, n3=-2, n0=1, n1=1), UNEVEN),  # half a turn, and both mirrors
        (one(UNEVEN, n7=1)[..., 1:], UNEVEN[..., :-1]),  # an eighth of the image
        (one(UNEVEN, n7=1)[..., 0], UNEVEN[..., 0]),  # beyond its edge as in a mirror
        (one(UNEVEN, n8=-2)[..., :-2, :], UNEVEN[..., 2:, :]),
    ],
)
def test_a_transform_is_what_its_numbers_say(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("numbers", "height", "width"), [({}, 8, 12), ({"n2": 5}, 16, 24), ({"n5": 5}, 4, 24), ({"n5": -5}, 16, 6)]
)
def test_sizes_and_stretches_are_powers_of_two(numbers, height, width):
    bright = one(STAIRS, **numbers)[0, 0, 8:24, 4:28] > 0.5  # without what its edges mirror
    assert (int(bright.any(1).sum()), int(bright.any(0).sum())) == (height, width)


def test_a_stretch_has_one_pair_of_numbers():
    """Along one axis as much as across the other; and it is undone by its opposite."""
    torch.testing.assert_close(one(STAIRS, n6=2)[0, 0].T, one(STAIRS.mT, n6=2)[0, 0], rtol=0, atol=1e-5)
    smooth = torch.cos(torch.linspace(-3, 3, 32))[None, None, :, None] * torch.linspace(-1, 1, 32)
    there_and_back = one(one(smooth, n5=1, n6=-1), n5=-1, n6=1)
    assert (there_and_back - smooth)[..., 8:24, 8:24].abs().max() < 0.02 < (one(smooth, n5=1, n6=-1) - smooth).abs().max()


def test_transforms_belong_to_the_sample_and_images_of_zeros_keep_their_bits():
    images, many = to_unit_range(IMAGES, 255), torch.arange(4000)
    numbers = draw_transforms(3, NUMBERS, 0.3)
    whole, plain = transformed(images, numbers), ~numbers.any(1)
    assert 0 < plain.sum() < 32 and torch.equal(whole[plain], images[plain])
    assert (whole - images)[~plain].flatten(1).abs().amax(1).min() > 0.01 and whole.abs().max() <= 1
    parts = [transformed(images[i : i + 5], draw_transforms(3, NUMBERS[i : i + 5], 0.3)) for i in range(0, 64, 5)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(draw_transforms(4, NUMBERS, 0.3), numbers)
    drawn = draw_transforms(0, many, 0.2)
    shares = (drawn != 0).float().mean(0)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.1, *[0.2] * 7]), rtol=0, atol=0.03)
    sized = [drawn[(drawn[:, 8] != 0) & chosen, 8].square().mean() for chosen in (drawn[:, 2] != 0, drawn[:, 2] == 0)]
    assert all(0.6 < square < 1.5 for square in sized)  # what is drawn says nothing of how much; 160 and 640 of variance 1
