"""The EDM2 network: layers that preserve magnitudes, and the U-Net that is built of them.

After Karras et al. 2024, "Analyzing and improving the training dynamics of diffusion models" (arXiv 2312.02696), config G;
equation numbers are the paper's. Every layer maps activations of unit magnitude (root mean square 1) to activations of unit
magnitude, in expectation, whatever the training does: so there are no biases and no group norms, and nothing drifts.

One file that imports torch and diffusers alone, because an exported pipeline carries it, and the Hub hands out one module per
component: `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` runs it.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import nn

EPSILON = 1e-4  # beside a magnitude of 1
RESIDUAL_BALANCE, EMBEDDING_BALANCE, SKIP_BALANCE = 0.3, 0.5, 0.5  # t of `mp_sum` and `mp_cat`
LARGEST_ACTIVATION = 256.0  # activations are clipped to this, far from what fp16 can hold (65504)

# The paper's sizes, for 64x64 latents; XXS is a guiding model of Karras et al. 2024b (arXiv 2406.02507).
PRESETS: dict[str, dict[str, Any]] = {
    "XXS": {"model_channels": 64},
    "XS": {"model_channels": 128},
    "S": {"model_channels": 192},
    "M": {"model_channels": 256},
    "L": {"model_channels": 320},
    "XL": {"model_channels": 384},
    "XXL": {"model_channels": 448},
    # 16x16 images on 2 CPU cores in minutes: few channels at full size, where they cost most.
    "digits16": {
        "model_channels": 16,
        "channel_multipliers": (1, 2, 4),
        "layers_per_block": 1,
        "attention_resolutions": (4,),
        "attention_head_dim": 32,
    },
    # Small folders of images on a CPU.
    "small32": {
        "model_channels": 16,
        "channel_multipliers": (1, 2, 4, 8),
        "layers_per_block": 1,
        "attention_resolutions": (8, 4),
        "attention_head_dim": 32,
    },
    "small64": {
        "model_channels": 16,
        "channel_multipliers": (1, 2, 4, 6, 8),
        "layers_per_block": 1,
        "attention_resolutions": (8, 4),
        "attention_head_dim": 32,
    },
}
PRESETS["few"] = PRESETS["digits16"]  # a network that learns few images by heart later


def normalize(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """`x` over its root mean square along `dim`, computed in fp32 and returned in the dtype of `x`.

    A vector far below the magnitude of EPSILON stays small.
    """
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)  # its gradient at a zero vector is 0; a root's would be NaN
    rms = length * math.sqrt(length.numel() / wide.numel())
    return (wide / (rms + EPSILON)).to(x.dtype)


def mp_silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU over its root mean square on standard normal input (eq. 81)."""
    return F.silu(x) / 0.596


