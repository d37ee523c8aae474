"""The EDM2 network of a run: from a preset, a config, or the resolution."""

import torch

from models.edm2_unet import PRESETS, EDM2UNet
from utils.core.errors import UserError
from utils.core.randomness import derive_seed
from utils.data.dataset import ImageSet
from utils.diffusion.unet import to_channels_last
from utils.options.flags import EDM2Options

PAPER_LEVELS = (1, 2, 3, 4)  # EDM2UNet's own channel_multipliers


def make_edm2_unet(options: EDM2Options, device_type: str = "cpu", num_classes: int = 0) -> EDM2UNet:
    """Returns an EDM2UNet whose weights are a function of the options (global random state is left as it was).

    Without preset and config the network is the paper's XS. `num_classes` 0 makes it unconditional; `dropout` of None keeps
    the network's own. Raises UserError when the config cannot be read or is of another network, when its channels differ from
    the images', or when the resolution does not divide by the levels.
    """
    resolution, image_channels = options.resolution, options.image_channels
    config_name_or_path = options.model_config_name_or_path
    if config_name_or_path is not None:
        try:
            config = dict(EDM2UNet.load_config(config_name_or_path, cache_dir=options.cache_dir))
        except OSError as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(f"cannot read --model_config_name_or_path {config_name_or_path}: {first_line}") from None
        if config.get("_class_name", "EDM2UNet") != "EDM2UNet":
            raise UserError(
                f"{config_name_or_path} is the config of a {config['_class_name']}; train_edm2.py needs an EDM2UNet"
            )
        channels = (config.get("in_channels", image_channels), config.get("out_channels", image_channels))
        if channels != (image_channels, image_channels):
            raise UserError(
                f"the model config has in/out channels {channels[0]}/{channels[1]}, the images have {image_channels}; "
                "set --image_channels or edit the config"
            )
    else:
        config = dict(PRESETS[options.model_preset or "XS"])
    # The images decide; the config's own are those of the run that it came from.
    config |= {"sample_size": resolution, "in_channels": image_channels, "out_channels": image_channels}
    config["num_class_embeds"] = num_classes
    if options.dropout is not None:
        config["dropout"] = options.dropout
    levels = len(config.get("channel_multipliers", PAPER_LEVELS))
    divisor = 1 << (levels - 1)
    if resolution % divisor:
        raise UserError(
            f"--resolution {resolution} does not divide by {divisor}, which the network's {levels} levels need; use "
            f"{resolution // divisor * divisor or divisor} or {resolution // divisor * divisor + divisor}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(options.seed, "initial weights"))
        try:
            unet = EDM2UNet.from_config(config)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"the network cannot be built: {str(error).strip().splitlines()[0]}") from None
    if options.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if options.uses_channels_last(device_type):
        to_channels_last(unet)
    return unet


def count_classes(images: ImageSet) -> int:
    """Returns the number of classes; 0 without labels."""
    if images.labels is None or len(images.labels) == 0:
        return 0
    return max(int(images.labels.max()) + 1, len(images.class_names or ()))
