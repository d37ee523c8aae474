"""A dataset as an `ImageSet`: fixed-size integer images by index, and labels, whatever the source.

images = load_images("uoft-cs/cifar10", resolution=32, image_channels=3)
images.fetch(np.array([5, 0, 7]))     # uint8 [3, 3, 32, 32]
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import torch

from utils.core.errors import UserError
from utils.core.size import Size, describe_size, read_bytes
from utils.data.arrays import ArrayImages, is_array_file, range_of
from utils.data.bad_images import BadImage, BadImages
from utils.data.block_cache import BlockCache
from utils.data.cache import PACKING_VERSION, PackedImages, mark_used, pack_once
from utils.data.color_modes import background_color
from utils.data.columns import about_splits, find_labels
from utils.data.decode import ImagePreparation, Range, cut, describe_remarks, header_of, prepared
from utils.data.image_column import EncodedImages, find_image_column
from utils.data.shards import patiently
from utils.data.sources import contents_key, open_dataset
from utils.data.stored_files import forget_archives, is_address
from utils.data.stream import BlockReader, StreamedImages, open_shards
from utils.options.flags import DataOptions

STREAMED_BLOCKS = Path("streams", "blocks")  # below the folder of the packed caches; a folder for each streamed dataset
Indices = Sequence[int] | np.ndarray
_FEW_BLOCKS = 16  # that a sample of a streamed dataset comes from


class DecodedImages:
    """The counterpart of `PackedImages` without a cache: each fetch decodes its images; the same pixels."""

    uniform = False  # unknown before they are decoded

    def __init__(self, files: EncodedImages | ArrayImages, prepare: ImagePreparation, max_bad_images: int = 0):
        self.files, self.prepare = files, prepare
        self.bad_images = BadImages(max_bad_images)  # those met so far

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, rows: np.ndarray, crop: np.ndarray | None) -> np.ndarray | None:
        """Returns pixels [batch, channels, height, width] of `rows` int64 [batch]; `crop` as in `cut`.

        None when some of them cannot be decoded: `bad_images` has them now.

        Raises:
            UserError: naming a file that cannot be decoded, once there are more than may be.
        """
        images, _, errors = prepared(self.prepare, self.files.at(rows.tolist()))
        if errors:
            self.bad_images.learn(BadImage(int(rows[number]), *error) for number, error in errors)
            return None
        return cut(images, self.prepare.size, crop)


@dataclass(eq=False)
class ImageSet:
    """Images and labels by index. Holds no pixels itself, so that a pickled copy is small.

    In the place of an image that cannot be decoded, where that is allowed, stands the next one of the set that can be
    (after the last comes the first). So it is the same one whoever fetches, and a held-out image is never trained on.

    Attributes:
        shape: (channels, height, width).
        max_value: 255 (uint8) or 65535 (uint16), the value of white.
        labels: int64 numpy [images], or None.
        class_names: list of strings, or None.
        fingerprint: hex string that changes with the data or with an option that alters pixels.
        notes: sentences on choices and conversions that a user should see once.
        description: the source and the size, for people.
    """

    store: PackedImages | DecodedImages | StreamedImages
    shape: tuple[int, int, int]
    max_value: int
    labels: np.ndarray | None
    class_names: list[str] | None
    fingerprint: str
    notes: list[str]
    source: str
    rows: np.ndarray | None = None  # of the store; None means all of them
    files: EncodedImages | ArrayImages | None = None  # what the pixels were made from, where it is known
    opened: datasets.Dataset | None = None  # of `datasets`, before rows and columns of it were chosen: for the doctor

    def __getstate__(self) -> dict:
        """A copy in another process does without the files: a dataset in memory would travel with them."""
        return {**self.__dict__, "files": None, "opened": None}

    def __len__(self) -> int:
        return len(self.store) if self.rows is None else len(self.rows)

    @property
    def uniform(self) -> bool:
        """Whether every image is known to be stored at the final size, so that nothing is cut off."""
        return self.store.uniform

    @property
    def bad_images(self) -> BadImages:
        """Those of the whole store that are known: all of them with a packed cache, else those met so far."""
        return self.store.bad_images

    @property
    def cached(self) -> bool:
        """Whether fetching reads ready pixels; else it decodes files, which is far slower."""
        return isinstance(self.store, PackedImages)

    def blocks(self) -> np.ndarray | None:
        """Returns the number of images, int64 [blocks], of each block that is read as a whole; None: there are none."""
        if not isinstance(self.store, StreamedImages):
            return None
        return np.diff(self.store.starts if self.rows is None else np.searchsorted(self.rows, self.store.starts))

    def nearby(self, count: int, seed: int = 0) -> np.ndarray | None:
        """Returns at most `count` indices, ascending, drawn from few blocks, the same for the same seed; None as `blocks`."""
        sizes = self.blocks()
        if sizes is None:
            return None
        generator, first = np.random.default_rng(seed), np.cumsum(sizes) - sizes
        order = generator.permutation(np.flatnonzero(sizes))
        chosen, left, share = [], min(count, len(self)), -(-count // _FEW_BLOCKS)
        while np.minimum(sizes, share).sum() < left:
            share *= 2
        for block in order:
            chosen.append(first[block] + generator.permutation(sizes[block])[: min(share, left)])
            left -= len(chosen[-1])
            if not left:
                break
        return np.sort(np.concatenate(chosen)).astype(np.int64)

    def read_ahead(self, indices: Indices) -> None:
        """Begins to read what the images at `indices` need, in this order, where each is not read alone."""
        if isinstance(self.store, StreamedImages):
            self.store.read_ahead(self._rows(np.asarray(indices, dtype=np.int64)))

    @property
    def description(self) -> str:
        channels, height, width = self.shape
        classes = f", {len(self.class_names)} classes" if self.class_names else ""
        return f"{self.source}: {len(self):,} images, {height}x{width}, {channels} channel{'s'[: channels - 1]}{classes}"

    def fetch(self, indices: Indices, crop: np.ndarray | None = None) -> np.ndarray:
        """Returns images uint8 or uint16 [batch, channels, height, width].

        Args:
            indices: int64 [batch] in [0, len(self)).
            crop: float32 [batch, 2] in [0, 1), where to cut images of other proportions (top, left); None cuts the center.

        Raises:
            IndexError: an index outside the set.
            UserError: without a cache, naming an image that cannot be decoded, once there are more than may be; or
            there is no image in the set that can be.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if not len(indices):
            return np.empty((0, *self.shape), np.uint8 if self.max_value == 255 else np.uint16)
        if not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must lie in [0, {len(self)}), got {indices.min()} to {indices.max()}")
        while (pixels := self.store.fetch(self._rows(self.shown(indices)), crop)) is None:
            pass  # the store met images that it had not known to be bad; now others take their places
        return pixels

    def shown(self, indices: np.ndarray) -> np.ndarray:
        """Returns the indices int64 [batch] whose images stand at `indices`: others where an image is known not to decode.

        Final for indices that were fetched. Raises UserError when the set has no image that can be decoded.
        """
        if not self.bad_images:
            return indices
        indices = np.asarray(indices, dtype=np.int64)
        shown = indices.copy()
        for position in np.flatnonzero(np.isin(self._rows(indices), list(self.bad_images))):
            followers = (np.arange(len(self.bad_images)) + 1 + indices[position]) % len(self)
            good = followers[~np.isin(self._rows(followers), list(self.bad_images))]
            if len(good) == 0:
                bad = self.bad_images[int(self._rows(indices[position]))]
                raise UserError(
                    f"none of the {len(self)} images can be decoded; for example {bad.name}: {bad.reason}\ncheck these files"
                )
            shown[position] = good[0]
        return shown

    def shown_rows(self, indices: np.ndarray) -> np.ndarray:
        """Returns the rows of the dataset, int64 [batch], whose images stand at `indices`; see `shown`."""
        return self._rows(self.shown(indices))

    def replacements(self) -> dict[int, int]:
        """Returns the row of each image of the set that is known not to decode -> row of the image in its place."""
        rows = list(self.bad_images)
        indices = np.array(rows, np.int64) if self.rows is None else np.flatnonzero(np.isin(self.rows, rows))
        return dict(zip(self._rows(indices).tolist(), self._rows(self.shown(indices)).tolist()))

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        return indices if self.rows is None else self.rows[indices]

    def original_sizes(self, indices: Indices, max_bytes: int = 64 * 2**20) -> np.ndarray | None:
        """Returns height and width, int64 [images, 2], of the files of `indices` before they were resized, from their headers.

        Stops once files of `max_bytes` have been read, and leaves out those that are no longer there. None where the
        set does not know its files, as in a pickled copy.
        """
        if self.files is None:
            return None
        sizes, read = [], 0
        for row in self._rows(np.asarray(indices, dtype=np.int64)).tolist():
            (file,) = self.files.at([row])  # one at a time, because photographs are large
            read += len(file.data or b"")
            if (header := header_of(file)) is not None:
                sizes.append(header[1:])
            if read >= max_bytes:
                break
        return np.array(sizes, np.int64).reshape(-1, 2)

    def dataset_rows(self, indices: Indices) -> torch.Tensor:
        """Returns rows of the dataset, int64 [batch], that the images at `indices` int64 [batch] came from."""
        return torch.from_numpy(self._rows(np.asarray(indices, dtype=np.int64)))

    def subset(self, indices: Indices) -> "ImageSet":
        """Returns the images at `indices`, in that order; shares the pixels."""
        indices = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            labels=None if self.labels is None else self.labels[indices],
            fingerprint=hashlib.sha256(self.fingerprint.encode() + indices.tobytes()).hexdigest()[:32],
            rows=self._rows(indices),
        )


