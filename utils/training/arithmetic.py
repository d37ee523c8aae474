"""How much of what a device can compute a run uses: TFLOP/s, and their share of the device's peak (MFU)."""

import re
from dataclasses import dataclass

# TFLOP/s of dense matrix products, from the data sheets: (a word in the device's name, bf16 and fp16, TF32, fp32). None: the
# device does not have it. The first row that fits counts.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("H200", 989.0, 494.0, 67.0),
    ("H100 PCIe", 756.0, 378.0, 51.0),
    ("H100 NVL", 835.0, 417.0, 60.0),
    ("H100", 989.0, 494.0, 67.0),
    ("A100", 312.0, 156.0, 19.5),
    ("L40S", 362.0, 183.0, 91.6),
    ("L4", 121.0, 60.0, 30.3),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 3090", 71.0, 35.6, 35.6),
    ("V100", 125.0, None, 15.7),
    ("T4", 65.0, None, 8.1),
)


def peak_tflops(device_name: str, mixed_precision: str, tf32: bool) -> float | None:
    """TFLOP/s that the maker states for this precision ("no", "bf16" or "fp16"); None where it is not known."""
    for word, half, with_tf32, single in _PEAKS:
        if re.search(rf"\b{word}\b", device_name):
            return half if mixed_precision != "no" else with_tf32 or single if tf32 else single
    return None


@dataclass(frozen=True)
class Arithmetic:
    """Of one training run; see `memory_estimate.flops_per_image` for what is counted."""

    flops_per_image: int
    peak: float | None  # TFLOP/s of all its devices together

    def figures(self, images_per_second: float) -> dict[str, float]:
        """perf/tflops; and perf/mfu, a share, where the peak is known."""
        tflops = self.flops_per_image * images_per_second / 1e12
        return {"perf/tflops": tflops} | ({"perf/mfu": tflops / self.peak} if self.peak else {})
