"""Runs on streamed data: resumed, and on other numbers of processes."""

import json

import pytest
from conftest import make_tiny_flags, slow_turns


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
    return [*flags, "--streaming", "--shuffle_window", "30", "--random_flip"]


@pytest.mark.parametrize("more", [["--dataloader_num_workers", 1, "--cache_dir", "cold"], *slow_turns([])], ids=str)
def test_resumed_equals_uninterrupted_bit_for_bit(resumed_alike, flags, tmp_path, more):
    """Three windows of 30 images, of which 64 are seen; the resume finds no decoded blocks."""
    resumed_alike(flags, tmp_path, more=[tmp_path / word if word == "cold" else word for word in more])


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
