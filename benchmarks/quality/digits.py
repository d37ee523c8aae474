"""How good are the digits of the trained networks? Judged by a classifier that is independent of them, and by distances.

    accelerate launch generate.py --pipeline runs/digits --num_images 1797 --output_dir runs/digits-images
    python benchmarks/quality/digits.py images runs/digits-images
    python benchmarks/quality/digits.py classes runs/digits-edm2 --guidance 1 1.5 2
    python benchmarks/quality/digits.py equal_seconds --seconds 150 --output_dir runs/equal-seconds

`images` prints, of a folder of 16x16 PNGs:

- certain: share of the first 512 images to which an SVM trained on the real digits (SVC, probabilities calibrated
  by Platt scaling) gives a top probability over 0.7. Beside it the same share for real digits, for real ones that a second SVM
  did not see in training, and for two kinds of non-digits: half-and-half blends of two digits, and digits with shuffled pixels.
- smallest class: share of the class that the SVM sees least often among them.
- Frechet ratio: Frechet distance in 64 pixel values (images reduced to 8x8) between all images and the real digits, over the
  median of that between two random halves of the real digits.
- copies: share of images nearer to a real digit than all but 1 % of the real digits are to one another.

`classes` samples a class-conditional pipeline, every class equally often, at each strength of guidance. It prints the share of
images to which an SVM gives the class that was asked for, the same share of held-out real digits, and the Frechet ratio.

`equal_seconds` times some updates of train_ddpm.py and of train_edm2.py, trains each for as many updates as fit into the
seconds (its learning rate laid out for just these), and has evaluate.py measure both without guidance. EDM2 is told the
classes, all of them equally often; DDPM has none. Runs that are already there are not trained again.
"""

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC

from benchmarks.shared.real_script import ROOT, train_once
from utils.diffusion.guidance import make_guided_prediction
from utils.diffusion.pipelines import image_shape, load_decoder, load_network
from utils.diffusion.sampling import SamplePlan, is_edm, make_sampler, sample, to_uint8
from utils.runs.record import RunRecord

CERTAIN = 0.7
SCRIPTS = {"ddpm": "train_ddpm.py", "edm2": "train_edm2.py"}
TIMED = 60  # updates


def reduce(images: np.ndarray) -> np.ndarray:
    """uint8 [n, 16, 16] -> float64 [n, 64] in [0, 1], each value the mean of four pixels."""
    return images.reshape(-1, 8, 2, 8, 2).mean((2, 4)).reshape(-1, 64) / 255


