"""Which libraries decode JPEG and PNG to the bytes that Pillow gives, and how fast? In an environment of its own:

    pip install pillow simplejpeg imagecodecs numpy
    python benchmarks/speed/decoders.py

Seconds of processor time of one thread, libraries in turns, medians over rounds; from the bytes of a file to an array
[H, W, C]. Pillow's time is that of `Image.open` and `numpy.asarray`; what packing does besides (upright, color, size) is
left out.
"""

import io
import statistics
import time

import imagecodecs  # type: ignore[import-not-found]
import numpy as np
import simplejpeg  # type: ignore[import-not-found]
from PIL import Image

ROUNDS = 9
KINDS = {
    "JPEG 4:2:0": ("RGB", "JPEG", {"quality": 90, "subsampling": 2}),
    "JPEG 4:4:4": ("RGB", "JPEG", {"quality": 90, "subsampling": 0}),
    "JPEG progressive": ("RGB", "JPEG", {"quality": 75, "progressive": True}),
    "JPEG gray": ("L", "JPEG", {"quality": 90}),
    "JPEG CMYK": ("CMYK", "JPEG", {"quality": 90}),
    "PNG": ("RGB", "PNG", {}),
    "PNG palette": ("P", "PNG", {}),
}


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB") if image.mode in ("P", "CMYK") else image)


LIBRARIES = {
    "simplejpeg": lambda data, kind: simplejpeg.decode_jpeg(data, "GRAY" if kind == "JPEG gray" else "RGB").squeeze(),
    "imagecodecs": lambda data, kind: (imagecodecs.jpeg8_decode if "JPEG" in kind else imagecodecs.png_decode)(data),
    "imagecodecs spng": lambda data, kind: imagecodecs.spng_decode(data),
}


def picture(random: np.random.Generator, side: int) -> Image.Image:
    """Smooth and with noise, as photographs are."""
    coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    return Image.fromarray(np.clip(np.asarray(coarse) + random.normal(0, 6, (side, side, 3)), 0, 255).astype(np.uint8))


def main() -> None:
    random = np.random.default_rng(0)
    print("| images | library | bytes as Pillow's | Pillow | this | times as fast |\n|---|---|---|---|---|---|")
    for side, count in ((32, 1000), (256, 100), (1024, 10)):
        for kind, (mode, suffix, options) in KINDS.items():
            files = []
            for _ in range(count):
                file = io.BytesIO()
                picture(random, side).convert(mode).save(file, suffix, **options)
                files.append(file.getvalue())
            for name, decode in LIBRARIES.items():
                if ("JPEG" in kind and "spng" in name) or ("PNG" in kind and name == "simplejpeg"):
                    continue
                try:
                    same = sum(np.array_equal(by_pillow(data), decode(data, kind)) for data in files)
                except Exception as error:
                    print(f"| {kind}, {side}x{side} | {name} | {type(error).__name__}: {error} | | | |")
                    continue
                times: tuple[list[float], list[float]] = ([], [])
                for _ in range(ROUNDS):
                    start = time.process_time()
                    for data in files:
                        by_pillow(data)
                    middle = time.process_time()
                    for data in files:
                        decode(data, kind)
                    times[0].append((middle - start) / count)
                    times[1].append((time.process_time() - middle) / count)
                pillow, other = map(statistics.median, times)
                ratio = statistics.median(a / b for a, b in zip(*times))
                told = f"{1e6 * pillow:.0f} us | {1e6 * other:.0f} us | {ratio:.2f}"
                print(f"| {kind}, {side}x{side} | {name} | {same} of {count} | {told} |", flush=True)


if __name__ == "__main__":
    main()
