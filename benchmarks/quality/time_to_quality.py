"""Which script makes the better samples of the same seconds? diffusers' train_unconditional.py, train_ddpm.py, train_edm2.py.

    python benchmarks/quality/time_to_quality.py --unconditional train_unconditional.py --seconds 60 --seeds 0 1 2
    python benchmarks/quality/time_to_quality.py --unconditional train_unconditional.py --data shapes --seconds 15 30 60 \\
        --plot curves.svg

The digits as RGB images, or drawn shapes in color, of 16x16, in batches of 32. Three rows train the same U-Net: diffusers'
script as it comes (given by its path, not shipped here), the same with the best of a small search over its own flags, and
train_ddpm.py with its preset. The fourth is train_edm2.py with its own network. Seconds are those of one processor core,
which other programs disturb little: two short runs of each script tell what an epoch takes (data, updates, reports), and a
run makes as many epochs as fit, with its learning rate laid out for just these. evaluate.py judges all by the same reference
and seed, with DDIM and with DDPM sampling in 50 steps; the better one counts. So each point of a curve over several
--seconds is of runs of their own, laid out for just these seconds. What is already there is not made again.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.quality.draw_shapes import draw
from benchmarks.shared.real_script import ROOT

BATCH, SIDE, SHAPES = 32, 16, 2000
SHORT, LONGER = 1, 4  # epochs of the runs that tell the time of one
AS_IT_COMES = "train_unconditional.py as it comes"
TUNED = "train_unconditional.py, the best of its flags"
OURS = {"train_ddpm.py": "train_ddpm.py", "train_edm2.py": "train_edm2.py"}
RATES, SCHEDULES = ("5e-4", "2e-3"), ("linear", "squaredcos_cap_v2")
SEARCH = [
    ["--learning_rate", rate, "--ddpm_beta_schedule", schedule, "--use_ema", "--lr_warmup_steps", "100"]
    for rate, schedule in itertools.product(RATES, SCHEDULES)
]
SAMPLERS = {"train_edm2.py": [["--sampler", "heun", "--num_inference_steps", "32"]]}
DDPM_SAMPLERS = [["--sampler", name, "--num_inference_steps", "50"] for name in ("ddim", "ddpm")]


def digits() -> Iterator[Image.Image]:
    for digit in load_digits().images:
        scan = Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8))
        yield scan.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("RGB")


def shapes() -> Iterator[Image.Image]:
    numbers = random.Random(0)
    return (draw(numbers, SIDE) for _ in range(SHAPES))


DATA = {"digits": digits, "shapes": shapes}


class Trials:
    def __init__(self, args: argparse.Namespace):
        self.folder, self.unconditional, self.num_images = (
            args.output_dir.resolve(),
            args.unconditional.resolve(),
            args.num_images,
        )
        self.data = self.folder / args.data
        if not self.data.exists():
            self.data.mkdir(parents=True)
            for number, image in enumerate(DATA[args.data]()):
                image.save(self.data / f"{number:04}.png")
        self.epoch = -(-len(list(self.data.iterdir())) // BATCH)  # updates
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        if importlib.util.find_spec("torchvision") is None:
            stand_in = ROOT / "benchmarks/doctor/foreign/stand_ins"
            self.environment["PYTHONPATH"] = os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])

    def run(self, command: list, log: Path) -> float:
        """Returns the seconds of processor time."""
        log.parent.mkdir(parents=True, exist_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with open(log, "w") as file:
            command = [sys.executable, *map(str, command)]
            subprocess.run(command, check=True, env=self.environment, stdout=file, stderr=subprocess.STDOUT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def train(self, script: str, flags: list, epochs: int, seed: int, name: str) -> tuple[Path, float]:
        """(the pipeline's folder, seconds of processor time)."""
        folder = self.folder / name
        told = folder.with_name(f"{folder.name}.json")
        if not told.exists():
            command = ["--train_data_dir", self.data, "--resolution", SIDE, "--train_batch_size", BATCH, "--output_dir", folder]
            if script in OURS:
                command = [ROOT / script, *command, "--model_preset", "digits16", "--image_channels", 3, "--cpu_threads", 1]
                command += ["--max_train_steps", epochs * self.epoch, "--validation_images", 0, "--seed", seed]
                command += ["--save_images_steps", 10**6, "--save_model_steps", 10**6, "--checkpointing_steps", 10**6]
                command += ["--overwrite_output_dir"]
            else:
                command = [self.unconditional, *command, "--num_epochs", epochs, "--center_crop", "--overwrite_output_dir"]
                command += ["--model_config_name_or_path", self.network(), "--checkpointing_steps", 10**6]
                command += ["--save_images_epochs", 10**6, "--save_model_epochs", 10**6, "--eval_batch_size", 1]
                command += ["--ddpm_num_inference_steps", 2]
            told.write_text(json.dumps(self.run([*command, *flags], folder.with_name(f"{folder.name}.log"))))
        return folder, json.loads(told.read_text())

    def network(self) -> Path:
        """The config of the network that the preset of train_ddpm.py has."""
        folder, _ = self.train("train_ddpm.py", [], SHORT, 0, "timing/train_ddpm.py-short")
        return folder / "unet"

    def epochs(self, script: str, flags: list, seconds: float, name: str) -> int:
        """Epochs that fit into the seconds."""
        times = [self.train(script, flags, count, 0, f"timing/{name}-{word}")[1] for count, word in
                 ((SHORT, "short"), (LONGER, "longer"))]  # fmt: skip
        return max(1, round(seconds * (LONGER - SHORT) / (times[1] - times[0])))

    def distance(self, script: str, pipeline: Path) -> float:
        return min(self.evaluate(pipeline, sampler) for sampler in SAMPLERS.get(script, DDPM_SAMPLERS))

    def evaluate(self, pipeline: Path, sampler: list) -> float:
        told = pipeline.with_name(f"{pipeline.name}-{sampler[1]}.json")
        if not told.exists():
            out = pipeline.with_name(f"{pipeline.name}-{sampler[1]}")
            command = [ROOT / "evaluate.py", "--pipeline", pipeline, "--train_data_dir", self.data, "--resolution", 16]
            command += ["--num_images", self.num_images, "--cpu_threads", 1, "--output_dir", out, "--json", *sampler]
            log = out.with_suffix(".log")
            self.run(command, log)
            told.write_text(log.read_text()[log.read_text().index("{") :])
        return json.loads(told.read_text())["results"][0]["figures"]["fd"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unconditional", type=Path, required=True, help="diffusers' train_unconditional.py")
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0], help="of one core, for the updates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="diffusers' script has no seed: as many runs")
    parser.add_argument("--num_images", type=int, default=1000, help="samples that are judged")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/time-to-quality"), help="of one --data")
    parser.add_argument("--plot", type=Path, help="the medians over the seconds, as an SVG file")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    trials = Trials(args)
    print("| script | seconds | updates | distance of each run | median |\n|---|---|---|---|---|")
    curves: dict[str, list[float]] = {}
    for seconds in args.seconds:
        found = {}
        for number, flags in enumerate(SEARCH):
            epochs = trials.epochs(TUNED, flags, seconds, f"search-{number}")
            pipeline, _ = trials.train(TUNED, flags, epochs, 0, f"{seconds:g}/search-{number}")
            found[number] = trials.distance(TUNED, pipeline)
        best = min(found, key=lambda number: found[number])
        rows = {AS_IT_COMES: [], TUNED: SEARCH[best], **{script: [] for script in OURS}}
        for script, flags in rows.items():
            name = {AS_IT_COMES: "as-it-comes", TUNED: f"search-{best}"}.get(script, script)
            epochs, distances = trials.epochs(script, flags, seconds, name), []
            for seed in args.seeds:
                again = f"{name}-{seed}" if script != TUNED or seed != args.seeds[0] else name  # the search has made one
                pipeline, _ = trials.train(script, flags, epochs, seed, f"{seconds:g}/{again}")
                distances.append(trials.distance(script, pipeline))
            told = " ".join(f"{each:.1f}" for each in distances)
            words = script + (f" ({' '.join(flags)})" if flags else "")
            curves.setdefault(script, []).append(statistics.median(distances))
            print(f"| {words} | {seconds:g} | {epochs * trials.epoch} | {told} | {curves[script][-1]:.1f} |", flush=True)
            if args.plot:
                plot(curves, args.seconds, args.plot)


def plot(curves: dict[str, list[float]], seconds: list[float], path: Path) -> None:
    """An SVG file; both axes are logarithmic."""
    lows, highs = (
        list(map(math.log10, (pick(seconds), pick(d for curve in curves.values() for d in curve)))) for pick in (min, max)
    )

    def place(second: float, distance: float) -> str:
        x, y = ((math.log10(v) - low) / (high - low or 1) for v, low, high in zip((second, distance), lows, highs))
        return f"{60 + 420 * x:.1f},{310 - 290 * y:.1f}"

    parts, text = [], '<text x="{}" y="{}" fill="{}" text-anchor="{}">{}</text>'
    for second in seconds:
        x, _ = place(second, 10 ** lows[1]).split(",")
        parts.append(text.format(x, 330, "#555", "middle", f"{second:g}"))
    for power in range(math.ceil(lows[1]), math.floor(highs[1]) + 1):
        _, y = place(seconds[0], 10**power).split(",")
        parts.append(f'<path d="M60 {y}H480" stroke="#ddd"/>' + text.format(52, y, "#555", "end", f"{10**power:,}"))
    for number, ((script, distances), color) in enumerate(zip(curves.items(), ("#888", "#b35", "#06c", "#084"))):
        points = [place(*point) for point in zip(seconds, distances)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += ['<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*point.split(","), color) for point in points]
        parts.append(text.format(60, 388 + 18 * number, color, "start", script))
    parts.append(
        text.format(270, 350, "#555", "middle", "seconds of one core") + text.format(60, 12, "#555", "start", "fd_randconv")
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 460" width="500" font-family="sans-serif" font-size="12">'
    path.write_text(f'{head}<rect width="500" height="460" fill="#fff"/>{"".join(parts)}</svg>\n')


if __name__ == "__main__":
    main()
