"""The data's side of the step audit, asked about real data: it finds nothing wrong, and names each fault in reading.

The faults are in what trains and in what it reports of itself alike, so that it agrees with itself.
"""

import io
import re
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
from utils.diagnostics.audit.table import Table
from utils.options.flags import EDM2Options
from utils.training import data_audit
from utils.training.data_audit import DataAudit

PIXELS = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8)
KINDS = np.random.default_rng(1).integers(0, 3, 120)
NAMES = ["cow", "ant", "bee"]


def png(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_folder(path):
    for number, (image, kind) in enumerate(zip(PIXELS, KINDS)):
        file = path / NAMES[kind] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))
    (path / ".hidden.png").write_bytes(b"")
    (path / "about.txt").write_text("no image")
    return {"train_data_dir": str(path)}


def make_archive(path, kind):
    make_folder(path)
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    with zipfile.ZipFile(path / "a.zip", "w") if kind == "zip" else tarfile.open(path / "a.tar", "w") as archive:
        for name, file in files.items():
            (archive.write if kind == "zip" else archive.add)(file, f"photos/{name}")
    return {"train_data_dir": str(path / f"a.{kind}")}


def make_table(path, labels=KINDS, feature=None, save="parquet"):
    feature = datasets.ClassLabel(names=NAMES) if feature is None else feature
    features = {"other": datasets.Value("int64"), "image": datasets.Image(), "kind": feature}
    values = {"other": range(120), "image": [{"bytes": png(p), "path": None} for p in PIXELS], "kind": labels}
    made = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    path.mkdir(exist_ok=True, parents=True)
    if save == "parquet":
        made.to_parquet(path / "train.parquet")
        return {"dataset_name": str(path / "train.parquet")}
    if save == "arrow":
        made = made.select(range(0, 120, 2))  # the folder has these rows alone
    made.save_to_disk(path)
    return {"dataset_name": str(path)}


def make_shards(path):
    (name,) = make_table(path / "whole").values()
    whole = datasets.Dataset.from_parquet(name, cache_dir=str(path / "whole"))
    (path / "shards").mkdir()
    for number in range(2):
        whole.shard(2, number, contiguous=True).to_parquet(path / "shards" / f"train-{number}.parquet", batch_size=10)
    return {"dataset_name": str(path / "shards"), "streaming": True, "shuffle_window": 40}


def make_saved_shards(path):
    return make_table(path, save="arrow") | {"streaming": True, "shuffle_window": 1000}


def strings(path):
    return make_table(path, [NAMES[k] for k in KINDS], datasets.Value("string")) | {"label_column": "kind"}


def booleans(path):
    return make_table(path, KINDS > 0, datasets.Value("bool")) | {"label_column": "kind"}


SOURCES = {
    "digits": lambda path: {"dataset_name": "digits"},
    "folder": make_folder,
    "parquet": make_table,
    "saved": lambda path: make_table(path, save="arrow"),
    "strings": strings,
    "booleans": booleans,
    "integers": lambda path: make_table(path, KINDS * 2, datasets.Value("int16")) | {"label_column": "kind"},
    "no labels": lambda path: make_table(path, [0.5] * 120, datasets.Value("float32")),
    "the first": lambda path: make_folder(path) | {"max_train_images": 50},
    "balanced": lambda path: strings(path) | {"balanced_sampling": True},
    "zip": lambda path: make_archive(path, "zip"),
    "tar": lambda path: make_archive(path, "tar"),
    "on the fly": lambda path: make_folder(path) | {"cache_images": "no"},
    "streamed": make_shards,
    "streamed, saved": make_saved_shards,
}

QUICK_SOURCES = ("folder", "parquet", "streamed")


def look(tmp_path, updates=24, change=lambda data: None, **given):
    """What the audit says of a run's data after some updates."""
    flags = {"resolution": 8, "image_channels": 1, "train_batch_size": 8, "validation_images": 12, "random_flip": True}
    options = EDM2Options(**flags | {"cache_dir": str(tmp_path / "cache"), "label_dropout": 0.0} | given)
    process = SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1, is_main_process=True)
    data = TrainingData(options, process)
    change(data)
    known = data.images.labels
    names = data.images.class_names or ()
    facts = {"classes": 0 if known is None else max(int(known.max()) + 1, len(names))}
    length = SimpleNamespace(global_batch_size=options.train_batch_size)
    audit = DataAudit(SimpleNamespace(options=options, accelerator=process, data=data, facts=facts, length=length))
    found = []
    for step, batch in enumerate(data.samples.batches(0, updates)):
        audit.begin_micro_step(batch)
        drawn = data.samples.on_device(batch)
        labels = {} if known is None else {"labels": drawn.classes()}
        audit.add({"clean_images": drawn.clean_images} | labels)
        if step in (0, 1, 2, 7, updates - 1):
            found += audit.checks(step, [batch["sample_numbers"]], [drawn.clean_images])
    return found