def spread(images: ImageSet, count: int) -> np.ndarray:
    """Returns `count` indices from all over the set, or all of them; of a streamed one, which reads whole blocks, from few."""
    nearby = images.nearby(count)
    return np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64) if nearby is None else nearby


def load_images(options: DataOptions, progress: Callable[[int, int], None] | None = None) -> ImageSet:
    """Opens a dataset (see `sources`), and packs its images once (see `cache`) unless `cache_images` is "no".

    Images of other proportions are cut at the center with `center_crop`, else where `fetch` is told to; those that cannot be
    decoded end it, or are replaced as `ImageSet` says. `progress` is called with (done, total) while images are packed.

    Raises:
        UserError: anything about the data that a user can mend, in one line.
    """
    shape, size = options.image_shape, Size.of(options.resolution)
    try:
        color = background_color(options.background)
    except ValueError:
        raise UserError(
            f"--background must be an opaque color, such as white, #808080 or rgb(0,0,0); got {options.background}"
        ) from None
    allowed = options.max_bad_images if options.on_bad_image == "replace" else 0
    if options.streaming:
        source = _open_stream(options, progress)
    else:
        source = _open_arrays(options) if is_array_file(options.dataset_name) else _open_table(options)
    files, notes = source.files, [*source.notes]
    if options.dataset_name is not None and options.train_data_dir is not None:
        notes.append("warning: --train_data_dir is ignored, because --dataset_name is given")
    if source.data_range is None and options.image_channels not in (1, 3):
        raise UserError(
            f"--image_channels is {options.image_channels}, and image files become gray (1) or RGB (3)\n"
            "set 1 or 3: transparent images get the color --background"
        )
    max_value = 65535 if options.preserve_input_precision else 255
    made_as = (size, options.image_channels, options.center_crop, options.background, max_value, source.data_range)
    prepare = ImagePreparation(*made_as)
    shaping = [PACKING_VERSION, source.column, len(files), size.resolution, options.image_channels, options.center_crop, color]
    shaping += [max_value] if source.data_range is None else [max_value, source.data_range]
    fingerprint = hashlib.sha256(json.dumps([source.key, shaping]).encode()).hexdigest()[:32]
    crop = ", center crop" if options.center_crop else ""
    made = f"{'x'.join(map(str, shape))}{crop}, background {options.background}"
    about = {"data": source.description, "images": f"{len(files):,} images", "options": made}
    if isinstance(files, BlockReader):
        limit = _cache_limit(options, len(files), prepare)
        cache = BlockCache(cache_folder(options.cache_dir) / STREAMED_BLOCKS, fingerprint, prepare, limit)
        store: PackedImages | DecodedImages | StreamedImages = StreamedImages(cache, files, prepare, allowed)
        mark_used(cache.folder, about | {"images": f"{len(files):,} images, streamed"})
        notes.append(f"streamed: {files}, shuffled in windows of {options.shuffle_window:,} images")
        notes.append(f"decoded blocks: at most {options.cache_limit} with those of other runs, in {cache.folder}")
    elif options.cache_images == "yes":
        folder = cache_folder(options.cache_dir) / fingerprint
        store = pack_once(folder, len(files), files.between, prepare, progress, allowed)
        forget_archives()
        mark_used(folder, about)
        notes += describe_remarks(store.packed.remarks)
        notes.append(f"packed images: {describe_size(len(store.packed.data))} in {folder}")
    else:
        store = DecodedImages(files, prepare, allowed)
    images = ImageSet(
        store,
        shape,
        max_value,
        source.labels,
        source.class_names,
        fingerprint,
        notes,
        source.description,
        files=None if isinstance(files, BlockReader) else files,
        opened=source.opened,
    )
    images.fetch([0])  # a format that nobody can read is told now, not in a worker
    return images


