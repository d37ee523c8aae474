"""Runs on streamed data: resumed twice, and on other numbers of processes."""

import json
import shutil

import pytest
from conftest import make_tiny_flags, same_bytes

FILES = ("model.safetensors", "ema.safetensors", "optimizer.bin")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    import datasets
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("streamed")
    (folder / "shards").mkdir()
    pixels = (load_digits().images[:90] * 15).astype("uint8")
    features = datasets.Features({"image": datasets.Image()})
    for number in range(3):
        rows = {"image": list(pixels[number * 30 : number * 30 + 30])}
        dataset = datasets.Dataset.from_dict(rows, features=features)
        dataset.to_parquet(folder / "shards" / f"train-{number}.parquet", batch_size=10)
    flags = make_tiny_flags(folder)
    flags[flags.index("--dataset_name") + 1] = str(folder / "shards")
    return [*flags, "--streaming", "--shuffle_window", "30", "--checkpointing_steps", "2", "--random_flip"]


def test_resumed_twice_equals_uninterrupted_bit_for_bit(train, flags, tmp_path):
    """Three windows of 30 images, of which 64 are seen; the second resume finds no decoded blocks."""
    whole, once, twice = (tmp_path / name for name in ("whole", "once", "twice"))
    assert train([*flags, "--output_dir", whole]) == 0
    shutil.copytree(whole / "checkpoint-2", once / "checkpoint-2")
    assert train([*flags, "--output_dir", once, "--resume_from_checkpoint", "latest", "--dataloader_num_workers", 1]) == 0
    shutil.copytree(once / "checkpoint-4", twice / "checkpoint-4")
    cold = [*flags, "--cache_dir", tmp_path / "another cache", "--output_dir", twice]
    assert train([*cold, "--resume_from_checkpoint", "latest"]) == 0
    for file in FILES:
        assert same_bytes(whole / "checkpoint-8" / file, twice / "checkpoint-8" / file), file


@pytest.mark.slow
def test_samples_are_the_same_on_other_processes(server, flags, tmp_path):
    """Weights of two processes differ from those of one by rounding alone; the ledger has the samples themselves."""
    batches = []
    for processes in (1, 2, 4):
        folder = tmp_path / str(processes)
        split = [*flags, "--train_batch_size", 8 // processes, "--output_dir", folder]
        server.run(["train_ddpm.py", *split], processes)
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        batches.append([line["batch"] for line in lines if "batch" in line])
    assert len(batches[0]) >= 8 and batches[0] == batches[1] == batches[2]
