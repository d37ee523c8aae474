"""Records of a healthy run, and the changes that make it a sick one."""

import math
from pathlib import Path

from utils.runs.record import RunRecord

REPORTS, EVERY = 20, 50
LAYER_NAMES = ("conv_in.weight", "mid_block.weight", "conv_out.weight")


def layers(**figures: float) -> dict:
    return {name: {"weight": 0.1, "gradient": 1e-3, "update": 1e-3, **figures} for name in LAYER_NAMES}


def report(number: int, **figures) -> dict:
    """The `number`-th report (from 1) of a healthy run."""
    step = number * EVERY
    levels = {f"train/loss_timestep_quartile_{i}": 0.5 / i + 0.5 / number for i in (1, 2, 3, 4)}
    return {
        "step": step,
        "train/loss": 0.1 + 1 / number,
        "train/grad_norm": 0.5 + 1 / number,
        "train/clip_value": 1.0,
        "train/skipped_updates": 0.0,
        "train/bad_updates_in_a_row": 0.0,
        "train/ema_decay": 1 - step**-0.75,
        "train/ema_distance": 0.05 / number,
        "perf/data_wait": 0.02,
        "data/min": -1.0,
        "data/max": 1.0,
        "data/mean": -0.4 + 0.01 * (number % 3),
        "data/std": 0.7,
        "layers": layers(),
        "train/lr": 1e-3 * math.cos(math.pi * number / (2 * REPORTS)) ** 2,
        **levels,
        **figures,
    }


DATA = {
    "min": -1.0,
    "max": 1.0,
    "mean": [-0.4],
    "std": [0.7],
    "copies": {"share": 0.02},
    "near_copies": {"share": 0.1},
}
DATA |= {"classes": {"number": 10, "largest_share": 0.12}, "shape": [1, 16, 16], "constant_share": 0.0, "constant_rows": []}
DATA |= {"damaged": {"images": 0, "share": 0.0, "files": []}, "sizes": {"enlarged_share": 0.0, "shorter_side_min": 16}}
BAD_FILE = {"row": 3, "file": "cats/3.png", "reason": "image file is truncated"}
SCHEDULE = {"alphas_cumprod": [0.9999 * math.exp(-10 * (t / 100) ** 2) for t in range(101)]}  # the linear schedule
NETWORK = {"batch_norms": [], "dropout": 0.1, "spectral_norm": False, "attention": 1, "attention_declared": True}
NETWORK |= {"zero_inputs": {"conv": 0.05}, "idle": [], "cut": [], "told": 450.0, "received": 450.0}
SAMPLES = {
    "raw": {"std": 0.6, "pair_distance": 0.7, "saturated": 0.1},
    "ema": {"std": 0.6, "pair_distance": 0.8, "saturated": 0.1},
    "data": {"std": 0.7, "pair_distance": 0.79, "saturated": 0.05},
}


def by_level(clean: float, noisy: float) -> dict:
    return {"0": clean, "500": noisy, "999": noisy}


PROBE = {
    "prediction_type": "epsilon",
    "errors_as": {"epsilon": by_level(0.9, 0.1), "sample": by_level(3.0, 3.0), "v_prediction": by_level(0.9, 1.5)},
    "images": 32,
    "held_out_images": 32,
    "timestep_response": 0.1,
    "linear_error": {"0": 1.0, "100": 0.9, "500": 0.5, "900": 0.2, "999": 0.1},
    "batch_response": 1e-6,
    "error": {"0": 1.0, "100": 0.2, "500": 0.1, "900": 0.05, "999": 0.05},
    "held_out_error": {"0": 1.0, "100": 0.22, "500": 0.11, "900": 0.05, "999": 0.05},
}


def run(
    change=None, *, options=None, data=None, network=None, schedule=None, samples=None, probe=None, validation=()
) -> RunRecord:
    """A healthy run of 20 reports, changed: `change(number)` gives other figures of a report, the rest other records."""
    first = {"data": DATA | (data or {}), "network": NETWORK | (network or {}), "schedule": SCHEDULE | (schedule or {})}
    history = [{"step": 0, **first}]
    history += [report(number, **(change(number) if change else {})) for number in range(1, REPORTS + 1)]
    last = REPORTS * EVERY
    history += [{"step": last * (i + 1) // len(validation), "validation/loss": v} for i, v in enumerate(validation)]
    history += [{"step": last, "samples": SAMPLES | (samples or {})}, {"step": last, "probe": PROBE | (probe or {})}]
    return RunRecord(
        Path("run"),
        options={"lr_warmup_steps": 100, "learning_rate": 1e-3, "prediction_type": "epsilon", **(options or {})},
        resolved={"max_train_steps": last, "training_images": 1000, "global_batch_size": 16, "num_processes": 1},
        history=sorted(history, key=lambda record: record["step"]),
    )


def updates(size: float, warmup: int = 0):
    return lambda number: {"layers": layers(update=size if number > warmup else 0.0)}


def distance(kind: str, value: float) -> dict:
    return {kind: {"pair_distance": value}}


def quartile_losses(*losses: float):
    return lambda number: {f"train/loss_timestep_quartile_{i}": loss for i, loss in enumerate(losses, start=1)}


def rise(factor: float, quartiles=(1, 2, 3, 4)):
    rising = {f"train/loss_timestep_quartile_{i}": 0.1 * factor for i in quartiles}
    return lambda number: quartile_losses(0.1, 0.1, 0.1, 0.1)(number) | (rising if number >= 14 else {})


def sizes(newest: float):
    return lambda number: {"layers": layers(weight=0.1 + (newest - 0.1) * number / REPORTS)}


def linear_schedule(total_beta: float) -> dict:
    return {"alphas_cumprod": [0.9999 * math.exp(-total_beta * (t / 100) ** 2) for t in range(101)]}


def bins(generated: list[int], accuracy: float | None = None) -> dict:
    """Four modes of equal real shares; with an accuracy, classes that a judge of such an accuracy told apart."""
    judge = {} if accuracy is None else {"names": list("abcd"), "accuracy": accuracy}
    return {"number": 4, "generated": generated, "real": [50] * 4, "different": 0} | judge


def copies(share: float, real: float) -> dict:
    return {"images": 300, "near_duplicates": share, "near_duplicates_real": real}


def evaluated(**changes):
    """A healthy evaluation, but for the changes."""
    healthy = {"precision": 0.95, "variance_ratio": 0.97, "distance_ratio": 0.98}
    healthy |= {"rows": 400, "modes": bins([90, 110, 100, 100])}
    figures = healthy | {"floor": {"precision": 0.96}, "memorisation": copies(0.01, 0.01)} | changes
    return lambda n: {"evaluation": figures}
