"""Full, read-only and lying disks: training goes on or ends with one line, and no checkpoint suffers."""

import contextlib
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import datasets
import pytest
from accelerate.state import AcceleratorState
from conftest import TINY_NETWORK, logged_scalars, make_tiny_flags, same_bytes, slow_turns, small_kl
from full_disk import Write, damaged, full_at
from kills import EXPORTED, hashes, invalid_checkpoints, same
from sklearn.datasets import load_digits

from utils.core.entrypoint import run_script
from utils.core.errors import UserError
from utils.runs.checkpoint_files import find_checkpoint, list_checkpoints

FLAGS = ["--checkpointing_steps", 2]
TOLD = {  # what a run says of a write that fails, by the beginning of its name; a line may fit into the last block of a file
    "run/.tmp-checkpoint": "was not saved, earlier ones are whole: ",
    "run/.tmp-export": "left out: the pipeline after ",
    "run/samples": "left out: the samples after ",
    "run/evaluation": "left out: ",
    "run/ema_snapshots": "left out: the snapshots of averages after ",
    "run/.report.html": "report.html was not written: ",
}


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


@pytest.mark.parametrize("processes", [1, *slow_turns(2)])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(server, script, script_flags, tmp_path, processes):
    script_flags = [*script_flags, *FLAGS, "--train_batch_size", 8 // processes]
    server.run([script, *script_flags, "--output_dir", (whole := tmp_path / "whole")], processes)
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "run"
        fault = ["disk-full", "--step", 3, "--value", disk]  # until update 5: the save after 4 fails
        flags = [*script_flags, "--output_dir", folder, "--save_images_steps", 4, "--save_model_steps", 4]
        said = server.run(["tests/faults/inject.py", script, *fault, "--", *flags], processes)
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


TURNS = 13  # an export has so many files and folders: a try meets one of them


def sweep_flags(script_flags: list, folder: Path) -> list:
    """A tiny run below `folder` that writes all that runs write."""
    often = ("checkpointing", "save_images", "save_model", "validation", "eval")
    flags = [*script_flags, "--max_train_steps", 6, *(word for name in often for word in (f"--{name}_steps", 3))]
    flags += ["--validation_images", 64, "--eval_images", 32]
    return [*flags, "--cache_dir", folder / "cache", "--output_dir", folder / "run"]


@pytest.fixture(scope="module")
def sweep(train, script, script_flags, tmp_path_factory) -> tuple[Path, list[Write], list[Write]]:
    """The folder of such a run that nothing happened to, its writes before the first update, and those after it."""
    folder = tmp_path_factory.mktemp("sweep")
    with full_at(folder, []) as (writes, _):
        assert train(sweep_flags(script_flags, folder), importlib.import_module(Path(script).stem)) == 0
    assert damaged(folder) == []
    begun = next(place for place, (name, _) in enumerate(writes) if name == "run/ledger.jsonl")
    return folder / "run", writes[:begun], writes[begun:]


@pytest.fixture
def on_small_disk(train_script, script_flags, tmp_path, capsys):
    """Runs the same on a small disk that is full at the chosen writes; returns the exit status, what was said, and the writes
    that were met."""
    with small_disk(tmp_path / "disk", "size=24m") as disk:

        def run(chosen: list[Write], *more) -> tuple[int, str, list[Write]]:
            refused = ""
            with full_at(disk, chosen) as (_, full):
                try:
                    status = train_script([*sweep_flags(script_flags, disk), *more])
                except UserError as error:
                    status, refused = 2, str(error)
            said = "".join(capsys.readouterr()) + refused
            assert "Traceback" not in said and refused.count("\n") <= 1
            assert damaged(disk) == []
            return status, said, full

        yield disk / "run", run


def continues(run: Path, start, whole: Path) -> None:
    """The same command again ends as a run that nothing happened to."""
    assert invalid_checkpoints(run, whole) == []
    status, said, _ = start([], "--resume_from_checkpoint", "latest")
    assert status == 0 and same(run / EXPORTED, whole / EXPORTED), said
    lines = hashes(run)  # the last one may be missing
    assert lines == hashes(whole)[: len(lines)] and len(lines) > 5


@pytest.mark.parametrize("turn", [0, *slow_turns(*range(1, TURNS))])
def test_each_write_of_a_run_may_find_the_disk_full(sweep, on_small_disk, turn):
    """Several fail in each turn, and those between them do not."""
    (whole, _, writes), (run, start) = sweep, on_small_disk
    logged = [write for write in writes if "tfevents" in write[0]]
    chosen = [write for write in writes if write not in logged][turn::TURNS]
    status, said, full = start([*chosen, logged[turn - TURNS]])
    assert len(full) > 3
    assert "left out: the pipeline" in said if status else same(run / EXPORTED, whole / EXPORTED), (status, said)
    for name, _ in full:
        assert all(words in said for begin, words in TOLD.items() if name.startswith(begin)), (name, said)
    continues(run, start, whole)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
def test_each_write_of_a_start_may_find_the_disk_full(sweep, on_small_disk, turn):
    (whole, writes, _), (run, start) = sweep, on_small_disk
    for write in [write for write in writes if "tfevents" not in write[0]][turn::4]:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(run.parent / "cache", ignore_errors=True)
        status, said, full = start([write])
        assert full == [write] and status in (0, 2)
        assert status == 0 or "No space left on device" in said, said
    continues(run, start, whole)


@pytest.fixture(scope="module")
def averages(train, tmp_path_factory) -> Path:
    """A run with snapshots of its averages."""
    folder = tmp_path_factory.mktemp("averages")
    flags = [*make_tiny_flags(folder), "--ema_type", "power", "--ema_snapshot_steps", 2, "--max_train_steps", 4]
    assert train([*flags, "--output_dir", folder / "run"]) == 0
    return folder


OTHERS = {
    "generate": "--pipeline {run} --output_dir {disk}/out --num_images 2 --batch_size 2 --num_inference_steps 2",
    "reconstruct_ema": "{run} --width 0.1 --output_dir {disk}/out",
    "evaluate": "make-reference --dataset_name digits --image_channels 1 --resolution 16 --cpu_threads 1 "
    "--cache_dir {cache} --output {disk}/out/r.safetensors",
}


@pytest.mark.parametrize("name", ["generate", *slow_turns("reconstruct_ema", "evaluate")])
def test_each_write_of_another_script_may_find_the_disk_full(averages, name, tmp_path, capsys):
    script, run, cache = importlib.import_module(name), averages / "run", averages / "cache"

    with small_disk(tmp_path / "disk") as disk:
        flags = OTHERS[name].format(run=run, cache=cache, disk=disk).split()

        def call(chosen: list[Write]) -> tuple[int, str, list[Write]]:
            """The exit status, errors and writes."""
            AcceleratorState._reset_state(reset_partial_state=True)
            with full_at(disk, chosen) as (writes, _), pytest.raises(SystemExit) as ended:
                run_script(script.main, lambda: script.parse_args(flags))
            return ended.value.code or 0, capsys.readouterr().err, writes

        status, said, writes = call([])
        assert status == 0 and damaged(disk) == [] and len(writes) > 2
        written = {path.name for path in disk.rglob("*")}
        for write in writes:
            shutil.rmtree(disk / "out")
            status, said, _ = call([write])
            assert status == 2 or ".write-test" in write[0] or write[1] > 1, (write, said)
            if status:
                assert said.count("error: ") == 1 and str(disk) in said and "No space left on device" in said
                assert said.partition("error: ")[2].count("\n") <= 2 and "Traceback" not in said
            assert damaged(disk) == []
            assert call([])[0] == 0, write
            assert {path.name for path in disk.rglob("*")} == written


@pytest.fixture(scope="module", params=["latents", "stream"])
def other_data(request, tmp_path_factory) -> list:
    """Flags of a tiny run whose images are encoded by an autoencoder, or read block by block."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "latents":
        small_kl().save_pretrained(folder / "vae")
        (network := folder / "latents").mkdir()
        flags = make_tiny_flags(network)
        (network / "config.json").write_text(json.dumps(TINY_NETWORK | {"in_channels": 3, "out_channels": 3}))
        return [*flags, "--max_train_steps", 2, "--vae", folder / "vae", "--latent_scale", "auto", "--max_train_images", 120]
    (folder / "shards").mkdir()
    for number in range(2):
        rows = {"image": list((load_digits().images[number * 30 : number * 30 + 30] * 15).astype("uint8"))}
        rows = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
        rows.to_parquet(folder / "shards" / f"train-{number}.parquet", batch_size=10)
    flags = make_tiny_flags(folder)
    flags[flags.index("--dataset_name") + 1] = folder / "shards"
    return [*flags, "--max_train_steps", 2, "--streaming", "--shuffle_window", 30]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_each_write_of_latents_and_of_a_stream_may_find_the_disk_full(other_data, train, tmp_path, capsys, turn):
    """What is left of latents is gone on with by the next start."""
    with small_disk(tmp_path / "disk", "size=24m") as disk:

        def start(chosen: list[Write]) -> tuple[int, str, list[Write]]:
            said = ""
            with full_at(disk, chosen) as (writes, full):
                try:
                    status = train(
                        [*other_data, "--doctor", "off", "--cache_dir", disk / "cache", "--output_dir", disk / "run"]
                    )
                except UserError as error:
                    status, said = 2, str(error)
            return status, said + "".join(capsys.readouterr()), full if chosen else writes

        status, _, writes = start([])
        assert status == 0 and damaged(disk) == []
        weights = (disk / "run" / EXPORTED).read_bytes()
        kinds = {re.sub(r"[0-9a-f]{16,}|\d", "", write[0]): write for write in writes if write[0].startswith("cache/")}
        assert len(kinds) > 5, writes
        for write in list(kinds.values())[turn::3]:
            for folder in disk.iterdir():
                shutil.rmtree(folder)
            status, said, full = start([write])
            assert full == [write] and status in (0, 2) and "Traceback" not in said
            assert status == 0 or "No space left on device" in said, said
            if status:
                assert start([])[0] == 0
            assert damaged(disk) == [] and (disk / "run" / EXPORTED).read_bytes() == weights
