"""The data of our own runs: silent of any source; faults in what trains and in what it reports alike have their code."""

import shutil
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import slow_turns
from PIL import Image

from steady_doctor.data.judge import DataJudge
from utils.data import columns, dataset, stream, training_data
from utils.data.dataset import ImageSet
from utils.data.loader import SampleOrder
from utils.data.training_data import TrainingData
from utils.options.flags import EDM2Options
from utils.training.audit import declared_data, given

PIXELS = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8)
KINDS = np.random.default_rng(1).integers(0, 3, 120)
NAMES = ["cow", "ant", "bee"]


def make_folder(path, archive=None, **flags):
    for number, kind in enumerate(KINDS):
        (path / NAMES[kind]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[number]).save(path / NAMES[kind] / f"{number}.png")
    if archive is not None:
        return {"train_data_dir": shutil.make_archive(str(path), archive, path.parent, path.name)}
    return {"train_data_dir": str(path)} | flags


def make_table(path, save="parquet", labels=KINDS, feature=None, **flags):
    kind = feature or datasets.ClassLabel(names=NAMES)
    features = {"other": datasets.Value("int64"), "image": datasets.Image(), "kind": kind}
    values = {"other": range(120), "image": list(PIXELS), "kind": labels}
    made = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    (path / "shards").mkdir(parents=True)
    if save == "arrow":
        made.select(range(0, 120, 2)).save_to_disk(path)  # the folder has these rows alone
    for number in range(2):
        made.shard(2, number, contiguous=True).to_parquet(path / "shards" / f"train-{number}.parquet", batch_size=10)
    made.to_parquet(path / "train.parquet")
    return {"dataset_name": str(path / {"parquet": "train.parquet", "arrow": "", "shards": "shards"}[save])} | flags


def make_kinds(path, **flags):
    exif, noise = Image.Exif(), np.random.default_rng(2)
    path.mkdir()
    for number in range(1, 9):
        exif[0x0112] = number
        smooth = Image.fromarray(noise.integers(0, 256, (9, 14, 4), np.uint8)).resize((30 + 5 * number, 50))
        color, gray = smooth.convert("RGB"), smooth.getchannel(3)
        color.save(path / f"{number}.jpg", exif=exif)
        smooth.save(path / f"{number}a.png", exif=exif)
        color.quantize(20).save(path / f"{number}p.png", transparency=3)
        color.convert("CMYK").save(path / f"{number}.tiff")
        gray.convert("1").save(path / f"{number}b.png")
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 250 + number).save(path / f"{number}d.png")
        Image.merge("LA", [gray, gray]).save(path / f"{number}la.png")
    return {"train_data_dir": str(path), "resolution": 24, "color_jitter": 0.4} | flags


def make_arrays(path):
    np.savez(path.with_suffix(".npz"), images=PIXELS[..., None], labels=KINDS)
    return {"dataset_name": str(path.with_suffix(".npz"))}


SOURCES = {
    "folder": make_folder,
    "parquet": make_table,
    "streamed": partial(make_table, save="shards", streaming=True, shuffle_window=40),
    "kinds": partial(make_kinds, image_channels=3),
    "gray kinds": partial(make_kinds, color_jitter=0.0),
    "cropped kinds": partial(make_kinds, image_channels=3, center_crop=True),
    "deep kinds": partial(make_kinds, preserve_input_precision=True),
    "digits": lambda path: {"dataset_name": "digits"},
    "saved": partial(make_table, save="arrow"),
    "strings": partial(make_table, labels=[NAMES[k] for k in KINDS], feature=datasets.Value("string"), label_column="kind"),
    "no labels": partial(make_table, labels=[0.5] * 120, feature=datasets.Value("float32")),
    "the first": partial(make_folder, max_train_images=50),
    "balanced": partial(make_table, balanced_sampling=True),
    "replacing": partial(make_folder, on_bad_image="replace"),
    "zip": partial(make_folder, archive="zip"),
    "tar": partial(make_folder, archive="tar"),
    "arrays": make_arrays,
    "streamed, saved": partial(make_table, save="arrow", streaming=True, shuffle_window=1000),
}
COUNTS = {"digits": 1797, "the first": 50, "saved": 60, "streamed, saved": 60}


