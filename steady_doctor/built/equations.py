"""Whether the EDM2 network computes what its paper says: its equations, written here once more, beside each of its parts.

Karras et al. 2024 (arXiv 2312.02696), config G. Both get the same weights. Gains, which start at zero, are replaced by others,
so that every path counts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steady_doctor.found import Found

KNOWN = {"sample_size", "in_channels", "out_channels", "num_class_embeds", "model_channels", "channel_multipliers"}
KNOWN |= {"layers_per_block", "attention_resolutions", "attention_head_dim", "dropout"}
TOLERANCE, ROUGH = 1e-3, 0.05  # of a part's output; where layers compute with fewer digits
LISTS = ("encoder.", "decoder.")
IMAGES = 3


@torch.no_grad()
def equations(network: nn.Module, update: int) -> Iterator[Found]:
    """Of an EDM2UNet, the first of its parts that computes something else. Its mode is as before afterwards, and no random
    number is drawn. Silent where its config has settings that the paper has not."""
    config: Any = getattr(network, "config", {})
    if any(not name.startswith("_") and name not in KNOWN for name in config):
        return
    weights = {name: tensor.detach() for name, tensor in (*network.named_parameters(), *network.named_buffers())}
    device = next(iter(weights.values())).device
    draw = torch.Generator().manual_seed(0)
    gains = {name: torch.rand((), generator=draw).to(device) + 0.5 for name in weights if name.endswith("gain")}
    classes, size = config["num_class_embeds"], 2 ** len(config["channel_multipliers"])  # small images tell as much
    images = torch.randn(IMAGES, config["in_channels"], size, size, generator=draw).to(device)
    noise_levels = torch.linspace(-1.2, 0.9, IMAGES).to(device)
    labels = (torch.arange(IMAGES, device=device) - 1) % classes if classes else None
    if labels is not None:
        labels[0] = -1  # no class
    seen = _outputs_of(network, gains, (images, noise_levels, labels))
    fewer_digits = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    rough = device.type == "mps" or (device.type != "cpu" and fewer_digits)
    for name, wanted in _Equations(weights | gains, config).outputs(images, noise_levels, labels).items():
        found = seen.get(name)
        found = torch.zeros_like(wanted) if found is None or found.shape != wanted.shape else found
        ours, theirs = (part.cpu().double().flatten() for part in (found, wanted))
        off = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        if not off <= (ROUGH if rough else TOLERANCE):
            factor = float(ours @ theirs / (theirs @ theirs).clamp(min=1e-300))
            yield Found("network-equations", update, {"part": name, "off": off, "factor": factor})
            return


def _outputs_of(network: nn.Module, gains: Mapping[str, torch.Tensor], inputs: tuple) -> dict[str, torch.Tensor]:
    """What its parts give, by their names, in evaluation mode."""
    seen: dict[str, torch.Tensor] = {}
    # Its layers, and the blocks in its lists.
    named = [(name, part) for name, part in network.named_modules() if name and name.count(".") == name.startswith(LISTS)]
    hooks = [
        part.register_forward_hook(lambda _, inputs, output, name=name: seen.setdefault(name, output)) for name, part in named
    ]
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.compiler.set_stance("force_eager"):
            seen["output"] = torch.func.functional_call(network.eval(), dict(gains), inputs).sample
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return seen


class _Equations:
    """Of the paper; numbers of equations are in brackets."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Any):
        self._weights, self._config = weights, config

    def outputs(self, x: torch.Tensor, c_noise: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """By the names of the parts, in the order in which they are computed."""
        config, out = self._config, {}
        frequencies, phases = self._weights["noise_features.frequencies"], self._weights["noise_features.phases"]
        out["noise_features"] = 2**0.5 * (2 * math.pi * (c_noise[:, None] * frequencies + phases)).cos()  # (75)
        out["noise_embedding"] = embedding = self._layer("noise_embedding", out["noise_features"])
        if labels is not None:
            classes = int(config["num_class_embeds"])
            chosen = F.one_hot(labels.clamp(min=0), classes).float() * (labels >= 0)[:, None]
            out["class_embedding"] = self._layer("class_embedding", chosen * classes**0.5)
            embedding = _sum(embedding, out["class_embedding"], 0.5)
        embedding = _silu(embedding)
        widths = [config["model_channels"] * multiplier for multiplier in config["channel_multipliers"]]
        x = out["conv_in"] = self._layer("conv_in", torch.cat([x, torch.ones_like(x[:, :1])], 1))
        skips, number = [x], 0
        side = min(config["sample_size"]) if isinstance(config["sample_size"], (list, tuple)) else config["sample_size"]
        attends = [side >> level in config["attention_resolutions"] for level in range(len(widths))]
        for level in range(len(widths)):
            for place in range(config["layers_per_block"] + (level > 0)):
                down = level > 0 and place == 0
                x = F.avg_pool2d(x, 2) if down else x
                x = self._block(f"encoder.{number}", x, embedding, True, attends[level] and not down)
                out[f"encoder.{number}"] = x
                skips.append(x)
                number += 1
        number = 0
        for level in reversed(range(len(widths))):
            deepest = level == len(widths) - 1
            for place in range(config["layers_per_block"] + 2 + deepest):
                first = 2 if deepest else 1  # blocks before those with a skip
                if place == 0 and not deepest:
                    x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
                if place >= first:
                    x = _cat(x, skips.pop(), 0.5)
                attention = (deepest and place == 0) or (place >= first and attends[level])
                x = out[f"decoder.{number}"] = self._block(f"decoder.{number}", x, embedding, False, attention)
                number += 1
        out["output"] = self._layer("conv_out", x) * self._weights["output_gain"]
        return out

    def _block(self, name: str, x: torch.Tensor, embedding: torch.Tensor, encoder: bool, attention: bool) -> torch.Tensor:
        skip = f"{name}.conv_skip"
        if encoder:
            x = _normalized(self._layer(skip, x), 1)
        gains = self._layer(f"{name}.modulation", embedding) * self._weights[f"{name}.modulation_gain"] + 1
        branch = self._layer(f"{name}.conv_in", _silu(x)) * gains[:, :, None, None]
        branch = self._layer(f"{name}.conv_out", _silu(branch))
        x = _sum(x if encoder else self._layer(skip, x), branch, 0.3)
        if attention:
            qkv = self._layer(f"{name}.attention_in", x)
            heads = max(1, x.shape[1] // self._config["attention_head_dim"])
            q, k, v = (_normalized(part.flatten(2).unflatten(1, (heads, -1)), 2) for part in qkv.chunk(3, 1))
            shares = (torch.einsum("bhcq,bhck->bhqk", q, k) / q.shape[2] ** 0.5).softmax(-1)
            attended = torch.einsum("bhqk,bhck->bhcq", shares, v).flatten(1, 2).view_as(x)
            x = _sum(x, self._layer(f"{name}.attention_out", attended), 0.3)
        return x.clamp(-256, 256)

    def _layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """(47); what has no such layer passes unchanged."""
        if (weight := self._weights.get(f"{name}.weight")) is None:
            return x
        rows = weight.float().flatten(1)
        unit = (rows / (rows.norm(dim=1, keepdim=True) + 1e-4 * rows.shape[1] ** 0.5)).view_as(weight)
        return x @ unit.T if weight.ndim == 2 else F.conv2d(x, unit, padding=weight.shape[-1] // 2)


def _normalized(x: torch.Tensor, dim: int) -> torch.Tensor:
    """(30)"""
    return x / (x.square().mean(dim, keepdim=True).sqrt() + 1e-4)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """(81)"""
    return x * x.sigmoid() / 0.596


def _sum(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """(88)"""
    return ((1 - t) * a + t * b) / ((1 - t) ** 2 + t**2) ** 0.5


def _cat(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """(103)"""
    both, sizes = ((1 - t, a), (t, b)), a.shape[1] + b.shape[1]
    scale = (sizes / ((1 - t) ** 2 + t**2)) ** 0.5
    return torch.cat([share * part * scale / part.shape[1] ** 0.5 for share, part in both], 1)
