"""What is said of the data of our own runs: nothing of any source, and a code of each fault in reading or drawing them.

The faults are in what trains and in what it reports of itself alike, so that it agrees with itself.
"""

import io
import tarfile
import zipfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import slow_turns
from PIL import Image

from utils.data import columns, dataset, loader, stream, training_data
from utils.data.dataset import ImageSet
from utils.data.loader import SampleOrder
from utils.data.training_data import TrainingData
from utils.options.flags import EDM2Options
from utils.training.data_audit import DataAudit

PIXELS = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8)
KINDS = np.random.default_rng(1).integers(0, 3, 120)
NAMES = ["cow", "ant", "bee"]


def png(pixels) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def make_folder(path):
    for number, (image, kind) in enumerate(zip(PIXELS, KINDS)):
        file = path / NAMES[kind] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))
    return {"train_data_dir": str(path)}


def make_archive(path, kind):
    make_folder(path)
    with zipfile.ZipFile(path / "a.zip", "w") if kind == "zip" else tarfile.open(path / "a.tar", "w") as archive:
        for file in path.rglob("*.png"):
            (archive.write if kind == "zip" else archive.add)(file, f"photos/{file.relative_to(path)}")
    return {"train_data_dir": str(path / f"a.{kind}")}


def make_table(path, labels=KINDS, feature=None, save="parquet", **flags):
    feature = datasets.ClassLabel(names=NAMES) if feature is None else feature
    features = {"other": datasets.Value("int64"), "image": datasets.Image(), "kind": feature}
    values = {"other": range(120), "image": [{"bytes": png(p), "path": None} for p in PIXELS], "kind": labels}
    made = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    (path / "shards").mkdir(exist_ok=True, parents=True)
    if save == "arrow":
        made.select(range(0, 120, 2)).save_to_disk(path)  # the folder has these rows alone
    for number in range(2):
        made.shard(2, number, contiguous=True).to_parquet(path / "shards" / f"train-{number}.parquet", batch_size=10)
    made.to_parquet(path / "train.parquet")
    return {"dataset_name": str({"parquet": path / "train.parquet", "arrow": path, "shards": path / "shards"}[save])} | flags


def make_arrays(path):
    path.mkdir()
    np.savez(path / "a.npz", images=PIXELS[..., None], labels=KINDS)
    return {"dataset_name": str(path / "a.npz")}


STREAMED = {"save": "shards", "streaming": True, "shuffle_window": 40}
KIND = {"label_column": "kind"}
SOURCES = {
    "folder": make_folder,
    "parquet": make_table,
    "streamed": lambda path: make_table(path, **STREAMED),
    "digits": lambda path: {"dataset_name": "digits"},
    "saved": lambda path: make_table(path, save="arrow"),
    "strings": lambda path: make_table(path, [NAMES[k] for k in KINDS], datasets.Value("string"), **KIND),
    "booleans": lambda path: make_table(path, KINDS > 0, datasets.Value("bool"), **KIND),
    "no labels": lambda path: make_table(path, [0.5] * 120, datasets.Value("float32")),
    "the first": lambda path: make_folder(path) | {"max_train_images": 50},
    "balanced": lambda path: make_table(path, balanced_sampling=True),
    "replacing": lambda path: make_folder(path) | {"on_bad_image": "replace"},
    "zip": lambda path: make_archive(path, "zip"),
    "tar": lambda path: make_archive(path, "tar"),
    "arrays": make_arrays,
    "streamed, saved": lambda path: make_table(path, save="arrow", streaming=True, shuffle_window=1000),
}


def look(tmp_path, source, updates=24):
    """Codes of what the audit says of a run's data after some updates, and its judge."""
    flags = {"resolution": 8, "image_channels": 1, "train_batch_size": 8, "validation_images": 12, "random_flip": True}
    flags |= {"cache_dir": str(tmp_path / "cache"), "label_dropout": 0.0} | SOURCES[source](tmp_path / "data")
    options, process = EDM2Options(**flags), SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1)
    process.is_main_process = True
    data = TrainingData(options, process)
    known, names = data.images.labels, data.images.class_names or ()
    facts = {"classes": 0 if known is None else max(int(known.max()) + 1, len(names))}
    audit, found = DataAudit(SimpleNamespace(options=options, accelerator=process, data=data, facts=facts)), []
    for step, batch in enumerate(data.samples.batches(0, updates)):
        audit.begin_micro_step(batch)
        drawn = data.samples.on_device(batch)
        audit.add({"clean_images": drawn.clean_images} | ({} if known is None else {"labels": drawn.classes()}))
        if step in (0, 1, 2, 4, 6, 8, 10, updates - 1):
            found += audit.checks(step, [batch["sample_numbers"]], [drawn.clean_images])
    return {check.name for check in found}, audit._judge


