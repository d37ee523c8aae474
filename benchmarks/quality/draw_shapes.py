"""Draws colored shapes into a folder of PNG files: a small data set for trying the small presets.

    python benchmarks/quality/draw_shapes.py shapes32 --size 32
    accelerate launch train_ddpm.py --train_data_dir shapes32 --model_preset small32 --output_dir runs/shapes32

Discs, squares and triangles of six colors, of several sizes and at several places, on pale plain backgrounds. The same call
draws the same files.
"""

import argparse
import colorsys
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

OVERSAMPLED = 4  # for smooth edges


def draw(random_numbers: random.Random, size: int) -> Image.Image:
    side = size * OVERSAMPLED
    pale = [round(255 * c) for c in colorsys.hsv_to_rgb(random_numbers.random(), 0.15, 0.95)]
    color = [round(255 * c) for c in colorsys.hsv_to_rgb(random_numbers.randrange(6) / 6, 0.85, 0.8)]
    x, y = (side * random_numbers.uniform(0.4, 0.6) for _ in range(2))
    radius = side * random_numbers.uniform(0.2, 0.35)
    image = Image.new("RGB", (side, side), tuple(pale))
    corners = random_numbers.choice((3, 4, 0))
    pen = ImageDraw.Draw(image)
    if corners:
        angles = [2 * math.pi * (k / corners + (0.125 if corners == 4 else -0.25)) for k in range(corners)]
        pen.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=tuple(color))
    else:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(color))
    return image.resize((size, size), Image.Resampling.BOX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (32)")
    parser.add_argument("--count", type=int, default=2000, help="images (2000)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    random_numbers = random.Random(0)
    for i in range(args.count):
        draw(random_numbers, args.size).save(args.folder / f"{i:05d}.png")


if __name__ == "__main__":
    main()