def look(tmp_path, source, updates=24):
    """Codes of what the audit says of a run's data after some updates, and its judge."""
    flags = {"resolution": 8, "image_channels": 1, "train_batch_size": 8, "validation_images": 12, "random_flip": True}
    flags |= {"cache_dir": str(tmp_path / "cache"), "label_dropout": 0.0} | SOURCES[source](tmp_path / "data")
    process = SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1, is_main_process=True)
    data = TrainingData(options := EDM2Options(**flags), process)
    known, names = data.images.labels, data.images.class_names or ()
    facts = {"num_processes": 1, "training_images": len(data.training)}
    facts["classes"] = 0 if known is None else max(int(known.max()) + 1, len(names))
    audit, found = DataJudge(declared_data(options, facts, 0), given(data)), []
    for step, batch in enumerate(data.samples.batches(0, updates)):
        audit.begin_micro_step(batch["sample_numbers"])
        drawn = data.samples.on_device(batch)
        audit.add(drawn.clean_images, None if known is None else drawn.classes())
        if step in (0, 1, 2, 4, 6, 8, 10, updates - 1):
            found += audit.found(step, [batch["sample_numbers"]], [drawn.clean_images])
    return {one.code for one in found}, audit


@pytest.mark.parametrize("source", [*list(SOURCES)[:4], *slow_turns(*list(SOURCES)[4:])])
def test_healthy_data_of_any_source_are_silent(tmp_path, source):
    found, judge = look(tmp_path, source)
    assert found == set() and len(judge._table) == COUNTS.get(source, 56 if "kinds" in source else 120)
    assert judge._draws.sided > 20 and (judge._table.labels is None) == (source == "no labels" or "kinds" in source)


def put(owner, name, change):
    """A fault: `change(what was there, its arguments)` in place of it."""
    old = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **more: change(partial(old, **more), *args))


def resplit(change):
    """Changes which rows are trained on and held out."""

    def split(old, images, *args):
        return tuple(images.subset(rows) for rows in change(*(part.rows for part in old(images, *args))))

    return put(training_data, "split_validation", split)


LABELS, AUGMENTED = partial(put, dataset, "find_labels"), partial(put, training_data, "augment")
FAULTS = {
    "no labels": ("folder", "condition-classes", LABELS(lambda old, *args: (None, None, []))),
    "another column": ("parquet", "condition-labels", LABELS(lambda old, t, n: columns.find_labels(t, "other"))),
    "trained on all": ("folder", "data-held-out", resplit(lambda train, held: (np.append(train, held), held))),
    "one lost": ("folder", "data-split", resplit(lambda train, held: (train[1:], held))),
    "unbalanced": ("balanced", "data-balance", put(SampleOrder, "indices", lambda old, s, n: n % s.length)),
    "replaced": ("replacing", "data-stand-in", put(ImageSet, "shown", lambda old, s, n: np.where(n % 10, n, (n + 1) % len(s)))),
    "another block": ("streamed", "data-differs", put(stream.BlockReader, "__call__", lambda old, r, b: old(r, b ^ 1))),
    "flips of a pass": ("folder", "data-flips-again", AUGMENTED(lambda old, x, n: old(x, n % 108))),
    "one place": ("folder", "data-rescaled", AUGMENTED(lambda old, x, n: old(x, n) - 9 * (n % 8 == 5).view(-1, 1, 1, 1))),
}


@pytest.mark.parametrize("fault", [*list(FAULTS)[::4], *slow_turns(*(f for n, f in enumerate(FAULTS) if n % 4))])
def test_a_fault_in_reading_is_found(tmp_path, fault, monkeypatch):
    source, code, change = FAULTS[fault]
    change(monkeypatch)
    assert code in look(tmp_path, source)[0]
