"""Scaling, flip and color jitter against exact values and against Pillow's enhancers."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from utils.core import randomness
from utils.data.augmentation import augment, to_unit_range

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
