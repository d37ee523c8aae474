"""A run's folder as training leaves it, made up: figures of any length without any training."""

import json
import math
import random
import shutil
from pathlib import Path

from utils.runs.history import History

PICTURES = Path(__file__).parent.parent / "docs"
BLOCKS = ("conv_in", "time_embedding", "down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1", "conv_out")


def layer_names(count: int) -> list[str]:
    """Names like those of a U-Net, `count` of them, from input to output."""
    return [f"{BLOCKS[i * len(BLOCKS) // count]}.resnets.{i}.conv1" for i in range(count)]


def synthetic_run(folder: Path, *, reports: int, layers: int = 60, layer_records: int = 40, samples: int = 8) -> Path:
    """Writes options.json, history.jsonl and samples/ of a run of `reports` reports, one every 50 updates; returns `folder`."""
    chance = random.Random(0)
    total = 50 * max(reports, 1)
    folder.mkdir(parents=True)
    options = {"dataset_name": "digits", "resolution": 16, "learning_rate": 2e-3, "model_preset": "digits16", "seed": 0}
    resolved = {"max_train_steps": total, "parameters": 720_000, "training_images": 1733, "global_batch_size": 32}
    resolved |= {"num_processes": 1, "mixed_precision": "bf16", "device": "cuda:0"}
    (folder / "options.json").write_text(
        json.dumps(
            {
                "options": options,
                "resolved": resolved,
                "command": "train_ddpm.py --learning_rate 2e-3 --dataset_name digits",
                "started": "2026-03-01T10:00:00+00:00",
                "git_commit": "0123abcd",
                "versions": {"torch": "2.13.0"},
                "earlier_starts": [],
            }
        )
    )
    history = History(folder, first_step=0)
    names = layer_names(layers)
    levels = [10 ** chance.uniform(-1, 1) for _ in names]
    lines = []
    for i in range(1, reports + 1):
        step, done = 50 * i, i / reports
        loss = 0.02 + 0.98 * math.exp(-12 * done) + 0.004 * chance.random()
        warm = min(1, 20 * done)
        line = {
            "train/loss": loss,
            "train/clip_value": 1.0,
            "train/grad_norm": (0.1 + 3 * math.exp(-15 * done)) * chance.uniform(0.5, 2),
        }
        line |= {f"train/loss_timestep_quartile_{q}": loss * (5 - q) / 2.5 * chance.uniform(0.9, 1.1) for q in (1, 2, 3, 4)}
        line |= {"train/lr": 2e-3 * warm * 0.5 * (1 + math.cos(math.pi * done)), "train/skipped_updates": 0}
        line |= {"train/ema_decay": 1 - 1 / (1 + step) ** 0.75, "train/ema_distance": 0.08 * math.sin(math.pi * done) + 0.005}
        line |= {"perf/images_per_second": chance.gauss(450, 25), "perf/data_wait": abs(chance.gauss(0.01, 0.005))}
        line |= {"perf/peak_memory_gib": 1.25, "data/min": -1.0, "data/max": 1.0, "data/mean": -0.4, "data/std": 0.75}
        lines.append({"step": step, **line})
        if i % max(1, reports // 12) == 0:
            lines.append({"step": step, "validation/loss": loss * 1.1})
        if layer_records and i % max(1, reports // layer_records) == 0:
            rows = {}
            for depth, (name, level) in enumerate(zip(names, levels)):
                shift = math.exp(3 * done) if depth == layers // 2 else 1.0
                rows[name] = {
                    "activation": level * shift * chance.uniform(0.9, 1.1),
                    "weight": level * 0.1 * (1 + done),
                    "gradient": level * 1e-3 * math.exp(-3 * done) * chance.uniform(0.6, 1.5),
                    "update": 2e-3 * warm * (1.02 - done) * level * chance.uniform(0.8, 1.2),
                }
            lines.append({"step": step, "layers": rows})
    levels = range(0, 1000, 100)
    errors = [{"error": {str(t): (0.02 + 0.3 / k) * math.exp(-t / 300) for t in levels}} for k in (1, 4)]
    known = {"linear_error": {str(t): math.exp(-t / 300) for t in levels}}
    if reports:
        lines.insert(
            0, {"step": 0, "data": {"images": 1797, "duplicates": 3, "constant_share": 0.0, "mean": [0.31], "std": [0.6]}}
        )
        lines += [
            {"step": 50 + (total - 50) * k, "probe": one | known | {"timestep_response": 0.1}} for k, one in enumerate(errors)
        ]
        figures = {"mean": -0.42, "std": 0.71, "saturated_share": 0.3, "pair_distance": 0.9}
        lines.append({"step": total, "samples": {"raw": figures, "ema": figures, "data": figures | {"mean": 0.31}}})
    start = 1772359200.0  # 2026-03-01T10:00:00+00:00
    with open(history.path, "w") as file:
        for line in sorted(lines, key=lambda line: line["step"]):
            file.write(json.dumps({"time": start + 4 * line["step"] / 50, **line}) + "\n")
    (folder / "samples").mkdir()
    for i in range(1, samples + 1):
        step = total * i // samples
        shutil.copy(PICTURES / "digits.png", folder / "samples" / f"{step:07d}.png")
        shutil.copy(PICTURES / "digits-path.png", folder / "samples" / f"{step:07d}-path.png")
    return folder
