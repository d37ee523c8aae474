"""Which training makes the better samples of the same seconds? These scripts, and those of other projects.

    python benchmarks/quality/time_to_quality.py --rival diffusers=train_unconditional.py --rival lucidrains=FOLDER \\
        --rival smalldiffusion=FOLDER --rival torchcfm=FOLDER --data digits --seconds 15 30 60 --plot curves.svg

Rivals are given by their path and not shipped here; rivals.py says what each of them gets. The data: digits as RGB images of
16x16, 200 of them (few), or drawn shapes of 32x32. Seconds are those of one thread of a processor from the first to the last
update, for everybody alike: the start is not counted. A short run of each row, one after the other, tells what an update
costs, and a run makes as many as fit, with its learning rate laid out for just these. Each writes its samples as PNG files:
rivals by their own sampler, pipelines of diffusers by generate.py. One call of evaluate.py judges all folders: distance,
precision and recall against all images of the kind, copies against those that were trained on. What is already there is not
made again; a table has the seeds that were asked for.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.quality.draw_shapes import draw
from benchmarks.quality.rivals import BATCH, RIVALS, WARM
from benchmarks.shared.real_script import ROOT

SHAPES, FEW, TIMED = 2000, 200, 20  # images; images; updates that tell what one costs
NEVER = 10**9
DDPM, EULER, HEUN = (["--sampler", *words.split()] for words in (
    "ddpm --num_inference_steps 50", "euler --num_inference_steps 50", "heun --num_inference_steps 32"))  # fmt: skip


@dataclass(frozen=True)
class Row:
    driver: str  # of rivals.py
    flags: tuple[str, ...] = ()
    sampler: tuple[str, ...] = ()  # of generate.py
    batch: int = BATCH


def _ours(script: str, preset: str, sampler: list[str], *flags: str) -> Row:
    flags += ("--eval_steps", str(NEVER)) if preset == "few" else ()  # but once, after the last update
    return Row(script, ("--model_preset", preset, *flags), tuple(sampler), 16 if preset in ("few", "small32") else BATCH)


TUNED = ("--learning_rate", "2e-3", "--use_ema", "--lr_warmup_steps", "100", "--ddpm_beta_schedule")
ROWS = {
    "train_ddpm.py": _ours("train_ddpm.py", "digits16", DDPM),
    "train_ddpm.py --objective flow": _ours("train_ddpm.py", "digits16", EULER, "--objective", "flow"),
    "train_ddpm.py, augmented": _ours("train_ddpm.py", "digits16", DDPM, "--augment_probability", "0.15"),
    "train_edm2.py": _ours("train_edm2.py", "digits16", HEUN),
    "train_ddpm.py, few": _ours("train_ddpm.py", "few", DDPM),
    "train_edm2.py, few": _ours("train_edm2.py", "few", HEUN),
    "train_edm2.py, small32": _ours("train_edm2.py", "small32", HEUN),
    "diffusers": Row("diffusers", sampler=tuple(DDPM)),
    "diffusers, tuned": Row("diffusers", (*TUNED, "squaredcos_cap_v2"), tuple(DDPM)),
    "diffusers, tuned, linear": Row("diffusers", (*TUNED, "linear"), tuple(DDPM)),
    "lucidrains, tuned": Row("lucidrains", ("--tuned",)),
    **{name: Row(name) for name in RIVALS},
}


def digits() -> Iterator[Image.Image]:
    for digit in load_digits().images:
        scan = Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8))
        yield scan.resize((16, 16), Image.Resampling.BILINEAR).convert("RGB")


def few() -> Iterator[Image.Image]:
    return itertools.islice(digits(), FEW)


def shapes() -> Iterator[Image.Image]:
    numbers = random.Random(0)
    return (draw(numbers, 32) for _ in range(SHAPES))


DATA = {"digits": digits, "few": few, "shapes": shapes}


class Trials:
    def __init__(self, args: argparse.Namespace):
        self.folder, self.num_images = args.output_dir.resolve(), args.num_images
        self.paths = {name: Path(path).resolve() for name, path in (rival.split("=", 1) for rival in args.rival)}
        self.paths |= {script: ROOT / script for script in ("train_ddpm.py", "train_edm2.py")}
        self.data, self.reference = (self._write(name) for name in (args.data, "digits" if args.data == "few" else args.data))
        self.work, self.side = self.folder / f"{args.data}-runs", 32 if args.data == "shapes" else 16
        self.timing = self.folder / f"timing-{self.side}"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        if importlib.util.find_spec("torchvision") is None:
            stand_in = ROOT / "benchmarks/doctor/foreign/stand_ins"
            self.environment["PYTHONPATH"] = os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])

    def _write(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir(parents=True)
            for number, image in enumerate(DATA[name]()):
                image.save(folder / f"{number:04}.png")
        return folder

    def run(self, *command, log: Path) -> None:
        with open(log, "a") as file:
            command = [sys.executable, *map(str, command)]
            subprocess.run(command, check=True, env=self.environment, stdout=file, stderr=subprocess.STDOUT)

    def train(self, row: Row, updates: int, seed: int, out: Path, stop_after: int | None = None) -> dict:
        """What rivals.py told of a run, whose pipeline or samples are in the folder `out`."""
        told = out.with_name(f"{out.name}.json")
        if not told.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            unfinished = told.with_suffix(".unfinished")
            command = [ROOT / "benchmarks/quality/rivals.py", row.driver if row.driver in RIVALS else "script"]
            command += [self.paths[row.driver], "--told", unfinished, "--seed", seed]
            command += ["--stop_after", stop_after] if stop_after else []
            if row.driver in RIVALS:
                command += ["--data", self.data, "--updates", updates, "--output_dir", out, "--num_images", self.num_images]
                command += row.flags
            else:
                command += ["--", *self._flags(row, updates, seed, out), *row.flags]
            self.run(*command, log=out.with_name(f"{out.name}.log"))
            unfinished.rename(told)
        return json.loads(told.read_text())

    def _flags(self, row: Row, updates: int, seed: int, out: Path) -> list:
        """Of a script. Nothing is saved, sampled or validated before the end."""
        flags = ["--train_data_dir", self.data, "--resolution", self.side, "--train_batch_size", row.batch]
        flags += ["--output_dir", out, "--overwrite_output_dir", "--checkpointing_steps", NEVER]
        if row.driver == "diffusers":
            epochs = max(1, round(updates / math.ceil(len(list(self.data.iterdir())) / row.batch)))
            flags += ["--num_epochs", epochs, "--model_config_name_or_path", self.network(), "--center_crop"]
            flags += ["--save_images_epochs", NEVER, "--save_model_epochs", NEVER]
            return [*flags, "--eval_batch_size", 1, "--ddpm_num_inference_steps", 2]
        flags += ["--max_train_steps", updates, "--image_channels", 3, "--cpu_threads", 1, "--seed", seed]
        flags += ["--validation_images", 0, "--save_images_steps", NEVER, "--save_model_steps", NEVER]
        return flags

    def network(self) -> Path:
        """The config of the network that digits16 has: diffusers' script trains the same."""
        self.train(ROWS["train_ddpm.py"], 2, 0, self.timing / "network")
        return self.timing / "network/unet"

    def updates_in(self, name: str, seconds: float, longest: float) -> int:
        """As many as fit, by a run that is laid out for about the `longest` seconds and stopped: what it does now and then, it
        does as often. Its updates count as they were, with what comes often among the first ones alone; all others would be
        like the median one."""
        row, guess = ROWS[name], max(WARM + TIMED + 1, round(8 * longest))
        told = self.train(row, guess, 0, self.timing / name, WARM + TIMED)
        return max(2, told["updates"] + round((seconds - told["seconds"]) / told["seconds_of_update"]))

    def samples(self, name: str, seconds: float, updates: int, seed: int) -> tuple[Path, dict]:
        """(a folder of PNG files, what rivals.py told of their training)."""
        row, out = ROWS[name], self.work / f"{seconds:g}/{name}-{seed}"
        told = self.train(row, updates, seed, out)
        if not row.sampler:
            return out, told
        images = out.with_name(f"{out.name}-samples")
        if (images / f"{self.num_images - 1:06}.png").exists():
            return images, told
        flags = ["--pipeline", out, "--output_dir", images, "--num_images", self.num_images]
        flags += ["--batch_size", 100, "--seed", seed]
        self.run(ROOT / "generate.py", *flags, "--quiet", *row.sampler, log=out.with_name(f"{out.name}.log"))
        return images, told

    def evaluate(self, folders: list[Path], reference: Path) -> list[dict]:
        out = self.work / "evaluation"
        flags = ["--reference", reference, "--resolution", self.side, "--no_classes"]
        command = [ROOT / "evaluate.py", "--images", *folders, *flags, "--cpu_threads", 1, "--output_dir", out, "--quiet"]
        self.run(*command, log=self.work / "evaluation.log")
        return [result["figures"] for result in json.loads((out / "evaluation.json").read_text())["results"]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rival", action="append", default=[], metavar="NAME=PATH", help="diffusers: its script; others: folders"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="(all whose rival was given)", metavar="ROW")
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0], help="of one thread, for the updates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_images", type=int, default=500, help="samples that are judged")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/time-to-quality"))
    parser.add_argument("--plot", type=Path, help="the medians over the seconds, as an SVG file")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    trials = Trials(args)
    rows = args.rows or [name for name, row in ROWS.items() if row.driver in trials.paths]
    fitting = {each: trials.updates_in(*each, max(args.seconds)) for each in itertools.product(rows, args.seconds)}
    print("| row | seconds | updates | fd_randconv of each run | median | precision | recall | copies |\n" + "|---" * 8 + "|")
    curves: dict[str, list[float]] = {name: [] for name in rows}
    for seconds in args.seconds:
        runs = {}
        for seed, name in itertools.product(args.seeds, rows):  # all rows of a seed: a busy hour of the machine is everybody's
            runs[name, seed] = trials.samples(name, seconds, fitting[name, seconds], seed)
        folders = [folder for folder, _ in runs.values()]
        quality = dict(zip(runs, trials.evaluate(folders, trials.reference)))
        copies = dict(zip(runs, trials.evaluate(folders, trials.data))) if trials.data != trials.reference else quality
        for name in rows:
            of = [quality[name, seed] for seed in args.seeds]
            told = [runs[name, seed][1] for seed in args.seeds]
            precision, recall = (statistics.median(each[key] for each in of) for key in ("precision", "recall"))
            copied = statistics.median(copies[name, seed]["memorisation"]["copies"] for seed in args.seeds)
            curves[name].append(statistics.median(each["fd"] for each in of))
            spent = " ".join(f"{each['seconds']:.0f}" for each in told)
            each = " ".join(f"{figures['fd']:.1f}" for figures in of)
            cells = [name, spent, told[0]["updates"], each, f"{curves[name][-1]:.1f}"]
            print(f"| {' | '.join(map(str, cells))} | {precision:.2f} | {recall:.2f} | {copied:.1%} |", flush=True)
        real = next(iter(copies.values()))["memorisation"]["copies_real"]
        print(f"real images: fd_randconv {next(iter(quality.values()))['floor']['fd']:.2f}, copies {real:.1%}")
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
    for number, (script, distances) in enumerate(curves.items()):
        color = f"hsl({360 * number // len(curves)} 80% 35%)"
        points = [place(*point) for point in zip(seconds, distances)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += ['<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*point.split(","), color) for point in points]
        parts.append(text.format(60, 388 + 18 * number, color, "start", script))
    parts.append(
        text.format(270, 350, "#555", "middle", "seconds of one core") + text.format(60, 12, "#555", "start", "fd_randconv")
    )
    height, font = 388 + 18 * len(curves), 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 {height}" width="500" {font}>'
    path.write_text(f'{head}<rect width="500" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n')


if __name__ == "__main__":
    main()
