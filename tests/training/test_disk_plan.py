"""Whether the disk has room for a run is said before the first update, and counted as the run will write it."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_disk import small_disk
from torch import nn

from train_ddpm import parse_args
from utils.core.errors import UserError
from utils.optim.optimizers import make_optimizer, state_bytes
from utils.options.flags import DDPMOptions, OptimizerOptions
from utils.training.memory_plan import DiskPlan, free_bytes

MIB = 2**20
OPTIONS = DDPMOptions(dataset_name="digits", checkpointing_steps=10, save_images_steps=50)


@pytest.mark.parametrize("name", ["adamw", "adam", "rmsprop", "sgd"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_each_optimizer_is_as_large_as_torch_makes_it(name, momentum):
    options = OptimizerOptions(optimizer=name, momentum=momentum)
    layer = nn.Linear(64, 64)
    optimizer = make_optimizer(layer, options)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
    assert state_bytes(options, 4 * (64 * 64 + 64)) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("options", "step", "there", "expected"),
    [
        ({}, 0, 0, 10),
        ({"checkpoints_total_limit": 3}, 0, 0, 4),  # one is being written beside three
        ({"checkpoints_total_limit": 1}, 0, 0, 3),  # never fewer than two
        ({"checkpoints_total_limit": 3, "validation_images": 8}, 0, 0, 5),  # and the best
        ({"checkpoints_total_limit": 3}, 95, 3, 4),
        ({"checkpoints_total_limit": 30}, 45, 4, 10),
        ({}, 95, 9, 10),
        ({"checkpointing_steps": 1000}, 0, 0, 0),
    ],
)
def test_how_many_checkpoints_there_are_at_once(options, step, there, expected):
    plan = DiskPlan(replace(OPTIONS, **options), MIB, updates=100, step=step, checkpoints=there)
    assert plan._checkpoints() == expected


@pytest.mark.slow
def test_a_run_takes_what_was_counted(train, tiny_flags, tmp_path):
    """But for names and shapes in the files, which are a good part of so small a network's."""
    extra = "--checkpointing_steps 2 --checkpoints_total_limit 2 --save_images_steps 4 --ema_type power --ema_snapshot_steps 3"
    folder, flags = tmp_path / "run", [*tiny_flags, *extra.split()]
    assert train([*flags, "--output_dir", folder]) == 0
    checkpoint, exported = folder / "checkpoint-8", folder / "unet" / "diffusion_pytorch_model.safetensors"
    network = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
    parts = DiskPlan(parse_args(flags), network, updates=8).parts()
    weights = sum(path.stat().st_size for path in checkpoint.iterdir() if path.suffix in (".safetensors", ".bin"))
    snapshots = sum(path.stat().st_size for path in (folder / "ema_snapshots").iterdir())
    taken = {"3 checkpoints": 3 * weights, "the pipeline": 2 * exported.stat().st_size, "6 EMA snapshots": snapshots}
    assert parts.keys() == taken.keys()
    assert all(0.8 * taken[name] < planned <= taken[name] for name, planned in parts.items()), (parts, taken)


def test_the_verdict_counts_what_a_run_in_the_folder_frees(monkeypatch, tmp_path):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(40 * MIB))
    plan = DiskPlan(OPTIONS, MIB, updates=100)
    line = r"need 42.0 MiB of disk \(10 checkpoints 40.0 MiB, the pipeline 2.0 MiB\); 40.0 MiB are free for .*\n.*_total_limit"
    with pytest.raises(UserError, match=line):
        plan.check(tmp_path)
    plan.check(tmp_path, there=20 * MIB)
    assert free_bytes(tmp_path / "not" / "yet") == 40 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_will_not_fit_is_refused_before_it_deletes_another(server, tiny_flags, tmp_path, processes):
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        (disk / "unet").mkdir()
        for name in ("model_index.json", "unet/x", "mine.txt"):
            (disk / name).write_text("before")
        flags = [*tiny_flags, "--output_dir", disk, "--overwrite_output_dir", "--checkpointing_steps", 1]
        said = server.run(["train_ddpm.py", *flags, "--train_batch_size", 8 // processes], processes, ends=2)
        [line] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "8 checkpoints" in line
        assert Path(disk, "unet/x").read_text() == "before"