def mp_sum(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """`a` and `b` mixed, `t` in [0, 1] being the share of `b`; unit magnitude where they are uncorrelated (eq. 88)."""
    return torch.lerp(a, b, t) / math.hypot(1.0 - t, t)


def mp_cat(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """[B, Na + Nb, ...] of [B, Na, ...] and [B, Nb, ...]; each contributes by `t`, not by its number of channels (eq. 103)."""
    channels_a, channels_b = a.shape[1], b.shape[1]
    scale = math.sqrt((channels_a + channels_b) / ((1.0 - t) ** 2 + t**2))
    weight_a, weight_b = scale * (1.0 - t) / math.sqrt(channels_a), scale * t / math.sqrt(channels_b)
    return torch.cat([weight_a * a, weight_b * b], dim=1)


def unit_weight(weight: torch.Tensor, gain: torch.Tensor | float) -> torch.Tensor:
    """Returns what a layer computes with: each output's weight vector at length `gain`, whatever that of `weight` is (eq. 47).

    fp32, like the normalization's gradient, which is orthogonal to the stored vector.
    """
    fan_in = weight[0].numel()
    return normalize(weight.float(), tuple(range(1, weight.ndim))) * (gain / math.sqrt(fan_in))


class MPConv2d(nn.Conv2d):
    """Convolution of odd `kernel_size` that keeps size and magnitude, without bias."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor, gain: torch.Tensor | float = 1.0) -> torch.Tensor:
        return self._conv_forward(x, unit_weight(self.weight, gain).to(x.dtype), None)


class MPLinear(nn.Linear):
    """Linear layer that keeps magnitude, without bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor, gain: torch.Tensor | float = 1.0) -> torch.Tensor:
        return F.linear(x, unit_weight(self.weight, gain).to(x.dtype))


class MPFourier(nn.Module):
    """Random Fourier features sqrt(2) cos(2 pi (f x + p)) of numbers [B] -> [B, channels], in fp32 (eq. 75)."""

    frequencies: torch.Tensor
    phases: torch.Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(channels))
        self.register_buffer("phases", torch.rand(channels))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Of `Module.to` and its like: moves the tables, but keeps their precision, which a cast network would miss."""

        def move(table: torch.Tensor) -> torch.Tensor:
            moved = fn(table)
            return moved if moved.dtype == table.dtype else table.to(moved.device)

        return super()._apply(move, recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = x.float()[:, None] * self.frequencies + self.phases
        return math.sqrt(2.0) * torch.cos(2.0 * math.pi * angle)


@torch.no_grad()
def force_weight_norm(model: nn.Module, finite: torch.Tensor | None = None) -> None:
    """Forced weight normalization (section 2.3, eq. 66): stretches every stored weight vector to unit variance, in place.

    Call it after each optimizer step: then a step of the same size turns the weights by the same angle for ever, where
    they would otherwise grow and slow the learning down. Changes no output, and no weights that are not trained. Nothing
    happens where `finite` (0-dim bool on the device, whether the update was made) is false; on a GPU nothing waits for it.
    """
    if finite is not None and finite.device.type == "cpu":
        if not finite:
            return
        finite = None
    weights = [module.weight for module in model.modules() if isinstance(module, (MPConv2d, MPLinear))]
    weights = [weight for weight in weights if weight.requires_grad]
    lengths = [
        torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True, dtype=torch.float32)
        for weight in weights
    ]
    # All at once but for the norms and the products, for which no kernel takes several shapes: each launch has its price on a
    # GPU. Weights of one shape could be stacked for these two; the copies took three times as long on a CPU as it all takes.
    scales = torch._foreach_reciprocal(torch._foreach_clamp_min(lengths, 1e-12))
    torch._foreach_mul_(scales, [math.sqrt(weight.numel() / len(weight)) for weight in weights])
    if finite is not None:
        together = torch.where(finite, torch.cat([scale.flatten() for scale in scales]), 1.0)
        scales = [part.view_as(scale) for part, scale in zip(together.split([len(weight) for weight in weights]), scales)]
    torch._foreach_mul_(weights, scales)


class EDM2Block(nn.Module):
    """Residual block with modulation by the embedding, then self-attention over pixels if `num_heads` is not 0.

    `mode` is "encoder", which begins with a pixel norm, or "decoder"; `resample` is "keep", "down" or "up" (by 2).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        embedding_channels: int,
        *,
        mode: str,
        resample: str = "keep",
        num_heads: int = 0,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.mode, self.resample, self.num_heads, self.dropout = mode, resample, num_heads, dropout
        self.conv_skip = MPConv2d(in_channels, out_channels, 1) if in_channels != out_channels else None
        self.conv_in = MPConv2d(out_channels if mode == "encoder" else in_channels, out_channels, 3)
        self.modulation = MPLinear(embedding_channels, out_channels)
        self.modulation_gain = nn.Parameter(torch.zeros(()))
        self.conv_out = MPConv2d(out_channels, out_channels, 3)
        self.attention_in = MPConv2d(out_channels, 3 * out_channels, 1) if num_heads else None
        self.attention_out = MPConv2d(out_channels, out_channels, 1) if num_heads else None

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """x [B, in_channels, H, W], embedding [B, embedding_channels] -> [B, out_channels, H', W']."""
        if self.resample == "down":
            x = F.avg_pool2d(x, 2)
        elif self.resample == "up":
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if self.mode == "encoder":
            x = normalize(x if self.conv_skip is None else self.conv_skip(x), dim=1)
        branch = self.conv_in(mp_silu(x))
        scale = 1.0 + self.modulation(embedding, self.modulation_gain)
        branch = mp_silu(branch * scale[:, :, None, None].to(branch.dtype))
        branch = self.conv_out(F.dropout(branch, self.dropout, self.training))
        if self.mode == "decoder" and self.conv_skip is not None:
            x = self.conv_skip(x)
        x = mp_sum(x.to(branch.dtype), branch, RESIDUAL_BALANCE)
        if self.attention_in is not None and self.attention_out is not None:
            x = mp_sum(x, self.attention_out(self._attend(self.attention_in(x))).to(x.dtype), RESIDUAL_BALANCE)
        return x.clamp(-LARGEST_ACTIVATION, LARGEST_ACTIVATION)

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Cosine attention: q, k and v have unit magnitude in each head. [B, 3 C, H, W] -> [B, C, H, W]."""
        batch, channels, height, width = qkv.shape
        if qkv.device.type != "cpu":
            # A pixel's channels side by side, or no fused kernel takes them. On a CPU it would be another kernel, which rounds
            # otherwise than that of all runs so far.
            qkv = qkv.contiguous(memory_format=torch.channels_last)
        # [3, B, heads, pixels, head channels]
        heads = qkv.reshape(batch, 3, self.num_heads, channels // 3 // self.num_heads, height * width).permute(1, 0, 2, 4, 3)
        q, k, v = normalize(heads, dim=-1).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        return attended.transpose(2, 3).reshape(batch, channels // 3, height, width)


class EDM2UNet(ModelMixin, ConfigMixin):
    """F of D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (Karras et al. 2022, eq. 7): the network without preconditioning.

    Args:
        sample_size: height and width of the images in pixels, one number for both or two; each level but the first halves
            them.
        in_channels, out_channels: of the images or latents.
        num_class_embeds: number of classes; 0 for an unconditional network.
        model_channels: channels at full size; times `channel_multipliers` at each level.
        layers_per_block: residual blocks per level of the encoder; the decoder has one more.
        attention_resolutions: sizes (the shorter side of the feature map, in pixels) at which blocks attend.
        attention_head_dim: channels per head.
        dropout: between the convolutions of each block.
    """

    _supports_gradient_checkpointing = True
    _keep_in_fp32_modules = ["noise_features"]  # noqa: RUF012 - diffusers takes only a list; for loading in another precision

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] | list[int] = 64,
        in_channels: int = 4,
        out_channels: int = 4,
        num_class_embeds: int = 0,
        model_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 2, 3, 4),
        layers_per_block: int = 3,
        attention_resolutions: tuple[int, ...] = (16, 8),
        attention_head_dim: int = 64,
        dropout: float = 0.0,
    ):
        super().__init__()
        levels = [model_channels * multiplier for multiplier in channel_multipliers]
        sides = (sample_size,) if isinstance(sample_size, int) else sample_size
        if any(side % (1 << (len(levels) - 1)) for side in sides):
            raise ValueError(f"sample_size {sample_size} does not divide by {1 << (len(levels) - 1)}, as the levels need")
        embedding_channels = max(levels)
        self.gradient_checkpointing = False
        self.noise_features = MPFourier(model_channels)
        self.noise_embedding = MPLinear(model_channels, embedding_channels)
        self.class_embedding = MPLinear(num_class_embeds, embedding_channels) if num_class_embeds else None

        def block(channels_in: int, channels_out: int, size: int, mode: str, attends: bool, resample: str = "keep"):
            num_heads = max(1, channels_out // attention_head_dim) if attends else 0
            if num_heads and channels_out % num_heads:
                raise ValueError(f"{channels_out} channels at size {size} do not divide into {num_heads} heads")
            return EDM2Block(
                channels_in,
                channels_out,
                embedding_channels,
                mode=mode,
                resample=resample,
                num_heads=num_heads,
                dropout=dropout,
            )

        self.conv_in = MPConv2d(in_channels + 1, levels[0], 3)  # one more for the channel of ones
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        skips, width = [levels[0]], levels[0]
        for level, channels in enumerate(levels):
            size = min(sides) >> level
            if level:
                self.encoder.append(block(width, width, size, "encoder", False, "down"))
                skips.append(width)
            for _ in range(layers_per_block):
                self.encoder.append(block(width, channels, size, "encoder", size in attention_resolutions))
                width = channels
                skips.append(width)
        self.takes_skip: list[bool] = []  # by decoder block
        for level, channels in reversed(list(enumerate(levels))):
            size = min(sides) >> level
            if level == len(levels) - 1:
                self.decoder.append(block(width, width, size, "decoder", True))
                self.decoder.append(block(width, width, size, "decoder", False))
                self.takes_skip += [False, False]
            else:
                self.decoder.append(block(width, width, size, "decoder", False, "up"))
                self.takes_skip.append(False)
            for _ in range(layers_per_block + 1):
                self.decoder.append(block(width + skips.pop(), channels, size, "decoder", size in attention_resolutions))
                self.takes_skip.append(True)
                width = channels
        self.conv_out = MPConv2d(width, out_channels, 3)
        self.output_gain = nn.Parameter(torch.zeros(()))

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[torch.Tensor]:
        """`sample` c_in x of unit magnitude, [B, in_channels, H, W]; `timestep` c_noise = ln(sigma) / 4, [B] or one number;
        `class_labels` int64 [B], -1 or None for no class. Returns F, [B, out_channels, H, W]."""
        noise_level = torch.as_tensor(timestep, dtype=torch.float32, device=sample.device).reshape(-1).expand(len(sample))
        embedding = self.noise_embedding(self.noise_features(noise_level).to(sample.dtype))
        if self.class_embedding is not None:
            if class_labels is None:
                class_labels = torch.full((len(sample),), -1, device=sample.device)
            count = self.config.num_class_embeds
            one_hot = (class_labels[:, None] == torch.arange(count, device=sample.device)).to(sample.dtype)
            classes = self.class_embedding(one_hot * math.sqrt(count))
            embedding = mp_sum(embedding, classes, EMBEDDING_BALANCE)
        embedding = mp_silu(embedding)

        x = self.conv_in(torch.cat([sample, torch.ones_like(sample[:, :1])], dim=1))
        skips = [x]
        for block in self.encoder:
            x = self._run(block, x, embedding)
            skips.append(x)
        for block, takes_skip in zip(self.decoder, self.takes_skip):
            if takes_skip:
                x = mp_cat(x, skips.pop(), SKIP_BALANCE)
            x = self._run(block, x, embedding)
        x = self.conv_out(x, self.output_gain)
        return UNet2DOutput(sample=x) if return_dict else (x,)

    def _run(self, block: nn.Module, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, x, embedding)
        return block(x, embedding)
