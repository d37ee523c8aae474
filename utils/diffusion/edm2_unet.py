"""The EDM2 network of a run: from a preset, a config, or the resolution."""

from models.edm2_unet import PRESETS, EDM2UNet
from utils.diffusion.unet import build_network, read_config
from utils.options.flags import EDM2Options

PAPER_LEVELS = (1, 2, 3, 4)  # EDM2UNet's own channel_multipliers


def make_edm2_unet(
    options: EDM2Options,
    device_type: str = "cpu",
    num_classes: int = 0,
    config: dict | None = None,
    shape: tuple[int, int, int] | None = None,
) -> EDM2UNet:
    """Returns an EDM2UNet whose weights are a function of the options (global random state is left as it was).

    `config`: that of the network, in place of what the options say of it. Without it, preset and config file the network is the
    paper's XS. `num_classes` 0 makes it unconditional; `dropout` of None keeps the network's own.
    `shape`: channels, height and width of what it sees, where those are latents. Raises UserError as `read_config` and
    `build_network` do.
    """
    shape = shape or options.image_shape
    config = read_config(EDM2UNet, options, shape[0]) if config is None else dict(config)
    if config is None:
        config = dict(PRESETS[options.model_preset or "XS"])
    config["num_class_embeds"] = num_classes
    levels = len(config.get("channel_multipliers", PAPER_LEVELS))
    return build_network(EDM2UNet, config, levels, options, device_type, shape)
