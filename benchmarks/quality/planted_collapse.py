"""Is a collapse named for what it is? Known collapses of real images, and healthy sets, through the whole evaluation.

    python benchmarks/quality/planted_collapse.py --seeds 3 --healthy 10

A seed splits the real images in two: one half is the reference (and what copies are compared with), of the other the sets are
made. The classes are judged by the classifier that evaluate.py trains, on the reference half alone. Found means that the
first finding is the expected one; healthy sets must give none.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared.images import add_noise, digits, enlarged_class, halved_variance, halves, shapes
from utils.core.distributed import make_accelerator
from utils.evaluation.evaluator import ClassJudge, Evaluation
from utils.evaluation.extractors import make_extractor, trained_classifier
from utils.evaluation.feature_sets import FeatureSet
from utils.evaluation.memorization import Originals


def planted(images, labels, real, seed: int) -> dict[str, tuple[str | None, torch.Tensor]]:
    """name -> (expected code, images)."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    missing, enlarged = (int(torch.randint(classes, (1,), generator=generator)) for _ in range(2))
    alike = images[int(torch.randint(len(images), (1,), generator=generator))].expand(len(images), -1, -1, -1)
    return {
        "one class missing": ("modes-missing", images[labels != missing]),
        "one mode x 5": ("mode-dominates", enlarged_class(images, labels, enlarged, 5, generator)),
        "variance halved": ("samples-lack-variety", halved_variance(images)),
        "all alike": ("samples-alike", alike),
        "all alike but for 1 % noise": ("samples-alike", add_noise(alike, 0.01, generator)),
        "copies of training images": ("samples-copied", real[: len(images)]),
        "copies with 1 % noise": ("samples-copied", add_noise(real[: len(images)], 0.01, generator)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=10, help="splits of which only the held-out images are evaluated")
    parser.add_argument("--shapes", type=int, default=2000)
    parser.add_argument("--cache_dir", type=Path)
    parser.add_argument("--no_labels", action="store_true", help="as for data without labels: modes alone tell")
    args = parser.parse_args()
    accelerator = make_accelerator(cpu_threads=1)
    sets = {"digits": digits(args.cache_dir and str(args.cache_dir)), "shapes": shapes(args.shapes, seed=0)}
    for name, (images, labels) in sets.items():
        found: dict[str, list[str]] = {}
        healthy = []
        for seed in range(max(args.seeds, args.healthy)):
            reference_set, others, their_labels = halves(images, labels, seed)
            real = torch.from_numpy(reference_set.pixels)
            extractor = make_extractor("randconv", reference_set)
            # Without labels a judge is needed by no healthy set either; training one takes most of the time.
            judge = None
            if not args.no_labels and seed < args.seeds:
                names = [str(label) for label in range(int(labels.max()) + 1)]
                judge = ClassJudge(trained_classifier(reference_set, args.cache_dir), reference_set.labels, names)
            reference = FeatureSet.of(extractor(real))
            evaluation = Evaluation(
                accelerator,
                extractor,
                reference,
                seed=seed,
                judge=judge,
                originals=Originals(reference_set),
            )

            def codes(part, evaluation=evaluation) -> list[str]:
                figures, _ = evaluation.measure(lambda numbers: part[numbers], len(part))
                return [finding["code"] for finding in figures["findings"]]

            healthy.append(codes(others))
            for collapse, (expected, part) in planted(others, their_labels, real, seed).items() if seed < args.seeds else ():
                first = next(iter(codes(part)), "none")
                found.setdefault(collapse, []).append("found" if first == expected else first)
        for collapse, firsts in found.items():
            others = [first for first in firsts if first != "found"]
            print(f"| {name} | {collapse} | {firsts.count('found')} of {len(firsts)} | {', '.join(others)} |", flush=True)
        wrong = [found for found in healthy if found]
        print(f"| {name} | held-out real images | {len(wrong)} of {len(healthy)} with a finding | {wrong or ''} |", flush=True)


if __name__ == "__main__":
    main()
