"""A run's data beside what is declared of it: images of samples and their files, and which samples, rows and labels came."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from steady_doctor.data.declared import DeclaredData, Given
from steady_doctor.data.decode import decoded_or_none
from steady_doctor.data.images import Draws, check_images
from steady_doctor.data.latents import Latents
from steady_doctor.data.rows import check_balance, check_labels, check_rows, check_split, check_stand_ins
from steady_doctor.data.table import Table, open_table
from steady_doctor.found import Found

FILES = 4  # decoded at a look, and half as many from places that change; half of both where images are large
_SAMPLES = 8192  # of which rows and labels are kept
_AGAIN = 96  # of the next pass that are looked at besides, about
_ENCODED = 3  # looks at which latents are encoded again, on the host
_WHOLE = 1 << 18  # samples whose rows are asked for at once, at most


class DataJudge:
    """`add` is cheap: it keeps references. `found` reads files and compares."""

    def __init__(self, declared: DeclaredData, given: Given):
        self._declared, self._given = declared, given
        self._draws = Draws(declared.images)
        self._of_update = declared.batch_size * declared.processes * declared.micro_steps
        self._latents = None if declared.latents is None else Latents(declared.latents)
        self._pending: Tensor | None = None  # samples of the micro step under way
        self._numbers: list[Tensor] = []  # of each micro step
        self._told: list[Tensor] = []  # their labels as they were drawn
        self._again: set[int] = set()  # samples that have the places or the images of some that were looked at, one pass later
        self._kept, self._looks, self._misread, self._looked = 0, 0, False, False
        self.compared = 0  # images of samples that were looked at beside their files

    @cached_property
    def _table(self) -> Table | None:
        return open_table(self._declared.source, self._given.dataset)

    def counters(self) -> list[object]:
        """What gathers something of each update, in its attributes."""
        return [self, self._draws]

    def begin_micro_step(self, numbers: Tensor) -> None:
        self._pending = numbers

    def add(self, images: Tensor, labels: Tensor | None, told: Tensor | None = None) -> list[Found]:
        """What the micro step under way was of: clean images [B, C, H, W], and labels as the network gets them, int64 [B]; and
        what it is `told` of each image [B, N]. Returns what was found in images that were waited for."""
        numbers, found = self._pending, list[Found]()
        if numbers is None:
            return found
        if self._again and not self._again.isdisjoint(listed := numbers.tolist()):
            places = [place for place, number in enumerate(listed) if number in self._again]
            self._again.difference_update(listed)
            told = None if told is None else told[places]
            found = list(self._compare(int(numbers[0]) // self._of_update + 1, *_plain(numbers[places], images[places], told)))
        if self._kept < _SAMPLES:
            self._kept += len(numbers)
            self._numbers.append(numbers.clone())  # a worker's tensor holds a file descriptor
            self._told += [] if labels is None else [labels.detach()]
        return found

    def found(
        self,
        step: int,
        numbers: Sequence[Tensor | None],
        images: Sequence[Tensor | None],
        told: Sequence[Tensor | None] | None = None,
    ) -> Iterator[Found]:
        """Of all samples so far, and of the update after `step` finished ones: the `numbers` of the samples of each micro step
        and their `images`, None where they are not known. Images of one micro step in turn are looked at: those of which the
        network is `told` zeros, which are to be as in their files, where it is told anything."""
        declared, update, turn = self._declared, step + 1, self._looks % max(len(numbers), 1)
        if not self._looked and declared.process == 0 and self._table is not None:
            self._looked = True
            yield from self._whole(update, self._table)
        yield from self._position(update, numbers)
        if numbers and (samples := numbers[turn]) is not None:
            self._looks += 1
            if (shown := images[turn]) is not None and not self._misread:
                samples, shown = _plain(samples, shown, told[turn] if told else None)
                places = _places(len(samples), max(declared.images.sides), (self._looks - 1) // len(numbers))
                found = list(self._compare(update, samples[places], shown[places]))
                self._misread = bool(found)  # once said, a fault is not looked into again
                yield from found
        periods = {"batch": declared.batch_size, "update": self._of_update, "pass over the data": declared.training}
        yield from self._draws.found(update, periods)
        if self._numbers:
            yield from self._order(update)

    def _position(self, update: int, numbers: Sequence[Tensor | None]) -> Iterator[Found]:
        size, of_all = self._declared.batch_size, self._declared.batch_size * self._declared.processes
        first = (update - 1) * self._of_update + self._declared.process * size
        for place, part in enumerate(numbers):
            begin = first + place * of_all
            if part is not None and part.tolist() != list(range(begin, begin + size)):
                figures = {"low": int(part.min()), "high": int(part.max()), "count": len(part)}
                yield Found("data-samples", update, {**figures, "first": begin, "last": begin + size - 1, "micro": place + 1})
                return

    def _whole(self, update: int, table: Table) -> Iterator[Found]:
        """What is asked once: the split, the first pass over the images, the classes, and the images held out."""
        declared, given, held_out = self._declared, self._given, self._given.held_out_rows
        count = len(given.training_rows)
        yield from check_split(update, given.training_rows, held_out, len(table), declared.held_out)
        numbers = torch.arange(min(8 * count, _WHOLE) if declared.balanced else count)
        if len(numbers) <= _WHOLE:
            first = given.drawn_rows(numbers).numpy()
            if declared.balanced and table.labels is not None:
                yield from check_balance(update, first, table.labels, given.training_rows)
            yield from check_rows(update, first, numbers.numpy(), count, held_out, declared.balanced, declared.window)
        if declared.classes is not None and declared.classes != table.num_classes:
            yield Found("condition-classes", update, {"network": declared.classes, "data": table.num_classes})
        if len(held_out):
            images, rows, labels = given.held_out(FILES)
            plain, files = replace(declared.images, random_flip=False, color_jitter=0.0), table.images(rows)
            if self._latents is not None:
                yield from self._latents.check(update, images, files, plain, "validation")
            else:
                yield from check_images(update, images, files, plain)
            if labels is not None and table.labels is not None:
                yield from check_labels(update, labels, table.labels[rows], 0.0)

    def _compare(self, update: int, numbers: Tensor, images: Tensor) -> Iterator[Found]:
        """Images of samples beside their files."""
        declared, table = self._declared.images, self._table
        if table is None or not len(numbers) or (self._latents is not None and self._looks > _ENCODED):
            return
        self.compared += len(numbers)
        rows = self._given.shown_rows(numbers)
        files = table.images(rows.tolist())
        if self._latents is not None:
            yield from self._latents.check(update, images, files, declared, "training")
            return
        yield from check_images(update, images, files, declared, self._draws, list(zip(numbers.tolist(), rows.tolist())))
        length = self._declared.training
        if (
            (declared.random_flip or declared.color_jitter)
            and len(self._again) < _AGAIN
            and int(numbers[-1]) < length <= _WHOLE
        ):
            following = torch.arange(length, 2 * length)
            same = following[torch.isin(self._given.shown_rows(following), rows)]
            self._again |= {*(numbers + length).tolist(), *same.tolist()}

    def _order(self, update: int) -> Iterator[Found]:
        declared, table, given = self._declared, self._table, self._given
        numbers, held_out = torch.cat(self._numbers).cpu(), given.held_out_rows
        rows = given.drawn_rows(numbers).numpy()
        shown = given.shown_rows(numbers).numpy() if declared.replaces_bad else rows
        yield from check_rows(update, rows, numbers.numpy(), declared.training, held_out, declared.balanced, declared.window)
        if table is None:
            return
        if declared.replaces_bad:
            yield from check_stand_ins(
                update, rows, shown, held_out, lambda row: decoded_or_none(table.images([row])[0], declared.images) is not None
            )
        if self._told and declared.classes and table.labels is not None:
            yield from check_labels(update, torch.cat(self._told).cpu().numpy(), table.labels[shown], declared.dropout)


def _plain(samples: Tensor, images: Tensor, told: Tensor | None) -> tuple[Tensor, Tensor]:
    """Those of which the network is told zeros, or nothing."""
    if told is None:
        return samples, images
    plain = ~told.any(1)
    return samples[plain.to(samples.device)], images[plain]


def _places(count: int, longer: int, turn: int) -> list[int]:
    """Of a batch of `count`: the first few, in which something that repeats shows soonest, and half as many of the others,
    which all come in turn. `longer`: side of the images; in large ones the search for the place of a cut takes long."""
    few = FILES // (1 if longer <= 64 else 2 if longer <= 256 else 4)
    others, more = range(few, count), few // 2
    turns = range(turn * more, (turn + 1) * more)
    return [*range(min(few, count)), *dict.fromkeys(others[k % len(others)] for k in turns if others)]
