"""The network itself: its mode and precision, and whether only what is declared changes its weights."""

import torch
from torch import nn

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check

_PRECISIONS = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # by the dtype of autocast


def check_state(update: Update, declared: Declared, observer: Observer) -> list[Check]:
    """Whether nothing but the optimizer's step, and forced weight normalization where it is declared, changes the weights."""
    moments = (
        ("weights at the forward pass", "those that the update began with", update.digest_begun, update.digest_first),
        ("weights at the step", "those of the forward pass", update.digest_first, update.digest_step),
        ("weights at the end of the update", "those that the step left", update.digest_stepped, update.digest_last),
    )
    checks = []
    for name, wanted, before, after in moments:
        if before is not None and after is not None:
            text = f"the {name} are not {wanted}: something other than the optimizer changes them"
            checks.append(_unchanged(name, wanted, bool(before == after), text))
    forced = declared.denoising is not None and declared.denoising.force_weight_norm
    step = update.optimizer_step
    if forced and update.row_sizes is not None:
        off = float((update.row_sizes - 1).abs().max())
        text = f"rows of the weights have root mean squares that are {off:.2g} off 1: they are not normalized after the step"
        found = f"within {off:.1e} of 1"
        checks.append(Check("optimizer", "forced weight norm", "rows of root mean square 1", found, off < 1e-3, text))
    if step is not None and step.after is not None and update.weights is not None:
        wanted = "those of the step, rows of another length" if forced else "those of the step"
        text = "the weights change after the optimizer's step, before the update is over"
        text += ", by more than the lengths of their rows" if forced else ""
        after = _stretched(step.after, update.weights, observer) if forced else step.after
        same = torch.allclose(after, update.weights, rtol=1e-4, atol=1e-5) if forced else torch.equal(after, update.weights)
        checks.append(_unchanged("weights after the step", wanted, same, text))
    return checks


def _stretched(before: torch.Tensor, after: torch.Tensor, observer: Observer) -> torch.Tensor:
    """Sampled weights [n] `before`, each row of a matrix or kernel as many times as long as fits `after` best."""
    sample, rows, first = observer.sample, [], 0
    for shape, stride, count in zip(sample.shapes, sample.strides, sample.counts):
        of_row = shape[1:].numel() if len(shape) > 1 else 0
        places = torch.arange(count) * stride
        rows.append(places // of_row + first if of_row else torch.full_like(places, -1))  # -1: as it is
        first += shape[0] if of_row else 0
    row = torch.cat(rows).to(before.device)
    products, squares = (
        torch.zeros(first + 1, device=before.device).index_add(0, row + 1, before * other) for other in (after, before)
    )
    factors = products / squares.clamp(min=1e-30)
    return torch.where(row < 0, before, before * factors[row + 1])


def _unchanged(name: str, wanted: str, same: bool, text: str) -> Check:
    return Check("state", name, wanted, "the same" if same else "others", same, text)


def check_network(update: Update, observer: Observer, declared: Declared) -> list[Check]:
    """Mode, gradients, dtypes of the network in its forward passes."""
    every = dict.fromkeys((*observer.parameters, *observer.frozen))
    trained, total = len(every) - len(observer.frozen), len(every)
    wanted = sum(map(declared.trains, every))
    frozen = [name for name in observer.frozen if declared.trains(name)]
    others = [name for name in every if name not in observer.frozen and not declared.trains(name)]
    text = f"{len(frozen)} of {total} parameters are frozen, such as {frozen[0]}" if frozen else ""
    text = text or (f"{len(others)} parameters that should stay frozen are trained, such as {others[0]}" if others else "")
    asked = f"all {total}" if wanted == total else f"{wanted} of {total}"
    checks = [Check("network", "trained parameters", asked, f"{trained} of {total}", not text, text)]
    if declared.dropout is not None:
        modules = observer.averaged_module.modules()
        rates = [m.p if isinstance(m, nn.Dropout) else vars(m).get("dropout") for m in modules]
        found = max((float(rate) for rate in rates if isinstance(rate, (int, float))), default=0.0)
        text = f"the network drops a share of {found:g} of its activations, not the declared {declared.dropout:g}"
        checks.append(Check("network", "dropout", f"{declared.dropout:g}", f"{found:g}", found == declared.dropout, text))
    if calls := [step.calls["network"] for step in update.micro_steps if "network" in step.calls]:
        training = all(call.training for call in calls)
        text = "the network is in evaluation mode: dropout is off while it trains"
        checks.append(Check("network", "mode", "training", "training" if training else "evaluation", training, text))
        wanted, found = (_PRECISIONS.get(dtype, str(dtype)) for dtype in (declared.autocast, calls[0].autocast))
        text = f"layers compute in {found}; declared: {wanted}"
        checks.append(Check("network", "precision of the layers", wanted, found, found == wanted, text))
    found = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in observer.parameters.values()}))
    text = f"weights are kept in {found}: updates below its rounding are lost"
    return [*checks, Check("network", "precision of the weights", "float32", found, found == "float32", text)]
