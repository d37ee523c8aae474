"""The features of a whole set of images: streamed in chunks over all processes, kept in bounded memory, stored with a hash.

Chunks are cut by image number and computed whole by whichever process, and every process receives the features of all in their
order. So any number of processes gets the same numbers to the last bit, no image counts twice, and a set that does not divide
evenly is nothing special.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from utils.core.distributed import from_all, from_main_process, together, waited_for
from utils.core.errors import UserError
from utils.core.files import whole_file
from utils.data.dataset import ImageSet, content_fingerprint
from utils.evaluation.distances import Moments
from utils.evaluation.extractors import Extractor, eight_bit, tensors_sha256

FORMAT = 2
SAMPLE_ROWS, REFERENCE_ROWS = 10_000, 50_000  # features kept of generated and of real images; the moments are of all


@dataclasses.dataclass
class FeatureSet:
    """`moments` of all images; `rows` float32 [kept, D], on the CPU, of those whose numbers are in `indices` int64 [kept];
    `pixels_sha256` of all images, in their order, where it was asked for."""

    moments: Moments
    rows: torch.Tensor
    indices: torch.Tensor
    pixels_sha256: str = ""

    def __len__(self) -> int:
        return self.moments.count

    @classmethod
    def of(cls, features: torch.Tensor) -> "FeatureSet":
        return cls(Moments.of(features), features, torch.arange(len(features)))


def evenly(count: int, most: int) -> torch.Tensor:
    """Numbers int64 of min(count, most) of range(count), spread over it: a folder sorted by class gives all of its classes."""
    kept = min(count, most)
    return torch.arange(kept) * count // max(kept, 1)


def sharded(
    accelerator: Accelerator,
    count: int,
    batch_size: int,
    make: Callable[[torch.Tensor], list[torch.Tensor]],
    what: str = "features of images",
    advice: str = "",
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """(numbers int64 [n], tensors [n, ...]) chunk by chunk, in order, on every process; `make` gives the tensors of `numbers`.

    Chunk c is made by process c modulo their number. Memory holds one chunk of each process. All processes must go to the end.
    Where `make` fails on any, all of them raise, see `together`, which gets `what` and `advice`.
    """
    chunks = torch.arange(count).split(batch_size) if count else ()
    processes = accelerator.num_processes
    for first in range(0, len(chunks), processes):
        turn = chunks[first : first + processes]
        # Who has no chunk left makes the last one again, so that shapes agree; nothing waits for it longer.
        with together(accelerator, what, advice):
            made = make(turn[min(accelerator.process_index, len(turn) - 1)])
            if processes > 1:
                made = [torch.cat([part, part.new_zeros(batch_size - len(part), *part.shape[1:])]) for part in made]
                # What the gather will need must be had now, when all can still give up together; the allocator keeps it.
                room = [part.new_empty(processes, *part.shape) for part in made]
                del room
        if processes == 1:
            yield turn[0], made
            continue
        gathered = [accelerator.gather(part.contiguous()).unflatten(0, (processes, batch_size)) for part in made]
        for slot, numbers in enumerate(turn):
            yield numbers, [part[slot, : len(numbers)] for part in gathered]


@torch.no_grad()
def extract(
    accelerator: Accelerator,
    extractors: list[Extractor],
    count: int,
    batch_size: int,
    make_images: Callable[[torch.Tensor], torch.Tensor],
    *,
    kept_rows: int = SAMPLE_ROWS,
    kept_images: int = 0,
    hash_pixels: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[FeatureSet], torch.Tensor | None]:
    """Returns the features of images 0 ... count - 1 by each of the extractors, equal on all processes.

    Args:
        make_images: gives uint8 [n, C, H, W] of the numbers int64 [n], on the accelerator's device, where the extractors are.
        kept_rows: how many features are kept, evenly spread; the moments are of all.
        kept_images: how many images are kept beside them, evenly spread: uint8 [kept, C, H, W] on the CPU; None for 0.
        hash_pixels: whether the sets get their `pixels_sha256`.
        progress: called with the number of images that each chunk adds.
    """
    on_device = accelerator.device if accelerator.device.type == "cuda" else "cpu"  # not every backend has float64
    moments = [Moments.empty(extractor.dimensions, on_device) for extractor in extractors]
    kept = evenly(count, kept_rows)
    rows: list[list[torch.Tensor]] = [[] for _ in extractors]
    shown, images_kept, digest = evenly(count, kept_images), [], hashlib.sha256()

    def make(numbers: torch.Tensor) -> list[torch.Tensor]:
        images = make_images(numbers)
        features = [extractor(images) for extractor in extractors]
        hashes = [_image_hashes(images)] if hash_pixels else []
        return [*features, *hashes, images] if kept_images else [*features, *hashes]

    for numbers, tensors in sharded(accelerator, count, batch_size, make):
        chosen = torch.isin(numbers, kept)
        for total, parts, features in zip(moments, rows, tensors):
            features = features.to(on_device)
            total.add(features)
            parts.append(features[chosen.to(on_device)].float().cpu())
        if hash_pixels:
            digest.update(tensors[len(extractors)].cpu().numpy().data)
        if kept_images:
            images_kept.append(tensors[-1].cpu()[torch.isin(numbers, shown)])
        if progress is not None:
            progress(len(numbers))
    pixels_sha256 = digest.hexdigest() if hash_pixels else ""
    sets = [FeatureSet(total, torch.cat(parts), kept, pixels_sha256) for total, parts in zip(moments, rows)]
    return sets, torch.cat(images_kept) if kept_images else None


def _image_hashes(images: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 32]: the SHA-256 of each image's shape and pixels, which does not depend on how images are cut into chunks."""
    shape = repr(tuple(images.shape[1:])).encode()
    hashes = [hashlib.sha256(shape + image.tobytes()).digest() for image in images.cpu().numpy()]
    return torch.tensor([list(digest) for digest in hashes], dtype=torch.uint8, device=images.device)


