"""Optimizers, the learning rate as a closed form of the update count, and the update that a bad gradient cannot harm."""

import math

import torch
from torch import nn

from utils.core.errors import UserError
from utils.options.flags import OptimizerOptions

OPTIMIZERS = ("adamw", "adam", "rmsprop", "sgd", "adamw8bit")
LR_SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "cyclic",
    "inverse_sqrt",
)


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Returns an optimizer with decoupled weight decay (AdamW) that spares biases and the parameters of norms.

    `adam`, `rmsprop` and `sgd` couple the decay to the gradient, as torch does. `adamw8bit` needs bitsandbytes and a GPU.
    Raises UserError for an unknown name or a missing package.
    """
    name, learning_rate, epsilon = options.optimizer, options.learning_rate, options.adam_epsilon
    betas, momentum = (options.adam_beta1, options.adam_beta2), options.momentum
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    spared = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.adam_weight_decay}, {"params": spared, "weight_decay": 0.0}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
    if name == "adam":
        return torch.optim.Adam(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=learning_rate, momentum=momentum, eps=epsilon)
    if name == "sgd":
        # Not fused: torch's fused SGD leaves its momentum uninitialized when the very first update is skipped.
        return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum)
    if name == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError:
            raise UserError(
                "--optimizer adamw8bit needs bitsandbytes, which is not installed\npip install bitsandbytes"
            ) from None
        return AdamW8bit(groups, lr=learning_rate, betas=betas, eps=epsilon)
    raise UserError(f"unknown --optimizer {name!r}\nchoose from {', '.join(OPTIMIZERS)}")


def state_bytes(options: OptimizerOptions, parameter_bytes: int) -> int:
    """Returns the bytes of the optimizer's state for fp32 parameters of so many bytes."""
    momentum = options.momentum > 0
    copies = {"adamw": 2, "adam": 2, "rmsprop": 1 + momentum, "sgd": momentum, "adamw8bit": 0.5}  # two of 8 bits each
    return int(copies[options.optimizer] * parameter_bytes)


_SETTING_OF = {  # of the parameter groups
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "adam_weight_decay": "weight_decay",
    "momentum": "momentum",
}


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Returns what each parameter group has beside its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def change_settings(optimizer: torch.optim.Optimizer, asked: list[dict], options: list[str]) -> None:
    """Takes the settings of these options from those `asked` for, after a checkpoint brought its own."""
    names = {_SETTING_OF.get(option) for option in options}
    for group, settings in zip(optimizer.param_groups, asked):
        if "optimizer" in options:
            parameters = group["params"]
            group.clear()
            group.update(settings, params=parameters)
        group.update({name: value for name, value in settings.items() if name in names})
    for changed in optimizer.param_groups:
        for parameter in changed["params"] if changed.get("momentum") else ():
            state = optimizer.state.get(parameter, {})
            if "square_avg" in state:  # RMSprop's, which had no momentum so far
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))


def match_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Lays the optimizer's state out in memory as its parameters are, after it was loaded from one with another layout
    (channels last or not): fused kernels take elements in the order of memory, and would mix them up without a word. That of
    bitsandbytes stays: before a step it makes its parameters contiguous, so its state is in one order whatever the strides."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if "state1" not in state else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def learning_rate_at(step: int, total_steps: int, options: OptimizerOptions) -> float:
    """Learning rate of the update that follows `step` finished ones of `total_steps`; a function of its arguments alone.

    Warm-up is linear from 0 to `learning_rate` over `lr_warmup_steps`. Afterwards, with progress in [0, 1] over the remaining
    updates, `linear`, `polynomial`, `cosine` and `cosine_with_restarts` fall to `lr_floor` times it (floor 0 gives diffusers'
    curves, but that its polynomial ends at 1e-7); `cyclic` is a triangle between the two, `lr_cycles` times; `inverse_sqrt`
    falls as 1 / sqrt(max(step / lr_decay_steps, 1)), during the warm-up times its ramp, with `lr_warmup_steps` where that is
    None (Vaswani et al. 2017, eq. 3, scaled to peak at `learning_rate`; Karras et al. 2024, eq. 67, t_ref = lr_decay_steps).
    """
    schedule, base, warmup_steps, floor = options.lr_scheduler, options.learning_rate, options.lr_warmup_steps, options.lr_floor
    if schedule == "constant":
        return base
    ramp = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    if schedule == "inverse_sqrt":
        return base * ramp / math.sqrt(max(step / max(options.lr_decay_steps or warmup_steps, 1), 1.0))
    if step < warmup_steps or schedule == "constant_with_warmup":
        return base * ramp
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        shape = 1.0 - progress
    elif schedule == "polynomial":
        shape = (1.0 - progress) ** options.lr_power
    elif schedule == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif schedule == "cosine_with_restarts":
        shape = 0.5 * (1.0 + math.cos(math.pi * (progress * options.lr_cycles % 1.0))) if progress < 1.0 else 0.0
    elif schedule == "cyclic":
        shape = abs(1.0 - 2.0 * (progress * options.lr_cycles % 1.0))
    else:
        raise UserError(f"unknown --lr_scheduler {schedule!r}\nchoose from {', '.join(LR_SCHEDULES)}")
    return base * (floor + (1.0 - floor) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def l1_norm(model: nn.Module) -> torch.Tensor:
    """Returns the sum of |w| over matrices and kernels (not biases or norms), 0-dim, differentiable."""
    return torch.stack([p.abs().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1]).sum()
