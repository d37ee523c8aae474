import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from test_validation import Images
from torch.utils._python_dispatch import TorchDispatchMode

from utils.diagnostics.data_check import nearest
from utils.evaluation.memorization import (
    Originals,
    closest,
    kept_for_memorization,
    memorization,
    near_duplicates,
    small_pixels,
)


def patches(count: int, seed: int) -> np.ndarray:
    """Random squares of 4 x 4 pixels, so that thumbnails keep the contrast."""
    squares = np.random.default_rng(seed).integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
    return squares.repeat(4, axis=2).repeat(4, axis=3)


def samples(count: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(patches(count, seed))


@pytest.fixture
def real():
    return Images(patches(300, 0))


def nearest_rows(queries, rows, own=None) -> torch.Tensor:
    """In parts of 17 rows."""
    return nearest(queries, ((start, rows[start : start + 17]) for start in range(0, len(rows), 17)), own)


def test_nearest_rows_are_those_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    queries, rows = torch.randn(40, 6, generator=generator), torch.randn(200, 6, generator=generator)
    indices = NearestNeighbors(n_neighbors=1).fit(rows.numpy()).kneighbors(queries.numpy())[1]
    assert nearest_rows(queries, rows).tolist() == indices[:, 0].tolist()
    own = torch.arange(50, 90)  # rows of the set itself: the nearest other one
    indices = NearestNeighbors(n_neighbors=2).fit(rows.numpy()).kneighbors(rows[own].numpy())[1]
    assert nearest_rows(rows[own], rows, own).tolist() == indices[:, 1].tolist()


def test_copies_are_found_and_shown_first(real, monkeypatch):
    monkeypatch.setattr("utils.evaluation.memorization._CHUNK_BYTES", 2**18)
    drawn = samples(30)
    drawn[5:11] = torch.from_numpy(real.pixels[100:106])
    drawn[7] = (drawn[7].int() + 1).clamp(0, 255).byte()  # as a near-duplicate, not the same bytes
    figures, sheet = memorization(drawn, Originals(real))
    assert figures["near_duplicates"] == pytest.approx(6 / 30)
    assert figures["near_duplicates_real"] == 0
    assert figures["compared_with"] == "other training images"
    assert isinstance(sheet, Image.Image)
    copies, _ = memorization(torch.from_numpy(real.pixels[::3].copy()), Originals(real))
    assert copies["near_duplicates"] == 1 and copies["pixel_ratio"] == 0
    fresh, _ = memorization(samples(100, seed=2), Originals(real.subset(np.arange(200)), real.subset(np.arange(200, 300))))
    assert fresh["compared_with"] == "held-out images"
    assert fresh["pixel_ratio"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("offset", [1.0, 1000.0])
def test_the_nearest_row_of_a_tight_set_is_found(offset):
    generator = torch.Generator().manual_seed(0)
    queries, rows = (offset * (1 + 2e-5 * torch.randn(n, 16, generator=generator)) for n in (50, 300))
    every = (queries[:, None].double() - rows[None].double()).norm(dim=2)
    assert nearest_rows(queries, rows).tolist() == every.argmin(1).tolist()


def test_a_near_duplicate_is_measured_by_its_own_contrast():
    images = samples(1)
    assert near_duplicates(images, images).item() == 0
    faint = images // 10 + 100
    clear, hidden = (near_duplicates(x, x + 5).item() for x in (images // 2, faint))
    assert hidden == pytest.approx(5 * clear, rel=0.1)  # the same step is five times as much of a fifth of the contrast
    assert near_duplicates(torch.full((1, 3, 16, 16), 9, dtype=torch.uint8), images).item() == torch.inf  # a blank


def test_mirrored_copies_are_copies(real):
    mirrored = torch.from_numpy(real.pixels[:40]).flip(-1)
    originals = Originals(real)
    figures, _ = memorization(torch.cat([mirrored, samples(40)]), originals)
    assert figures["near_duplicates"] == 0.5 and figures["near_duplicates_real"] == 0
    # What real images are measured by is searched in the same way: a set that holds its own mirror images is no wonder.
    both = Images(np.concatenate([real.pixels, real.pixels[..., ::-1]]))
    assert memorization(samples(40), Originals(both))[0]["near_duplicates_real"] == 1


def test_a_mirrored_copy_stands_beside_its_original(real):
    found = closest(lambda: [torch.from_numpy(real.pixels[[7]]).flip(-1), torch.from_numpy(real.pixels[[9]])], real)
    assert found.indices.tolist() == [7, 9] and found.relative.max() == 0 and found.pixels.max() == 0


def test_real_images_are_searched_once(real):
    class Counted(Images):
        fetched = 0

        def fetch(self, indices, crop=None):
            self.fetched += len(indices)
            return super().fetch(indices)

    training, validation = Counted(real.pixels[:200]), Counted(real.pixels[200:])
    originals = Originals(training, validation)
    first, _ = memorization(samples(50), originals)
    once = training.fetched, validation.fetched
    assert memorization(samples(50), originals)[0] == first
    assert validation.fetched == once[1] == 100
    assert training.fetched < 2 * once[0] - 200  # the scan for the held-out images is not made again


class LargestTensor(TorchDispatchMode):
    """The size in bytes of the largest tensor that anything makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.nbytes)
        return made


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("utils.evaluation.memorization._CHUNK_BYTES", 2**20)
    images = np.random.default_rng(0).integers(0, 256, (120, 3, 128, 128), dtype=np.uint8)
    training, validation, drawn = Images(images[:80]), Images(images[80:]), torch.from_numpy(images[:40].copy())
    training.shape = (3, 128, 128)
    with LargestTensor() as made:
        memorization(drawn, Originals(training, validation))
    assert made.largest < 1.5 * 2**20  # all samples as float32 are 8 MB
    assert kept_for_memorization(50_000, 3 * 32 * 32) == 1000
    assert kept_for_memorization(50_000, 3 * 512 * 512) * 3 * 512 * 512 <= 256 * 2**20
    assert small_pixels(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 3 * 16 * 16)