def reference_features(
    accelerator: Accelerator,
    extractor: Extractor,
    images: ImageSet,
    *,
    batch_size: int,
    cache_dir: Path | None,
    progress: Callable[[int], None] | None = None,
) -> FeatureSet:
    """Those of `images`, from `cache_dir` where they were computed before: the name of the file says of what and by what.

    Images of other proportions are cut in the center. Every process must call it; each gets them.
    """
    key = [FORMAT, REFERENCE_ROWS, images.fingerprint, content_fingerprint(images), extractor.identity()]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_dir / f"features-{name}.safetensors" if cache_dir is not None else None
    try:
        found = load_features(path)[0] if path is not None and path.exists() else None
    except UserError:  # damaged: made again
        found = None
    everywhere = all(from_all(accelerator, torch.tensor([int(found is not None)], device=accelerator.device)))
    if found is not None and everywhere:
        return found

    def make_images(numbers: torch.Tensor) -> torch.Tensor:
        return eight_bit(images.fetch(numbers.numpy()), images.max_value).to(accelerator.device)

    (features,), _ = extract(
        accelerator,
        [extractor],
        len(images),
        batch_size,
        make_images,
        kept_rows=REFERENCE_ROWS,
        hash_pixels=True,
        progress=progress,
    )
    with waited_for(accelerator, "writing the features"):
        if path is not None and accelerator.is_main_process:
            with contextlib.suppress(OSError):  # a cache that cannot be written is made again next time
                save_features(path, features, {})
    return features


def save_features(path: Path, features: FeatureSet, facts: dict) -> str:
    """Writes the features with `facts` (JSON), complete or not at all; their common SHA-256. Raises OSError."""
    tensors = {
        "count": torch.tensor(len(features)),
        "mean": features.moments.mean.cpu(),
        "scatter": features.moments.scatter.cpu(),
        "rows": features.rows,
        "indices": features.indices,
    }
    text = json.dumps(facts | {"pixels_sha256": features.pixels_sha256}, sort_keys=True)
    digest = tensors_sha256(tensors, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, shared=True) as draft:
        draft.write_bytes(save(tensors, {"facts": text, "sha256": digest, "format": str(FORMAT)}))
    return digest


def is_stored(path: Path) -> bool:
    """Whether a file is one of `save_features`, whatever its name."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def load_features(path: Path) -> tuple[FeatureSet, dict, str]:
    """Returns the features, the facts and the SHA-256 of what `save_features` wrote. Raises UserError where it is not as it was
    written."""
    try:
        with safe_open(path, "pt") as file:
            # Cloned into fresh memory: read in place, inside the mapped file, some CPUs' kernels would round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        text, digest = metadata["facts"], metadata["sha256"]
    except FileNotFoundError:
        raise UserError(f"--reference {path}: no such file or folder\nmake it with evaluate.py make-reference") from None
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"--reference {path} is not a file of statistics: {error}\nmake it with evaluate.py make-reference"
        ) from None
    if metadata.get("format") != str(FORMAT) or tensors_sha256(tensors, text) != digest:
        raise UserError(
            f"--reference {path} is damaged, or another version wrote it\nmake it again with evaluate.py make-reference"
        )
    moments = Moments(int(tensors["count"]), tensors["mean"], tensors["scatter"])
    facts = json.loads(text)
    return FeatureSet(moments, tensors["rows"], tensors["indices"], facts.pop("pixels_sha256")), facts, digest


def sync_weights(extractor: Extractor) -> None:
    """Gives every process the main one's weights: a classifier trained on several GPUs differs in its last bits."""
    state = from_main_process(extractor.state_dict())
    extractor.load_state_dict(state)
