"""What a process has at an update, as short texts that are equal where the numbers are, to the last bit."""

import hashlib
from collections.abc import Iterable

from torch import Tensor

from steady_doctor.identify.step import Step
from steady_doctor.record.ranks import in_parts
from steady_doctor.record.session import Recorded

FEWEST = 8  # numbers, which are not alike by chance


def digests(recorded: Recorded, step: Step) -> dict[str, str]:
    """Of weights and gradient, where each process has all of them, and of the first pass: images, noise and noise levels."""
    found = {}
    if not in_parts(recorded.parameters):
        found["weights"] = digest([recorded.weights[-1].flat])
        found["gradient"] = digest([recorded.at_step.flat])
    mixture = step.passes[0].mixture if step.passes else None
    batch = step.passes[0].batch if step.passes else None
    if mixture is not None and mixture.noise.head.numel() >= FEWEST:
        found["noise"] = digest([mixture.noise.head])
    if batch is not None and len(batch.marks.unique(dim=0)) > 1:
        found["images"] = digest([batch.marks])
    return found


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
