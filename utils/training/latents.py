"""The autoencoder of a run with --vae: loaded once, and the scale of its latents, which a checkpoint keeps."""

from accelerate import Accelerator

from utils.core.bars import Bar
from utils.core.distributed import from_main_process, main_process_first
from utils.core.errors import UserError
from utils.data.autoencoder import Autoencoder, Scale, load_autoencoder
from utils.data.latents import PackedLatents
from utils.options.flags import EDM2Options, RunOptions
from utils.runs.state import read_state
from utils.training.pretrained import Pretrained, checkpoint_to_resume


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
