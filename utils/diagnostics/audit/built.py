"""Whether a network is built as its config file and the flags say; of a DDPM also its activation, its spectral norm, the spread
of its first weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

from utils.diagnostics.audit.verdict import Check

SIGMAS = 7.0  # of chance
OF_THE_DATA = ("sample_size", "num_class_embeds")  # which a config file does not decide
ENOUGH = 256  # weights of a layer whose spread is looked at


@dataclass(frozen=True)
class DeclaredNetwork:
    """The names are those of the flags."""

    activation: str | None  # None: the network's own
    initialisation: str
    zero_init_output: bool
    spectral_norm: bool


def check_config(network: nn.Module, path: Path, flags: Mapping[str, Any]) -> list[Check]:
    """Of a network of diffusers, beside the config file `path`, or the folder with it. `flags`: what the flags say of it, which
    counts more than the file; None: nothing. Empty where there is no such file."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return []
    wanted = json.loads(path.read_text()) | {name: value for name, value in flags.items() if value is not None}
    config: Any = getattr(network, "config", {})
    known = {k: v for k, v in wanted.items() if k in config and k not in OF_THE_DATA and not k.startswith("_")}
    off = [name for name, value in known.items() if _plain(config[name]) != _plain(value)]
    text = f"the network has {off[0]} {_plain(config[off[0]])}, not the declared {_plain(known[off[0]])}" if off else ""
    found = f"{len(known) - len(off)} of {len(known)} settings"
    return [Check("network", "config", f"{path.name} and the flags", found, not off, text)]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_built(network: nn.Module, declared: DeclaredNetwork, fresh: bool) -> list[Check]:
    """Of a UNet2DModel. `fresh`: no update was made yet."""
    layers: dict[str, Any] = {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    checks = [_spectral(layers, declared.spectral_norm)]
    if declared.activation is not None:
        from diffusers.models.activations import get_activation  # here: see `declared.py`

        wanted = type(get_activation(declared.activation)).__name__
        kinds = {type(m.nonlinearity).__name__ for m in network.modules() if hasattr(m, "nonlinearity")}
        found, text = (
            ", ".join(sorted(kinds)),
            f"the blocks of the network have the activation {declared.activation} by its flag",
        )
        checks.append(Check("network", "activation", wanted, found, kinds <= {wanted}, f"{text}, but it is {found}"))
    return checks + (_first_weights(layers, declared) if fresh else [])


def _spectral(layers: dict[str, Any], declared: bool) -> Check:
    inner = {name: layer for name, layer in layers.items() if name != "conv_out"}
    normed = [name for name, layer in inner.items() if any(isinstance(part, _SpectralNorm) for part in layer.modules())]
    wanted, found = f"of {len(inner) if declared else 0} layers", f"of {len(normed)} of {len(inner)}"
    fine = len(normed) == (len(inner) if declared else 0)
    text = f"spectral norm is {'asked for' if declared else 'not asked for'}, and {len(normed)} of {len(inner)} layers have it"
    return Check("network", "spectral norm", wanted, found, fine, text)


@torch.no_grad()
def _first_weights(layers: dict[str, Any], declared: DeclaredNetwork) -> list[Check]:
    last, ratios, off = layers["conv_out"].weight, list[float](), list[str]()
    zero = not bool(last.any())
    text = f"the last layer starts at {'zero' if zero else 'weights that are not zero'}, which is not what was asked for"
    wanted = "zero" if declared.zero_init_output else "not zero"
    checks = [
        Check("network", "last layer at the start", wanted, "zero" if zero else "not zero", (wanted == "zero") == zero, text)
    ]
    for name, layer in layers.items():
        weight = layer.parametrizations.weight.original if hasattr(layer, "parametrizations") else layer.weight
        if weight.numel() < ENOUGH or (name == "conv_out" and zero):
            continue
        ratio = float(weight.double().square().mean()) / _variance(declared.initialisation, weight)
        ratios.append(ratio)
        if abs(ratio - 1) > SIGMAS * math.sqrt(2 / weight.numel()) * max(1.0, ratio):
            off.append(name)
    if ratios:
        said = f"a standard deviation of {min(ratios) ** 0.5:.3g} to {max(ratios) ** 0.5:.3g} times that of its kind"
        text = f"{len(off)} of {len(ratios)} layers do not start as --initialisation {declared.initialisation} says, such as "
        name = f"{off[0]}: {said}" if off else ""
        checks.append(Check("network", "first weights", declared.initialisation, said, not off, text + name))
    return checks


def _variance(initialisation: str, weight: torch.Tensor) -> float:
    """Of torch's own layers by default; Glorot & Bengio 2010, eq. 16; He et al. 2015, eq. 10."""
    inputs = weight[0].numel()
    outputs = weight.numel() // weight.shape[1]
    return {"default": 1 / (3 * inputs), "xavier": 2 / (inputs + outputs), "he": 2 / inputs}[initialisation]
