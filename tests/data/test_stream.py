"""Streamed parquet shards: the same pixels and updates as of packed ones."""

import numpy as np
import pytest
import torch
from shard_files import ROWS, SHARDS, png, write_shards

from utils.core.errors import UserError
from utils.data.dataset import content_fingerprint
from utils.data.loader import BatchSplit, WindowedOrder, training_batches
from utils.data.training_data import split_validation

pytest_plugins = ("shard_fixtures",)


def test_the_same_images_and_labels_as_packed(folder, load):
    packed, streamed = load(folder, streaming=False), load(folder, shuffle_window=30)
    assert packed.labels is not None and (packed.labels == streamed.labels).all()
    assert streamed.class_names == ["ant", "bee"] and len(streamed) == SHARDS * ROWS
    indices = np.random.default_rng(0).permutation(len(packed))
    crop = np.random.default_rng(1).random((len(indices), 2), np.float32)
    assert (packed.fetch(indices, crop) == streamed.fetch(indices, crop)).all()
    assert streamed.blocks().tolist() == [10, 10, 5] * SHARDS
    few = load(folder, max_train_images=33)
    assert len(few) == 33 and few.blocks().tolist() == [10, 10, 5, 8]
    assert (few.fetch([32]) == packed.fetch([32])).all()


def test_workers_bring_the_same_batches(folder, load):
    images = load(folder)
    order, steps = WindowedOrder(images.blocks(), 30, 0), range(9, 13)  # into the second pass
    first, second = (list(training_batches(images, order, BatchSplit(8), steps, num_workers=n)) for n in (0, 2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("images", "labels", "sample_numbers"))


def test_held_out_images_are_not_trained_on(folder, load):
    images = load(folder)
    training, validation = split_validation(images, 20, 0)
    rows = np.concatenate([part.dataset_rows(np.arange(len(part))).numpy() for part in (training, validation)])
    assert len(validation) == 20 and sorted(rows) == list(range(len(images)))
    assert training.blocks().sum() == len(training)
    shown = WindowedOrder(training.blocks(), 30, 0).indices(torch.arange(len(training)))
    assert len(shown.unique()) == len(training)
    assert content_fingerprint(images) == content_fingerprint(load(folder))


def test_images_that_cannot_be_decoded(tmp_path, load):
    folder = write_shards(tmp_path / "shards", damaged=(12, 13), empty=(30,))
    packed = load(folder, streaming=False, on_bad_image="replace")
    streamed = load(folder, on_bad_image="replace")
    indices = np.arange(len(packed))
    assert (packed.fetch(indices) == streamed.fetch(indices)).all() and (packed.shown(indices) == streamed.shown(indices)).all()
    assert packed.replacements() == streamed.replacements() == {12: 14, 13: 14, 30: 31}
    with pytest.raises(UserError, match=r"at row 12, column 'image' of train-00000.parquet"):
        load(folder).fetch([12])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"shuffle_window": 75, "cache_limit": "10kB"}, "two windows"),
        ({"dataset_split": "test"}, "has no such split"),
        ({"image_column": "photo"}, "no such column"),
        ({"label_column": "kind"}, "no such column"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(options, words, folder, load):
    with pytest.raises(UserError, match=words) as caught:
        load(folder, **options)
    assert len(str(caught.value).splitlines()) == 2


def test_sources_that_cannot_be_streamed(tmp_path, load):
    for name in ("photo.png", "photo.csv"):
        (tmp_path / name).write_bytes(png(0))
    for name in (tmp_path, tmp_path / "photo.csv", "digits"):
        with pytest.raises(UserError, match="reads parquet, tar or arrow files"):
            load(name)