@dataclass(frozen=True)
class _Source:
    """Images that are not yet prepared; `data_range` where they are arrays."""

    files: EncodedImages | ArrayImages | BlockReader
    labels: np.ndarray | None
    class_names: list[str] | None
    key: str
    description: str
    column: str
    notes: list[str]
    opened: datasets.Dataset | None = None
    data_range: Range | None = None


def _open_stream(options: DataOptions, progress: Callable[[int, int], None] | None) -> _Source:
    files, (labels, class_names, notes) = open_shards(options, cache_folder(options.cache_dir) / "streams" / "index", progress)
    about = (files.key(), str(options.dataset_name), ", ".join(files.columns), notes)
    first = patiently(lambda: files.images(0), files.shard(0).address)
    return _Source(files, labels, class_names, *about, data_range=_range_of(first, options))


def _cache_limit(options: DataOptions, images: int, prepare: ImagePreparation) -> int:
    """Returns the bytes that --cache_limit names. Raises UserError where two windows of a stream are larger."""
    limit, needed = read_bytes(options.cache_limit), 2 * min(options.shuffle_window, images) * prepare.blank().nbytes
    if needed > limit:
        raise UserError(
            f"--cache_limit {options.cache_limit} is too small: two windows of --shuffle_window take {describe_size(needed)}\n"
            "set a larger --cache_limit or a smaller --shuffle_window"
        )
    return limit


