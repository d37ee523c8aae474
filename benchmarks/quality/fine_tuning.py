"""Is fine-tuning worth it? Letters, from a network of the digits and from scratch, in the same number of updates.

    python benchmarks/quality/fine_tuning.py --pretrained runs/digits --fonts fonts/ --output_dir runs/fine-tuning

It renders the letters A to Z in gray at 16x16 pixels from the fonts of a folder (such as Liberation's), moved and turned a
little. It trains train_ddpm.py on them with --pretrained and without, for as many updates, with all other flags alike but the
learning rate: each gets the better of two. evaluate.py measures the samples of both against about 1,500 letters that none was
trained on. Runs that are already there are not trained again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.shared.real_script import ROOT, train_once
from utils.runs.record import RunRecord

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def render(folder: Path, fonts: list[Path], per_letter: int, seed: int) -> Path:
    """Writes a folder of images for each letter: white on black, as the digits are. Returns `folder`."""
    random = np.random.default_rng(seed)
    for letter in LETTERS:
        if (folder / letter).exists():
            continue
        (folder / letter).mkdir(parents=True)
        for number in range(per_letter):
            font = ImageFont.truetype(fonts[random.integers(len(fonts))], int(random.integers(46, 57)))
            image = Image.new("L", (64, 64))
            place = tuple(32 + random.integers(-4, 5, 2))
            ImageDraw.Draw(image).text(place, letter, 255, font=font, anchor="mm")
            image = image.rotate(random.uniform(-8, 8), Image.Resampling.BICUBIC).resize((16, 16), Image.Resampling.BOX)
            image.save(folder / letter / f"{number:04d}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True, help="pipeline of the digits, 16x16 in gray")
    parser.add_argument("--fonts", type=Path, required=True, help="folder of .ttf files")
    parser.add_argument("--updates", type=int, default=150, help="of 32 images")
    parser.add_argument("--num_images", type=int, default=500)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-3, 2e-3])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--cpu_threads", type=int, default=1)
    args = parser.parse_args()
    fonts = sorted(args.fonts.glob("*.ttf"))
    letters = render(args.output_dir / "letters", fonts, per_letter=80, seed=0)
    unseen = render(args.output_dir / "unseen", fonts, per_letter=58, seed=1)
    common = ["--train_data_dir", letters, "--class_conditional", "--max_train_steps", args.updates, "--train_batch_size", 32]
    common += ["--lr_warmup_steps", args.updates // 10, "--snr_gamma", 5, "--adam_beta1", 0.9, "--adam_beta2", 0.99]
    common += ["--sampler", "ddpm", "--ddpm_num_inference_steps", 50, "--cpu_threads", args.cpu_threads]
    common += ["--save_images_steps", 10**6, "--save_model_steps", 10**6, "--checkpointing_steps", 10**6]
    starts = {
        "pretrained": ["--pretrained", args.pretrained],
        "scratch": ["--model_preset", "digits16", "--validation_images", 0, "--resolution", 16, "--image_channels", 1],
    }
    folders = []
    for name, flags in starts.items():
        for rate in args.learning_rates:
            folder = args.output_dir / f"{name}-{rate:g}"
            run: RunRecord = train_once("train_ddpm.py", [*flags, *common, "--learning_rate", rate], folder)
            speeds = run.series("perf/images_per_second")[1]
            seconds = args.updates * 32 / (sum(speeds) / len(speeds))
            print(f"{folder.name}: {args.updates} updates in {seconds:.0f} s", flush=True)
            folders.append(folder)
    command = [sys.executable, ROOT / "evaluate.py", "--pipeline", *folders, "--train_data_dir", unseen, "--resolution", 16]
    command += ["--image_channels", 1, "--num_images", args.num_images, "--sampler", "ddpm", "--num_inference_steps", 50]
    command += ["--output_dir", args.output_dir / "evaluation", "--cpu_threads", args.cpu_threads, "--no_classes", "--json"]
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    for found in json.loads(result.stdout)["results"]:
        figures = found["figures"]
        floor = figures["floor"]["fd"]
        print(f"{Path(found['name']).name}: fd {figures['fd']:.4g}, kd {figures['kd']:.4g} (real/real fd {floor:.4g})")


if __name__ == "__main__":
    main()
