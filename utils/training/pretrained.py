"""What a run starts from: the pipeline of --pretrained and the autoencoder of --vae, checked and taken over.

A resumed run takes all of it from its checkpoint, so that the pipeline may be gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import ModelMixin

from utils.core.bars import Bar
from utils.core.distributed import from_main_process, made_on_main_process, main_process_first
from utils.core.errors import UserError, in_full
from utils.core.size import Size
from utils.data.autoencoder import Autoencoder, Scale, load_autoencoder
from utils.data.latents import PackedLatents
from utils.diffusion.ddpm import is_flow
from utils.diffusion.pipelines import (
    SCHEDULER,
    exported,
    image_shape,
    load_decoder,
    load_network,
    names_of_classes,
    place_of_decoder,
    training_scheduler,
)
from utils.diffusion.sampling import Scheduler, is_edm
from utils.evaluation.newest import agreed
from utils.options.flags import DDPMOptions, EDM2Options, RunOptions
from utils.runs.checkpoint_files import find_checkpoint
from utils.runs.state import read_state

EMBEDDING = "class_embedding.weight"
LEARNING_RATES = {"train_ddpm": 1e-5, "train_edm2": 1e-3}  # a tenth of what a training from scratch begins with
_NAMED = 8  # classes that a note lists


@dataclass
class Pretrained:
    """`config`, `scheduler`: JSON; `image_shape`: channels, height, width; `weights`: None in a resumed run."""

    pipeline: str
    config: dict[str, Any]
    scheduler: dict[str, Any]
    image_shape: tuple[int, int, int]
    weights: dict[str, torch.Tensor] | None = None
    class_names: list[str] = field(default_factory=list)
    autoencoder: dict[str, Any] = field(default_factory=dict)  # its facts, where the network makes latents
    vae: str | None = None  # where it is
    decoder: Autoencoder | None = None  # itself, in a new run
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of it beside the network's config."""
        return {SCHEDULER: self.scheduler}

    def make_scheduler(self) -> Scheduler:
        """Returns DDPM's process that the network was trained on."""
        return training_scheduler(self.scheduler)


def start_from_pipeline(options: DDPMOptions | EDM2Options, accelerator: Accelerator) -> Pretrained | None:
    """What --pretrained names, on every process; None without it. Sets the `options` that the pipeline decides. Raises
    UserError for one that cannot be loaded or is of the other script, and for flags that contradict it."""
    if options.pretrained is None:
        return None
    checkpoint = checkpoint_to_resume(options, accelerator)
    if checkpoint is not None:
        saved = read_state(checkpoint).options
        if SCHEDULER not in saved:
            raise UserError(f"{checkpoint} is of a run without --pretrained\nleave it out, or choose another --output_dir")
        config = {name.removeprefix("network."): value for name, value in saved.items() if name.startswith("network.")}
        shape = (saved["image_channels"], *Size.of(saved["resolution"]))
        start = Pretrained(options.pretrained, config, saved[SCHEDULER], shape)
        start.autoencoder = {name: value for name, value in saved.items() if name.startswith("vae.")}
        own = exported(options.pretrained)
        start.vae = own if Path(own, "vae").is_dir() else saved.get("vae")
    else:
        pipeline = agreed(accelerator, options.pretrained)
        with main_process_first(accelerator, "loading the pipeline"):  # one download, and one message where it fails
            unet, scheduler = load_network(pipeline)
            shape = image_shape(unet)
            decoder = load_decoder(pipeline, unet)
        edm, wants_edm = is_edm(scheduler), isinstance(options, EDM2Options)
        if edm != wants_edm:
            script = "train_edm2.py" if edm else "train_ddpm.py"
            raise UserError(f"--pretrained {options.pretrained} contains a {type(unet).__name__}\nfine-tune it with {script}")
        if is_flow(scheduler):
            raise UserError(
                f"--pretrained {options.pretrained} is of flow matching, which cannot be fine-tuned here\nleave it out"
            )
        config = {name: value for name, value in unet.config.items() if not name.startswith("_")}
        public = scheduler if edm else training_scheduler(scheduler).config
        scheduler = {name: value for name, value in public.items() if not name.startswith("_")}
        shape = decoder.image_shape if decoder else shape
        start = Pretrained(options.pretrained, config, scheduler, shape, unet.state_dict())
        start.class_names = names_of_classes(pipeline)
        if decoder is not None:
            start.autoencoder, start.vae, start.decoder = decoder.facts(), place_of_decoder(pipeline), decoder
    _take_over(options, start)
    return start


