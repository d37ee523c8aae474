"""Asks `diagnose.py` about the faulty sets of data_faults.py and the sets of healthy_sets.py, stored as a user stores them.

    python benchmarks/doctor/data_trials.py                    # middle strength, and all healthy sets
    python benchmarks/doctor/data_trials.py --strengths 0 1 2 --only "watermark" photos

A fault is named when a finding has one of the codes that were written down, above "info" unless it may be meant. A healthy set
must have no finding above "info". Of what is split off for the validation, the run's own check is asked.
"""

import argparse
import io
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor.data_faults import FAULTS
from benchmarks.doctor.healthy_sets import HEALTHY, Pictures
from utils.data.dataset import load_images
from utils.diagnostics.data_check import check_data
from utils.diagnostics.data_checks.checks import look_at
from utils.diagnostics.data_checks.sample import Sample
from utils.diagnostics.diagnose import diagnose
from utils.options.flags import DataOptions
from utils.runs.record import RunRecord


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def stored(pictures: Pictures, folder: Path) -> None:
    import datasets

    features = {"image": datasets.Image()}
    rows = {"image": [{"bytes": png(image), "path": None} for image in pictures.images]}
    if pictures.labels is not None:
        features["label"] = datasets.ClassLabel(names=pictures.class_names)
        rows["label"] = [int(label) for label in pictures.labels]
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(str(folder))


def asked(pictures: Pictures, report: Path | None = None) -> list:
    """The findings about a set."""
    folder = Path(tempfile.mkdtemp())
    try:
        stored(pictures, folder / "set")
        channels = 3 if any(image.ndim == 3 for image in pictures.images) else 1
        options = DataOptions(
            dataset_name=str(folder / "set"),
            cache_dir=str(folder / "cache"),
            resolution=pictures.resolution,
            image_channels=channels,
        )
        images = load_images(options)
        count = len(images) - pictures.held_out
        training, held_out = images.subset(range(count)), images.subset(range(count, len(images)))
        checks = look_at(Sample.of(training, held_out, pictures.random_flip), report)
        history = [{"step": 0, "data": check_data(training, seed=0), "data_checks": checks}]
        return diagnose(RunRecord(Path(), history=history))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strengths", nargs="*", type=int, default=[1])
    parser.add_argument("--only", nargs="*", help="names of faults and of healthy sets")
    args = parser.parse_args()
    named, missed, false = 0, [], []
    healthy = [name for name in HEALTHY if not args.only or name in args.only]
    faulty = [(name, source, k) for name, f in FAULTS.items() for source in f.sources for k in args.strengths]
    for name, source, strength in [*((name, name, None) for name in healthy), *faulty]:
        if strength is not None and args.only and name not in args.only:
            continue
        rng = np.random.default_rng(zlib.crc32(f"{name}{source}{strength}".encode()))
        pictures = HEALTHY[source](rng)
        began = time.perf_counter()
        findings = asked(pictures if strength is None else FAULTS[name].damage(pictures, rng, strength))
        told = ", ".join(f"{finding.code} ({finding.severity})" for finding in findings)
        if strength is None:
            verdict = "FALSE" if any(finding.severity != "info" for finding in findings) else "ok"
            false += [name] if verdict == "FALSE" else []
        else:
            fault = FAULTS[name]
            hits = [f for f in findings if f.code in fault.codes and (fault.info or f.severity != "info")]
            verdict = "named" if hits else "MISSED"
            named += bool(hits)
            missed += [] if hits else [f"{name} of {source} at {strength}"]
        print(f"{verdict:<7}{name} / {source} / {strength}: {told} [{time.perf_counter() - began:.1f} s]", flush=True)
    total = named + len(missed)
    if total:
        print(f"named: {named} of {total} ({named / total:.1%}); missed: {'; '.join(missed) or 'none'}")
    if healthy:
        print(f"healthy sets with a finding above info: {len(false)} of {len(healthy)}: {', '.join(false) or 'none'}")


if __name__ == "__main__":
    main()