def messages(checks) -> list[str]:
    return [f"{check.stage}: {check.message}" for check in checks if check.healthy is False]


@pytest.mark.parametrize("source", [*QUICK_SOURCES, *slow_turns(*(s for s in SOURCES if s not in QUICK_SOURCES))])
def test_healthy_data_of_any_source_has_no_deviation(tmp_path, source):
    checks = look(tmp_path, **SOURCES[source](tmp_path / "data"))
    assert messages(checks) == []
    said = {check.name for check in checks if check.healthy}
    assert {"rows", "order", "images", "images of the validation", "classes of the network"} <= said
    assert ("label" in said) == (source != "no labels") and ("balance" in said) == (source == "balanced")


@pytest.mark.parametrize("source", SOURCES)
def test_the_files_rows_are_counted(tmp_path, source):
    given = SOURCES[source](tmp_path / "data")
    options = EDM2Options(cache_dir=str(tmp_path / "cache"), **given)
    table = Table(dataset.open_dataset(options).dataset, options)
    assert table.stored == {"digits": 1797, "saved": 60, "streamed, saved": 60}.get(source, 120)
    if "train_data_dir" in given:  # not known of a part of the files
        assert Table(table._dataset, EDM2Options(dataset_split="train[:5]", **given)).stored is None
    assert len(table) == (50 if source == "the first" else table.stored)


def relabelled(change):
    """Changes what the columns' reading gives: (labels, names) -> (labels, names)."""

    def fault(patch):
        def find(*arguments):
            labels, names, notes = columns.find_labels(*arguments)
            return *change(labels, names), notes

        patch.setattr(dataset, "find_labels", find)

    return fault


def resplit(change):
    """Changes which rows are trained on and held out: (all rows, training, held out) -> (training, held out)."""

    def fault(patch):
        def split(images, count, seed):
            training, held_out = training_data_split(images, count, seed)
            every = np.arange(len(images))
            return tuple(images.subset(rows) for rows in change(every, training.rows, held_out.rows))

        patch.setattr(training_data, "split_validation", split)

    training_data_split = training_data.split_validation
    return fault


def reopened(change):
    def fault(patch):
        opened = dataset.open_dataset

        def changed(options):
            found = opened(options)
            return replace(found, dataset=change(found.dataset))

        patch.setattr(dataset, "open_dataset", changed)

    return fault


def reordered(change):
    def fault(patch):
        patch.setattr(SampleOrder, "indices", lambda self, numbers, old=SampleOrder.indices: change(self, numbers, old))

    return fault


def labels_of_the_next(patch):
    def fetch(self, numbers, old=loader._Samples.fetch):
        batch = old(self, numbers)
        return batch | {"labels": batch["labels"].roll(1)}

    patch.setattr(loader._Samples, "fetch", fetch)


def replaced_needlessly(patch):
    patch.setattr(ImageSet, "shown", lambda self, indices: np.where(indices % 10 == 0, (indices + 1) % len(self), indices))


def validation_of_training_images(patch):
    def made(self, *arguments, old=TrainingData.__init__):
        old(self, *arguments)
        fetch = self.training.fetch
        self.validation.fetch = lambda *a: fetch(*a)

    patch.setattr(TrainingData, "__init__", made)


def other_column(patch):
    patch.setattr(columns, "LABEL_NAMES", ("other",))
    patch.setattr(dataset, "find_labels", lambda table, asked: columns.find_labels(table, "other"))


def block_read(change):
    """Changes which images a block of a stream has: (the reader, its number, all) -> images."""

    def fault(patch):
        read = stream.BlockReader.__call__
        patch.setattr(stream.BlockReader, "__call__", lambda self, block: change(self, block, partial(read, self)))

    return fault


def streamed_labels_shifted(patch):
    find = stream.find_labels

    def shifted(*arguments):
        labels, *others = find(*arguments)
        return np.roll(labels, 1), *others

    patch.setattr(stream, "find_labels", shifted)


def by_name(labels, names):
    order = np.argsort(names)
    return np.argsort(order)[labels], [names[k] for k in order]


