"""The real training scripts, run by a benchmark, in its process or in one of their own: with which data and which network."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import datasets
import numpy as np
from accelerate.state import AcceleratorState
from PIL import Image

from benchmarks.shared.tasks import NUM_CLASSES
from utils.runs.record import RunRecord
from utils.training.memory_plan import MemoryPlan

ROOT = Path(__file__).parents[2]


def small_network(side: int, channels: int, widths: Iterable[int] = (8, 16), groups: int = 4) -> dict:
    """config.json of a U-Net of two levels."""
    return {
        "_class_name": "UNet2DModel",
        "sample_size": side,
        "in_channels": channels,
        "out_channels": channels,
        "block_out_channels": list(widths),
        "layers_per_block": 1,
        "norm_num_groups": groups,
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
    }


def train_once(script: str, flags: list, folder: Path) -> RunRecord:
    """Trains into `folder` in a process of its own, unless that was done before; a run that was stopped goes on. What it
    prints goes to a log beside it."""
    status = folder / "exit_status"
    if not status.exists() or status.read_text().strip() != "0":
        folder.parent.mkdir(parents=True, exist_ok=True)
        how = ["--resume_from_checkpoint", "latest"] if list(folder.glob("checkpoint-*")) else ["--overwrite_output_dir"]
        command = [sys.executable, ROOT / script, *flags, "--output_dir", folder, *how]
        with open(folder.with_name(f"{folder.name}.log"), "a") as log:
            subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=subprocess.STDOUT)
    return RunRecord.read(folder)


def load_script(name: str) -> ModuleType:
    """train_ddpm or train_edm2, by the name of its file."""
    return importlib.import_module(Path(name).stem)


def synthetic_dataset(folder: Path, resolution: int, count: int | None = None) -> Path:
    """`count` labeled images of noise (2,000, or 500 large ones), for presets whose data cannot be had offline."""
    generator = np.random.default_rng(0)
    count = count or (2000 if resolution <= 64 else 500)
    pixels = generator.integers(0, 256, (count, resolution, resolution, 3), dtype=np.uint8)
    labels = datasets.ClassLabel(num_classes=NUM_CLASSES)
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    rows = {"image": [Image.fromarray(p) for p in pixels], "label": np.arange(count) % NUM_CLASSES}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    return folder


def one_micro_batch(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with updates of one micro batch on each process: EDM2's presets have a global batch of 2048."""
    args.global_batch_size, args.gradient_accumulation_steps = None, 1
    return args


@contextmanager
def planned() -> Iterator[list[MemoryPlan]]:
    """The MemoryPlan of each script that starts inside, in a list: what `--dry_run` would print is of the same plan."""
    plans, init = [], MemoryPlan.__init__

    def remember(plan, *arguments, **options) -> None:
        init(plan, *arguments, **options)
        plans.append(plan)

    with mock.patch.object(MemoryPlan, "__init__", remember):
        yield plans


def run_script(script: ModuleType, args: argparse.Namespace) -> None:
    """Calls the script's main, which another may have been before in this process. Raises RuntimeError if it fails."""
    AcceleratorState._reset_state(reset_partial_state=True)
    status = script.main(args)
    if status:
        raise RuntimeError(f"{script.__name__} ended with status {status}")
