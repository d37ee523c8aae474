"""The networks: a UNet2DModel of diffusers or an EDM2UNet, by preset, config, or resolution; and their first weights."""

import fnmatch
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from diffusers import ModelMixin, UNet2DModel
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from models.edm2_unet import PRESETS, EDM2UNet
from utils.core.errors import UserError, in_full
from utils.core.hub import reason_of
from utils.core.randomness import derive_seed
from utils.core.size import Size
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.presets import NETWORKS, network_for_resolution

Network = TypeVar("Network", bound=ModelMixin)

INITIALIZATIONS = ("default", "xavier", "he")
ORIGINAL_WEIGHT = ".parametrizations.weight.original"  # what a layer under spectral norm calls its weight
UNET_DEFAULT_LEVELS = (224, 448, 672, 896)  # UNet2DModel's own block_out_channels
PAPER_LEVELS = (1, 2, 3, 4)  # EDM2UNet's own channel_multipliers


def make_unet(
    options: DDPMOptions,
    device_type: str = "cpu",
    num_classes: int = 0,
    config: dict | None = None,
    shape: tuple[int, int, int] | None = None,
) -> UNet2DModel:
    """Returns a UNet2DModel whose weights are a function of the options (global random state is left as it was).

    `config`: that of the network, in place of what the options say of it. With `num_classes` it has an embedding for each class
    and, the last one, for no class; 0 makes it unconditional.
    `activation` and `dropout` of None keep the network's own. `channels_last` puts the channels of kernels innermost in memory,
    which those of activations follow. `shape`: channels, height and width of what it sees, where those are latents. Raises
    UserError as `read_config` and `build_network` do.
    """
    shape = shape or options.image_shape
    config = read_config(UNet2DModel, options, shape[0]) if config is None else dict(config)
    if config is None:
        resolution = Size(*shape[1:]).resolution
        name = options.model_preset or network_for_resolution(resolution)
        if name is None:
            raise UserError(f"no preset fits {_shown_size(options, shape)}\nuse a multiple of 4, or set --model_preset")
        if name not in NETWORKS:
            raise UserError(f"unknown --model_preset {name!r}\nchoose from {', '.join(NETWORKS)}")
        config = dict(NETWORKS[name])
    elif config.get("class_embed_type") or (config.get("num_class_embeds") and not options.class_conditional):
        raise UserError(
            "--model_config_name_or_path: this network needs class labels\nset --class_conditional, or edit the config"
        )
    config["num_class_embeds"] = num_classes + 1 if num_classes else None
    if options.activation is not None:
        config["act_fn"] = options.activation

    def initialized(unet: UNet2DModel) -> None:
        initialize(unet, options.initialisation)
        if options.zero_init_output:
            nn.init.zeros_(unet.conv_out.weight)
            nn.init.zeros_(unet.conv_out.bias)
        if options.spectral_norm:
            normalize_spectra(unet)

    levels = len(config.get("block_out_channels", UNET_DEFAULT_LEVELS))
    return build_network(UNet2DModel, config, levels, options, device_type, shape, initialized)


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


def _shown_size(options: DDPMOptions | EDM2Options, shape: tuple[int, int, int]) -> str:
    """The size that a network is for, with the flag that decides it."""
    of_latents = f", whose latents are {Size(*shape[1:]).resolution}," if options.vae else ""
    return f"--resolution {options.resolution}{of_latents}"


def read_config(network_class: type, options: DDPMOptions | EDM2Options, image_channels: int) -> dict | None:
    """Returns what --model_config_name_or_path holds; None where it is not given.

    Raises UserError when it cannot be read, is of another class, or when its channels differ from `image_channels`.
    """
    name = options.model_config_name_or_path
    if name is None:
        return None
    try:
        config = dict(network_class.load_config(name, cache_dir=options.cache_dir))  # type: ignore[attr-defined]
    except OSError as error:
        raise UserError(f"cannot read --model_config_name_or_path {name}: {reason_of(error, name, 'model')}") from None
    needed = network_class.__name__
    if config.get("_class_name", needed) != needed:
        raise UserError(
            f"--model_config_name_or_path {name}: it is the config of a {config['_class_name']}\nuse the config of a {needed}"
        )
    if not config.keys() & inspect.signature(network_class).parameters.keys():
        raise UserError(f"--model_config_name_or_path {name}: it is no config of a {needed}\nuse a config.json of diffusers")
    channels = tuple(config.get(side, image_channels) for side in ("in_channels", "out_channels"))
    if channels != (image_channels, image_channels):
        have, advice = ("latents", "use another --vae") if options.vae else ("images", "set --image_channels")
        raise UserError(
            f"--model_config_name_or_path {name}: in_channels and out_channels are {channels[0]} and {channels[1]}, but the "
            f"{have} have {image_channels}\n{advice}, or edit the config"
        )
    return config


