"""Exported pipelines, ours or anyone's, and checkpoints of a run: loading them and what they are made for."""

import contextlib
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import DDPMScheduler, DiffusionPipeline, UNet2DModel
from diffusers.utils import logging
from safetensors.torch import load_file
from torch import nn

from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from models.flow_scheduler import FlowScheduler
from utils.core.errors import UserError, in_full
from utils.core.files import read_json
from utils.core.hub import reason_of
from utils.core.size import Size
from utils.data.autoencoder import Autoencoder, Scale, autoencoder_of, load_autoencoder
from utils.diffusion.ddpm import PREDICTION_TYPES, config_for_any, flow_config, is_flow, scheduler_of
from utils.diffusion.unet import load_plain
from utils.diffusion.weights import advice, only_variant
from utils.options.paths import located

T = TypeVar("T", bound=nn.Module)

# The classes of ours by which pipelines that carry code are known.
EDM2, OURS = "EDM2UNet", ("ClassDDPMPipeline", "LatentDDPMPipeline")
SCHEDULER = "pretrained.scheduler"  # among the options of a checkpoint: the config of the scheduler that --pretrained had


def load_unconditional(pipeline: str) -> tuple[UNet2DModel, dict]:
    """Returns the U-Net in fp32 and the scheduler's config, of a folder or a name on the Hub, or as `load_network` of a
    checkpoint.

    Weights may be safetensors or pickled tensors (of which nothing is run), in fp32, as the variant "fp16", or, in a local
    folder, as any variant that is there alone; the parts may lie in folders of their own or, as in the first releases, side by
    side. Raises UserError for a pipeline of another kind, before its weights are loaded, and for one whose scheduler has
    neither betas nor the levels of flow matching, such as EDM's.
    """
    is_checkpoint, index = _is_checkpoint(pipeline), _index_if_any(pipeline)
    by_our_scheduler = (index.get("_class_name") or "")[1:] == [OURS[1]] and "latent_std" not in index  # that carries its code
    if is_checkpoint or by_our_scheduler:
        network, config = load_network(pipeline)
        plain = isinstance(network, UNet2DModel) and not network.config.num_class_embeds
        if not plain or (is_checkpoint and _state(pipeline).get("vae")):
            raise UserError(
                f"{pipeline} is not an unconditional pipeline of pixels\nuse a run of train_ddpm.py without classes and latents"
            )
        return network, config
    logging.disable_progress_bar()  # one bar, the script's own
    try:
        _refuse_other_parts(pipeline, _index(pipeline))
        loaded = _load_any_variant(pipeline)
    except UserError:
        raise
    except Exception as error:  # missing, unreachable, truncated or of another shape: each library raises its own kind
        raise _cannot_load(pipeline, error) from error
    config = dict(loaded.scheduler.config)
    of_unet = loaded.unet.config
    if of_unet.num_class_embeds is not None or of_unet.class_embed_type is not None:
        raise UserError(
            f"{pipeline} is class-conditional; only unconditional pipelines and those of train_ddpm.py and train_edm2.py are "
            "supported"
        )
    if config.get("trained_betas") is not None:  # whatever number of timesteps stands beside them, there are so many
        config["num_train_timesteps"] = len(config["trained_betas"])
    if is_flow(config):
        return _in_own_memory(loaded.unet, pipeline), flow_config(config, pipeline)
    if config.get("predict_epsilon") is False:  # what prediction_type was called until diffusers 0.9
        config["prediction_type"] = "sample"
    prediction_type = config.get("prediction_type", "epsilon")
    if not hasattr(loaded.scheduler, "alphas_cumprod") or prediction_type not in PREDICTION_TYPES:
        raise UserError(
            f"{pipeline} has a {type(loaded.scheduler).__name__} with prediction_type {prediction_type}, which is not "
            "supported\n"
            f"use a pipeline with a schedule of betas and one of {', '.join(PREDICTION_TYPES)}"
        )
    return _in_own_memory(loaded.unet, pipeline), config


def _refuse_other_parts(pipeline: str, index: dict) -> None:
    """Raises UserError where the index of a pipeline names other parts than an unconditional one of pixels has, or code."""
    components = {name for name, value in index.items() if isinstance(value, list) and value[0] is not None}
    if components != {"unet", "scheduler"} or index["unet"][1] != "UNet2DModel":
        has = ", ".join(sorted(components)) or "neither"
        kind = f", the unet of class {index['unet'][1]}" if "unet" in components else ""
        raise UserError(
            f"{pipeline} is not an unconditional pipeline of pixels: it has {has}{kind}\n"
            "use a pipeline that has only a `unet` (UNet2DModel) and a `scheduler`"
        )
    if isinstance(index.get("_class_name"), list):  # of which code would be run
        raise UserError(f"{pipeline} contains code, which is not run here\nuse a pipeline of diffusers' own classes")


