from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from train_ddpm import DDPM
from utils.core.errors import UserError
from utils.data.training_data import TrainingData, TrainingSamples, check_images, split_validation
from utils.options.flags import DDPMOptions
from utils.training.evaluation import Validation
from utils.training.progress import ProgressBar


class Images:
    """A stand-in for ImageSet: uint8 images, by index."""

    shape, max_value, labels = (1, 4, 4), 255, None

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self):
        return len(self.pixels)

    def fetch(self, indices, crop=None):
        return self.pixels[indices]

    def subset(self, indices):
        return Images(self.pixels[indices])

    def blocks(self):
        return None  # it is not streamed

    def nearby(self, count, seed=0):
        return None


@pytest.fixture
def images():
    return Images(np.random.default_rng(0).integers(0, 256, (37, 1, 4, 4), dtype=np.uint8))


def process(rank: int, of: int):
    return SimpleNamespace(
        process_index=rank,
        num_processes=of,
        device=torch.device("cpu"),
        reduce=lambda tensor, how: tensor,
        gather=lambda tensor: tensor,
        waiting=SimpleNamespace(meet=lambda what, words, longest: [words], patience=600.0),
    )


def test_split_is_a_partition_that_depends_on_the_seed_alone(images):
    numbered = Images(np.arange(37))
    train, validation = split_validation(numbered, 7, seed=3)
    assert sorted([*train.pixels, *validation.pixels]) == list(range(37))
    assert len(validation) == 7
    assert np.array_equal(split_validation(numbered, 7, seed=3)[1].pixels, validation.pixels)
    assert not np.array_equal(split_validation(numbered, 7, seed=4)[1].pixels, validation.pixels)
    with pytest.raises(UserError, match="leaves no images to train on: there are 37"):
        split_validation(numbered, 37, seed=0)


def test_blank_images_are_refused(images):
    check_images(images)
    blank = np.full((500, 1, 4, 4), 128, np.uint8)
    with pytest.raises(UserError, match="have the same value"):
        check_images(Images(blank))
    blank[250:] = 0  # half black, half gray is a set, if a dull one
    check_images(Images(blank))


class Recorder(torch.nn.Module):
    """Predicts zero, so that the loss of epsilon prediction is the mean square of the noise; notes the timesteps."""

    def __init__(self):
        super().__init__()
        self.timesteps, self.config = [], {}

    def forward(self, noisy_images, timesteps):
        self.timesteps += timesteps.tolist()
        return SimpleNamespace(sample=torch.zeros_like(noisy_images))


def loss(images, accelerator, unet=None, batch_size: int = 5) -> float:
    options = DDPMOptions(train_batch_size=batch_size)
    data = TrainingData.__new__(TrainingData)
    data.validation, data.samples = images, TrainingSamples(images, Accelerator(cpu=True), options)
    objective = DDPM(unet or Recorder(), options, accelerator.device)
    return Validation(
        SimpleNamespace(
            options=options, accelerator=accelerator, data=data, objective=objective, progress=ProgressBar(False, 0, 1)
        )
    ).mean_loss()


def test_same_figure_every_time_and_for_any_number_of_processes(images):
    alone = loss(images, process(0, 1))
    assert alone == loss(images, process(0, 1))
    assert alone == pytest.approx(loss(images, process(0, 1), batch_size=64), rel=1e-5)
    shares = [loss(images, process(rank, 3)) for rank in range(3)]  # each already divided by the total
    assert sum(shares) == pytest.approx(alone, rel=1e-5)
    assert alone == pytest.approx(1.0, abs=0.1)  # the variance of the noise


def test_timesteps_cover_the_schedule_evenly_once(images):
    unet = Recorder()
    loss(images, process(0, 1), unet)
    assert len(unet.timesteps) == 37 * 4
    gaps = np.diff(sorted(unet.timesteps))
    assert gaps.min() >= 6 and gaps.max() <= 7  # 1000 / 148 = 6.76
