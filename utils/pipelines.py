"""Exported pipelines, ours or anyone's: loading them and what they are made for."""

from utils.errors import UserError


def load_unconditional(pipeline: str):
    """The U-Net in fp32 and the scheduler's config. Raises UserError for a pipeline of another kind,
    before its weights are loaded."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()  # one bar, the script's own
    try:
        index = DiffusionPipeline.load_config(pipeline)
        components = {name for name, value in index.items() if isinstance(value, list) and value[0] is not None}
        if components != {"unet", "scheduler"} or index["unet"][1] != "UNet2DModel":
            raise UserError(
                f"{pipeline} is no unconditional pixel-space pipeline: it needs a UNet2DModel `unet` and a `scheduler` "
                f"alone, and has {', '.join(sorted(components)) or 'neither'}"
            )
        loaded = DiffusionPipeline.from_pretrained(pipeline)
    except UserError:
        raise
    except Exception as error:  # missing, unreachable, truncated or of another shape: each library raises its own kind
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot load a pipeline from {pipeline}: {reason}") from error
    return loaded.unet.float(), loaded.scheduler.config


def load_network(pipeline: str):
    """As `load_unconditional`, for EDM2 pipelines too, with or without classes. No code of the pipeline's own is run: their
    network is loaded with the classes of this repository."""
    from diffusers import DiffusionPipeline

    from models.edm2_unet import EDM2UNet
    from models.edm_heun import EDMHeunScheduler

    try:
        kind = DiffusionPipeline.load_config(pipeline).get("unet", (None, None))[1]
    except Exception:  # load_unconditional says why
        kind = None
    if kind != "EDM2UNet":
        return load_unconditional(pipeline)
    try:
        unet = EDM2UNet.from_pretrained(pipeline, subfolder="unet", use_safetensors=True)
        return unet.float().eval(), EDMHeunScheduler.load_config(pipeline, subfolder="scheduler")
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot load a pipeline from {pipeline}: {reason}") from error


def image_shape(unet) -> tuple[int, int, int]:
    """(C, H, W) of the images that `unet` was trained on. Raises UserError where it does not say, or needs more than
    noise."""
    config = unet.config
    is_edm2 = "model_channels" in config
    if not is_edm2 and (config.num_class_embeds is not None or config.class_embed_type is not None):
        raise UserError("the pipeline's unet is class-conditional; only unconditional ones and EDM2's are supported")
    if config.sample_size is None:
        raise UserError("the pipeline's unet/config.json has no sample_size, so the size of its images is unknown")
    if config.in_channels not in (1, 3) or config.out_channels != config.in_channels:
        raise UserError(
            f"the pipeline's unet maps {config.in_channels} channels to {config.out_channels}; "
            "only 1 to 1 and 3 to 3 are images"
        )
    height, width = (config.sample_size,) * 2 if isinstance(config.sample_size, int) else config.sample_size
    return config.in_channels, height, width