def training_scheduler(config: dict) -> DDPMScheduler | FlowScheduler:
    """The process that a pipeline's network was trained on. Raises UserError for an unknown schedule."""
    # With this list, from_config would replace what another scheduler class has for a default by its own.
    config = {key: value for key, value in config.items() if key != "_use_default_values"}
    if is_flow(config):
        return FlowScheduler.from_config(config)
    try:
        return DDPMScheduler.from_config(config)
    except NotImplementedError:
        raise UserError(
            f"the pipeline's scheduler has an unknown beta_schedule {config.get('beta_schedule')!r}\n"
            "use a schedule that diffusers' DDPMScheduler has"
        ) from None


def _load_any_variant(pipeline: str) -> DiffusionPipeline:
    try:
        return DiffusionPipeline.from_pretrained(pipeline)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            return DiffusionPipeline.from_pretrained(pipeline, variant=only_variant(pipeline) or "fp16")
        raise  # what was wrong with the usual files


def load_network(pipeline: str) -> tuple[UNet2DModel | EDM2UNet, dict]:
    """Returns the U-Net in fp32 and the scheduler's config of what the scripts here can sample from. Raises UserError.

    An unconditional pipeline as for `load_unconditional`; an EDM2 pipeline, with or without classes, or a DDPM pipeline of ours
    with classes or of latents, of which no code of its own is run; or `checkpoint-<N>` of a run's folder, with its
    averaged weights (the raw ones of a run without EMA), in the network that the run has exported or, where it has exported
    none yet, in the one that its options mean.
    """
    path = Path(pipeline)
    if _is_checkpoint(pipeline) and not _has_index(path.parent):
        unet, scheduler_config = _made_by_options(path)
    else:
        folder = exported(pipeline)
        kind = _kind(pipeline)
        unet, scheduler_config = _load_parts(folder, kind) if kind else load_unconditional(folder)
    if _is_checkpoint(pipeline):
        weights = next(path / name for name in ("ema.safetensors", "model.safetensors") if (path / name).is_file())
        try:
            tensors = {name.removeprefix("unet."): tensor for name, tensor in load_file(weights).items()}  # beside u(sigma)
            load_plain(unet, tensors)
        except Exception as error:  # truncated, of another network: each library raises its own kind
            raise UserError(
                f"cannot load {path}: {in_full(error)}\nuse another checkpoint, or the exported pipeline"
            ) from error
    return unet.eval(), scheduler_config


def load_decoder(pipeline: str, unet: UNet2DModel | EDM2UNet) -> Autoencoder | None:
    """The autoencoder by which what `unet` of the pipeline, or of the checkpoint of a run, makes becomes images; None where it
    makes images. Raises UserError for one that cannot be loaded."""
    index = _index_if_any(pipeline)
    if not index and _is_checkpoint(pipeline) and (saved := _state(pipeline)).get("vae"):
        name = place_of_decoder(pipeline)
        autoencoder = load_autoencoder(name, (saved["image_channels"], *Size.of(saved["resolution"])))
        if autoencoder.fingerprint() != saved["vae.weights"]:
            raise UserError(f"--vae {name} of the run of {pipeline} is another autoencoder now\nput that of the run there")
        autoencoder.scale = Scale(saved["vae.latent_mean"], saved["vae.latent_std"])
        return autoencoder
    if "latent_std" not in index:
        return None
    return autoencoder_of(exported(pipeline), image_shape(unet), Scale(index["latent_mean"], index["latent_std"]))


def place_of_decoder(pipeline: str) -> str:
    """Returns where the autoencoder of a pipeline of latents is, or of a checkpoint's run: in the pipeline, or what --vae of
    the run named where it has exported none yet."""
    folder = Path(exported(pipeline))
    if _has_index(folder) or not _is_checkpoint(pipeline):
        return str(folder)
    record, saved = read_json(folder / "options.json"), _state(pipeline)
    return str(located({**record, "options": {**record.get("options", {}), "vae": saved["vae"]}}, folder, ["vae"])["vae"])


def exported(pipeline: str) -> str:
    """The pipeline of a checkpoint's run, or that pipeline itself."""
    return str(Path(pipeline).parent) if _is_checkpoint(pipeline) else pipeline


def _is_checkpoint(pipeline: str) -> bool:
    return (Path(pipeline) / "state.json").is_file()


def _has_index(folder: Path) -> bool:
    return (folder / "model_index.json").is_file()


