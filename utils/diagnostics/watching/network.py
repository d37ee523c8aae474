"""The network in its forward passes: mode and precision."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.facts import Facts

_PRECISIONS = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LIBRARIES = "diffusers.", "torch.", "transformers."
VARIES = {"training", "p"}  # the share of a dropout may follow a schedule
_ASKED = {"bf16", "fp16"}  # that Accelerate's setting may be; "no" asks for nothing


def check_network(update: Update, observer: Observer, asked: str | None) -> tuple[list[Check], str]:
    """(the checks, the precision that its layers compute in). `asked`: Accelerate's mixed precision."""
    calls = [s.calls["network"] for s in update.micro_steps if "network" in s.calls]
    if not calls:
        return [], ""
    beside = observer.trained is not observer.modules["network"]  # then the network itself may be frozen
    training = observer.trained.training if beside else all(call.training for call in calls)
    text = "the network is in evaluation mode while it trains: dropout and batch normalization are off"
    severity = "warning" if any(map(_acts_otherwise, observer.trained.modules())) else "info"
    checks = [Check("network", "mode", "training", "training" if training else "evaluation", training, text, severity)]
    broken = sum(not bool(torch.isfinite(output).all()) for call in calls for output in call.outputs[:1])
    text = "the network's output has values that are not finite (NaN or infinite)"
    checks.append(Check("network", "output", "finite", "not finite" if broken else "finite", not broken, text))
    x = calls[0].inputs[0]
    dtype = calls[0].autocast or (x.dtype if isinstance(x, torch.Tensor) else None)
    seen = _PRECISIONS.get(dtype, str(dtype))
    if asked in _ASKED:
        text = f"layers compute in {seen}, Accelerate was asked for {asked}"
        checks.append(Check("network", "precision of the layers", str(asked), seen, seen == asked, text, "warning"))
    if not beside:
        checks.append(_frozen(observer))
    checks += _normalized(observer.modules["network"])
    found = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in observer.parameters.values()}))
    text = f"weights are kept in {found}: updates below its rounding are lost"
    checks.append(Check("network", "precision of the weights", "float32", found, found == "float32", text, "warning"))
    return checks, seen


def check_beside(facts: Facts, stepped: Collection[int]) -> list[Check]:
    """Of models beside the network. `stepped`: ids of the optimizer's parameters."""
    checks = []
    for encoder in facts.encoders:
        own = list(encoder.parameters())
        trained = any(id(p) in stepped or p.requires_grad for p in own)
        drops = encoder.training and not trained and any(map(_acts_otherwise, encoder.modules()))
        text = (
            f"{type(encoder).__name__}, which nothing trains, is in training mode: its dropout changes what it says of a text"
        )
        name, found = f"mode of {type(encoder).__name__}", "training" if encoder.training else "evaluation"
        checks.append(Check("condition", name, "evaluation, or trained", found, not drops, text, "warning"))
    if isinstance(facts.autoencoder, nn.Module):
        own = [p for p in facts.autoencoder.parameters() if id(p) in stepped]
        text = f"{len(own)} parameters of the autoencoder are in the optimizer: what the latents mean changes with them"
        name, found = "parameters of the autoencoder in the optimizer", str(len(own))
        checks.append(Check("optimizer", name, "none", found, not own, text, "warning"))
    return checks


def _normalized(network: nn.Module) -> list[Check]:
    """Normalization over the batch. Some small networks are made with it; diffusers' are not."""
    found = [name for name, module in network.named_modules() if isinstance(module, _BatchNorm)]
    if not found:
        return []
    text = f"{len(found)} layers normalize over the batch, such as {found[0]}: what is predicted of an image depends on the "
    text += "others and on their noise levels"
    severity = "warning" if type(network).__module__.startswith("diffusers.") else "info"
    return [Check("network", "normalization over the batch", "none", str(len(found)), False, text, severity)]


class Settings:
    """What the layers of a network are set to, beside their weights: a preview may leave them otherwise."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}

    def look(self, observer: Observer) -> list[Check]:
        found = {
            f"{name}.{key}": value
            for name, module in observer.modules["network"].named_modules()
            for key, value in vars(module).items()
            if key not in VARIES
            and not key.startswith("_")
            and type(value) in (bool, float, str)
            and type(module).__module__.startswith(LIBRARIES)  # a script's own layers may change what they like
        }
        self._first = self._first or found
        changed = [key for key, value in found.items() if key in self._first and not _equal(self._first[key], value)]
        changed += [key for key in found if key not in self._first]
        text = f"{len(changed)} settings of the network's layers have changed, such as {changed[0]}: " if changed else ""
        text += "has a preview left them otherwise?"
        name, observed = "settings of the network's layers", f"{len(changed)} changed" if changed else "the same"
        return [Check("network", name, "the same in the whole run", observed, not changed, text, "warning")]


def _equal(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)  # NaN


def _frozen(observer: Observer) -> Check:
    """Weights that nobody trains and nobody has trained: torch's layers begin uniform, to 1 / sqrt(fan-in). Where most of a
    network is frozen, it is adapted on purpose."""
    weights = {name: p for name, p in observer.modules["network"].named_parameters() if name in observer.frozen}
    left = [name for name, p in weights.items() if p.ndim > 1 and _as_made(p)]
    few = sum(p.numel() for p in weights.values()) < sum(p.numel() for p in observer.parameters.values())
    text = f"{len(left)} weights are frozen and as torch makes them, such as {left[0]}: nothing trains them" if left else ""
    name, wanted = "weights that are not trained", "none, or trained before"
    return Check("network", name, wanted, str(len(left)) if left else "none", not (left and few), text, "warning")


def _as_made(weight: torch.Tensor) -> bool:
    values = weight.detach().double().flatten() * weight[0].numel() ** 0.5
    if values.numel() < 256 or float(values.abs().max()) > 1 + 1e-6:
        return False
    return abs(float(values.std()) * 3**0.5 - 1) < 0.1 and abs(float((values.abs() < 0.5).double().mean()) - 0.5) < 0.1


def _acts_otherwise(module: nn.Module) -> bool:
    """In training mode than in evaluation mode."""
    share = module.p if isinstance(module, _DropoutNd) else vars(module).get("dropout")
    return isinstance(module, _BatchNorm) or (isinstance(share, float) and share > 0) or _drops_by_itself(module)


def _drops_by_itself(module: nn.Module) -> bool:
    """Whether a module of the script asks for its mode and has a share above 0, as those that drop labels."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)  # a scripted module has none
    if code is None or "training" not in code.co_names or type(module).__module__.startswith(("torch.", "diffusers.")):
        return False
    return any("drop" in name and isinstance(value, float) and 0 < value < 1 for name, value in vars(module).items())
