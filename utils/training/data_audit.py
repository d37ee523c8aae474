"""The data's side of the step audit: the images of samples beside their files, and which samples, rows and labels came."""

from typing import Any

import numpy as np
import torch

from utils.diagnostics.audit.files import DeclaredImages
from utils.diagnostics.audit.images import Draws, check_images
from utils.diagnostics.audit.passes import Passes
from utils.diagnostics.audit.rows import check_labels, check_rows
from utils.diagnostics.audit.verdict import Check
from utils.training.run import Run

FILES = 4  # decoded at an audit; half as many large ones
SAMPLES = 8192  # of which rows and labels are kept


class DataAudit:
    """`add` is cheap: it keeps references. `checks` reads files and compares."""

    def __init__(self, run: Run):
        self._run = run
        names = ("resolution", "center_crop", "random_flip", "color_jitter", "background")
        self._declared = DeclaredImages(
            channels=run.options.image_channels,
            max_value=65535 if run.options.preserve_input_precision else 255,
            **{name: getattr(run.options, name) for name in names},
        )
        self._draws = Draws()
        self._passes = Passes(len(run.data.training), self._declared, run.data.samples.dataset_rows)
        self._numbers: list[torch.Tensor] = []  # samples of each micro step
        self._told: list[torch.Tensor] = []  # their labels as they were drawn
        self._kept, self._misread = 0, False
        self._pending: torch.Tensor | None = None

    def begin_micro_step(self, batch: dict[str, Any]) -> None:
        self._pending = batch["sample_numbers"]

    def add(self, drawn: dict[str, torch.Tensor]) -> None:
        """What the micro step under way was of."""
        if self._pending is None:
            return
        self._passes.add(self._pending.tolist(), drawn["clean_images"])
        if self._kept >= SAMPLES:
            return
        self._kept += len(self._pending)
        self._numbers.append(self._pending.clone())  # a worker's tensor holds a file descriptor
        if "labels" in drawn:
            self._told.append(drawn["labels"].detach())

    def checks(self, step: int, sample_numbers: torch.Tensor | None, clean_images: torch.Tensor | None) -> list[Check]:
        """Of all samples so far, and the images of the first micro step of the update after `step` finished ones."""
        checks = []
        if sample_numbers is not None:
            checks.append(self._position(step, sample_numbers))
            large = self._declared.resolution > 64  # where the search for the place of a cut takes as long as an update
            checks += self._images(sample_numbers[: FILES // 2 if large else FILES], clean_images)
        return checks + self._drawn() + self._passes.checks()

    def _position(self, step: int, numbers: torch.Tensor) -> Check:
        accelerator, options = self._run.accelerator, self._run.options
        size = options.train_batch_size
        of_update = size * accelerator.num_processes * options.gradient_accumulation_steps
        first = step * of_update + accelerator.process_index * size
        name, wanted = "samples of the update", f"{first} to {first + size - 1}"
        fine = numbers.tolist() == list(range(first, first + size))
        found = f"{int(numbers.min())} to {int(numbers.max())}, {len(numbers)} of them"
        text = f"update {step + 1} is made of the samples {found}, declared {wanted}: does the data begin again, or repeat?"
        return Check("data", name, wanted, found, fine, text)

    def _images(self, numbers: torch.Tensor, clean_images: torch.Tensor | None) -> list[Check]:
        files = self._run.data.images.files
        if files is None or clean_images is None or self._misread:  # once said, a fault is not looked into again
            return []
        rows = self._run.data.samples.dataset_rows(numbers).tolist()
        checks = check_images(clean_images[: len(rows)], files.at(rows), self._declared, self._draws)
        self._misread = any(check.healthy is False for check in checks)
        return checks + self._draws.checks(self._declared)

    def _drawn(self) -> list[Check]:
        if not self._numbers:
            return []
        data = self._run.data
        options: Any = self._run.options  # the dropout of labels is EDM2's own
        numbers = torch.cat(self._numbers).cpu()
        rows = data.samples.drawn_rows(numbers).numpy()
        held_out = data.validation.dataset_rows(np.arange(len(data.validation))).tolist()
        checks = check_rows(rows, numbers.numpy(), len(data.training), held_out, options.balanced_sampling)
        known = data.images.labels
        if self._told and known is not None and self._run.facts.get("classes"):
            told = torch.cat(self._told).cpu().numpy()
            shown = data.samples.dataset_rows(numbers).numpy()
            checks += check_labels(told, known[shown], options.label_dropout)
        return checks