def _state(checkpoint: str | Path) -> dict[str, Any]:
    """The options in a checkpoint. Raises UserError for one that is damaged."""
    try:
        return dict(json.loads((Path(checkpoint) / "state.json").read_text())["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot load {checkpoint}: its state.json is damaged: {in_full(error)}\nuse another checkpoint"
        ) from None


def _made_by_options(checkpoint: Path) -> tuple[UNet2DModel | EDM2UNet, dict]:
    """A network of any weights, and the config of its scheduler, as the options of a checkpoint mean them."""
    options = _state(checkpoint)
    config = {name.removeprefix("network."): value for name, value in options.items() if name.startswith("network.")}
    with torch.random.fork_rng(devices=[]):
        if "sigma_data" in options:
            return EDM2UNet.from_config(config), dict(EDMHeunScheduler(sigma_data=options["sigma_data"]).config)
        unet = UNet2DModel.from_config(config)
    if options.get("objective") == "flow":
        return unet, flow_config({"num_train_timesteps": 1000, "prediction_type": options["prediction_type"]}, str(checkpoint))
    scheduler = training_scheduler(options[SCHEDULER]) if SCHEDULER in options else scheduler_of(options)
    return unet, dict(DDPMScheduler.from_config(config_for_any(scheduler.config)).config)


def _index(pipeline: str) -> dict:
    """What model_index.json of the pipeline, or of a checkpoint's run, says. Raises UserError where it cannot be read."""
    try:
        return DiffusionPipeline.load_config(exported(pipeline))
    except Exception as error:  # each library raises its own kind
        raise _cannot_load(pipeline, error) from error


def _cannot_load(pipeline: str, error: Exception) -> UserError:
    return UserError(f"cannot load a pipeline from {pipeline}: {advice(pipeline) or reason_of(error, pipeline, 'model')}")


def _index_if_any(pipeline: str) -> dict:
    """The same, but empty where it cannot be read."""
    try:
        return _index(pipeline)
    except UserError:
        return {}


def names_of_classes(pipeline: str) -> list[str]:
    """The names of a pipeline's classes, or of those of a checkpoint's run, by their numbers; empty where they have none."""
    index = _index_if_any(pipeline)
    if not index and _is_checkpoint(pipeline):
        return read_json(Path(pipeline).parent / "options.json").get("class_names") or []
    names = index.get("id2label") or {}
    with contextlib.suppress(KeyError, TypeError):  # another's, numbered in another way
        return [names[str(number)] for number in range(len(names))]
    return []


def _kind(pipeline: str) -> str | None:
    """EDM2 or one of OURS for pipelines that carry code of ours, None for all others."""
    index = _index(pipeline)
    made_by, unet = index.get("_class_name"), index.get("unet")
    if isinstance(unet, list) and unet[1:] == [EDM2]:
        return EDM2
    return made_by[1] if isinstance(made_by, list) and made_by[-1] in OURS else None


def _load_parts(pipeline: str, kind: str) -> tuple[UNet2DModel | EDM2UNet, dict]:
    """Of a pipeline that is of this `_kind`."""
    network, scheduler = (EDM2UNet, EDMHeunScheduler) if kind == EDM2 else (UNet2DModel, DDPMScheduler)
    try:
        unet = network.from_pretrained(pipeline, subfolder="unet", use_safetensors=True)
        config = dict(scheduler.load_config(pipeline, subfolder="scheduler"))
        return _in_own_memory(unet, pipeline), flow_config(config, pipeline) if is_flow(config) else config
    except UserError:
        raise
    except Exception as error:
        raise _cannot_load(pipeline, error) from error


def trained_bits(pipeline: str) -> int:
    """16 for a run, or a checkpoint of one, whose images have as many bits; 8 for everything else."""
    for folder in (Path(pipeline), Path(pipeline).parent):
        with contextlib.suppress(KeyError, TypeError):
            return 16 if read_json(folder / "options.json")["options"]["preserve_input_precision"] else 8
    return 8


def _in_own_memory(unet: T, pipeline: str) -> T:
    """`unet` in fp32, with each tensor in fresh memory. safetensors leaves them inside the mapped file, at any multiple of 4
    bytes, and kernels of some CPUs round otherwise there: the same weights shall give the same bits, whatever their file.

    Raises UserError where the file had not all of them.
    """
    missing = [name for name, tensor in unet.state_dict().items() if tensor.is_meta]
    if missing:
        raise UserError(
            f"the weights of {pipeline} lack {len(missing):,} tensors of the network, such as {missing[0]}\n"
            "use the weights that its config.json describes, under the names that diffusers gives them"
        )
    for tensor in (*unet.float().parameters(), *unet.buffers()):
        tensor.data = tensor.data.clone()
    return unet


def image_shape(unet: UNet2DModel | EDM2UNet) -> tuple[int, int, int]:
    """(C, H, W) of the images that `unet` was trained on. Raises UserError where it does not say."""
    config = unet.config
    if config.sample_size is None:
        raise UserError(
            "the pipeline's unet/config.json has no sample_size, so the size of its images is unknown\n"
            "add sample_size to that file"
        )
    if config.out_channels != config.in_channels:
        raise UserError(
            f"the pipeline's unet has {config.in_channels} input channels and {config.out_channels} output channels\n"
            "use a pipeline that has as many of both"
        )
    height, width = (config.sample_size,) * 2 if isinstance(config.sample_size, int) else config.sample_size
    return config.in_channels, height, width
