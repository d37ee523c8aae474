"""A finished run as `reconstruct_ema.py` takes it up: its network, its sampler, and what its model card says."""

import json
from pathlib import Path

import torch
from diffusers import ModelMixin
from torch import nn

from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.core.size import Size
from utils.diffusion.classes import classes_known
from utils.diffusion.pipelines import image_shape, load_network
from utils.diffusion.sampling import Scheduler, is_edm
from utils.diffusion.unet import normalize_spectra
from utils.runs.record import RunRecord


def load_run(run: Path, pipeline: str) -> tuple[ModelMixin, Scheduler]:
    """(network to load averaged weights into, scheduler) of a run, from its exported `pipeline` or a checkpoint of it."""
    from diffusers import DDPMScheduler

    unet, config = load_network(pipeline)
    if RunRecord.read(run).options.get("spectral_norm"):
        normalize_spectra(unet)  # in training the weights stand beside their singular vectors, and so do their averages
    return unet, (EDMHeunScheduler if is_edm(config) else DDPMScheduler).from_config(config)


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
    """Raises UserError where the pipeline would take the place of a run, or of anything but another pipeline."""
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


def describe(run: Path, unet: ModelMixin) -> dict:
    """Returns facts for the model card (see `export.model_card`) from what the run recorded."""
    record = RunRecord.read(run)
    facts = {
        "title": f"{run.resolve().name}, EMA reconstructed after training",
        "data": record.options.get("dataset_name") or record.options.get("train_data_dir"),
        "command": record.command,
        "resolution": record.options.get("resolution") or Size(*image_shape(unet)[1:]).resolution,
        "autoencoder": record.options.get("vae"),
        "classes": classes_known(unet) or None,
        "prediction_type": record.options.get("prediction_type"),
        "carries_code": isinstance(unet, EDM2UNet) or bool(classes_known(unet) or record.options.get("vae")),
    }
    return json.loads(json.dumps(facts))
