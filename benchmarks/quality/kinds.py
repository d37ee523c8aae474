"""Images that are no square files of 8 bits: does train_ddpm.py learn them?

    python benchmarks/quality/kinds.py tall --output_dir runs/kinds
    python benchmarks/quality/kinds.py deep --output_dir runs/kinds

The built-in digits as another kind of data, with their classes:

    tall    48x32 pixels, a .npz file
    deep    16x16 pixels of 16 bits, a .npz file

It trains on them, and lets generate.py make samples of all classes in turn. An SVM that was trained on the real images of the
kind, reduced to 8x8, is asked for the class of each sample: printed is the share that is the class that was asked for, and the
same share of real images that it did not see. Also printed: for `deep`, the share of values that 8 bits cannot
hold. A finished training is not repeated; one that was stopped goes on.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_predict
from sklearn.svm import SVC

from benchmarks.shared.real_script import ROOT
from utils.options.presets import NETWORKS

SIZES = {"tall": (48, 32), "deep": (16, 16)}
COMMON = ["--class_conditional", "--train_batch_size", 32, "--learning_rate", 2e-3, "--lr_warmup_steps", 100]
COMMON += ["--ddpm_beta_schedule", "squaredcos_cap_v2", "--prediction_type", "v_prediction", "--snr_gamma", 5]
COMMON += ["--adam_beta1", 0.9, "--adam_beta2", 0.99, "--sampler", "ddpm", "--ddpm_num_inference_steps", 50]
COMMON += ["--checkpointing_steps", 200, "--save_images_steps", 10**6, "--save_model_steps", 10**6]
TALL_NETWORK = NETWORKS["small32"] | {"block_out_channels": (8, 16, 32, 64), "attention_head_dim": 8, "norm_num_groups": 4}
FLAGS = {
    "tall": ["--image_channels", 1],
    "deep": ["--model_preset", "digits16", "--image_channels", 1, "--preserve_input_precision"],
}


def scans(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [1797, H, W] in [0, 1], labels int [1797])."""
    digits = load_digits()
    height, width = SIZES[kind]
    values = [Image.fromarray(scan.astype(np.float32)) for scan in digits.images]
    return np.stack([np.asarray(v.resize((width, height), Image.Resampling.BILINEAR)) for v in values]) / 16.0, digits.target


def write(kind: str, folder: Path) -> list:
    """Writes the data of a kind. Returns the flags that name it."""
    images, labels = scans(kind)
    folder.mkdir(parents=True, exist_ok=True)
    most, kept = (65535, np.uint16) if kind == "deep" else (255, np.uint8)
    np.savez(folder / "digits.npz", images=np.rint(images * most).astype(kept), labels=labels)
    return ["--dataset_name", folder / "digits.npz"]


def reduced(images: np.ndarray) -> np.ndarray:
    """[n, H, W] -> [n, 64], each value the mean of a rectangle of pixels."""
    height, width = images.shape[1:]
    return images.reshape(-1, 8, height // 8, 8, width // 8).mean((2, 4)).reshape(-1, 64)


def judge(kind: str, folder: Path) -> None:
    real, labels = scans(kind)
    made = np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("[0-9]*.png"))])
    svm, unseen = SVC().fit(reduced(real), labels), cross_val_predict(SVC(), reduced(real), labels, cv=5)
    agrees = svm.predict(reduced(made / (65535 if kind == "deep" else 255))) == np.arange(len(made)) % 10
    print(f"agrees {agrees.mean():.3f} of {len(made)} (held-out real {(unseen == labels).mean():.3f})", flush=True)
    if kind == "deep":
        print(f"values that 8 bits cannot hold: {(made % 257 != 0).mean():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=SIZES)
    parser.add_argument("--updates", type=int, default=1000, help="of 32 images")
    parser.add_argument("--num_images", type=int, default=300)
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--cpu_threads", type=int, default=1)
    args = parser.parse_args()
    run = args.output_dir / args.kind
    size = "x".join(map(str, SIZES[args.kind]))
    flags = [*write(args.kind, args.output_dir / f"{args.kind}-data"), *FLAGS[args.kind], *COMMON, "--resolution", size]
    flags += ["--max_train_steps", args.updates, "--cpu_threads", args.cpu_threads, "--validation_images", 64]
    flags += ["--output_dir", run, "--resume_from_checkpoint", "latest"]
    if args.kind == "tall":
        (args.output_dir / "tall.json").write_text(json.dumps(TALL_NETWORK))
        flags += ["--model_config_name_or_path", args.output_dir / "tall.json"]
    subprocess.run(list(map(str, [sys.executable, ROOT / "train_ddpm.py", *flags])), check=True)
    for guidance in args.guidance:
        samples = args.output_dir / f"{args.kind}-samples-{guidance:g}"
        command = [sys.executable, ROOT / "generate.py", "--pipeline", run, "--num_images", args.num_images]
        command += ["--sampler", "ddpm", "--num_inference_steps", 50, "--guidance", guidance]
        command += ["--output_dir", samples, "--quiet"]
        subprocess.run(list(map(str, command)), check=True)
        print(f"guidance {guidance:g}: ", end="")
        judge(args.kind, samples)


if __name__ == "__main__":
    main()