def checkpoint_to_resume(options: RunOptions, accelerator: Accelerator) -> Path | None:
    """The checkpoint that --resume_from_checkpoint names, on every process; None where there is none."""
    if not options.resume_from_checkpoint:
        return None
    asked = Path(options.output_dir), options.resume_from_checkpoint
    return made_on_main_process(accelerator, "reading the checkpoint", find_checkpoint, *asked)[0]


def _take_over(options: DDPMOptions | EDM2Options, start: Pretrained) -> None:
    config, scheduler, wants = start.config, start.scheduler, options.class_conditional
    if start.autoencoder:
        options.vae = options.vae or start.vae
    elif options.vae is not None:
        raise UserError(f"--vae {options.vae}: the network of {start.pipeline} makes images, and no latents\nleave --vae out")
    options.check_latents()
    if isinstance(options, EDM2Options):
        process = {"sigma_data": scheduler["sigma_data"]}
    else:
        process = {
            "prediction_type": scheduler["prediction_type"],
            "ddpm_num_steps": scheduler["num_train_timesteps"],
            "ddpm_beta_schedule": scheduler["beta_schedule"],
            "rescale_betas_zero_snr": scheduler["rescale_betas_zero_snr"],
        }
    for name, value in (process | {"image_channels": start.image_shape[0]}).items():
        if name in options.given and getattr(options, name) != value:
            raise UserError(
                f"--{name} {getattr(options, name)}: {start.pipeline} was trained with {value}, and its weights do not fit "
                "another value\nleave the flag out, or train without --pretrained"
            )
        setattr(options, name, value)
    trained = Size(*start.image_shape[1:]).resolution
    if "resolution" not in options.given:
        options.resolution = trained
    elif options.resolution != trained and isinstance(options, EDM2Options):
        raise UserError(
            f"--resolution {options.resolution}: the attention layers of {start.pipeline} are for {trained}\n"
            "leave the flag out, or train without --pretrained"
        )
    elif options.resolution != trained:
        start.notes.append(f"{start.pipeline} was trained at --resolution {trained}, and goes on at {options.resolution}")
    if "learning_rate" not in options.given:
        options.learning_rate = LEARNING_RATES[options.script]
    if config.get("num_class_embeds") and not wants:
        raise UserError(f"--pretrained {start.pipeline} is class-conditional\nadd --class_conditional")


def load_weights(network: ModelMixin, start: Pretrained, class_names: Sequence[str] | None) -> None:
    """Puts the pipeline's weights into a new run's `network`, and adds a note of what is new. Classes are matched by
    `class_names`, or by their numbers where one side has no names; new ones start as no class does in a UNet2DModel, and at
    random in an EDM2UNet. Raises UserError for weights that do not fit."""
    if start.weights is None:
        return
    weights, start.weights = start.weights, None
    start.notes.append(f"starting from {start.pipeline}, {sum(tensor.numel() for tensor in weights.values()):,} parameters")
    is_edm2 = "model_channels" in network.config
    if EMBEDDING in weights or EMBEDDING in network.state_dict():
        if is_edm2 and (EMBEDDING in weights) != (EMBEDDING in network.state_dict()):
            raise UserError(
                f"--pretrained {start.pipeline} was trained with classes, and the data has none\nname their column with "
                "--label_column"
                if EMBEDDING in weights
                else f"--pretrained {start.pipeline} was trained without classes\nadd --no-class_conditional"
            )
        # By class in rows; in a UNet2DModel the last row is that of no class.
        table = network.state_dict()[EMBEDDING].clone()
        rows = table.T if is_edm2 else table
        known = weights.get(EMBEDDING, torch.zeros(1, table.shape[1]))
        known = known.T if is_edm2 else known
        count, old_count = (len(part) - (not is_edm2) for part in (rows, known))
        if known.shape[1] == rows.shape[1]:  # else load_state_dict says what does not fit
            taken = _same_classes(list(class_names or ()), start.class_names, count, old_count)
            if not is_edm2:
                rows[:] = known[-1]
            for new, old in taken.items():
                rows[new] = known[old]
            weights = weights | {EMBEDDING: table}
            start.notes += _about_classes(taken, list(class_names or map(str, range(count))), old_count)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"--pretrained {start.pipeline}: its weights do not fit its config: {in_full(error)}") from None


