"""The network in its forward passes: mode and precision."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check

_PRECISIONS = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ASKED = {"bf16", "fp16"}  # that Accelerate's setting may be; "no" asks for nothing


def check_network(update: Update, observer: Observer, asked: str | None) -> tuple[list[Check], str]:
    """(the checks, the precision that its layers compute in). `asked`: Accelerate's mixed precision."""
    calls = [s.calls["network"] for s in update.micro_steps if "network" in s.calls]
    if not calls:
        return [], ""
    training = all(call.training for call in calls)
    text = "the network is in evaluation mode while it trains: dropout and batch normalization are off"
    severity = "warning" if any(map(_acts_otherwise, observer.modules["network"].modules())) else "info"
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
    found = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in observer.parameters.values()}))
    text = f"weights are kept in {found}: updates below its rounding are lost"
    checks.append(Check("network", "precision of the weights", "float32", found, found == "float32", text, "warning"))
    return checks, seen


def _acts_otherwise(module: nn.Module) -> bool:
    """In training mode than in evaluation mode."""
    share = module.p if isinstance(module, _DropoutNd) else vars(module).get("dropout")
    return isinstance(module, _BatchNorm) or (isinstance(share, float) and share > 0)
