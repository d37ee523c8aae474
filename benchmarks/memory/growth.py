"""Resident memory and start-up time of a run against the number of images.

    python benchmarks/memory/growth.py --images 1000 100000 1000000

For each size it writes a parquet file of 32x32 RGB PNGs (1,000 different ones, repeated), lets `train_ddpm.py` pack it once,
and then measures a second run of `--updates` updates with batch 64, which reads the packed file. Start-up is the time from the
start of the process, imports included, until the loop asks for the first batch of the first update. Memory is what the kernel
counts as resident, pages of mapped files included: the most that each run ever held, and the median while the second trains.
"""

import argparse
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.shared.real_script import ROOT, small_network

# What each process runs, given the project's folder, a file to make when the first update begins, and the script's flags.
TRAIN = """
import sys
from pathlib import Path
root, marker = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, root)
import train_ddpm
from utils.training.progress import Stopwatch
wait = Stopwatch.waiting_for_data
def begin(stopwatch):
    Path(marker).touch()
    Stopwatch.waiting_for_data = wait
    return wait(stopwatch)
Stopwatch.waiting_for_data = begin
train_ddpm.run_script(train_ddpm.main, train_ddpm.parse_args)
"""


def write_parquet(path: Path, images: int) -> None:
    generator = np.random.default_rng(0)
    files = []
    for _ in range(1000):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
        files.append({"bytes": buffer.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    block = pa.table({"image": pa.array(files, type=kind)})
    with pq.ParquetWriter(path, block.schema) as writer:
        for _ in range(images // 1000):
            writer.write_table(block)


class Measured(NamedTuple):
    """Of one training run; memory in MiB, the median of the last third where it is called `training`."""

    ready: float  # seconds until the first update can begin
    seconds: float  # in all
    peak: float  # resident
    own_peak: float  # resident, without pages of files
    training: float
    own_training: float


def run(flags: list[str], folder: Path) -> Measured:
    """Trains in `folder`."""
    start, began, resident = time.perf_counter(), time.time(), {"VmRSS": [], "RssAnon": []}
    marker = folder / "began"
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(ROOT), str(marker), *flags], stdout=subprocess.DEVNULL, stderr=errors
        )
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.split(":")[0] in resident}
            for name, kib in sizes.items():
                resident[name].append(int(kib) / 1024)
            time.sleep(0.1)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(errors.read())
    peaks = [max(sizes) for sizes in resident.values()]
    training = [statistics.median(sizes[-len(sizes) // 3 :]) for sizes in resident.values()]
    return Measured(marker.stat().st_mtime - began, time.perf_counter() - start, *peaks, *training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()
    print("                    the run that packs     | a later run: resident, and of it the process's own memory (MiB)")
    print("   images  packed | packing s   peak    own | start s  run s   peak    own   training    own")
    for images in options.images:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "network").mkdir()
            (folder / "network" / "config.json").write_text(json.dumps(small_network(32, 3)))
            write_parquet(folder / "train.parquet", images)
            flags = f"""--dataset_name {folder}/train.parquet --cache_dir {folder}/cache --resolution 32 --train_batch_size 64
                --model_config_name_or_path {folder}/network --eval_batch_size 1 --ddpm_num_inference_steps 2
                --output_dir {folder}/run --overwrite_output_dir""".split()
            first = run([*flags, "--max_train_steps", "1"], folder)
            later = run([*flags, "--max_train_steps", str(options.updates)], folder)
            packed = sum(p.stat().st_size for p in (folder / "cache" / "steady_diffusion").rglob("*") if p.is_file())
            row = f"{images:>9,} {packed / 2**20:>7.0f} | {first.seconds:>9.1f} {first.peak:>6.0f} {first.own_peak:>6.0f} |"
            row += f" {later.ready:>7.1f} {later.seconds:>6.1f} {later.peak:>6.0f} {later.own_peak:>6.0f}"
            print(f"{row} {later.training:>10.0f} {later.own_training:>6.0f}", flush=True)
            shutil.rmtree(folder / "cache")


if __name__ == "__main__":
    main()
