"""What evaluation costs: time for 10,000 images of 32x32, memory against the number of images, memory of the figures alone.

    python benchmarks/speed/evaluation.py speed --threads 2
    python benchmarks/speed/evaluation.py memory --images 2000 10000 40000
    python benchmarks/speed/evaluation.py figures --rows 50000 --dimensions 2048

Images are made up (benchmarks/shared/images.py), so that nothing is spent on a network's sampling. Memory is the most that a
fresh process ever held (resident), beside what it held before the first image.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def setting(reference_images: int):
    """(accelerator, an ImageSet of shapes, 500 other images to draw samples from)."""
    from benchmarks.shared.images import ArrayImages, shapes
    from utils.core.distributed import make_accelerator

    images, labels = shapes(min(reference_images, 2000) + 500, seed=0)
    repeated = images[500:].repeat(-(-reference_images // (len(images) - 500)), 1, 1, 1)[:reference_images]
    return make_accelerator(cpu_threads=1), ArrayImages(repeated, labels[:reference_images]), images[:500]


def measure(images: int, reference_images: int, threads: int, features: str) -> dict:
    import torch

    from utils.evaluation.evaluator import Evaluation
    from utils.evaluation.extractors import make_extractor
    from utils.evaluation.feature_sets import extract, reference_features
    from utils.evaluation.memorization import Originals

    accelerator, reference_set, pool = setting(reference_images)
    torch.set_num_threads(threads)
    extractor = make_extractor(features, reference_set)
    wall, cpu = {}, {}

    @contextlib.contextmanager
    def timed(name: str):
        start, busy = time.perf_counter(), time.process_time()
        yield
        wall[name], cpu[name] = time.perf_counter() - start, time.process_time() - busy

    with timed("features of the reference"):
        reference = reference_features(accelerator, extractor, reference_set, batch_size=64, cache_dir=None)

    def make_images(numbers):  # different ones: a level more or less in each pixel
        generator = torch.Generator().manual_seed(int(numbers[0]))
        return pool[numbers % len(pool)] ^ torch.randint(0, 2, (len(numbers), *pool.shape[1:]), generator=generator).byte()

    before = peak_gib()
    with timed("features of the samples"):
        extract(accelerator, [extractor], images, 64, make_images)
    evaluation = Evaluation(accelerator, extractor, reference, seed=0, originals=Originals(reference_set))
    with timed("floor"):
        evaluation.floor(images)
    with timed("features, all figures, nearest training images"):
        evaluation.measure(make_images, images)
    return {"images": images, "before_gib": before, "peak_gib": peak_gib(), "seconds": wall, "cpu_seconds": cpu}


def figures(rows: int, dimensions: int) -> dict:
    import torch

    from utils.evaluation.distances import Moments, frechet_distance
    from utils.evaluation.diversity import mean_pairwise_distance, neighborhoods, variance_ratio, vendi_score

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(rows, dimensions, generator=generator) for _ in range(2))
    found = {"rows": rows, "dimensions": dimensions, "before_gib": peak_gib()}
    for name, function in (
        ("variance_ratio", lambda: variance_ratio(first, second)),
        ("vendi_score", lambda: vendi_score(first)),
        ("frechet_distance", lambda: frechet_distance(Moments.of(first), Moments.of(second))),
        ("mean_pairwise_distance", lambda: mean_pairwise_distance(first)),
        ("neighborhoods", lambda: neighborhoods(first, second)),
    ):
        start = time.perf_counter()
        function()
        found[name] = {"seconds": time.perf_counter() - start, "peak_gib": peak_gib()}
        print(json.dumps({name: found[name]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory", "figures", "one"))
    parser.add_argument("--images", type=int, nargs="+", default=[10_000])
    parser.add_argument("--reference_images", type=int, default=10_000)
    parser.add_argument("--features", default="randconv")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=2048)
    args = parser.parse_args()
    if args.what == "figures":
        print(json.dumps(figures(args.rows, args.dimensions)))
    elif args.what in ("speed", "one"):
        print(json.dumps(measure(args.images[0], args.reference_images, args.threads, args.features)))
    else:
        for count in args.images:
            command = [sys.executable, __file__, "one", "--images", str(count), "--threads", str(args.threads)]
            command += ["--reference_images", "2000", "--features", args.features]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
