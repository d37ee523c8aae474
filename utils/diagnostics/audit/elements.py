"""Few numbers that stand for many: a sample of the parameters' elements, and digests of tensors."""

import math
from collections.abc import Iterable, Mapping

import torch

SAMPLED = 1 << 15  # elements of the parameters that are looked at, at most: some tens of vectors of them are made
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes


def judged_on(device: torch.device) -> torch.device:
    """Where what was seen is computed with, in float64: MPS has none."""
    return torch.device("cpu") if device.type == "mps" else device


class ElementSample:
    """A fixed choice of at most `SAMPLED` elements of tensors that have the shapes of `parameters`: every n-th of each."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.names = list(parameters)
        self.shapes = [p.shape for p in parameters.values()]
        stride = max(1, math.ceil(sum(p.numel() for p in parameters.values()) / SAMPLED))
        self.strides = [max(1, min(stride, p.numel())) for p in parameters.values()]
        self.counts = [-(-p.numel() // stride) for p, stride in zip(parameters.values(), self.strides)]
        self.device = judged_on(next(iter(parameters.values())).device)

    def part(self, number: int, tensor: torch.Tensor | None) -> torch.Tensor:
        """float32, of the tensor with that number; zeros for one that is None or has another shape."""
        if tensor is None or tensor.shape != self.shapes[number]:
            return torch.zeros(self.counts[number], device=self.device)
        if tensor.is_contiguous():  # the same by one call: hundreds of small tensors cost as much as the calls do
            chosen = tensor.detach().as_strided((self.counts[number],), (self.strides[number],))
        else:
            chosen = tensor.detach().reshape(-1)[:: self.strides[number]]
        return chosen if chosen.dtype == torch.float32 and chosen.device == self.device else chosen.float().to(self.device)

    def take(self, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """float32 [n], of all tensors."""
        return torch.cat([self.part(number, tensor) for number, tensor in enumerate(tensors)])

    def per_element(self, values: Iterable[int]) -> torch.Tensor:
        """int64 [n] of one number for each tensor."""
        return torch.repeat_interleave(torch.tensor(list(values)), torch.tensor(self.counts)).to(self.device)


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
