"""All objectives in each precision: is what the doctor says right, and has a run that is resumed the bits of one that is not?

    python benchmarks/reliability/precisions.py                    # on the GPU where there is one; 2 minutes with 16 cores

Each trains on the digits. With --deterministic, it trains once more from the start and once more from its middle.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ("train_ddpm.py", "train_ddpm.py --objective flow", "train_edm2.py")
ANYWHERE = {
    "fp32": "--no-tf32",
    "bf16": "--mixed_precision bf16",
    "bf16, checkpointed, accumulated": "--mixed_precision bf16 --gradient_checkpointing --gradient_accumulation_steps 2",
}
ON_A_GPU = ANYWHERE | {
    "tf32": "",
    "fp16": "--mixed_precision fp16",
    "bf16, compiled": "--mixed_precision bf16 --compile",
    "fp16, compiled": "--mixed_precision fp16 --compile",
}


def train(script: str, flags: list[str], folder: Path) -> tuple[int, str]:
    """Exit status, and the last line of what was printed."""
    environment = os.environ | {"TQDM_MININTERVAL": "60", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    name, *own = script.split()
    command = [sys.executable, ROOT / name, *own, *flags, "--output_dir", folder]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder.with_suffix(f".{time.monotonic_ns()}.log").write_text(done.stdout)
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


def weights(folder: Path) -> dict[str, str]:
    """Digests of the weights, averages and optimizer that a run left."""
    files = [*folder.glob("*/*.safetensors"), *folder.glob("checkpoint-*/*.bin")]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def findings(folder: Path) -> list[str]:
    """Above "info", and where the doctor itself failed, which makes it silent."""
    found = json.loads((folder / "diagnosis.json").read_text())
    said = [one for one in found if one["severity"] != "info" or one["code"] == "rule-failed"]
    return [f"{one['code']}: {one['evidence']}"[:160] for one in said]


def measured(folder: Path) -> int:
    """Updates that the doctor has looked at."""
    lines = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return len({line["step"] for line in lines if line.get("audit", {}).get("measured")})


def row(script: str, name: str, flags: str, updates: int, place: Path) -> tuple[str, bool]:
    """What is said of one configuration, and whether it is as it should be: without --deterministic only of its findings."""
    half = updates // 2
    numbers = {
        "max_train_steps": updates,
        "checkpointing_steps": half,
        "save_images_steps": updates,
        "lr_warmup_steps": half // 4,
    }
    every = [*flags.split(), *(word for name, number in numbers.items() for word in (f"--{name}", str(number)))]
    kind = re.sub("[^a-z0-9]+", "-", f"{script[6:]} {name}".replace(".py", ""))
    whole, again, resumed = (place / f"{kind}-{letter}" for letter in "abc")
    start = time.monotonic()
    status, last = train(script, every, whole)
    if status:
        return f"exit status {status}: {last}", False
    if "--deterministic" not in flags:
        found = findings(whole)
        looks = measured(whole)
        return f"{looks} looks, {found or 'no finding'}; {time.monotonic() - start:.0f} s", bool(looks) and not found
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("unet", f"checkpoint-{updates}"))
    others = [train(script, every, again), train(script, [*every, "--resume_from_checkpoint", f"checkpoint-{half}"], resumed)]
    if any(status for status, _ in others):
        return f"exit status and last line, again and resumed: {others}", False
    expected = weights(whole)
    repeats, continues = weights(again) == expected, weights(resumed) == expected
    found = findings(whole) + findings(resumed)
    bits = "resumed: the same bits" if continues else "resumed: OTHER BITS" if repeats else "no two runs have the same bits"
    said = (
        f"{bits} of {len(expected)} files; {measured(whole)} looks, {found or 'no finding'}; {time.monotonic() - start:.0f} s"
    )
    return said, bool(expected and measured(whole)) and not found and continues and repeats


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="at a time")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="configurations whose names have one of these words (all)")
    parser.add_argument("--keep", type=Path, help="the runs stay there")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    kinds = ON_A_GPU if torch.cuda.is_available() else ANYWHERE
    kinds = {f"{name}, deterministic": f"{flags} --deterministic" for name, flags in kinds.items()} | kinds
    kinds = {name: flags for name, flags in kinds.items() if not args.only or any(word in name for word in args.only)}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        place = args.keep or Path(folder)
        asked = {
            (s, name): pool.submit(row, s, name, flags, args.updates, place) for name, flags in kinds.items() for s in SCRIPTS
        }
        wrong = 0
        for (script, name), future in asked.items():
            said, right = future.result()
            wrong += not right
            print(f"=> {'ok   ' if right else 'WRONG'} {script} {name}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(parse_args()))
