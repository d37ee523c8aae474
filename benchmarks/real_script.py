"""The real training scripts, run inside a benchmark: their data, and what they make on the way."""

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import datasets
import numpy as np
from accelerate.state import AcceleratorState
from PIL import Image

from benchmarks.bare_tasks import NUM_CLASSES
from utils.memory_plan import MemoryPlan


def load_script(name: str) -> ModuleType:
    """train_ddpm or train_edm2, by the name of its file."""
    return importlib.import_module(Path(name).stem)


def synthetic_dataset(folder: Path, resolution: int, count: int | None = None) -> Path:
    """`count` labelled images of noise (2,000, or 500 large ones), for presets whose data cannot be had offline."""
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
