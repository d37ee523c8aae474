"""What the scripts set for a GPU and for DDP, seen without either."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend
from torch.nn.parallel import DistributedDataParallel

import utils.core.distributed
from benchmarks.shared.replace import replace_everywhere


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Makes an accelerator as on a GPU; gives the arguments of Accelerate's own."""
    given = {}

    def accelerator(**options):
        given.update(options)
        state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
        return SimpleNamespace(device=torch.device("cuda"), distributed_type=DistributedType.NO, state=state, num_processes=1)

    monkeypatch.setattr(utils.core.distributed, "Accelerator", accelerator)
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    precision = torch.get_float32_matmul_precision()
    yield given
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("wanted", [False, True])
def test_settings_reach_cudnn_and_ddp(on_a_gpu, wanted):
    utils.core.distributed.make_accelerator(cudnn_benchmark=wanted, broadcast_buffers=wanted)
    assert torch.backends.cudnn.benchmark is wanted
    (ddp,) = (handler for handler in on_a_gpu["kwargs_handlers"] if isinstance(handler, DistributedDataParallelKwargs))
    assert ddp.broadcast_buffers is wanted


def test_deterministic_means_every_kernel(on_a_gpu, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        utils.core.distributed.make_accelerator(cudnn_benchmark=True, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


class Asked(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """What a script asks `make_accelerator` for, which ends it."""
    found = {}

    def stop(**options):
        found.update(options)
        raise Asked

    replace_everywhere("utils.core.distributed.make_accelerator", stop, monkeypatch)
    return found


def test_training_takes_the_quickest_convolutions_and_sends_no_constants(train_script, script_flags, asked, tmp_path):
    with pytest.raises(Asked):
        train_script([*script_flags, "--output_dir", tmp_path])
    assert asked["cudnn_benchmark"] and not asked.get("broadcast_buffers")
    with pytest.raises(Asked):
        train_script([*script_flags, "--no-cudnn_benchmark", "--output_dir", tmp_path])
    assert not asked["cudnn_benchmark"]


def test_buffers_that_training_moves_are_sent(train, tiny_flags, asked, tmp_path):
    with pytest.raises(Asked):
        train([*tiny_flags, "--spectral_norm", "--output_dir", tmp_path])
    assert asked["broadcast_buffers"]


@pytest.mark.parametrize(
    ("ranks", "device", "deterministic", "sorts"),
    [(3, "cpu", False, True), (3, "cuda", False, False), (3, "cuda", True, True), (2, "cuda", True, False)],
)
def test_buckets_are_sorted_first_where_a_resumed_run_is_to_have_the_same_bits(
    process_group, monkeypatch, ranks, device, deterministic, sorts
):
    model, sorted_first = DistributedDataParallel(torch.nn.Linear(2, 1)), []
    model.device_type, model.reducer = device, SimpleNamespace(_push_all_rebuilt_params=lambda: sorted_first.append(True))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    utils.core.distributed.fix_bucket_order(model)
    assert bool(sorted_first) is sorts
