"""Digests of tensors: few numbers that are equal where the bits are."""

from collections.abc import Iterable

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers of their size."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64, 0-dim: a sum over the bits of all tensors, each with a weight of its own. Equal tensors have equal digests."""
    together = digests(tensors)
    return (together * torch.arange(3, 2 * len(together) + 3, 2, device=together.device)).sum()


def digests(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64 [n]: of each of n tensors on one device, the sum over its bits."""
    sums = [_words(tensor.detach().reshape(-1)).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 numbers two by two, where they are even in number: half as many to add up, and none to convert. The same
    wherever they lie in memory: from an odd place no pairs are read, so they are copied (gradients of DDP lie in buckets)."""
    if flat.element_size() != 4 or flat.numel() % 2:
        return bits_of(flat)
    return (flat.clone() if flat.storage_offset() % 2 else flat.contiguous()).view(torch.int64)


def fingerprint(rows: torch.Tensor) -> torch.Tensor:
    """int64 [B] of [B, ...]: of the bits of each row and their places, so that equal ones mean equal rows."""
    bits = bits_of(rows.reshape(len(rows), -1)).long()
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    weights = (places * -7046029254386353131) ^ (places << 17)  # wraps around: odd multiples of 2^64 / golden ratio, mixed
    return ((bits * 6364136223846793005 + weights) ^ ((bits + places) << 23)).mul(weights | 1).sum(1)