def real_digits() -> tuple[np.ndarray, np.ndarray]:
    """(images float64 [1797, 64] as `reduce` gives them, labels int [1797]).

    They go the way of the training images: to uint8, to 16x16, and back to 8x8.
    """
    digits = load_digits()
    scans = np.round(digits.images * 255 / 16).astype(np.uint8)
    resized = [np.asarray(Image.fromarray(scan).resize((16, 16), Image.Resampling.BILINEAR)) for scan in scans]
    return reduce(np.stack(resized)), digits.target


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Squared Frechet distance between Gaussians fitted to [n, d] and [m, d] (Dowson & Landau 1982)."""
    mean = np.square(first.mean(0) - second.mean(0)).sum()
    a, b = (np.cov(x, rowvar=False) for x in (first, second))
    # Trace of the root of a @ b by its eigenvalues: some pixels are always black, and sqrtm fails on singular matrices.
    root = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    return float(mean + np.trace(a) + np.trace(b) - 2 * root)


def frechet_floor(real: np.ndarray, random: np.random.Generator) -> float:
    """Median distance between two random halves of the real digits."""
    orders = [random.permutation(len(real)) for _ in range(11)]
    return float(np.median([frechet_distance(real[order[:898]], real[order[898:]]) for order in orders]))


def fit(images: np.ndarray, labels: np.ndarray) -> SVC:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn means to replace probability=True by a wrapper with other figures
        return SVC(probability=True, random_state=0).fit(images, labels)


def certain(svm: SVC, images: np.ndarray) -> float:
    return float((svm.predict_proba(images).max(1) > CERTAIN).mean())


def judge_images(args: argparse.Namespace) -> None:
    files = sorted(args.images.glob("[0-9]*.png"))
    generated = reduce(np.stack([np.asarray(Image.open(file).convert("L")) for file in files]))

    real, labels = real_digits()
    svm = fit(real, labels)
    seen, unseen, seen_labels, _ = train_test_split(real, labels, test_size=0.3, random_state=0, stratify=labels)
    random = np.random.default_rng(0)
    a, b = random.integers(0, len(real), (2, 2000))
    blends = (real[a] + real[b])[labels[a] != labels[b]] / 2
    shuffled = random.permuted(real, axis=1)
    print(f"{len(generated)} images")
    print(f"certain           {certain(svm, generated[:512]):.3f}   (real {certain(svm, real):.3f}, "
          f"real unseen {certain(fit(seen, seen_labels), unseen):.3f}, blends {certain(svm, blends):.3f}, "
          f"shuffled {certain(svm, shuffled):.3f})")  # fmt: skip
    classes = np.bincount(svm.predict_proba(generated[:512]).argmax(1), minlength=10) / 512
    print(
        f"smallest class    {classes.min():.3f}   (digit {classes.argmin()}; real {np.bincount(labels).min() / len(real):.3f})"
    )
    distance, floor = frechet_distance(generated, real), frechet_floor(real, random)
    print(f"Frechet ratio     {distance / floor:.2f}    ({distance:.3f} over {floor:.3f} between halves of the real digits)")
    nearest_real = NearestNeighbors(n_neighbors=2).fit(real).kneighbors(real)[0][:, 1]
    nearest = NearestNeighbors(n_neighbors=1).fit(real).kneighbors(generated)[0][:, 0]
    print(f"copies            {(nearest < np.percentile(nearest_real, 1)).mean():.3f}   (real 0.010 by definition)")


def judge_classes(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    real, labels = real_digits()
    svm, unseen = SVC().fit(real, labels), cross_val_predict(SVC(), real, labels, cv=5)
    print(f"held-out real digits: {(unseen == labels).mean():.3f}")
    floor = frechet_floor(real, np.random.default_rng(0))
    unet, config = load_network(args.pipeline)
    guide, guide_config = load_network(args.guide_pipeline) if args.guide_pipeline else (None, None)
    asked = np.arange(args.num_images) % 10
    sampler = make_sampler("heun" if is_edm(config) else "ddpm", config)
    steps = args.num_inference_steps or (32 if is_edm(config) else 50)
    for guidance in args.guidance:
        with torch.no_grad():
            images = sample(
                unet,
                SamplePlan(sampler, steps, image_shape(unet), 0, 100, "cpu", load_decoder(args.pipeline, unet)),
                torch.arange(args.num_images),
                predict=make_guided_prediction(unet, config, None, guidance, guide if guidance != 1.0 else None, guide_config),
            )
        made = reduce(to_uint8(images)[:, 0].numpy())
        agrees, ratio = svm.predict(made) == asked, frechet_distance(made, real) / floor
        by_class = " ".join(f"{agrees[asked == c].mean():.2f}" for c in range(10))
        print(f"guidance {guidance:g}: agrees {agrees.mean():.3f} (by class {by_class}), Frechet ratio {ratio:.2f}", flush=True)


def train_equally_long(args: argparse.Namespace) -> None:
    def trained(name: str, folder: Path, updates: int) -> RunRecord:
        """Samples, checkpoints and exports come once, at the end, and do not count."""
        flags = ["--train_batch_size", 32, "--max_train_steps", updates, "--logging_steps", max(1, updates // 3)]
        flags += ["--save_images_steps", 10**6, "--save_model_steps", 10**6, "--checkpointing_steps", 10**6]
        return train_once(SCRIPTS[name], [*flags, "--validation_images", 0, "--cpu_threads", args.cpu_threads], folder)

    speeds = {}  # images per second of the updates alone
    for name in SCRIPTS:
        speeds[name] = trained(name, args.output_dir / f"{name}-timed", TIMED).series("perf/images_per_second")[1][-1]
    for name, speed in speeds.items():
        done = trained(name, args.output_dir / name, round(args.seconds * speed / 32)).resolved["max_train_steps"]
        print(f"{name}: {done} updates, {done * 32 / speed:.0f} s at {speed:.0f} images/s", flush=True)
    command = [sys.executable, ROOT / "evaluate.py", "--pipeline", *(args.output_dir / name for name in SCRIPTS)]
    command += ["--dataset_name", "digits", "--resolution", 16, "--image_channels", 1, "--num_images", args.num_images]
    command += ["--output_dir", args.output_dir / "evaluation", "--cpu_threads", args.cpu_threads, "--json"]
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    (args.output_dir / "evaluation.json").write_text(result.stdout)
    print("| recipe | fd_randconv | kd_randconv |\n|---|---|---|")
    for name, found in zip(SCRIPTS, json.loads(result.stdout)["results"]):
        print(f"| {name} | {found['figures']['fd']:.3f} | {found['figures']['kd']:.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    images = commands.add_parser("images")
    images.add_argument("images", type=Path, help="folder of 16x16 PNGs made by generate.py")
    images.set_defaults(run=judge_images)
    classes = commands.add_parser("classes")
    classes.add_argument("pipeline")
    classes.add_argument("--guide_pipeline")
    classes.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    classes.add_argument("--num_images", type=int, default=500)
    classes.add_argument("--num_inference_steps", type=int)  # as the presets have it: 32 of EDM2, 50 of DDPM
    classes.set_defaults(run=judge_classes)
    equal = commands.add_parser("equal_seconds")
    equal.add_argument("--seconds", type=float, default=150.0)
    equal.add_argument("--num_images", type=int, default=2000)
    equal.add_argument("--cpu_threads", type=int, default=2)
    equal.add_argument("--output_dir", type=Path, default=Path("runs/equal-seconds"))
    equal.set_defaults(run=train_equally_long)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
