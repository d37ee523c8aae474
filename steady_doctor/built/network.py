"""Whether a network is built as it was asked for: its config; of a UNet2DModel its activation, spectral norm, first weights."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

from steady_doctor.found import Found

SIGMAS = 7.0  # of chance
OF_THE_DATA = ("sample_size", "num_class_embeds")  # which a config file does not decide
ENOUGH = 256  # weights of a layer whose spread is looked at


@dataclass(frozen=True)
class Built:
    """What was asked for."""

    activation: str | None  # diffusers' name; None: the network's own
    initialisation: str  # default, xavier or he
    zero_init_output: bool
    spectral_norm: bool


def config(network: nn.Module, path: Path, asked: Mapping[str, Any], update: int) -> Iterator[Found]:
    """Of a network of diffusers, beside the config file `path`, or the folder with it. `asked`: what was asked for in other
    ways, which counts more than the file; None: nothing. Silent where there is no such file."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return
    wanted = json.loads(path.read_text()) | {name: value for name, value in asked.items() if value is not None}
    own = json.loads(json.dumps(dict(getattr(network, "config", {})), default=str))  # tuples are lists there
    for name in sorted(own.keys() & wanted.keys() - set(OF_THE_DATA)):
        if not name.startswith("_") and own[name] != wanted[name]:
            yield Found("network-built", update, {"what": name, "declared": f"{wanted[name]}", "observed": f"{own[name]}"})
            return


def built(network: nn.Module, asked: Built, fresh: bool, update: int) -> Iterator[Found]:
    """Of a UNet2DModel. `fresh`: no update was made yet."""
    layers: dict[str, Any] = {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    inner = {name: layer for name, layer in layers.items() if name != "conv_out"}
    normed = sum(any(isinstance(part, _SpectralNorm) for part in layer.modules()) for layer in inner.values())
    if normed != len(inner) * asked.spectral_norm:
        figures = {"what": "spectral norm", "declared": f"of {len(inner) * asked.spectral_norm} layers"}
        yield Found("network-built", update, figures | {"observed": f"of {normed} of {len(inner)}"})
    if asked.activation is not None:
        from diffusers.models.activations import get_activation  # here, as it takes seconds

        wanted = type(get_activation(asked.activation)).__name__
        kinds = {type(m.nonlinearity).__name__ for m in network.modules() if hasattr(m, "nonlinearity")}
        if not kinds <= {wanted}:
            observed = ", ".join(sorted(kinds))
            yield Found("network-built", update, {"what": "activation", "declared": wanted, "observed": observed})
    if fresh:
        yield from _first_weights(layers, asked, update)


@torch.no_grad()
def _first_weights(layers: dict[str, Any], asked: Built, update: int) -> Iterator[Found]:
    zero, ratios, off = not bool(layers["conv_out"].weight.any()), list[float](), list[str]()
    if zero != asked.zero_init_output:
        words = {True: "zeros", False: "no zeros"}
        yield Found("network-built", update, {"what": "last layer", "declared": words[not zero], "observed": words[zero]})
    for name, layer in layers.items():
        weight = layer.parametrizations.weight.original if hasattr(layer, "parametrizations") else layer.weight
        if weight.numel() < ENOUGH or (name == "conv_out" and zero):
            continue
        ratio = float(weight.float().square().mean()) / _variance(asked.initialisation, weight)
        ratios.append(ratio)
        if abs(ratio - 1) > SIGMAS * math.sqrt(2 / weight.numel()) * max(1.0, ratio):
            off.append(name)
    if off:
        spread = {"low": min(ratios) ** 0.5, "high": max(ratios) ** 0.5}
        figures = {"off": len(off), "of": len(ratios), "such_as": off[0], "kind": asked.initialisation}
        yield Found("network-first-weights", update, figures | spread)


def _variance(initialisation: str, weight: torch.Tensor) -> float:
    """Of torch's own layers by default; Glorot & Bengio 2010, eq. 16; He et al. 2015, eq. 10."""
    inputs = weight[0].numel()
    outputs = weight.numel() // weight.shape[1]
    return {"default": 1 / (3 * inputs), "xavier": 2 / (inputs + outputs), "he": 2 / inputs}[initialisation]
