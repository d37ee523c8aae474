"""Do the distances see what is wrong with images? FD and KD of an extractor under known corruptions of growing strength.

    python benchmarks/quality/extractor_validation.py --features randconv --seeds 3

Real images are split in two by a seed: one half is the reference, the other is corrupted and compared with it. Blur, noise,
dropped classes (others in their places), duplicates, and images moved towards the mean of their class, five strengths each,
on the digits (898 against 899) and on shapes of eight known modes (--shapes against as many). A row passes when both
distances rise at every step in the median over the seeds, and its weakest corruption is at least five times the real/real
floor: FD of the uncorrupted half, and for KD, whose floor lies around 0, the largest of the seeds' absolute values.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared.images import add_noise, blur, digits, duplicated, halves, shapes, shrunken, without_classes
from utils.evaluation.distances import Moments, frechet_distance, kernel_distance
from utils.evaluation.extractors import make_extractor
from utils.evaluation.quality import location_and_spread

STRENGTHS = {
    "blur": (0.6, 0.8, 1.0, 1.4, 2.0),  # pixels
    "noise": (0.05, 0.1, 0.15, 0.2, 0.4),  # of white
    "dropped classes": (1, 2, 3, 4, 5),
    "duplicated": (4, 8, 16, 32, 64),  # copies of each
    "shrunken diversity": (0.2, 0.3, 0.4, 0.5, 0.6),  # of the way to the mean of the class
}
FLOOR_FACTOR = 5


def corrupted(images, labels, seed: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    # Who takes the places of dropped classes: the remaining images of the same half, as few twice as it can be.
    makers = {
        "blur": lambda strength: blur(images, strength),
        "noise": lambda strength: add_noise(images, strength, generator()),
        "dropped classes": lambda count: without_classes(images, labels, count, images, labels),
        "duplicated": lambda times: duplicated(images, times, generator()),
        "shrunken diversity": lambda share: shrunken(images, labels, share),
    }
    for name, make in makers.items():
        yield name, [make(strength) for strength in STRENGTHS[name]]


def features_of(extractor, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([extractor(part) for part in images.split(256)])


def distances(features: torch.Tensor, reference: torch.Tensor, standardized: bool) -> tuple[float, float]:
    moments, real = Moments.of(features), Moments.of(reference)
    if standardized:
        mean, spread = location_and_spread(real)
        moments, real = moments.scaled(mean, spread), real.scaled(mean, spread)
        features, reference = (features - mean) / spread, (reference - mean) / spread
    return frechet_distance(moments, real), kernel_distance(features, reference)


def rises(values: list[float]) -> bool:
    return all(first < second for first, second in itertools.pairwise(values))


def validate(name: str, images: torch.Tensor, labels: torch.Tensor, features: str, seeds: int) -> int:
    """Prints the rows of one set; how many of them do not pass."""
    floors, found = [], {}
    for seed in range(seeds):
        real, others, their_labels = halves(images, labels, seed)
        extractor = make_extractor(features, real)
        reference = features_of(extractor, torch.from_numpy(real.pixels))
        floors.append(distances(features_of(extractor, others), reference, extractor.standardized))
        for corruption, sets in corrupted(others, their_labels, seed):
            values = [distances(features_of(extractor, part), reference, extractor.standardized) for part in sets]
            found.setdefault(corruption, []).append(values)
    fd_floor, kd_floor = median(fd for fd, _ in floors), max(abs(kd) for _, kd in floors)
    failed = 0
    for corruption, by_seed in found.items():
        fds, kds = ([median(values[i][kind] for values in by_seed) for i in range(5)] for kind in (0, 1))
        monotone = rises([fd_floor, *fds]) and rises([median(kd for _, kd in floors), *kds])
        over = fds[0] / fd_floor, kds[0] / max(kd_floor, 1e-12)
        passed = monotone and min(over) >= FLOOR_FACTOR
        failed += not passed
        cells = [
            name,
            corruption,
            ", ".join(map(str, STRENGTHS[corruption])),
            ", ".join(f"{fd:.3g}" for fd in fds),
            ", ".join(f"{kd:.2g}" for kd in kds),
            "yes" if monotone else "**no**",
            *(f"{factor:.1f}" if factor >= FLOOR_FACTOR else f"**{factor:.1f}**" for factor in over),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"floors of {name}: FD {fd_floor:.3g}, KD at most {kd_floor:.2g} from 0 (N {len(others)} against {len(real)})")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", choices=("randconv", "classifier"), default="randconv")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shapes", type=int, default=5000)
    parser.add_argument("--cache_dir")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| set | corruption | strengths | FD | KD | rises | weakest FD over floor | weakest KD over floor |")
    print("|---|---|---|---|---|---|---|---|")
    failed = validate("digits", *digits(args.cache_dir), args.features, args.seeds)
    failed += validate("shapes", *shapes(2 * args.shapes, seed=0), args.features, args.seeds)
    print(f"{args.features}: {failed} of {2 * len(STRENGTHS)} rows do not pass")


if __name__ == "__main__":
    main()
