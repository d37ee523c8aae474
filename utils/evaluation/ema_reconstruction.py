"""A finished run as `reconstruct_ema.py` takes it up: its network, its model card, and which EMA length is best."""

from collections.abc import Callable
from html import escape
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import ModelMixin
from torch import nn

from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.bars import Bar
from utils.core.errors import UserError
from utils.core.files import make_folder, write_json
from utils.data.autoencoder import Autoencoder
from utils.data.dataset import cache_folder, load_images
from utils.data.training_data import split_validation
from utils.diagnostics.report.page import write_page
from utils.diagnostics.report.plots import Curve, plot
from utils.diffusion.classes import classes_known
from utils.diffusion.ddpm import predicts_clean_images
from utils.diffusion.export import DRAFT
from utils.diffusion.guidance import make_guided_prediction
from utils.diffusion.model_card import facts_of_run, options_of_record
from utils.diffusion.pipelines import image_shape, load_network, training_scheduler
from utils.diffusion.sampling import (
    SamplePlan,
    Scheduler,
    full_precision,
    is_edm,
    make_sampler,
    sample,
    sampling_steps,
    to_uint8,
)
from utils.diffusion.unet import normalize_spectra
from utils.evaluation.extractors import make_extractor
from utils.evaluation.feature_sets import extract, reference_features
from utils.evaluation.quality import MIN_IMAGES, compare
from utils.options.flags import DataOptions, EDM2Options, RunOptions
from utils.options.paths import located
from utils.runs.folder import WITHOUT, RunFolder
from utils.runs.record import RunRecord

METRICS = ("fd_randconv", "kd_randconv")


def load_run(run: Path, pipeline: str) -> tuple[ModelMixin, Scheduler]:
    """(network to load averaged weights into, scheduler) of a run, from its exported `pipeline` or a checkpoint of it."""
    unet, config = load_network(pipeline)
    if RunRecord.read(run).options.get("spectral_norm"):
        normalize_spectra(unet)  # in training the weights stand beside their singular vectors, and so do their averages
    return unet, (EDMHeunScheduler.from_config if is_edm(config) else training_scheduler)(config)


def load_weights(unet: nn.Module, weights: dict[str, torch.Tensor], run: Path) -> None:
    """Puts averaged `weights` into `unet`. Raises UserError when they are not of the pipeline that `run` exported."""
    try:
        unet.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"the EMA snapshots do not fit the pipeline in {run}: {str(error).splitlines()[0]}\n"
            "use the snapshots and the pipeline of one run"
        ) from None


def check_output(output_dir: Path, run: Path) -> None:
    """Makes the folder of the pipeline. Raises UserError where that would take the place of a run, or of anything but another
    pipeline, and where it cannot be written."""
    if output_dir.resolve() == run.resolve() or (output_dir / "options.json").exists():
        raise UserError(
            f"--output_dir {output_dir} is the folder of a run, which is not overwritten\nchoose another --output_dir"
        )
    of_ours = ("model_index.json", "sweep.json", DRAFT)  # or folders without files, where the disk was full
    if any(map(Path.is_file, output_dir.rglob("*"))) and not any((output_dir / name).exists() for name in of_ours):
        raise UserError(f"--output_dir {output_dir} has other files\nchoose another --output_dir")
    make_folder(output_dir, "--output_dir")


def describe(run: Path, unet: ModelMixin, scheduler: Scheduler, step: int, class_names: list[str]) -> dict:
    """Returns facts for the model card (see `model_card`) after `step` updates, from what the run recorded."""
    record = RunRecord.read(run)
    options, classes = options_of_record(record.options), classes_known(unet)
    facts = {
        "title": f"{run.resolve().name}, EMA reconstructed after training",
        "updates": step,
        "samples_seen": step * record.resolved["global_batch_size"] if "global_batch_size" in record.resolved else None,
        "carries_code": isinstance(unet, EDM2UNet) or bool(classes or options.vae) or predicts_clean_images(scheduler.config),
    }
    if isinstance(options, EDM2Options):
        facts["noise_levels"] = f"normal, mean {options.P_mean}, standard deviation {options.P_std}"
    else:
        facts["prediction_type"] = scheduler.config.prediction_type
    if classes:
        facts |= {"classes": classes, "label_dropout": record.options.get("label_dropout")}
    return facts_of_run(options, record.resolved | {"classes": classes}, scheduler, class_names) | facts


def make_judge(
    accelerator: Accelerator,
    run: Path,
    scheduler: Scheduler,
    metric: str,
    decoder: Autoencoder | None,
    *,
    num_images: int,
    batch_size: int,
    seed: int,
) -> Callable[[nn.Module], float]:
    """A function from a network to the `metric` (of METRICS) of its samples beside the run's training images; the lower the
    better. `decoder`: of a run on latents. The samples are those that generate.py makes with the run's own sampler and `seed`,
    of all classes in turn.

    Raises UserError for too few images.
    """
    kind, features = metric.split("_")
    options = located(RunFolder(run).record(), run, RunOptions.marked("path"))
    images = load_images(DataOptions.from_record(WITHOUT | options))
    images, _ = split_validation(images, options["validation_images"], options["seed"])
    if len(images) < MIN_IMAGES:
        raise UserError(f"{len(images)} training images are too few\nat least {MIN_IMAGES} are needed")
    extractor = make_extractor(features, images).to(accelerator.device)
    cache = cache_folder(options["cache_dir"])
    with Bar("features of the real images", len(images)) as bar:
        real = reference_features(accelerator, extractor, images, batch_size=batch_size, cache_dir=cache, progress=bar.update)
    requested = options.get("num_inference_steps") or options.get("ddpm_num_inference_steps")
    sampler = make_sampler(options["sampler"], scheduler)
    num_inference_steps = sampling_steps(options["sampler"], requested, scheduler)

    def judge(unet: nn.Module) -> float:
        made_by = (seed, batch_size, accelerator.device, decoder)
        plan = SamplePlan(sampler, num_inference_steps, image_shape(unet), *made_by)
        predict = make_guided_prediction(unet, scheduler.config)

        def make_images(numbers: torch.Tensor) -> torch.Tensor:
            return to_uint8(sample(unet, plan, numbers, predict=predict))

        with full_precision(unet.to(accelerator.device)), Bar("making samples", num_images) as bar:
            (generated,), _ = extract(accelerator, [extractor], num_images, batch_size, make_images, progress=bar.update)
        return compare(generated, real, standardized=extractor.standardized, seed=seed)[kind]

    return judge


def write_sweep(output_dir: Path, run: Path, metric: str, step: int, num_images: int, values: dict[float, float]) -> None:
    """sweep.json and sweep.html, from what each width gave. Raises OSError."""
    best = min(values, key=lambda width: values[width])
    found = {"run": str(run), "metric": metric, "step": step, "num_images": num_images, "best_width": best}
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / "sweep.json", found | {"widths": {str(width): value for width, value in values.items()}})
    widths = sorted(values)
    curve = Curve(f"{num_images} samples", widths, [values[width] for width in widths])
    figure = plot(
        f"{metric} by EMA width",
        [curve],
        unit=metric,
        x_label="relative width",
        marks=[(best, f"best: {best:g}")],
        reading=f"The lower the better: best at {best:g}. In a flat valley, all widths are about equally good.",
    )
    header = f"<header><h1>EMA widths of {escape(run.resolve().name)}</h1><p>after {step} updates</p></header>"
    sections = [("Widths", figure)]
    write_page(output_dir / "sweep.html", title="EMA widths", header=header, sections=sections, source=str(run))
