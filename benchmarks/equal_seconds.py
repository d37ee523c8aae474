"""The recipes of train_ddpm.py and train_edm2.py at equal compute: digits, the same seconds of training on the same machine.

    python benchmarks/equal_seconds.py --seconds 150 --output_dir runs/equal-seconds

times some updates of each with its digits preset, one after the other, trains each for as many updates as fit into the
seconds (its learning rate laid out for just these), and has evaluate.py measure both: Frechet and kernel distance of
random-convolution features of `--num_images` samples, without guidance. EDM2 is told the classes, all of them equally often;
DDPM has none. Runs that are already there are not trained again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from utils.run_record import RunRecord

ROOT = Path(__file__).parent.parent
SCRIPTS = {"ddpm": "train_ddpm.py", "edm2": "train_edm2.py"}
TIMED = 60  # updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--num_images", type=int, default=2000)
    parser.add_argument("--cpu_threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/equal-seconds"))
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    speeds = {name: speed(args, name) for name in SCRIPTS}
    for name, images_per_second in speeds.items():
        updates = round(args.seconds * images_per_second / 32)
        run(args, name, args.output_dir / name, updates)
        record = RunRecord.read(args.output_dir / name)
        done = record.resolved["max_train_steps"]
        print(f"{name}: {done} updates, {done * 32 / images_per_second:.0f} s at {images_per_second:.0f} images/s", flush=True)
    command = [sys.executable, ROOT / "evaluate.py", "--pipeline", *(args.output_dir / name for name in SCRIPTS)]
    command += ["--dataset_name", "digits", "--resolution", 16, "--image_channels", 1, "--num_images", args.num_images]
    command += ["--output_dir", args.output_dir / "evaluation", "--cpu_threads", args.cpu_threads, "--json"]
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    (args.output_dir / "evaluation.json").write_text(result.stdout)
    print("| recipe | fd_randconv | kd_randconv |\n|---|---|---|")
    for name, found in zip(SCRIPTS, json.loads(result.stdout)["results"]):
        print(f"| {name} | {found['figures']['fd']:.3f} | {found['figures']['kd']:.4f} |")


def speed(args: argparse.Namespace, name: str) -> float:
    """Images per second of the updates alone."""
    folder = args.output_dir / f"{name}-timed"
    run(args, name, folder, TIMED)
    _, speeds = RunRecord.read(folder).series("perf/images_per_second")
    return speeds[-1]


def run(args: argparse.Namespace, name: str, folder: Path, updates: int) -> None:
    """Trains, unless it was done before. Samples, checkpoints and exports come once, at the end, and do not count."""
    if (folder / "exit_status").exists():
        return
    flags = ["--train_batch_size", 32, "--max_train_steps", updates, "--logging_steps", max(1, updates // 3)]
    flags += ["--save_images_steps", 10**6, "--save_model_steps", 10**6, "--checkpointing_steps", 10**6]
    flags += ["--validation_images", 0, "--cpu_threads", args.cpu_threads, "--output_dir", folder, "--overwrite_output_dir"]
    with open(args.output_dir / f"{folder.name}.log", "w") as log:
        command = [sys.executable, ROOT / SCRIPTS[name], *flags]
        subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main()
