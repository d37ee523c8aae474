import math

import pytest
import torch

from utils.core.errors import UserError
from utils.training.length import RunLength, check_global_batch, updates_per_epoch


@pytest.mark.parametrize("images", [7, 16, 1797])
@pytest.mark.parametrize(("batch", "processes", "accumulation"), [(1, 1, 1), (16, 1, 1), (4, 2, 3), (3, 8, 2)])
def test_updates_per_epoch_counts_like_accelerates_data_loader(images, batch, processes, accumulation):
    """Against Accelerate itself: the longest shard of a prepared loader, in accumulation windows."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = torch.utils.data.BatchSampler(range(images), batch, drop_last=False)
    shards = [len(list(BatchSamplerShard(sampler, processes, rank))) for rank in range(processes)]
    expected = math.ceil(max(shards) / accumulation)
    assert updates_per_epoch(images, batch, processes, accumulation) == expected


def test_due_by_epochs_is_where_diffusers_script_acts():
    per_epoch, every, epochs = 5, 3, 10
    ours = [s for s in range(1, epochs * per_epoch) if RunLength(1, per_epoch, 50).is_due(s, None, every)]
    # its condition, at the end of each epoch: epoch % every == 0, or the last one (which has its own block here)
    theirs = [(epoch + 1) * per_epoch for epoch in range(epochs - 1) if epoch % every == 0]
    assert ours == theirs


def test_due_by_steps_overrides_epochs():
    assert [s for s in range(1, 10) if RunLength(1, 1, 9).is_due(s, 4, 1)] == [4, 8]


def test_fewer_images_than_a_batch_says_both_numbers():
    check_global_batch(8, 8)
    with pytest.raises(UserError, match=r"3 training images are fewer than one global batch of 8"):
        check_global_batch(3, 8)
    with pytest.raises(UserError, match=r"3 training images are .* of 2048\nset --global_batch_size to 3 or less"):
        check_global_batch(3, 2048, asked=2048)
    with pytest.raises(UserError, match=r"to 3 or less, or --model_preset small64, which is for small sets$"):
        check_global_batch(3, 2048, asked=2048, small="small64")
    with pytest.raises(UserError, match="no training images"):
        check_global_batch(0, 8)
