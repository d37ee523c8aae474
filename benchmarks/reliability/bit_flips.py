"""Which flipped bits --rerun_steps finds: one flips in each of 32 updates, from the lowest of the mantissa to the sign.

    python benchmarks/reliability/bit_flips.py                       # both scripts, digits16 and the digits, some minutes
    python benchmarks/reliability/bit_flips.py --scripts train_edm2.py --train_batch_size 8
    python benchmarks/reliability/bit_flips.py --checkpoint runs/mine/checkpoint-8     # of its files, on a copy; seconds

The element with the largest magnitude of one tensor is hit: of the largest parameter after the forward pass (weights), of its
gradient, of the output of the first convolution (activation), or of the batch of images. Each update is made again; other
flags go to the scripts.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared.measuring import default_device, describe
from utils.runs.checkpoint_files import MANIFEST, verify_checkpoint

ROOT = Path(__file__).parents[2]
PLACES, BITS, FIRST = ("weights", "gradient", "activation", "batch"), 32, 3  # update FIRST has the first one


def outcomes(script: str, where: str, flags: list[str]) -> list[tuple[str, str]]:
    """(outcome, first stage that differs) for bits 0 to 31, each in an update of its own."""
    with tempfile.TemporaryDirectory() as folder:
        fault = [script, "flip", "--value", where, "--step", str(FIRST), "--", "--dataset_name", "digits"]
        run = f"--max_train_steps {FIRST + BITS} --rerun_steps 1 --lr_warmup_steps 0 --logger none --output_dir {folder}/run"
        command = [sys.executable, ROOT / "tests/faults/inject.py", *fault, *flags, *run.split()]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in Path(folder, "run/history.jsonl").read_text().splitlines()]
    made = {line["step"]: line["rerun"] for line in lines if "rerun" in line}
    if differing := [step for step, each in made.items() if each["outcome"] != "same" and not FIRST <= step < FIRST + BITS]:
        sys.exit(f"updates without a flipped bit were not made again the same: {differing}")
    return [(made[FIRST + bit]["outcome"], made[FIRST + bit].get("stage", "")) for bit in range(BITS)]


def of_checkpoint(path: Path, most: int = 200) -> None:
    """Flips one bit at a time in each file: in the manifest all, in the others `most` by chance."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder, path.name)))
        if problem := verify_checkpoint(copy):
            sys.exit(f"{path}: {problem}")
        for file in sorted(file for file in copy.rglob("*") if file.is_file()):
            content, noticed = file.read_bytes(), 0
            bits = range(8 * len(content))
            chosen = bits if file.name == MANIFEST else random.Random(0).sample(bits, min(most, len(bits)))
            for bit in chosen:
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                file.write_bytes(flipped)
                noticed += verify_checkpoint(copy) is not None
            file.write_bytes(content)
            print(f"{file.relative_to(copy)}, {len(content)} bytes: {noticed} of {len(chosen)} flipped bits noticed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=["train_ddpm.py", "train_edm2.py"])
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint, in a copy of which bits of files flip instead")
    options, flags = parser.parse_known_args()
    if options.checkpoint:
        return of_checkpoint(options.checkpoint)
    print(describe(default_device()))
    for script in options.scripts:
        for where in PLACES:
            found = outcomes(script, where, flags)
            missed = [bit for bit, (outcome, _) in enumerate(found) if outcome != "wrong"]
            stages = sorted({stage for outcome, stage in found if outcome == "wrong"})
            print(f"{script:14} {where:10} {BITS - len(missed)} of {BITS} found, first seen in: {', '.join(stages)}", end="")
            print(f"; not found: bits {missed}" if missed else "", flush=True)


if __name__ == "__main__":
    main()