@pytest.mark.parametrize("source", [*list(SOURCES)[:3], *slow_turns(*list(SOURCES)[3:])])
def test_healthy_data_of_any_source_are_silent(tmp_path, source):
    found, judge = look(tmp_path, source)
    assert found == set() and len(judge._table) == {"digits": 1797, "the first": 50}.get(
        source, 60 if "saved" in source else 120
    )
    assert judge._draws.sided > 20 and (judge._table.labels is None) == (source == "no labels")


def put(owner, name, change):
    """A fault: `change(what was there, its arguments)` in place of it."""

    def fault(patch):
        old = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: change(partial(old, **more), *args))

    return fault


def relabelled(change):
    return put(
        dataset, "find_labels", lambda old, *args: (lambda labels, names, notes: (change(labels), names, notes))(*old(*args))
    )


def resplit(change):
    """Changes which rows are trained on and held out: (training, held out) -> (training, held out)."""

    def split(old, images, count, seed):
        training, held_out = old(images, count, seed)
        return tuple(images.subset(rows) for rows in change(training.rows, held_out.rows))

    return put(training_data, "split_validation", split)


def reordered(change):
    return put(SampleOrder, "indices", lambda old, self, numbers: change(self, numbers, partial(old, self)))


def black_at(place):
    def augment(old, images, numbers):
        return torch.where((numbers % 8 == place)[:, None, None, None], -1.0, old(images, numbers))

    return put(training_data, "augment", augment)


def fetched_next(old, self, numbers):
    batch = old(self, numbers)
    return batch | {"labels": batch["labels"].roll(1)}


def reopened(old, options):
    opened = old(options)
    return replace(opened, dataset=opened.dataset.select(range(100)))


def of_period(period):
    return put(training_data, "augment", lambda old, images, numbers: old(images, numbers % period))


def validating_training(old, self, *args):
    old(self, *args)
    self.validation.fetch = self.training.fetch


FAULTS = {
    "labels shifted": ("parquet", "condition-labels", relabelled(lambda labels: np.roll(labels, 1))),
    "labels too high": ("folder", "condition-classes", relabelled(lambda labels: labels + 1)),
    "no labels": ("folder", "condition-classes", put(dataset, "find_labels", lambda old, *args: (None, None, []))),
    "another column": (
        "parquet",
        "condition-labels",
        put(dataset, "find_labels", lambda old, t, n: columns.find_labels(t, "other")),
    ),
    "the next one's": ("parquet", "condition-labels", put(loader._Samples, "fetch", fetched_next)),
    "trained on all": ("folder", "data-held-out", resplit(lambda train, held: (np.append(train, held), held))),
    "one lost": ("folder", "data-split", resplit(lambda train, held: (train[1:], held))),
    "none held out": ("folder", "data-split", resplit(lambda train, held: (np.append(train, held), held[:0]))),
    "exchanged": ("folder", "data-split", resplit(lambda train, held: (held, train))),
    "rows twice": ("folder", "data-split", resplit(lambda train, held: (np.append(train, train), held))),
    "the last never": ("folder", "data-repeated", reordered(lambda self, n, old: old(n) % (self.length - 1))),
    "at random": ("folder", "data-repeated", reordered(lambda self, n, old: torch.randint(self.length, n.shape))),
    "unbalanced": ("balanced", "data-balance", reordered(lambda self, n, old: n % self.length)),
    "replaced": ("replacing", "data-stand-in", put(ImageSet, "shown", lambda old, s, n: np.where(n % 10, n, (n + 1) % len(s)))),
    "validation of training images": ("folder", "data-differs", put(TrainingData, "__init__", validating_training)),
    "another block": (
        "streamed",
        "data-differs",
        put(stream.BlockReader, "__call__", lambda old, r, b: old(r, (b + 1) % len(r.blocks))),
    ),
    "flips of a pass": ("folder", "data-flips-again", of_period(108)),
    "one place black": ("folder", "data-differs", black_at(5)),
    "another place black": ("folder", "data-differs", black_at(0)),
}


@pytest.mark.parametrize("fault", [*list(FAULTS)[::4], *slow_turns(*(f for n, f in enumerate(FAULTS) if n % 4))])
def test_a_fault_in_reading_is_found(tmp_path, fault, monkeypatch):
    source, code, change = FAULTS[fault]
    change(monkeypatch)
    found, _ = look(tmp_path, source)
    assert code in found


def test_what_an_update_counted_is_taken_back(tmp_path):
    """As when it is made again: by the attributes of what counts."""
    _, judge = look(tmp_path, "folder")
    assert {type(each).__name__ for each in judge.counters()} == {"DataJudge", "Draws"}