FAULTS = {
    # fault: (source, words of the message, the change of the code)
    "labels shifted": ("parquet", "condition: ", relabelled(lambda labels, names: (np.roll(labels, 1), names))),
    "labels of the reversed": ("folder", "condition: ", relabelled(lambda labels, names: (labels[::-1].copy(), names))),
    "labels one too high": ("folder", r"label \+ 1", relabelled(lambda labels, names: (labels + 1, [*names, "none"]))),
    "classes merged": ("folder", "classes are merged", relabelled(lambda labels, names: (labels // 2, names))),
    "classes sorted otherwise": ("parquet", "classes are exchanged", relabelled(by_name)),
    "strings by frequency": ("strings", "exchanged", relabelled(lambda labels, names: ((labels + 1) % 3, names))),
    "one class for all": ("folder", "label 0 for every image", relabelled(lambda labels, names: (labels * 0, names))),
    "no labels": ("folder", "has 0 classes, and the data has 3", relabelled(lambda labels, names: (None, None))),
    "another column": ("integers", "classes|condition: ", other_column),
    "digits' labels": (
        "digits",
        "condition: ",
        reopened(lambda t: t.remove_columns("label").add_column("label", np.roll(t["label"], 3), feature=t.features["label"])),
    ),
    "labels of the batch's next": ("parquet", "shifted by 1 in the batch", labels_of_the_next),
    "trained on all": ("folder", "trained on and held out", resplit(lambda every, train, held: (every, held))),
    "one lost": ("folder", "1 of 120 rows are neither", resplit(lambda every, train, held: (train[1:], held))),
    "a tenth lost": ("folder", "11 of 120 rows are neither", resplit(lambda every, train, held: (train[:-11], held))),
    "fewer held out": (
        "folder",
        "6 images are held out",
        resplit(lambda e, t, h: (np.append(t, h[6:]), h[:6])),
    ),
    "none held out": ("folder", "0 images are held out", resplit(lambda every, train, held: (every, held[:0]))),
    "exchanged": ("folder", "not the declared 12", resplit(lambda every, train, held: (held, train))),
    "rows twice": ("folder", "more than once", resplit(lambda every, train, held: (np.concatenate([train, train]), held))),
    "the first ones held out": ("folder", "not chosen at random", resplit(lambda e, t, h: (e[12:], e[:12]))),
    "every tenth held out": ("folder", "every 10th row", resplit(lambda e, t, h: (np.setdiff1d(e, e[::10]), e[::10]))),
    "another file list": ("folder", "neither|has only", reopened(lambda table: table.select(range(100)))),
    "half of the file": ("parquet", "neither|has only", reopened(lambda table: table.select(range(60)))),
    "the first of the folder": ("the first", "rows", reopened(lambda table: table.select(range(40)))),
    "the last is never drawn": ("folder", "leaves out 1", reordered(lambda s, n, old: old(s, n) % (s.length - 1))),
    "order of all rows": ("folder", "data: ", reordered(lambda s, n, old: torch.randint(s.length, n.shape))),
    "unbalanced": (
        "balanced",
        "do not show each of 3 classes once",
        reordered(lambda s, n, old: n % s.length),
    ),
    "replaced needlessly": ("bad images", "though it can be decoded", replaced_needlessly),
    "validation of training images": ("folder", "in the validation", validation_of_training_images),
    "another block of the stream": ("streamed", "data: ", block_read(lambda r, b, read: read((b + 1) % len(r.blocks)))),
    "a block of the stream reversed": ("streamed", "data: ", block_read(lambda r, b, read: read(b)[::-1])),
    "labels of the stream shifted": ("streamed", "condition: ", streamed_labels_shifted),
}
SOURCES_OF_FAULTS = SOURCES | {"bad images": lambda path: make_folder(path) | {"on_bad_image": "replace"}}


@pytest.mark.parametrize("fault", [*list(FAULTS)[::4], *slow_turns(*(f for n, f in enumerate(FAULTS) if n % 4))])
def test_a_fault_in_reading_is_named(tmp_path, fault, monkeypatch):
    source, words, change = FAULTS[fault]
    given = SOURCES_OF_FAULTS[source](tmp_path / "data")
    change(monkeypatch)
    found = "\n".join(messages(look(tmp_path, **given)))
    assert re.search(words, found), found


@pytest.mark.parametrize(("period", "words"), [(108, "each pass over the data"), (8, "each batch")])
def test_flips_that_repeat_are_named(tmp_path, period, words, monkeypatch):
    augment = training_data.augment
    monkeypatch.setattr(training_data, "augment", lambda images, numbers, **k: augment(images, numbers % period, **k))
    monkeypatch.setattr(data_audit, "FILES", 8)  # each pair of samples halves the chance that it is one
    found = "\n".join(messages(look(tmp_path, **make_folder(tmp_path / "data"))))
    assert f"data: the same places of {words} are mirrored" in found, found


@pytest.mark.parametrize("place", range(8))
def test_an_image_at_any_place_of_the_batch_is_looked_at_in_turn(tmp_path, place, monkeypatch):
    augment = training_data.augment

    def black(images, numbers, **how):
        return torch.where((numbers % 8 == place)[:, None, None, None], -1.0, augment(images, numbers, **how))

    monkeypatch.setattr(training_data, "augment", black)
    assert "data: the network sees" in "\n".join(messages(look(tmp_path, **make_folder(tmp_path / "data"))))