def _same_classes(names: list[str], old_names: list[str], count: int, old_count: int) -> dict[int, int]:
    """Which class of the pipeline each class of the data is, by their numbers."""
    if names and old_names:
        return {number: old_names.index(name) for number, name in enumerate(names) if name in old_names}
    return {number: number for number in range(min(count, old_count))}


def _about_classes(taken: dict[int, int], names: list[str], old_count: int) -> list[str]:
    new = [name for number, name in enumerate(names) if number not in taken]
    more = f" and {len(new) - _NAMED} more" * (len(new) > _NAMED)
    notes = [f"new classes: {', '.join(new[:_NAMED])}{more}"] if new else []
    if left := old_count - len(taken):
        notes.append(f"classes of the pipeline that the data does not have, and that go: {left} of {old_count}")
    return notes


def start_autoencoder(options: RunOptions, accelerator: Accelerator, start: Pretrained | None = None) -> Autoencoder | None:
    """What --vae names, on every process, with the scale of the checkpoint or pipeline that the run begins with; None without
    --vae. Raises UserError where it cannot be loaded, does not fit the images, or is not that of the pipeline."""
    if options.vae is None:
        return None
    name, shape = options.vae, options.image_shape
    if start is not None and start.decoder is not None and (name, shape) == (start.vae, start.decoder.image_shape):
        return start.decoder
    shown = accelerator.is_main_process and not options.quiet
    with Bar(what := "loading the autoencoder", shown=shown), main_process_first(accelerator, what):  # one download
        autoencoder = load_autoencoder(name, shape)
    if start is not None:
        known = start.autoencoder
        if autoencoder.fingerprint() != known["vae.weights"]:
            raise UserError(
                f"--vae {name} is another autoencoder than that of {start.pipeline}, on whose latents its network was trained\n"
                + ("leave --vae out" if start.weights is not None else "set --vae to a copy of that of the run")
            )
    else:
        checkpoint = checkpoint_to_resume(options, accelerator)
        known = {} if checkpoint is None else read_state(checkpoint).options
    if "vae.latent_mean" in known and known.get("latent_scale") == options.latent_scale:
        autoencoder.scale = Scale(known["vae.latent_mean"], known["vae.latent_std"])
    return autoencoder


def settle_scale(options: RunOptions, autoencoder: Autoencoder, latents: PackedLatents) -> list[str]:
    """Sets the scale of a run that begins, the same on every process. Returns notes for the user."""
    if autoencoder.scale is None:
        own = autoencoder.own_scale()
        asked = latents.measured if options.latent_scale == "auto" else own or latents.measured
        # The config's makes a spread of 1, as measured ones do: an EDM2 network is made for sigma_data.
        scale = asked.multiplied(options.sigma_data) if isinstance(options, EDM2Options) else asked
        autoencoder.scale = Scale(*from_main_process([scale.mean, scale.std]))
    size, values = "x".join(map(str, autoencoder.latent_shape)), spread(autoencoder, latents)
    shown = ", ".join(f"{value:.2f}" for value in values[:8]) + ", ..." * (len(values) > 8)
    return [f"latents of {size}, by {options.vae}; their standard deviation by channel: {shown}"]


def spread(autoencoder: Autoencoder, latents: PackedLatents) -> list[float]:
    """The standard deviation of what the network is trained on, by channel."""
    return [seen / used for seen, used in zip(latents.measured.std, autoencoder.known_scale().std)]
