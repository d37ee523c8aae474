"""Streamed images beside packed ones: seconds to the first batch, images per second in each pass, and memory.

    python benchmarks/speed/streaming.py
    python benchmarks/speed/streaming.py --images 2000000 --shards 400 --server --first 100000 --rounds 0

    python benchmarks/speed/streaming.py --server --rounds 0 --train 400          # share of waiting in a real run

A pool of different JPEGs is written again and again into parquet shards. The loader's batches alone are timed, nothing is
trained. After the first pass, or the `--first` images of it, the same images are read in turn from the decoded blocks and
from packed images. With `--train`, train_ddpm.py first trains for so many updates in its first pass, with the preset
digits16 and batches of 32, and tells the share of time that it waited for data. With `--server` the shards are read from a
web server, which is another process.
"""

import argparse
import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import psutil
import torch
from hub_stand_in import Answers, serving
from PIL import Image

from benchmarks.shared.images import shapes
from benchmarks.shared.measuring import default_device, describe, ratio
from benchmarks.shared.real_script import train_once
from utils.data.dataset import ImageSet, load_images
from utils.data.loader import BatchSplit, SampleOrder, WindowedOrder, training_batches
from utils.options.flags import DataOptions

POOL = 2000  # different images
PASSES = 4  # in which images are read from the disk, so that a loader's start counts little


def write_shards(folder: Path, images: int, shards: int, side: int, rows: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    encoded = []
    for pixels in shapes(min(POOL, images), seed=0, side=side)[0]:
        file = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=90)
        encoded.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for number, chosen in enumerate(np.array_split(np.arange(images), shards)):
        columns = {"image": [encoded[row % len(encoded)] for row in chosen], "label": [int(row % 8) for row in chosen]}
        dataset = datasets.Dataset.from_dict(columns, features=features)
        dataset.to_parquet(folder / f"train-{number:05}.parquet", batch_size=rows)


class _Parts(Answers):
    """Parts of the files of `folder`."""

    folder: Path

    def do_GET(self) -> None:
        path = self.folder / self.path.strip("/")
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with open(path, "rb") as file:
            file.seek(first)
            part = file.read(last - first + 1)
        said = {"ETag": path.name, "Content-Range": f"bytes {first}-{last}/{path.stat().st_size}"}
        self.reply(206, part, said)


def _serve(folder: Path, said: multiprocessing.connection.Connection) -> None:
    _Parts.folder = folder
    with serving(_Parts) as address:
        said.send(address)
        said.recv()


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def memory() -> float:
    """MiB that this process and its loader's workers hold, the pages of files not counted."""
    family = [psutil.Process(), *psutil.Process().children()]
    return sum(process.memory_info().rss - process.memory_info().shared for process in family) / 2**20


def read(images: ImageSet, order: SampleOrder, first: int, last: int, batch: int) -> tuple[float, float, list[float]]:
    """(images per second, seconds to the first batch, memory now and then) of updates `first` to `last`."""
    start, seen, begun = time.perf_counter(), [], 0.0
    batches = training_batches(images, order, BatchSplit(batch), range(first, last), num_workers=1, center_crop=True)
    for number, _ in enumerate(batches):
        begun = begun or time.perf_counter() - start
        if number % 100 == 50:
            seen.append(memory())
    return (last - first) * batch / (time.perf_counter() - start), begun, seen


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--rows", type=int, default=100, help="images of a row group")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--first", type=int, help="images of the first pass that are read (all)")
    parser.add_argument("--rounds", type=int, default=5, help="times that streamed and packed images are read in turn")
    parser.add_argument("--train", type=int, default=0, help="updates of a real run, before all else")
    parser.add_argument("--server", action="store_true", help="shards of a web server")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    print(describe(default_device()), flush=True)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder, cache = Path(temporary) / "shards", Path(temporary) / "cache"
        folder.mkdir()
        write_shards(folder, args.images, args.shards, args.side, args.rows)
        name = str(folder)
        if args.server:
            last = f"{args.shards - 1:05}"
            name = f"{stack.enter_context(web_server(folder))}/train-{{00000..{last}}}.parquet"
        if args.train:
            flags = ["--dataset_name", name, "--streaming", "--model_preset", "digits16", "--resolution", args.side]
            flags += ["--image_channels", 3, "--cache_dir", Path(temporary) / "other", "--max_train_steps", args.train]
            flags += ["--validation_images", 0, "--cpu_threads", 1, "--dataloader_num_workers", 1, "--logging_steps", 50]
            _, waits = train_once("train_ddpm.py", flags, Path(temporary) / "run").series("perf/data_wait")
            print("perf/data_wait of every 50 updates: " + " ".join(f"{wait:.4f}" for wait in waits), flush=True)
        how = {"resolution": args.side, "center_crop": True, "cache_dir": str(cache)}
        for words in ("without an index", "with the index"):
            start = time.perf_counter()
            streamed = load_images(DataOptions(dataset_name=name, streaming=True, **how))
            print(f"opened {words}: {time.perf_counter() - start:.1f} s", flush=True)
        blocks = streamed.blocks()
        order = WindowedOrder(blocks, DataOptions.shuffle_window, 0)
        updates = (args.first or args.images) // args.batch
        speed, begun, seen = read(streamed, order, 0, updates, args.batch)
        print(f"first pass: {speed:,.0f} images/s, first batch after {begun:.1f} s")
        print("memory, MiB: " + " ".join(f"{each:.0f}" for each in seen[:: max(1, len(seen) // 10)]), flush=True)
        if not args.rounds:
            return
        packed = load_images(DataOptions(dataset_name=str(folder), **how))
        speeds: dict[str, list[float]] = {"streamed again": [], "packed": []}
        for _ in range(args.rounds):
            speeds["streamed again"].append(read(streamed, order, 0, PASSES * updates, args.batch)[0])
            speeds["packed"].append(read(packed, SampleOrder(len(packed), 0), 0, PASSES * updates, args.batch)[0])
        for words, found in speeds.items():
            print(f"{words}: {statistics.median(found):,.0f} images/s")
        middle, low, high = ratio(speeds["streamed again"], speeds["packed"])
        print(f"streamed again over packed: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
