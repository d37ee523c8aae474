"""Full, read-only and lying disks: training goes on or ends with one line, and no checkpoint suffers."""

import contextlib
import subprocess
from pathlib import Path

import pytest
from conftest import logged_scalars, same_bytes, slow_turns
from kills import invalid_checkpoints

from utils.runs.checkpoint_files import find_checkpoint, list_checkpoints

FLAGS = ["--checkpointing_steps", 2]


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=12m"):
    """A file system of its own in `folder`; skips the test where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def whole(server, script, script_flags, tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    server.run([script, *script_flags, *FLAGS, "--output_dir", folder])
    return folder


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(server, script, script_flags, whole, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "run"
        fault = ["disk-full", "--step", 3, "--value", disk]  # until update 5: the save after 4 fails
        flags = [*script_flags, *FLAGS, "--output_dir", folder, "--save_images_steps", 4, "--save_model_steps", 4]
        said = server.run(["tests/faults/inject.py", script, *fault, "--", *flags])
        assert "checkpoint-4 was not saved, earlier ones are whole" in said
        for what in ("the samples", "the pipeline"):
            assert said.count(f"left out: {what} after 4 updates: No space left on device") == 1
        curve = logged_scalars(folder, "train/loss")  # small values may fit into the file's last block
        assert sorted(curve) == list(range(1, 9)) or "nothing more goes to tensorboard" in said
        assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
        assert invalid_checkpoints(folder, whole) == []
        assert not list(folder.glob(".tmp-*"))
        exported = "unet/diffusion_pytorch_model.safetensors"
        assert same_bytes(folder / exported, whole / exported)


@pytest.mark.parametrize(("processes", "rank", "limit"), [*slow_turns((1, 0, 20_000), (2, 0, 20_000)), (2, 1, 1_000)])
def test_a_file_that_cannot_be_written_on_one_rank(server, script, script_flags, tmp_path, processes, rank, limit):
    """20,000 bytes hold all but weights and optimizer; 1,000 not even the random states, which are all that rank 1 writes."""
    fault = ["file-size", "--rank", rank, "--step", 3, "--value", limit]
    flags = [*script_flags, *FLAGS, "--output_dir", tmp_path, "--train_batch_size", 8 // processes, "--save_model_steps", 4]
    runs = server.start(["tests/faults/inject.py", script, *fault, "--", *flags], processes)
    assert [run.wait() for run in runs] == [0] * processes, runs[rank].text()
    assert "checkpoint-4 was not saved, earlier ones are whole" in runs[0].text()
    assert runs[0].text().count("left out: ") == (rank == 0)  # the export
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert find_checkpoint(tmp_path, "latest")[1] == []
    assert len(logged_scalars(tmp_path, "train/loss")) == 8


def test_an_output_that_cannot_be_written_is_named_at_once(server, script, script_flags, tmp_path):
    (tmp_path / "file").write_text("mine")
    with small_disk(tmp_path / "disk", "size=1m,ro") as disk:
        for folder in (disk / "run", disk, tmp_path / "file", tmp_path / "file" / "run"):
            said = server.run([script, *script_flags, "--output_dir", folder], ends=2)
            line, *advice = said.splitlines()
            assert len(advice) <= 1 and line.startswith(f"error: cannot write to --output_dir {folder}: ")
    assert (tmp_path / "file").read_text() == "mine"
