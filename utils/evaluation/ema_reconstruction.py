"""A finished run as `reconstruct_ema.py` takes it up: its network, its sampler, and what its model card says."""

from pathlib import Path

import torch
from diffusers import ModelMixin
from torch import nn

from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.core.files import make_folder
from utils.diffusion.classes import classes_known
from utils.diffusion.ddpm import predicts_clean_images
from utils.diffusion.model_card import facts_of_run, options_of_record
from utils.diffusion.pipelines import load_network, training_scheduler
from utils.diffusion.sampling import Scheduler, is_edm
from utils.diffusion.unet import normalize_spectra
from utils.options.flags import EDM2Options
from utils.runs.record import RunRecord


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
    if (
        output_dir.exists()
        and any(output_dir.iterdir())
        and not any((output_dir / name).exists() for name in ("model_index.json", "sweep.json"))
    ):
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
