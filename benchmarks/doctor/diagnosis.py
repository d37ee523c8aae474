"""Does the doctor name what is wrong? Trains short runs with one fault each, and healthy ones, and asks it blind.

    python benchmarks/doctor/diagnosis.py                                   # everything, a quarter of an hour on 2 cores
    python benchmarks/doctor/diagnosis.py --part tuned --json tuned.json    # without the third that is kept aside
    python benchmarks/doctor/diagnosis.py --kept FOLDER                     # after a change of the rules: asks about kept runs
    python benchmarks/doctor/diagnosis.py --faults "EMA frozen" --healthy 0 --seeds 0 --datasets digits

Each run is the real train_ddpm.py in a process of its own, with a fault of faults.py or later_faults.py in it. The doctor then
reads the run's folder and nothing else. A fault counts as found when its code is the first or second finding; a healthy run
must not have a finding above "info". A third of the pairs of fault and data set, and of the healthy runs, is held out: chosen
by a hash of their names, they were not looked at while rules and thresholds were chosen. The later ones came after that.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests/faults"))

import numpy as np
from fork_server import ForkServer

from benchmarks.doctor.faults import FAULTS as FIRST_FAULTS
from benchmarks.doctor.later_faults import LATER_FAULTS
from benchmarks.shared.measuring import default_device, describe
from benchmarks.shared.real_script import small_network
from utils.diagnostics.diagnose import diagnose
from utils.runs.record import RunRecord

FAULTS = FIRST_FAULTS | LATER_FAULTS
DATASETS = {"digits": 1, "shapes": 3}  # -> channels
PARTS = ("tuned", "held_out", "later")
SPLIT_SEED = "diagnosis 3"
TIMEOUT_SECONDS = 180

# Three kinds of training, one for each seed, so that the rules do not learn the figures of one.
KINDS = (
    {"prediction_type": "epsilon", "ddpm_beta_schedule": "linear"},
    {"prediction_type": "v_prediction", "ddpm_beta_schedule": "squaredcos_cap_v2"},
    {"prediction_type": "sample", "ddpm_beta_schedule": "linear"},
)
BASE = {
    "resolution": 16,
    "train_batch_size": 16,
    "max_train_steps": 160,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 20,
    "logging_steps": 8,
    "validation_images": 64,
    "validation_steps": 40,
    "eval_batch_size": 8,
    "ddpm_num_inference_steps": 5,
    "save_images_steps": 100,
    "save_model_steps": 100_000,
    "checkpointing_steps": 100_000,
    "cpu_threads": 1,
}
# Smaller images and a larger network know 32 images by heart in half a minute.
OVERFIT = {"resolution": 8, "network": "large", "train_batch_size": 32, "learning_rate": 3e-3, "max_train_steps": 600}
OVERFIT |= {"logging_steps": 30, "validation_steps": 100, "save_images_steps": 300}
NETWORKS = {"tiny": [8, 16], "small": [16, 32], "large": [32, 64]}


def healthy_runs() -> dict[str, dict]:
    """Name -> flags; each is run on one of the data sets, in turn."""
    v_cosine, zero_snr = KINDS[1], {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    sample_cosine = {"prediction_type": "sample", "ddpm_beta_schedule": "squaredcos_cap_v2"}
    processes = {"epsilon linear": KINDS[0], "v cosine": v_cosine, "v zero SNR": zero_snr, "sample linear": KINDS[2]}
    runs = {}
    for name, flags in processes.items():
        runs[name] = flags
        runs[f"{name}, small network"] = flags | {"network": "small"}
        runs[f"{name}, LR 3e-4"] = flags | {"learning_rate": 3e-4}
        runs[f"{name}, LR 3e-3"] = flags | {"learning_rate": 3e-3}
        runs[f"{name}, zero output"] = flags | {"zero_init_output": True}
        runs[f"{name}, bf16"] = flags | {"mixed_precision": "bf16"}
    runs |= {
        "epsilon cosine": {"prediction_type": "epsilon", "ddpm_beta_schedule": "squaredcos_cap_v2"},
        "sample cosine": sample_cosine,
        "v linear, batch 64": {"prediction_type": "v_prediction", "train_batch_size": 64, "max_train_steps": 120},
        "epsilon, batch 128": {"train_batch_size": 128, "max_train_steps": 72},
        "sample zero SNR, batch 128": {**sample_cosine, "rescale_betas_zero_snr": True}
        | {"train_batch_size": 128, "max_train_steps": 72},
        "8 updates": {"max_train_steps": 8, "logging_steps": 1, "lr_warmup_steps": 4},
        "30 updates of v": {**v_cosine, "max_train_steps": 30, "logging_steps": 5, "lr_warmup_steps": 5},
        "60 updates, default logging": {"max_train_steps": 60, "logging_steps": 50, "lr_warmup_steps": 500},
        "min-SNR weights": {**v_cosine, "snr_gamma": 5.0, "random_flip": True},
        "no EMA, no warm-up, constant LR": {"use_ema": False, "lr_warmup_steps": 0, "lr_scheduler": "constant"},
        "long, adaptive clipping": {**v_cosine, "adaptive_clipping": True, "max_train_steps": 600, "logging_steps": 30},
        "he initialization, accumulation": {"initialisation": "he", "gradient_accumulation_steps": 2, "train_batch_size": 8},
    }
    return runs


@dataclass(frozen=True)
class Case:
    fault: str  # "none" for a healthy run
    name: str  # the fault's, or the healthy run's
    dataset: str
    seed: int
    flags: dict

    @property
    def part(self) -> str:
        if self.fault in LATER_FAULTS:
            return "later"
        digest = hashlib.sha256(f"{SPLIT_SEED}/{self.name}/{self.dataset}".encode()).digest()
        return "held_out" if digest[0] % 3 == 0 else "tuned"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.dataset}-{self.seed}".replace("/", "_")


@dataclass
class Result:
    name: str
    dataset: str
    seed: int
    expected: str | None
    part: str
    findings: list[dict] = field(default_factory=list)
    status: int | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        # The step audit's findings, for which there is audit.py, come before those of the rules, which are asked here.
        codes = [finding["code"] for finding in self.findings if not finding["code"].startswith("step-")]
        if self.expected is None:
            return not any(finding["severity"] != "info" for finding in self.findings)
        return self.expected in codes[:2]


def cases(faults: list[str], healthy: int, seeds: list[int], datasets: list[str]) -> list[Case]:
    chosen = []
    for fault in faults:
        for dataset in datasets:
            for seed in seeds:
                flags = BASE | KINDS[seed % len(KINDS)] | FAULTS[fault].flags(seed)
                if flags.pop("overfit", False):
                    flags |= OVERFIT
                chosen.append(Case(fault, fault, dataset, seed, flags))
    for number, (name, flags) in enumerate(list(healthy_runs().items())[:healthy]):
        dataset = datasets[(number + number // 6) % len(datasets)]
        chosen.append(Case("none", name, dataset, number, BASE | flags))
    return chosen


# ---- the data sets


def make_dataset(folder: Path, dataset: str, imbalanced: bool) -> None:
    """Labeled images, saved by `datasets`; of the imbalanced ones 95 % are of one class."""
    import datasets
    from PIL import Image

    pixels, labels = digit_images() if dataset == "digits" else shape_images(600)
    if imbalanced:
        most = np.flatnonzero(labels == 1)
        rest = np.flatnonzero(labels != 1)
        others = np.random.default_rng(0).choice(rest, max(len(most) // 19, 1), replace=False)
        chosen = np.concatenate([most, others])
        pixels, labels = pixels[chosen], labels[chosen]
    names = [str(label) for label in range(labels.max() + 1)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": [Image.fromarray(image) for image in pixels], "label": labels.tolist()}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)


def digit_images() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images * (255 / 16)).round().astype(np.uint8), digits.target


def shape_images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """A disc, a square or a cross of one color on a gradient between two others, uint8 [count, 16, 16, 3]; the classes."""
    chance = np.random.default_rng(0)
    labels = np.arange(count) % 3
    y, x = np.mgrid[0:16, 0:16]
    images = []
    for label in labels:
        (start, end, color), angle = chance.uniform(0, 255, (3, 3)), chance.uniform(0, 2 * np.pi)
        along = (np.cos(angle) * (x - 7.5) + np.sin(angle) * (y - 7.5)) / 21 + 0.5
        image = start + along[..., None] * (end - start)
        (cx, cy), radius = chance.uniform(4, 12, 2), chance.uniform(2.5, 5)
        distances = (
            np.hypot(x - cx, y - cy),
            np.maximum(abs(x - cx), abs(y - cy)),
            np.minimum(abs(x - cx), abs(y - cy)) * 2.5 + np.maximum(abs(x - cx), abs(y - cy)) * 0.3,
        )
        image[distances[label] < radius] = color
        images.append(image.clip(0, 255))
    return np.stack(images).astype(np.uint8), labels


# ---- the runs


def command(case: Case, work: Path, output_dir: Path) -> list[str]:
    flags = dict(case.flags)
    folder = work / f"{flags.pop('network', 'tiny')}-{case.dataset}"
    variety = FAULTS[case.fault].data if case.fault != "none" else "good"
    name = "digits" if (case.dataset, variety) == ("digits", "good") else work / f"{case.dataset}-{variety}"
    flags |= {"dataset_name": name, "model_config_name_or_path": folder, "image_channels": DATASETS[case.dataset]}
    flags |= {"cache_dir": work / "cache", "output_dir": output_dir, "seed": case.seed}
    words = [str(word) for flag, value in flags.items() for word in flag_words(flag, value)]
    return ["benchmarks/doctor/faulty_run.py", case.fault, case.seed, "--", *words]


def flag_words(flag: str, value) -> list:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", value]


def prepare(work: Path, chosen: list[Case]) -> None:
    for dataset in {case.dataset for case in chosen}:
        for imbalanced in (False, True):
            make_dataset(work / f"{dataset}-{'imbalanced' if imbalanced else 'good'}", dataset, imbalanced)
        for name, widths in NETWORKS.items():
            folder = work / f"{name}-{dataset}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(small_network(16, DATASETS[dataset], widths)))


def run_cases(chosen: list[Case], jobs: int = 2, keep: Path | None = None, say=print) -> list[Result]:
    """Runs them, `jobs` at a time, and asks the doctor about each folder; `keep` gets what the runs recorded."""
    os.environ["TQDM_MININTERVAL"] = "60"
    results: dict[int, Result] = {}
    waiting, running = list(enumerate(chosen)), {}
    with tempfile.TemporaryDirectory() as name, ForkServer() as server:
        work = Path(name)
        prepare(work, chosen)
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                (run,) = server.start(command(case, work, work / f"run-{number}"))
                running[number] = case, run, time.monotonic()
            for number, (case, run, start) in list(running.items()):
                seconds = time.monotonic() - start
                if run.poll() is None and seconds < TIMEOUT_SECONDS:
                    continue
                if run.status is None:
                    run.kill()
                del running[number]
                results[number] = examine(case, work / f"run-{number}", run.status, seconds)
                say(line(results[number]))
                if run.status not in (0, 3):
                    say(f"ended with {run.status}: {run.text()[-1500:]}")
                if keep is not None:
                    shutil.copytree(work / f"run-{number}", keep / case.folder, dirs_exist_ok=True)
                shutil.rmtree(work / f"run-{number}", ignore_errors=True)
            time.sleep(0.05)
    return [results[number] for number in sorted(results)]


def examine(case: Case, output_dir: Path, status: int | None = None, seconds: float = 0.0) -> Result:
    """The doctor sees the folder; the case is only told what to compare the answer with."""
    findings = diagnose(RunRecord.read(output_dir))
    expected = FAULTS[case.fault].code if case.fault != "none" else None
    kept = [{"code": f.code, "severity": f.severity, "evidence": f.evidence} for f in findings]
    return Result(case.name, case.dataset, case.seed, expected, case.part, kept, status, seconds)


# ---- the tables


def line(result: Result) -> str:
    codes = ", ".join(finding["code"] for finding in result.findings) or "nothing"
    verdict = "ok  " if result.right else "WRONG"
    return f"{verdict} {result.name} / {result.dataset} / {result.seed} ({result.seconds:.0f} s): {codes}"


def summary(results: list[Result]) -> str:
    text = []
    for name in PARTS:
        part = [result for result in results if result.part == name]
        faulty = [result for result in part if result.expected is not None]
        healthy = [result for result in part if result.expected is None]
        if part:
            text.append(f"\n{name.replace('_', ' ').capitalize()}:")
        if faulty:
            found = sum(result.right for result in faulty)
            text.append(f"{found} of {len(faulty)} faulty runs ({found / len(faulty):.1%}) have their fault first or second.\n")
            text.append("| fault | data | found | usual first finding | evidence |\n|---|---|---|---|---|")
        for name, dataset in dict.fromkeys((result.name, result.dataset) for result in faulty):
            runs = [result for result in faulty if (result.name, result.dataset) == (name, dataset)]
            codes = Counter(result.findings[0]["code"] if result.findings else "none" for result in runs)
            first = codes.most_common(1)[0][0]
            expected = [f for result in runs for f in result.findings if f["code"] == result.expected]
            evidence = expected[0]["evidence"] if expected else "-"
            text.append(f"| {name} | {dataset} | {sum(r.right for r in runs)} of {len(runs)} | `{first}` | {evidence} |")
        if healthy:
            alarms = [result for result in healthy if not result.right]
            text.append(f"\nHealthy runs: {len(healthy)}, with a finding above info: {len(alarms)}.")
            text += [line(result) for result in alarms]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="NAME", help="(all)")
    parser.add_argument("--healthy", type=int, default=len(healthy_runs()), metavar="N", help="the first N healthy runs (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every run's findings there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps the runs' folders there")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="runs nothing: asks about the folders that --keep left")
    args = parser.parse_args()
    chosen = cases(args.faults, args.healthy, args.seeds, args.datasets)
    if args.part != "all":
        chosen = [case for case in chosen if case.part == args.part]
    start = time.monotonic()
    if args.kept is not None:
        results = [examine(case, args.kept / case.folder) for case in chosen if (args.kept / case.folder).exists()]
    else:
        results = run_cases(chosen, args.jobs, args.keep, lambda text: print(text, flush=True))
    print(summary(results))
    machine = describe(default_device())
    print(f"\n{len(results)} runs in {time.monotonic() - start:.0f} s, {args.jobs} at a time; {machine}")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) | {"right": result.right} for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
