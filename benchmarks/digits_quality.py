"""Are the digits that a model makes digits? Figures for the main job, from an independent classifier and a distance.

    accelerate launch generate.py --pipeline runs/digits --num_images 1797 --output_dir runs/digits-images
    python benchmarks/digits_quality.py runs/digits-images

- certain: share of the first 512 images to which an SVM trained on the real digits (SVC, probabilities calibrated
  by Platt scaling) gives a top probability over 0.7. Beside it the same share for real digits, for real ones that a second SVM
  did not see in training, and for two kinds of non-digits: half-and-half blends of two digits, and digits with shuffled pixels.
- smallest class: share of the class that the SVM sees least often among them.
- Frechet ratio: Frechet distance in 64 pixel values (images reduced to 8x8) between all images and the real digits, over the
  median of that between two random halves of the real digits.
- copies: share of images nearer to a real digit than all but 1 % of the real digits are to one another.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC

CERTAIN = 0.7


def reduce(images: np.ndarray) -> np.ndarray:
    """uint8 [n, 16, 16] -> float64 [n, 64] in [0, 1], each value the mean of four pixels."""
    return images.reshape(-1, 8, 2, 8, 2).mean((2, 4)).reshape(-1, 64) / 255


def real_digits() -> tuple[np.ndarray, np.ndarray]:
    """(images float64 [1797, 64] as `reduce` gives them, labels int [1797]).

    They go the way of the training images: to uint8, to 16x16, and back to 8x8.
    """
    digits = load_digits()
    scans = np.round(digits.images * 255 / 16).astype(np.uint8)
    resized = [np.asarray(Image.fromarray(scan).resize((16, 16), Image.BILINEAR)) for scan in scans]
    return reduce(np.stack(resized)), digits.target


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Squared Frechet distance between Gaussians fitted to [n, d] and [m, d] (Dowson & Landau 1982)."""
    mean = np.square(first.mean(0) - second.mean(0)).sum()
    a, b = (np.cov(x, rowvar=False) for x in (first, second))
    # Trace of the root of a @ b by its eigenvalues: some pixels are always black, and sqrtm fails on singular matrices.
    root = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    return float(mean + np.trace(a) + np.trace(b) - 2 * root)


def fit(images: np.ndarray, labels: np.ndarray) -> SVC:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn means to replace probability=True by a wrapper with other figures
        return SVC(probability=True, random_state=0).fit(images, labels)


def certain(svm: SVC, images: np.ndarray) -> float:
    return float((svm.predict_proba(images).max(1) > CERTAIN).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of 16x16 PNGs made by generate.py")
    files = sorted(parser.parse_args().images.glob("[0-9]*.png"))
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
    halves = []
    for _ in range(11):
        order = random.permutation(len(real))
        halves.append(frechet_distance(real[order[:898]], real[order[898:]]))
    distance, floor = frechet_distance(generated, real), float(np.median(halves))
    print(f"Frechet ratio     {distance / floor:.2f}    ({distance:.3f} over {floor:.3f} between halves of the real digits)")
    nearest_real = NearestNeighbors(n_neighbors=2).fit(real).kneighbors(real)[0][:, 1]
    nearest = NearestNeighbors(n_neighbors=1).fit(real).kneighbors(generated)[0][:, 0]
    print(f"copies            {(nearest < np.percentile(nearest_real, 1)).mean():.3f}   (real 0.010 by definition)")


if __name__ == "__main__":
    main()