def _open_table(options: DataOptions) -> _Source:
    opened = open_dataset(options)
    dataset = opened.dataset
    if options.max_train_images is not None:
        dataset = dataset.select(range(min(options.max_train_images, len(dataset))))
    if len(dataset) == 0:
        raise UserError(f"the dataset {opened.description} has no images\ncheck its name and --dataset_split")
    columns, notes = find_image_column(dataset, options.image_column)
    labels, class_names, label_notes = find_labels(dataset, options.label_column)
    files = EncodedImages(dataset, columns, opened.base)
    key = opened.key
    if opened.base is not None and not is_address(opened.base) and (named := files.files_key()):
        key = f"{key} {named}"
    about = (key, opened.description, ", ".join(columns), [*opened.notes, *notes, *about_splits(dataset), *label_notes])
    return _Source(files, labels, class_names, *about, opened.dataset, _range_of(files, options))


def _range_of(files: EncodedImages, options: DataOptions) -> Range | None:
    """The values of black and white where the images are arrays. Raises UserError where they do not fit the options."""
    if files.shape is not None:
        return range_of(files, files.shape, options)
    if options.data_range is not None:
        raise UserError("--data_range is for arrays, and these are image files\nleave out --data_range")
    return None


def _open_arrays(options: DataOptions) -> _Source:
    files, name = ArrayImages(options), str(options.dataset_name)
    names = f"{options.image_column or 'images'}, {options.label_column or 'labels'}"
    about = (files.labels, files.class_names, contents_key([Path(name)], ""), name, names)
    return _Source(files, *about, [], data_range=range_of(files, files.shape[1:], options))


def cache_folder(cache_dir: str | None) -> Path:
    """Returns the folder of packed images and what is computed of them, in `cache_dir` or that of Hugging Face's datasets."""
    return Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "steady_diffusion"


def content_fingerprint(images: ImageSet, sample: int = 64) -> str:
    """Hex string of the images' number, shape, labels and the pixels of `sample` of them, spread over the set.

    Unlike `fingerprint`, which guards the cache, it is the same wherever and whenever the same data is stored.
    """
    indices = spread(images, sample)
    digest = hashlib.sha256(repr((len(images), images.shape, images.max_value)).encode())
    digest.update(np.ascontiguousarray(images.fetch(indices)).tobytes())
    if images.labels is not None:
        digest.update(images.labels.tobytes())
    return digest.hexdigest()[:32]
