"""What the options declare of a run's data, for the doctor."""

from typing import Any

import numpy as np
import torch

from steady_doctor.data.declared import DeclaredData, DeclaredImages, DeclaredLatents, Given, Source, sides_of
from steady_doctor.data.judge import DataJudge
from utils.training.run import Run


def data_judge(run: Run) -> DataJudge:
    return DataJudge(_declared(run), _given(run))


def _declared(run: Run) -> DeclaredData:
    options: Any = run.options  # the dropout of labels and sigma_data are not both scripts' own
    accelerator, classes = run.accelerator, run.facts.get("classes")
    names = ("center_crop", "random_flip", "color_jitter", "background", "data_range")
    images = DeclaredImages(
        sides=sides_of(options.resolution),
        channels=options.image_channels,
        max_value=65535 if options.preserve_input_precision else 255,
        **{name: getattr(options, name) for name in names},
    )
    source = Source(
        name=options.dataset_name,
        split=options.dataset_split,
        config=options.dataset_config_name,
        image_column=options.image_column,
        label_column=options.label_column,
        first=options.max_train_images,
        streamed=options.streaming,
    )
    return DeclaredData(
        images=images,
        source=source,
        training=len(run.data.training),
        held_out=options.validation_images,
        batch_size=int(options.train_batch_size),
        micro_steps=options.gradient_accumulation_steps,
        processes=accelerator.num_processes,
        process=accelerator.process_index,
        balanced=options.balanced_sampling,
        window=options.shuffle_window if options.streaming else None,
        replaces_bad=options.on_bad_image == "replace",
        dropout=options.label_dropout,
        classes=classes if getattr(options, "class_conditional", False) else None,
        latents=None if options.vae is None else _latents(run),
    )


def _latents(run: Run) -> DeclaredLatents:
    options: Any = run.options
    measured = options.latent_scale == "auto" or options.pretrained is not None  # here, or in an earlier run
    spread = None if measured else getattr(options, "sigma_data", 1.0)  # only EDM2 has another one than 1
    return DeclaredLatents(options.vae, run.facts["vae.latent_mean"], run.facts["vae.latent_std"], spread)


def _given(run: Run) -> Given:
    data = run.data

    def held_out(count: int) -> tuple[torch.Tensor, list[int], np.ndarray | None]:
        numbers = np.arange(min(count, len(data.validation)))
        batch = data.validation_batch(torch.from_numpy(numbers))
        rows = data.validation.dataset_rows(data.validation.shown(numbers)).tolist()
        return batch.clean_images, rows, None if batch.labels is None else batch.labels.numpy()

    def rows_of(images: Any) -> np.ndarray:
        return images.dataset_rows(np.arange(len(images))).numpy()

    samples = data.samples
    rows = rows_of(data.training), rows_of(data.validation)
    return Given(samples.drawn_rows, samples.dataset_rows, *rows, held_out, data.images.opened)