def build_network(
    network_class: type[Network],
    config: dict,
    levels: int,
    options: DDPMOptions | EDM2Options,
    device_type: str,
    shape: tuple[int, int, int],
    initialized: Callable[[Network], None] = lambda network: None,
) -> Network:
    """Returns the network of a config, for images or latents of `shape` (channels, height, width),
    with `levels` resolutions; `initialized` may draw its
    weights anew. The global random state is left as it was.

    Raises UserError when the resolution does not divide by the levels, or the config does not fit the class.
    """
    size, divisor = Size(*shape[1:]), 1 << (levels - 1)
    if any(side % divisor for side in size):
        smaller = Size(*(side // divisor * divisor or divisor for side in size))
        larger = Size(*(-(-side // divisor) * divisor for side in size))
        nearest = " or ".join(dict.fromkeys(str(fitting.resolution) for fitting in (smaller, larger)))
        advice = "use another --resolution, or a network of fewer levels" if options.vae else f"use {nearest}"
        raise UserError(
            f"{_shown_size(options, shape)} does not divide by {divisor}: the network has {levels} levels, and each "
            f"halves the image\n{advice}"
        )
    # The images decide; the config's own are those of the run that it came from.
    sample_size = size.height if size.height == size.width else list(size)  # diffusers': height, width
    config |= {"sample_size": sample_size, "in_channels": shape[0], "out_channels": shape[0]}
    if options.dropout is not None:
        config["dropout"] = options.dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(options.seed, "initial weights"))
        try:
            network = network_class.from_config(config)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"the network cannot be built: {in_full(error)}\ncheck --model_config_name_or_path") from None
        initialized(network)
    if options.train_only:
        freeze_others(network, options.train_only)
    if options.gradient_checkpointing:
        network.enable_gradient_checkpointing()
    if options.uses_channels_last(device_type):
        to_channels_last(network)
    return network


def freeze_others(network: nn.Module, patterns: list[str]) -> None:
    """Leaves only the parameters trainable whose names match one of the shell `patterns`. Raises UserError for one without
    a match."""
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            parts = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UserError(f"--train_only {pattern} matches no parameter\nthe names begin with {parts}")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(_in_plain_layout)


def _in_plain_layout(norm: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
    """Returns the input of a trained group norm behind frozen layers with its channels outermost in memory.

    On a CPU, torch's backward pass for channels that are innermost, as diffusers' attention leaves them, always writes the
    gradient of the input, also where none is asked for: into a null pointer.
    """
    (x,) = inputs
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in norm.parameters())
    if x.device.type != "cpu" or x.requires_grad or not trained:
        return None
    return (x.clone(memory_format=torch.contiguous_format),)  # `contiguous` may keep the strides of a single pixel


def to_channels_last(model: nn.Module) -> None:
    """Puts the channels of all kernels innermost in memory; not by Module.to, which fake tensors refuse."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def network_options(unet: UNet2DModel) -> dict:
    """Returns the network's config as options of a run, for comparison on resume: a file may change under its name."""
    return {f"network.{name}": value for name, value in unet.config.items() if not name.startswith("_")}


def initialize(model: nn.Module, name: str) -> None:
    """Re-initializes every convolution and linear layer in place: `xavier` (Glorot & Bengio 2010, eq. 16), `he` (He et al.
    2015, eq. 10, fan-in), biases zero; `default` leaves torch's. Raises UserError for another name."""
    if name not in INITIALIZATIONS:
        raise UserError(f"unknown --initialisation {name!r}\nchoose from {', '.join(INITIALIZATIONS)}")
    if name == "default":
        return
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            if name == "xavier":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def normalize_spectra(unet: UNet2DModel) -> None:
    """Divides the weight of every convolution and linear layer by its largest singular value (Miyato et al. 2018, eq. 8), which
    a power iteration follows in training. Not the last layer, whose scale the output needs and which may start at zero.
    """
    for module in list(unet.modules()):
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module is not unet.conv_out:
            parametrizations.spectral_norm(module)


def plain_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights that `model` computes with, under the names of the same network without parametrizations."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.parametrizations.")}
            training = module.parametrizations.training
            module.parametrizations.eval()  # a look in training mode would move the power iteration on
            state |= {f"{name}.{tensor}": getattr(module, tensor).detach() for tensor in module.parametrizations}
            module.parametrizations.train(training)
    return state


def load_plain(unet: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load into a plain network what a run keeps of the same network, under spectral norm too (see `plain_state_dict`).

    `weights` has the names of `state_dict`; others beside those of the network are left out. Raises RuntimeError or KeyError
    for the weights of another network.
    """
    normalized = [name.removesuffix(ORIGINAL_WEIGHT) for name in weights if name.endswith(ORIGINAL_WEIGHT)]
    with torch.random.fork_rng(devices=[]):  # the first singular vectors are drawn, and replaced by those of the run
        for name in normalized:
            parametrizations.spectral_norm(unet.get_submodule(name))
    unet.load_state_dict({name: weights[name] for name in unet.state_dict()})
    unet.eval()  # or removing it would move the power iteration on
    for name in normalized:
        parametrize.remove_parametrizations(unet.get_submodule(name), "weight")


def use_xformers(unet: UNet2DModel) -> None:
    """Switches attention to xformers. Raises UserError where that cannot work; torch's own attention saves as much memory."""
    try:
        unet.enable_xformers_memory_efficient_attention()
    except ImportError:  # whose words are only a link
        raise UserError(
            "--enable_xformers_memory_efficient_attention: xformers is not installed\nleave this flag out"
        ) from None
    except ValueError as error:
        raise UserError(f"--enable_xformers_memory_efficient_attention: {in_full(error)}\nleave this flag out") from None
