"""The data's side of the step audit: the images of samples beside their files, and which samples, rows and labels came."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch

from utils.diagnostics.audit.array_table import ArrayTable
from utils.diagnostics.audit.files import DeclaredImages, DecodedFile
from utils.diagnostics.audit.images import Draws, check_images
from utils.diagnostics.audit.latents import LatentFiles
from utils.diagnostics.audit.local_shards import open_local_shards
from utils.diagnostics.audit.passes import Passes
from utils.diagnostics.audit.rows import check_balance, check_labels, check_pass, check_rows, check_split, check_stand_ins
from utils.diagnostics.audit.table import Table
from utils.diagnostics.audit.verdict import Check
from utils.training.run import Run

FILES = 4  # decoded at an audit, and half as many from places that change; half of both where images are large
SAMPLES = 8192  # of which rows and labels are kept
AGAIN = 48  # samples whose places are looked at in the next pass too, about
BLOCK = 2048  # samples whose rows are computed at once
ENCODED = 3  # audits in which latents are encoded again, on the host
WHOLE = 1 << 18  # samples whose rows are asked for at once, at most


class DataAudit:
    """`add` is cheap: it keeps references. `checks` reads files and compares."""

    def __init__(self, run: Run):
        self._run = run
        names = ("resolution", "center_crop", "random_flip", "color_jitter", "background", "data_range")
        self._declared = DeclaredImages(
            channels=run.options.image_channels,
            max_value=65535 if run.options.preserve_input_precision else 255,
            **{name: getattr(run.options, name) for name in names},
        )
        self._draws = Draws()
        self._passes = Passes(len(run.data.training), self._declared, run.data.samples.dataset_rows)
        self._numbers: list[torch.Tensor] = []  # samples of each micro step
        self._rows: list[torch.Tensor] = []  # of the first of them, as the order gives them
        self._blocks: dict[int, torch.Tensor] = {}  # rows of all samples of a block, by its number
        self._told: list[torch.Tensor] = []  # their labels as they were drawn
        self._again: set[int] = set()  # samples that have the places of some that were looked at, one pass later
        self._kept, self._misread, self._looked = 0, False, False
        self._looks = 0  # at images
        self._pending: torch.Tensor | None = None
        self._encoded = 0  # audits that encoded
        self._latents: LatentFiles | None = None
        if run.options.vae is not None:
            facts, factor = run.facts, getattr(run.options, "sigma_data", 1.0)  # only EDM2 has another spread than 1
            measured = run.options.latent_scale == "auto" or run.options.pretrained is not None  # here, or in an earlier run
            scale = (facts["vae.latent_mean"], facts["vae.latent_std"])
            self._latents = LatentFiles(run.options.vae, scale, None if measured else factor)

    @cached_property
    def _table(self) -> Table | ArrayTable | None:
        options = self._run.options
        opened = open_local_shards(options) if options.streaming else self._run.data.images.opened
        if opened is not None:
            return Table(opened, options)
        return ArrayTable(options) if ArrayTable.reads(options) else None

    def counters(self) -> list[object]:
        """What gathers something of each update."""
        return [self, self._passes]

    def begin_micro_step(self, batch: dict[str, Any]) -> None:
        self._pending = batch["sample_numbers"]

    def add(self, drawn: dict[str, torch.Tensor]) -> None:
        """What the micro step under way was of."""
        if self._pending is None:
            return
        if self._run.options.vae is None:
            self._passes.add(self._pending, drawn["clean_images"])
        if self._again and not self._again.isdisjoint(numbers := self._pending.tolist()):
            places = [place for place, number in enumerate(numbers) if number in self._again]
            self._again.difference_update(numbers)
            self._compare(self._pending[places], drawn["clean_images"][places])
        if self._kept >= SAMPLES:
            return
        self._kept += len(self._pending)
        self._numbers.append(self._pending.clone())  # a worker's tensor holds a file descriptor
        if "labels" in drawn:
            self._told.append(drawn["labels"].detach())

    def checks(self, step: int, numbers: list[torch.Tensor | None], images: list[torch.Tensor | None]) -> list[Check]:
        """Of all samples so far, and of the update after `step` finished ones: the `numbers` of the samples of each micro step
        and their `images`, None where they are not known. Images of one micro step in turn are looked at."""
        checks, turn = [], self._looks % max(len(numbers), 1)
        sample_numbers = numbers[turn] if numbers else None
        if not self._looked and self._run.accelerator.is_main_process and self._table is not None:
            checks, self._looked = self._whole(self._table), True
        if sample_numbers is not None:
            checks.append(self._position(step, numbers))
            # In large images the search for the place of a cut takes as long as an update.
            longer = max(self._declared.sides)
            few = FILES // (1 if longer <= 64 else 2 if longer <= 256 else 4)
            places = _places(len(sample_numbers), few, self._looks // len(numbers))
            self._looks += 1
            checks += self._images(sample_numbers, images[turn], places)
        return checks + self._drawn() + self._passes.checks()

    def _position(self, step: int, numbers: list[torch.Tensor | None]) -> Check:
        accelerator, options = self._run.accelerator, self._run.options
        size, name = int(options.train_batch_size), "samples of the update"
        of_micro_step = size * accelerator.num_processes
        first = step * of_micro_step * options.gradient_accumulation_steps + accelerator.process_index * size
        wanted = found = text = ""
        for place, part in enumerate(numbers):
            begin = first + place * of_micro_step
            if part is None or text:
                continue
            wanted, found = f"{begin} to {begin + size - 1}", f"{int(part.min())} to {int(part.max())}, {len(part)} of them"
            if part.tolist() != list(range(begin, begin + size)):
                where = f"micro step {place + 1} of update {step + 1}" if len(numbers) > 1 else f"update {step + 1}"
                text = f"{where} is made of the samples {found}, declared {wanted}: does the data begin again, or repeat?"
        return Check("data", name, wanted, found, not text, text)

    def _whole(self, table: Table | ArrayTable) -> list[Check]:
        """What is asked once: the split, the first pass over the images, those held out, and the classes."""
        data, options = self._run.data, self._run.options
        training, held_out = (part.dataset_rows(np.arange(len(part))).numpy() for part in (data.training, data.validation))
        stored = table.stored
        total = len(table) if stored is None else min(stored, options.max_train_images or stored)
        checks = check_split(training, held_out, total, options.validation_images, blocks=options.streaming)
        if options.balanced_sampling and table.labels is not None:
            first = data.samples.drawn_rows(torch.arange(min(8 * len(training), WHOLE))).numpy()
            checks += check_balance(first, table.labels, training)
        elif len(training) <= WHOLE:
            checks += check_pass(data.samples.drawn_rows(torch.arange(len(training))).numpy(), training)
        if getattr(options, "class_conditional", False):
            found, wanted = self._run.facts["classes"], table.num_classes
            text = f"the network has {found} classes, and the data has {wanted}"
            checks.append(Check("condition", "classes of the network", str(wanted), str(found), found == wanted, text))
        return checks + (self._held_out_images(table) if len(held_out) else [])

    def _held_out_images(self, table: Table | ArrayTable) -> list[Check]:
        data = self._run.data
        numbers = np.arange(min(FILES, len(data.validation)))
        batch = data.validation_batch(torch.from_numpy(numbers))
        rows = data.validation.dataset_rows(data.validation.shown(numbers)).tolist()
        declared = replace(self._declared, random_flip=False, color_jitter=0.0)
        look = check_images if self._latents is None else self._latents.check
        checks = look(batch.clean_images, table.images(rows), declared)
        if batch.labels is not None and table.labels is not None:
            (check, _) = check_labels(batch.labels.numpy(), table.labels[rows], 0.0)
            checks.append(check)
        return [replace(c, name=f"{c.name} of the validation", message=f"in the validation, {c.message}") for c in checks]

    def _images(self, numbers: torch.Tensor, clean_images: torch.Tensor | None, places: list[int]) -> list[Check]:
        """Of the samples of a micro step with these `numbers`, those at some `places`."""
        if self._table is None or clean_images is None or self._misread:  # once said, a fault is not looked into again
            return []
        numbers, clean_images = numbers[places], clean_images[places]
        if self._latents is not None:
            self._encoded += 1
            if self._encoded > ENCODED:
                return []
            files = self._table.images(self._run.data.samples.dataset_rows(numbers).tolist())
            checks = self._latents.check(clean_images, files, self._declared)
            self._misread = any(check.healthy is False for check in checks)
            return checks
        checks = self._compare(numbers, clean_images)
        self._misread = any(check.healthy is False for check in checks)
        of_a_pass = len(self._run.data.training)
        if self._declared.random_flip and len(self._again) < AGAIN and int(numbers[-1]) < of_a_pass:
            self._again |= {number + of_a_pass for number in numbers.tolist()}
        batch, update = int(self._run.options.train_batch_size), self._run.length.global_batch_size
        periods = {"batch": batch, "update": update, "pass over the data": of_a_pass}
        return checks + self._draws.checks(self._declared, periods)

    def _compare(self, numbers: torch.Tensor, clean_images: torch.Tensor) -> list[Check]:
        """Images of samples beside their files."""
        rows = self._run.data.samples.dataset_rows(numbers).tolist()
        files = cast(Table | ArrayTable, self._table).images(rows)
        return check_images(clean_images, files, self._declared, self._draws, numbers.tolist())

    def _readable(self, table: Table | ArrayTable, row: int) -> bool:
        try:
            DecodedFile(table.images([row])[0], self._declared).planes()
        except Exception:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
            return False
        return True

    def _rows_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """As the order gives them; computed for many samples at once, which takes as long as for a few."""
        places = numbers // BLOCK
        for block in set(places.tolist()) - self._blocks.keys():
            self._blocks[block] = self._run.data.samples.drawn_rows(torch.arange(block * BLOCK, (block + 1) * BLOCK))
        rows = torch.zeros_like(numbers)
        for block in set(places.tolist()):
            rows[places == block] = self._blocks[block][numbers[places == block] % BLOCK]
        return rows

    def _drawn(self) -> list[Check]:
        if not self._numbers:
            return []
        data = self._run.data
        options: Any = self._run.options  # the dropout of labels is EDM2's own
        new = torch.cat(self._numbers[len(self._rows) :] or [torch.zeros(0, dtype=torch.int64)]).cpu()
        sizes = [len(part) for part in self._numbers[len(self._rows) :]]
        self._rows += self._rows_of(new).split(sizes)
        rows, numbers = torch.cat(self._rows).numpy(), torch.cat(self._numbers).cpu()
        replaces = options.on_bad_image == "replace"
        shown = data.samples.dataset_rows(numbers).numpy() if replaces else rows
        held_out = data.validation.dataset_rows(np.arange(len(data.validation))).tolist()
        window = options.shuffle_window if options.streaming else None
        checks = check_rows(rows, numbers.numpy(), len(data.training), held_out, options.balanced_sampling, window)
        if self._table is None:
            return checks
        if replaces:
            checks += check_stand_ins(rows, shown, held_out, partial(self._readable, self._table))
        if self._told and self._run.facts.get("classes") and self._table.labels is not None:
            checks += check_labels(torch.cat(self._told).cpu().numpy(), self._table.labels[shown], options.label_dropout)
        return checks


def _places(count: int, few: int, turn: int) -> list[int]:
    """Of a batch of `count`: the first `few`, in which something that repeats shows soonest, and half as many of the others,
    which all come in turn."""
    others, more = range(few, count), few // 2
    turns = range(turn * more, (turn + 1) * more)
    return [*range(min(few, count)), *dict.fromkeys(others[k % len(others)] for k in turns if others)]
