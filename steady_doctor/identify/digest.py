"""What a process has at an update, as short texts that are equal where the numbers are, to the last bit."""

import hashlib
from collections.abc import Iterable

from torch import Tensor

from steady_doctor.identify.step import Step
from steady_doctor.record.ranks import in_parts
from steady_doctor.record.session import Recorded

FEWEST = 8  # numbers, which are not alike by chance


def digests(recorded: Recorded, step: Step) -> dict[str, str]:
    """Of weights, gradient and the averages that a loop tells, where each process has all of them, and of the first pass:
    images, noise and noise levels."""
    found = {}
    if not in_parts(recorded.parameters):
        found["weights"] = digest([recorded.weights[-1].flat])
        found["gradient"] = digest([recorded.at_step.flat])
        averages = [samples[-1].flat for samples in recorded.averages.values()]
        found |= {"averages": digest(averages)} if any(map(len, averages)) else {}
    mixture = step.passes[0].mixture if step.passes else None
    if mixture is None:
        return found
    if mixture.noise.head.numel() >= FEWEST:
        found["noise"] = digest([mixture.noise.head])
    first, clean = step.passes[0], mixture.clean
    # Mirroring does not change the marks; the images that a loop tells are those that it was to have.
    images = (
        first.batch.marks if first.batch is not None else clean.head if first.drawn is not None and clean is not None else None
    )
    if images is not None and len(images.unique(dim=0)) > 1:
        found["images"] = digest([images])
    return found if first.levels is None else found | {"levels": digest([first.levels])}


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
