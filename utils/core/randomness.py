"""Random numbers that belong to samples: every value is a function of (seed, purpose, sample number) and of nothing else.

The generator is counter-based, so there is no state to save, nothing depends on the rank, on the accumulation split or on
what was drawn before, and the CPU and a GPU draw the same numbers (normals agree to float rounding). It runs as a few
integer tensor operations on the device that holds the sample numbers: no per-sample generator, no copy over PCIe.

The mixing function is the finalizer of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). A sample's numbers are the SplitMix64 sequence that starts at the sample's own 64-bit key.
"""

import hashlib
import math

import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio, odd
_WORD = 1 << 64


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as `value` modulo 2^64 (torch has no uint64 arithmetic)."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


_GAMMA = _signed(_GOLDEN_GAMMA)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_right_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> on int64 copies the sign bit


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, elementwise on int64; products wrap modulo 2^64."""
    z = (z ^ _logical_right_shift(z, 30)) * _MIX_1
    z = (z ^ _logical_right_shift(z, 27)) * _MIX_2
    return z ^ _logical_right_shift(z, 31)


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Returns a seed in [0, 2^63) for one purpose, for generators that want a plain integer."""
    digest = hashlib.sha256(repr((int(seed), purpose, *map(int, numbers))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generator(device: torch.device, seed: int) -> None:
    """Seeds torch's own generator of `device` alone: torch.manual_seed asks every backend there is, 0.6 ms each time."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def random_bits(seed: int, purpose: str, sample_numbers: torch.Tensor, count: int) -> torch.Tensor:
    """`count` random 64-bit words per sample, as int64 [batch, count], on the device of `sample_numbers` [batch]."""
    keys = _mix(_mix(sample_numbers.to(torch.int64) + derive_seed(seed, purpose)) * _GAMMA)
    counters = torch.arange(1, count + 1, dtype=torch.int64, device=sample_numbers.device)
    return _mix(keys[:, None] + counters * _GAMMA)


def uniform(seed: int, purpose: str, sample_numbers: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Returns uniform float32 [batch, count] in [0, 1), in steps of 2^-24; exact and equal on every device."""
    return _logical_right_shift(random_bits(seed, purpose, sample_numbers, count), 40).float() * 2.0**-24


def integers(seed: int, purpose: str, sample_numbers: torch.Tensor, high: int) -> torch.Tensor:
    """Returns uniform int64 [batch] in [0, high). The modulo's bias is below high / 2^63."""
    return _logical_right_shift(random_bits(seed, purpose, sample_numbers, 1)[:, 0], 1) % high


def normal(seed: int, purpose: str, sample_numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns standard normal float32 [batch, *shape] by the Box-Muller transform; |value| stays below 6.67."""
    size = math.prod(shape)
    bits = random_bits(seed, purpose, sample_numbers, (size + 1) // 2)
    # 32 bits for the radius, which sets the tails; the other 32 for the angle. (0, 1] keeps the logarithm finite.
    radius = (_logical_right_shift(bits, 32).float() + 1.0).mul_(2.0**-32).clamp_(max=1.0).log_().mul_(-2.0).sqrt_()
    angle = (bits & 0xFFFFFFFF).float().mul_(2.0 * math.pi * 2.0**-32)
    values = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return values[:, :size].reshape(len(sample_numbers), *shape)


def permute(seed: int, purpose: str, epochs: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Index [batch] that stands at `positions` [batch] of the shuffled order of pass `epochs` [batch], all in [0, length).

    For each epoch the map position -> index is a bijection of range(length), computed without storing the order, so that
    memory does not grow with the data set: a Feistel network (Luby & Rackoff 1988) on the next power of four, walked along
    its cycle until the value falls inside the range (Black & Rogaway 2002; at most 4 steps on average).
    """
    if length < 1:
        raise ValueError(f"length must be positive, got {length}")
    half_bits = max(1, math.ceil(math.log2(max(length, 2)) / 2))
    mask = (1 << half_bits) - 1
    round_keys = [derive_seed(seed, f"{purpose}/round{i}") for i in range(6)]
    epoch_keys = [_mix(epochs.to(torch.int64) * _GAMMA + key) for key in round_keys]

    def encrypt(values: torch.Tensor, epoch_keys: list[torch.Tensor]) -> torch.Tensor:
        left, right = values >> half_bits, values & mask
        for key in epoch_keys:
            left, right = right, left ^ (_mix(right + key) >> 16 & mask)  # of the sign's copies the mask leaves none
        return left << half_bits | right

    indices = encrypt(positions.to(torch.int64), epoch_keys)
    while len(outside := (indices >= length).nonzero()[:, 0]):
        indices[outside] = encrypt(indices[outside], [key[outside] for key in epoch_keys])
    return indices


def shuffled(seed: int, purpose: str, count: int, length: int) -> torch.Tensor:
    """Returns the first `count` numbers of range(length) in random order, int64."""
    positions = torch.arange(count)
    return permute(seed, purpose, torch.zeros_like(positions), positions, length)
